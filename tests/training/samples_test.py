"""Samples of text while a model trains: when, where, and after a kill."""

import pathlib
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np
import pytest

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.training import files
from rnnzoo.training import records
from rnnzoo.training import seed_state
from tests.testing import made_up_task


class TalkingTask(made_up_task.SignTask):
  """Makes a text of its parameters and its key, with ends of all kinds."""

  def sample(self, model, prompt, key):
    yield prompt
    yield '\r\nepoch 1, 3 characters\n'
    yield f'{float(model.head.kernel[...][0, 0]):.6f} ä'
    yield f' {int(jax.random.randint(key, (), 0, 10**9))}\n\n'


class SamplesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    names = {'talk': TalkingTask, 'sign': made_up_task.SignTask}
    self.enter_context(mock.patch.object(tasks, 'TASKS', names))

  def prepare(self, name, task='talk', **fields):
    config = made_up_task.base_config()
    config.update(
        task=task,
        num_epochs=2,
        eval_batch_size=4,
        checkpoint_seconds=0.0,
        sample_every=1,
    )
    config.update(fields)
    return training.prepare(config, str(self.workdir / name), task)

  @pytest.mark.slow
  def test_of_every_epoch_and_after_a_kill(self):
    experiment = self.prepare('whole')
    training.train_and_evaluate(experiment)
    path = self.workdir / 'whole/seed_0/samples.txt'
    whole = path.read_bytes().decode()
    self.assertStartsWith(whole, 'made up\n\nepoch 1, ')
    found = dict(records._read(path, 'made up\n'))
    self.assertSequenceEqual([*found], [1, 2])
    self.assertNotEqual(found[1], found[2])
    self.assertStartsWith(found[2], '\r\nepoch 1, 3 characters\n')
    kernel = training.best_model(experiment, 0).head.kernel[...]
    best = np.argmin([row['validation_loss'] for row in self.history()])
    if best == 1:
      self.assertIn(f'{float(kernel[0, 0]):.6f}', found[2])
    events = next(path.parent.glob('events.*')).read_bytes()
    self.assertIn(found[2].strip().encode(), events)

    save = seed_state.SeedState.save

    def save_and_fail(run, checkpoints):
      # The sample of the second epoch is written, its checkpoint is not.
      if len(run.history) == 2:
        raise KeyboardInterrupt
      save(run, checkpoints)

    with mock.patch.object(seed_state.SeedState, 'save', save_and_fail):
      with self.assertRaises(KeyboardInterrupt):
        training.train_and_evaluate(self.prepare('killed'))
    killed = self.workdir / 'killed/seed_0'
    self.assertIn('epoch 2, ', (killed / 'samples.txt').read_text())
    training.train_and_evaluate(self.prepare('killed'))
    for name in ('samples.txt', 'metrics.csv', 'result.json'):
      self.assertEqual(
          (killed / name).read_bytes(), (path.parent / name).read_bytes(), name
      )
    # They are no part of the training.
    training.train_and_evaluate(self.prepare('none', sample_every=0))
    none = self.workdir / 'none/seed_0'
    self.assertFalse((none / 'samples.txt').exists())
    self.assertEqual(
        (none / 'metrics.csv').read_bytes(),
        (killed / 'metrics.csv').read_bytes(),
    )

  def history(self):
    path = self.workdir / 'whole/seed_0/result.json'
    return files.read_json(path, dict)['history']

  def test_a_task_without_text(self):
    with self.assertRaisesRegex(
        ValueError, "sample_every must be 0 for the task 'sign'.*got 1"
    ):
      self.prepare('sign', task='sign')

  def test_damaged(self):
    path = self.workdir / 'samples.txt'
    written = records.Samples(path, 'text', 0)
    written.write(1, 'abc')
    written.write(2, '')
    self.assertEqual([*records._read(path, 'text\n')], [(1, 'abc'), (2, '')])
    records.Samples(path, 'text', 1).write(2, 'de')  # That of epoch 2 is void.
    self.assertEqual([*records._read(path, 'text\n')], [(1, 'abc'), (2, 'de')])
    content = path.read_bytes()
    for damaged in (content[:-9], content + b'x', b'other' + content, b'\xff'):
      path.write_bytes(damaged)
      with self.assertRaisesRegex(files.RunFileError, 'samples.txt is damaged'):
        records.Samples(path, 'text', 2)


if __name__ == '__main__':
  absltest.main()
