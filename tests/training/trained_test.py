"""Trained models of a run: loaded, tested again, asked."""

import contextlib
import dataclasses
import functools
import io
import pathlib
import shutil
import sys
import tempfile
from unittest import mock

from absl import flags
from absl.testing import absltest
from absl.testing import flagsaver
import jax.numpy as jnp
import numpy as np
import pytest

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.command import program
from rnnzoo.training import command_line
from rnnzoo.training import processes
from rnnzoo.training import trained as training_trained
from tests.testing import made_up_task


class TextTask(made_up_task.SignTask):
  """The made-up task with texts: their signs, and a sample."""

  def predict(self, model, inputs):
    return model(inputs).argmax(-1)

  def predict_lines(self, model, lines):
    for line in lines:
      x = np.full((1, 1, 2), float(line), np.float32)
      yield self.class_names[int(self.predict(model, x)[0])]

  def sample(self, model, prompt, key):
    del model, key
    yield from (prompt, '!', '?')


TASKS = {'sign': TextTask, 'mute': made_up_task.SignTask}


@functools.cache
def finished() -> tuple[training.Experiment, dict]:
  """Returns a run that is done, for copies, and its report."""
  config = made_up_task.base_config()
  config.update(
      task='sign', num_epochs=2, num_seeds=2, eval_batch_size=4, seed=3
  )
  config.optimizer.learning_rate = 0.03
  workdir = pathlib.Path(tempfile.mkdtemp()) / 'run'
  experiment = training.prepare(config, str(workdir), 'sign')
  with contextlib.redirect_stdout(io.StringIO()):
    return experiment, training.train_and_evaluate(experiment)


class TrainedTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    flags.FLAGS.mark_as_parsed()
    # Another test of this process may be rnnzoo.
    self.addCleanup(processes.set_name, processes.name())
    processes.set_name('train.py')
    self.enter_context(mock.patch.object(tasks, 'TASKS', dict(TASKS)))
    done, self.report = finished()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'
    shutil.copytree(done.workdir, self.workdir)
    self.experiment = done._replace(workdir=self.workdir)

  @pytest.mark.slow
  def test_load(self):
    for seed, index in ((None, 0), (4, 1)):
      loaded = training.load(self.workdir, seed)
      self.assertEqual(loaded.seed, 3 + index)
      self.assertEqual(
          loaded.config.to_dict(), self.experiment.config.to_dict()
      )
      test = loaded.task.splits['test']
      hits = loaded.predict(test['inputs']) == test['label']
      self.assertAlmostEqual(
          float(hits.mean()),
          self.report['seeds'][index]['test']['accuracy'],
          places=6,
      )
    self.assertEqual(training.load(self.workdir, np.int64(4)).seed, 4)

  def test_what_a_model_cannot_use(self):
    loaded = training.load(self.workdir)
    # array_checks_test.py has other wrong inputs.
    with self.assertRaisesRegex(ValueError, 'inputs must be arrays'):
      loaded.predict([[1.0]])
    ask = lambda lines: list(loaded.predict_lines(lines))
    for use, given, message in (
        (ask, '-3', "several strings, got '-3'; .'a line'. would work"),
        (ask, None, 'several strings, got None; '),
        (ask, ['-3', 3], 'line 2 must be a string, got an int'),
        (ask, ['-3', 'a\udcff'], 'line 2 is not UTF-8: its character 2 is '),
        (loaded.sample, 3, 'prompt must be a string, got an'),
        (loaded.sample, '\udcff', 'prompt is not UTF-8: its char'),
        (loaded.sample_many, 'So', 'must be a list of strings, got'),
        (loaded.sample_many, [], 'must be a list of strings, got'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        use(given)
    with self.assertRaisesRegex(NotImplementedError, 'no perplexity of a text'):
      loaded.perplexity('So')
    self.assertEqual(loaded.sample_many(['So', 'a']), ['So!?', 'a!?'])
    # This task's `sample` has no such argument.
    for name in ('length', 'temperature', 'top_k', 'top_p'):
      with self.assertRaisesRegex(
          NotImplementedError, f'samples of the task TextTask have no {name}'
      ):
        loaded.sample('So', **{name: 1})

  @pytest.mark.slow
  def test_samples_with_any_options(self):
    task = mock.Mock(sample=lambda model, prompt, key, **given: [str(given)])
    model = training.Trained(model=None, config=None, seed=0, task=task)
    for three in (3, np.int64(3), jnp.int32(3)):
      self.assertEqual(list(model.sample(length=three)), ["{'length': 3}"])

  def test_load_what_is_not_there(self):
    with self.assertRaisesRegex(FileNotFoundError, 'it has no config.json'):
      training.load(self.workdir.parent)
    message = 'no checkpoint of seed 5 in .*; there are those of seeds 3, 4'
    with self.assertRaisesRegex(FileNotFoundError, message):
      training.load(self.workdir, 5)
    for seed in ('4', 4.0, True):
      with self.assertRaisesRegex(ValueError, 'seed must be an integer or'):
        training.load(self.workdir, seed)
    for path in (None, 3, b'run', 5000 * 'a'):
      with self.assertRaisesRegex(ValueError, 'path must be a string or'):
        training.load(path)
    with mock.patch.object(TextTask, 'dataset', 'other'):
      with self.assertRaisesRegex(ValueError, "'made up', but .* 'other'"):
        training.load(self.workdir)
    del tasks.TASKS['sign']
    with self.assertRaisesRegex(ValueError, 'task must be one of mute; got'):
      training.load(self.workdir)

  def use(self, function, given=None, stdin='', **more):
    """Returns the output of a function with these flags."""
    output = io.StringIO()
    if isinstance(stdin, bytes):
      stdin = io.TextIOWrapper(io.BytesIO(stdin), 'utf-8')
    with (
        flagsaver.flagsaver(**more),
        mock.patch.object(sys, 'stdin', stdin),
        contextlib.redirect_stdout(output),
    ):
      function(given)
    return output.getvalue()

  def refused(self, function, given=None, **more):
    """Returns the sentence by which a function gives up."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit):
      self.use(function, given, **more)
    return errors.getvalue()

  def command(self, *words):
    """Returns a function of nothing that runs a command on the run."""
    command, *flags_of_it = words
    given = [command, str(self.workdir), *flags_of_it]
    return lambda _: program.main(given)

  def test_commands(self):
    evaluate = lambda experiment: print(training_trained.evaluate(experiment))
    output = self.use(evaluate, self.experiment)
    accuracy = self.report['test']['accuracy']['mean']
    self.assertEndsWith(output, f'test accuracy: {accuracy:.4f}\n')
    self.assertRegex(output, 'seed 4: test accuracy .*, loss')
    loaded = training.load(self.workdir)
    lines = self.use(self.command('predict'), stdin=b'-3\n3\n').split()
    x = np.array([-3, 3], np.float32)[:, None, None] * np.ones((1, 1, 2))
    self.assertEqual(
        lines,
        [TextTask.class_names[k] for k in loaded.predict(np.float32(x))],
    )
    sample = self.command('sample', '--prompt=So')
    self.assertEqual(self.use(sample), 'So!?\n')
    for name, message in (
        ('length', 'have no length'),
        ('temperature', 'have no temperature'),
        ('seed', 'seed must be an integer from 0 to 4294967295; got -1'),
    ):
      told = self.refused(self.command('sample', f'--{name}=-1'))
      self.assertEndsWith(told, f'{message}\n')
    # As a shell's `<&-` leaves it.
    self.assertEqual(self.use(self.command('predict'), stdin=None), '')

  def test_model_of_another_seed(self):
    evaluate = lambda seed: print(
        training_trained.evaluate(self.experiment, seed)
    )
    output = self.use(evaluate, 4)
    self.assertNotIn('seed 3', output)
    accuracy = self.report['seeds'][1]['test']['accuracy']
    self.assertEndsWith(output, f'test accuracy: {accuracy:.4f}\n')
    parsed = mock.Mock(run=str(self.workdir))
    for parsed.model_seed, seed in ((None, 3), (4, 4)):
      self.assertEqual(program._load(parsed).seed, seed)
    told = self.refused(self.command('sample', '--model_seed=5'))
    message = 'no checkpoint of seed 5 in .*; there are those of seeds 3, 4'
    self.assertRegex(told, message)
    with self.assertRaisesRegex(FileNotFoundError, message):
      evaluate(5)

  @pytest.mark.slow
  def test_lines_of_any_bytes(self):
    predict = self.command('predict')
    # An editor's mark is no part of the first number. A carriage return ends a
    # line where a newline follows, and nowhere else.
    for stdin in (b'\xef\xbb\xbf-3\r\n3', b'-3\n3\n', b'\r-3\r\r\n\x0c3'):
      self.assertLen(self.use(predict, stdin=stdin).split(), 2)
    told = self.refused(predict, stdin=b'-3\n3\n\xff\n')
    self.assertIn('line 3 is not UTF-8', told)

  def test_nobody_reads(self):
    output = (pathlib.Path(self.create_tempdir().full_path) / 'x').open('w')
    errors = io.StringIO()
    with (
        output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        mock.patch.object(
            command_line, '_main', side_effect=BrokenPipeError(32, 'pipe')
        ),
    ):
      with self.assertRaises(SystemExit) as end:
        command_line.main([])
      print('goes nowhere', flush=True)
    self.assertEqual(end.exception.code, 2)
    self.assertEqual(pathlib.Path(output.name).read_text(), '')
    self.assertIn('nobody reads the output', errors.getvalue())
    with self.assertRaises(BrokenPipeError):
      processes.give_up(BrokenPipeError(32, 'pipe'))

  @pytest.mark.slow
  def test_a_mode_needs_a_run_and_a_task_with_text(self):
    prepare = lambda unused: command_line.prepare()
    for workdir in ('', '/no/where'):
      told = self.refused(prepare, mode='evaluate', workdir=workdir)
      self.assertRegex(told, '--mode=evaluate needs the --workdir')
    task = made_up_task.SignTask()
    mute = dataclasses.replace(training.load(self.workdir), task=task)
    with mock.patch.object(program, '_load', lambda _: mute):
      for name in ('predict', 'sample'):
        told = self.refused(self.command(name))
        self.assertRegex(told, '^rnnzoo: the task SignTask ')
    with self.assertRaisesRegex(NotImplementedError, 'no predictions'):
      mute.predict(task.splits['test']['inputs'])


if __name__ == '__main__':
  absltest.main()
