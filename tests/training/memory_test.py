"""Too little memory is told as that, and as nothing else."""

import ast
import contextlib
import io
import pathlib
from unittest import mock

from absl.testing import absltest
from flax import nnx
import jax

import rnnzoo
from rnnzoo.command import program
from rnnzoo.tasks import backbones
from rnnzoo.training import command_line
from rnnzoo.training import loop
from tests.testing import made_up_task

ROOT = pathlib.Path(rnnzoo.__file__).parent
# Failures of a row are told with the error's name, and the others are sent on.
AS_THEY_ARE = ('benchmark', 'processes.py')


def catching_all():
  """Yields the try statements that catch any error, and where they stand."""
  for path in ROOT.rglob('*.py'):
    name = str(path.relative_to(ROOT))
    if any(part in name for part in AS_THEY_ARE):
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Try):
        kinds = [ast.unparse(h.type or ast.Name('')) for h in node.handlers]
        if 'Exception' in kinds:
          yield f'{name}:{node.lineno}', ast.unparse(node.handlers)


class MemoryTest(absltest.TestCase):

  def test_nothing_that_catches_all_takes_it_for_something_else(self):
    found = dict(catching_all())
    self.assertGreater(len(found), 5)
    # The file of a config is named with the error's own name.
    without = [place for place, text in found.items() if 'MemoryE' not in text]
    self.assertLen(without, 1, without)
    self.assertStartsWith(without[0], 'training/command_line.py')

  def test_is_not_the_fault_of_a_cell_or_an_option(self):
    config = made_up_task.base_config().model
    fails = mock.patch.object(jax, 'make_jaxpr', side_effect=MemoryError)
    rnnzoo.contract._check_equations.cache_clear()
    with fails, self.assertRaises(MemoryError):
      rnnzoo.GRU(2, 3, rngs=nnx.Rngs(0))
    with fails, self.assertRaises(MemoryError):
      backbones.build(config, 2, nnx.Rngs(0))

  def test_programs_say_it_in_a_sentence(self):
    fails = mock.Mock(side_effect=MemoryError('12 GiB'))
    commands = {'list': fails}
    for patch, run in (
        (
            mock.patch.object(command_line, '_main', fails),
            lambda: command_line.main([]),
        ),
        (
            mock.patch.object(program, 'COMMANDS', commands),
            lambda: program.main(['list']),
        ),
    ):
      told = io.StringIO()
      with patch, contextlib.redirect_stderr(told):
        with self.assertRaises(SystemExit):
          run()
      self.assertIn('has not enough memory', told.getvalue())
      self.assertIn('12 GiB', told.getvalue())

  def test_a_device_says_it_in_a_sentence(self):
    for text in ('RESOURCE_EXHAUSTED: it', 'INTERNAL: Out of memory: it'):
      fails = mock.Mock(side_effect=RuntimeError(text))
      told = io.StringIO()
      with (
          mock.patch.object(loop, 'train_and_evaluate', fails),
          contextlib.redirect_stderr(told),
          self.assertRaises(SystemExit),
      ):
        command_line.train(None)
      self.assertIn('the device has not enough memory', told.getvalue())


if __name__ == '__main__':
  absltest.main()
