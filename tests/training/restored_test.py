"""Trained runs without their data: every task, and lost files."""

import contextlib
import importlib
import io
import json
import math
import pathlib
import re
import sys
from unittest import mock

from absl import flags
from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import numpy as np
import pytest

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.command import program
from rnnzoo.training import trained
from tests.testing import made_up_task
from tests.testing import sequence_files

# configs/ is never installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

_SMALL = {'num_validation': 4, 'num_test': 4, 'steps_per_epoch': 2}
# These values make the tasks small enough for a test.
DATA = {
    'adding': _SMALL | {'length': 8},
    'cifar': {'source': 'digits', 'sequence': 'row', 'scaling': 'standard'},
    'copying': _SMALL | {'delay': 3},
    'lorenz': {'num_train': 6, 'num_validation': 2, 'num_test': 2}
    | {'length': 8, 'horizon': 2},
    'selective_copying': _SMALL | {'length': 20},
    'sequences': {},
    'skeletons': {'num_steps': 4, 'validation_samplings': 1}
    | {'test_samplings': 2},
    'smnist': {'source': 'digits', 'sequence': 'row', 'scaling': 'standard'},
    'state_tracking': _SMALL | {'language': 'parity', 'test_lengths': (6, 9)},
    'text': {'context': 8, 'steps_per_epoch': 5, 'sample_length': 9},
    'time_series': {'name': 'Made'},
    'translation': {'num_dates': 60, 'output_length': 5},
}
# `predict` takes these arrays of a split.
INPUTS = {
    'cifar': lambda part: {k: part[k] for k in ('inputs', 'index')},
    'copying': lambda part: part['tokens'],
    'selective_copying': lambda part: part['tokens'],
    'skeletons': lambda part: {k: part[k] for k in ('frames', 'length')},
    'state_tracking': lambda part: {k: part[k] for k in ('tokens', 'length')},
    'text': lambda part: part['tokens'],
    'translation': lambda part: part['source'],
}
for _name in ('lorenz', 'sequences', 'time_series'):
  INPUTS[_name] = lambda part: {
      'x': part['inputs'],
      'lengths': part['lengths'],
  }


def make_config(name, directory, **data):
  config = importlib.import_module(f'configs.base_{name}').get_config()
  config.data.update(DATA.get(name, {}) | data)
  config.model.layer = 'MinGRU'
  config.model.update(features=4, num_layers=1)
  config.update(batch_size=4, num_epochs=1, num_seeds=1, eval_batch_size=16)
  if name == 'sequences':
    config.data.path = str(sequence_files.write_npz(directory / 'mine.npz'))
  if name == 'time_series':
    sequence_files.write_archive(directory, 'Made')
    config.data.manual_dir = str(directory)
  return config


def quietly(function, *given):
  """Returns what a function returns, and prints nothing."""
  with contextlib.redirect_stdout(io.StringIO()):
    return function(*given)


def train(config, workdir):
  run = lambda: training.prepare(config, str(workdir))
  quietly(lambda: training.train_and_evaluate(run()))


def traced(task, inputs):
  """Returns all that a task's predictions are made of: operations, numbers."""
  made = jax.make_jaxpr(
      lambda inputs: task.predict(task.build_model(nnx.Rngs(0)), inputs)
  )(task.check_inputs(inputs))
  consts = [(np.asarray(x).dtype, np.asarray(x).tolist()) for x in made.consts]
  return re.sub(r'0x\w+', '', str(made.jaxpr)), consts


class OfPaper(made_up_task.SignTask):
  """A task of another project: it reads a file, and remembers a number."""

  def __init__(self, config):
    super().__init__()
    self.scale = float(pathlib.Path(config.data.data_dir).read_text())

  def describe(self):
    return {'scale': self.scale}

  @classmethod
  def restore(cls, config, described):
    task = cls.__new__(cls)
    task.stack, task.scale = {}, described['scale']
    return task

  def predict(self, model, inputs):
    return model(inputs * self.scale)

  def predict_lines(self, model, lines):
    for line in lines:
      yield f'{line}: {self.scale:g}'


class EveryTaskTest(parameterized.TestCase):

  @parameterized.named_parameters(
      *((name, name) for name in sorted(tasks.TASKS))
  )
  @pytest.mark.few(2)
  def test_answers_without_its_data(self, name):
    config = make_config(name, pathlib.Path(self.create_tempdir().full_path))
    task = quietly(tasks.TASKS[name], config)
    part = task.splits['test']
    part = part if isinstance(part, dict) else part[0]
    inputs = INPUTS.get(name, lambda part: part['inputs'])(part)
    inputs = jax.tree.map(lambda x: x[:3], inputs)
    described = json.loads(json.dumps(task.describe(), allow_nan=False))
    restored = tasks.TASKS[name].restore(config, described)
    self.assertFalse(hasattr(restored, 'splits'))
    self.assertEqual(traced(restored, inputs), traced(task, inputs))


class RunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    flags.FLAGS.mark_as_parsed()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.run_path = self.directory / 'run'

  def command(self, *words, stdin=''):
    """Returns what the console script prints, its exit code first."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      with mock.patch.object(sys, 'stdin', io.StringIO(stdin)):
        try:
          program.main(words)
        except SystemExit as error:
          code = error.code
    return code, out.getvalue(), err.getvalue()

  @pytest.mark.slow
  def test_sequences_are_gone(self):
    config = make_config('sequences', self.directory)
    train(config, self.run_path)
    arrays = sequence_files.arrays()
    x = {name: arrays[name][:3] for name in ('x', 'lengths')}
    # A task that is a function cannot be restored.
    make = tasks.find('sequences')
    find = lambda _: lambda *args: make(*args)
    with mock.patch.object(trained.tasks, 'find', find):
      old = quietly(training.load, self.run_path)
    self.assertIn('test', vars(old.task)['splits'])
    expected = old.predict(x)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      loaded = training.load(self.run_path)
    self.assertEqual(printed.getvalue(), '')
    self.assertEqual(loaded.task.dataset, 'mine.npz')
    self.assertEqual(loaded.task.class_names, ('0', '1'))
    # The same name, with classes of other names.
    there = sequence_files.arrays()
    np.savez(self.directory / 'mine.npz', **there | {'y': there['y'] + 1})
    with self.assertRaisesRegex(ValueError, "with other data .*'0' there"):
      train(config, self.run_path)
    code, _, err = self.command('evaluate', str(self.run_path))
    self.assertEqual(code, 2)
    self.assertRegex(err, "with other data .*'0' there, '1' here")
    (self.directory / 'mine.npz').unlink()
    loaded = training.load(self.run_path)
    np.testing.assert_array_equal(loaded.predict(x), expected)
    code, out, err = self.command('evaluate', str(self.run_path))
    self.assertEqual((code, out), (2, ''))
    self.assertRegex(err, 'mine.npz.*; evaluate tests models on the data set')

  @pytest.mark.slow
  def test_a_text_is_gone(self):
    path = self.directory / 'text.txt'
    path.write_text('abcdefg\n' * 40)
    config = make_config('text', self.directory, path=str(path))
    config.model.update(conv_width=0, mlp=None)
    train(config, self.run_path)
    before = self.command('sample', str(self.run_path), '--prompt=abc')
    self.assertRegex(before[1], '(?s)^abc.{9}\n$')
    moved = path.rename(self.directory / 'moved.txt')
    after = self.command('sample', str(self.run_path), '--prompt=abc')
    self.assertEqual(after, before)
    self.assertEqual(after[0], 0)
    loaded = training.load(self.run_path)
    tokens = loaded.task.tokens.encode('abc')[None]
    self.assertEqual(loaded.predict(tokens).shape, (1,))
    self.assertEqual(''.join(loaded.sample('abc')) + '\n', after[1])
    for key in (np.int32(loaded.seed), jax.random.PRNGKey(loaded.seed)):
      self.assertEqual(''.join(loaded.sample('abc', key)) + '\n', after[1])
    for key in (3.0, -1, True):
      with self.assertRaisesRegex(ValueError, 'key must be a jax.random.key'):
        loaded.sample('abc', key)
    score = loaded.perplexity('abcdefg\n' * 40)
    self.assertEqual((score['num_tokens'], score['num_bytes']), (319, 319))
    bits = math.log2(score['perplexity'])
    self.assertAlmostEqual(score['bits_per_byte'], bits, places=5)
    told = self.command('evaluate', str(self.run_path), f'--text={moved}')
    self.assertRegex(told[1], r'^seed 0: perplexity .*num_bytes 319\n$')
    with self.assertRaisesRegex(ValueError, 'must have two tokens or more'):
      loaded.perplexity('a')
    sample = 'sample', str(self.run_path)
    many = self.command(*sample, '--prompt=a', '--prompt=b')
    texts = loaded.sample_many(['a', 'b'])
    self.assertEqual(many[1], '\n\n'.join(texts) + '\n')
    words = *sample, '--prompt=abc', '--length=40'
    config = (self.run_path / 'config.json').read_text()
    warm = self.command(*words, '--temperature=3')
    self.assertRegex(warm[1], '(?s)^abc.{40}\n$')
    self.assertEqual(self.command(*words, '--temperature=3', '--seed=0'), warm)
    other = self.command(*words, '--temperature=3', '--seed=1')
    self.assertNotEqual(other[1], warm[1])
    self.assertEqual((self.run_path / 'config.json').read_text(), config)
    # language_test.py has other values that cannot be.
    for name in ('length', 'temperature', 'top_k', 'top_p', 'seed'):
      code, out, err = self.command(*words, f'--{name}=-1')
      self.assertEqual((code, out), (2, ''))
      self.assertRegex(err, f'^rnnzoo: {name} must be .*; got .*\n$')
    loaded.config.data.sample_length = 2
    self.assertLen(''.join(loaded.sample('abc')), 5)

  @pytest.mark.slow
  def test_a_task_of_another_project(self):
    path = self.directory / 'scale.txt'
    path.write_text('2.5')
    config = made_up_task.base_config()
    config.update(task='of_paper', num_epochs=1, eval_batch_size=4)
    config.data.data_dir = str(path)
    with mock.patch.object(tasks, '_REGISTERED', {}):
      tasks.register('of_paper', OfPaper)
      train(config, self.run_path)
      x = np.ones((3, 5, 2), np.float32)
      expected = OfPaper(config).predict(training.load(self.run_path).model, x)
      path.unlink()
      loaded = training.load(self.run_path)
      np.testing.assert_array_equal(loaded.predict(x), expected)
      self.assertEqual(
          list(loaded.predict_lines(['a\n', 'b'])), ['a: 2.5', 'b: 2.5']
      )
      with self.assertRaisesRegex(NotImplementedError, 'nothing to sample'):
        loaded.sample()
      given = self.command('predict', str(self.run_path), stdin='a\n')
      self.assertEqual(given, (0, 'a: 2.5\n', ''))
      # A function has no `restore`: its data are read.
      tasks.register('of_paper', lambda config: OfPaper(config))
      with self.assertRaisesRegex(FileNotFoundError, 'scale.txt'):
        training.load(self.run_path)
      tasks.register('of_paper', OfPaper)
      not_what = "run.json is not what the task 'of_paper'"
      for restore, error, message in (
          (tasks.Task.restore, NotImplementedError, 'must define restore'),
          (lambda _, told: told['mean'], training.RunFileError, not_what),
      ):
        with mock.patch.object(OfPaper, 'restore', restore):
          with self.assertRaisesRegex(error, message):
            training.load(self.run_path)

  def test_what_json_does_not_hold(self):
    config = made_up_task.base_config()
    config.update(task='sign', num_epochs=1)
    described = {'mean': np.ones(2)}
    task = made_up_task.SignTask
    with (
        mock.patch.object(tasks, 'TASKS', {'sign': task}),
        mock.patch.object(task, 'describe', lambda _: described),
        self.assertRaisesRegex(ValueError, 'describe must return what'),
    ):
      training.prepare(config, str(self.run_path))


if __name__ == '__main__':
  absltest.main()
