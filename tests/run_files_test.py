"""The files of a run: damaged, deleted, unwritable, locked, of another version.

Whatever happens to them, a run ends as it would have, bit by bit, or with a
sentence that names the file.
"""

import functools
import io
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
import contextlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import made_up_task
import pytest

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.training import checkpointing
from rnnzoo.training import files
from rnnzoo.training import run_directory

ROOT = pathlib.Path(__file__).resolve().parent.parent

# By name, what happens to the content of a file; None deletes it.
DAMAGES = {
    'deleted': lambda content, rng: None,
    'emptied': lambda content, rng: b'',
    'cut': lambda content, rng: content[: rng.randrange(len(content) or 1)],
    'flipped': lambda content, rng: flip(content, rng),
    'replaced': lambda content, rng: rng.randbytes(len(content) or 1),
    'longer': lambda content, rng: content + rng.randbytes(8),
    'text': lambda content, rng: b'{"a": [1, null, NaN, "x"]}\n',
    'list': lambda content, rng: b'[]',
}


def flip(content: bytes, rng: random.Random) -> bytes:
  """Returns the content with one bit changed."""
  if not content:
    return b'\1'
  changed = bytearray(content)
  changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
  return bytes(changed)


@contextlib.contextmanager
def sign_task() -> Iterator[None]:
  with mock.patch.object(
      tasks, 'TASKS', {'sign': functools.partial(made_up_task.SignTask)}
  ):
    yield


def config(**fields):
  config = made_up_task.base_config()
  config.update(task='sign', num_epochs=3, eval_batch_size=4)
  config.update(checkpoint_seconds=0.0, **fields)
  return config


@functools.cache
def finished() -> tuple[training.Experiment, pathlib.Path]:
  """Returns a run that is done, for copies."""
  directory = pathlib.Path(tempfile.mkdtemp()) / 'run'
  with sign_task(), contextlib.redirect_stdout(io.StringIO()):
    experiment = training.prepare(config(), str(directory), 'sign')
    training.train_and_evaluate(experiment)
  return experiment, directory


class RunFilesTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(sign_task())
    self.experiment, self.whole = finished()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'

  def copy(self) -> None:
    """Makes `self.workdir` a copy of the finished run."""
    shutil.rmtree(self.workdir, ignore_errors=True)
    shutil.copytree(self.whole, self.workdir)

  def resume(self) -> str:
    """Goes on with the copy, and returns the output.

    The compiled functions are those of the run that was copied.
    """
    run_directory.open_or_create(
        self.experiment.config, 'made up', str(self.workdir), 'sign'
    )
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
      training.train_and_evaluate(
          self.experiment._replace(workdir=self.workdir)
      )
    return output.getvalue()

  def check_same(self, *names: str) -> None:
    for name in (*names, 'report.json', 'seed_0/result.json'):
      self.assertEqual(
          (self.workdir / name).read_bytes(),
          (self.whole / name).read_bytes(),
          msg=name,
      )


class DamageTestCase(RunFilesTestCase):

  def check_damages(self, names, damages, repeats: int) -> None:
    """Damages one file of the finished run at a time, and goes on."""
    rng = random.Random(0)
    for name in names:
      for damage in damages:
        for _ in range(repeats):
          with self.subTest(f'{name} {damage}'):
            self.copy()
            self.forget_result(name)
            path = self.workdir / name
            content = DAMAGES[damage](path.read_bytes(), rng)
            if content is None:
              path.unlink()
            else:
              path.write_bytes(content)
            try:
              self.resume()
            except ValueError as error:
              self.assertIn(str(self.workdir), str(error))
            else:
              self.check_same()

  def forget_result(self, damaged: str) -> None:
    """Makes the run one that still has to be tested, and reads all it has."""
    if damaged != 'seed_0/result.json':
      (self.workdir / 'seed_0/result.json').unlink()

  def names(self) -> list[str]:
    """Returns the files of the run, except what is written and never read."""
    return sorted(
        str(path.relative_to(self.whole))
        for path in self.whole.rglob('*')
        if path.is_file() and path.suffix != '.png'
    )


class DamagedFilesTest(DamageTestCase):

  def test_some(self):
    names = [name for name in self.names() if 'checkpoints/' not in name]
    self.assertContainsSubset(
        {'config.json', 'run.json', 'seed_0/result.json', 'seed_0/seconds.csv'},
        names,
    )
    self.check_damages(names, ('emptied', 'list'), repeats=1)

  def test_a_damaged_checkpoint(self):
    # The arrays' files have names that are drawn at random.
    names = [
        name
        for name in self.names()
        if name.startswith('seed_0/checkpoints/3/') and '/d/' not in name
    ]
    self.assertNotEmpty(names)
    self.check_damages(names, ('cut',), repeats=1)


@pytest.mark.slow
class EveryDamageTest(DamageTestCase):

  def test_all(self):
    self.check_damages(self.names(), DAMAGES, repeats=2)


if __name__ == '__main__':
  absltest.main()
