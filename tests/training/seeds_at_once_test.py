"""Seeds that train in one compiled call: the results of separate runs."""

import functools
import json
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.training import loop
from rnnzoo.training import seed_state
from tests.testing import made_up_data
from tests.testing import made_up_task

TASKS = {
    'arrays': functools.partial(
        made_up_task.SignTask, num_layers=2, norm='batch', dropout_rate=0.2
    ),
    'generator': made_up_data.SumTask,
    'lessons': functools.partial(made_up_data.SumTask, kind='lessons'),
    'buckets': functools.partial(made_up_data.SumTask, kind='buckets'),
}


class SeedsAtOnceTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(mock.patch.object(tasks, 'TASKS', TASKS))

  def prepare(self, kind, name, seeds_at_once, **fields):
    config = made_up_task.base_config()
    config.update(
        task=kind,
        num_epochs=7,
        num_seeds=3,
        eval_batch_size=4,
        checkpoint_seconds=0.0,
        seeds_at_once=seeds_at_once,
    )
    # So that seeds stop after different epochs.
    config.early_stopping.patience = 1
    config.optimizer.learning_rate = 0.03
    config.update(fields)
    return training.prepare(config, str(self.workdir / name), kind)

  def results(self, name):
    return [
        json.loads((self.workdir / name / f'seed_{s}/result.json').read_text())
        for s in range(3)
    ]

  @parameterized.parameters(('arrays', 2), ('lessons', 3))
  @pytest.mark.slow
  def test_equals_separate_runs(self, kind, at_once):
    self.equals_separate_runs(kind, at_once)

  @pytest.mark.exhaustive
  def test_of_a_generator_equals_separate_runs(self):
    self.equals_separate_runs('generator', 2)

  def equals_separate_runs(self, kind, at_once):
    # Patience counts from the end of the lessons.
    fields = {'num_epochs': 8} if kind == 'lessons' else {}

    def train(name, seeds_at_once):
      experiment = self.prepare(kind, name, seeds_at_once, **fields)
      training.train_and_evaluate(experiment)

    train('separate', 1)
    train('whole', at_once)
    separate = self.results('separate')
    self.assertGreater(len({result['num_epochs'] for result in separate}), 1)
    for found, wanted in zip(self.results('whole'), separate, strict=True):
      self.assertEqual(found['stopped'], wanted['stopped'])
      self.assertEqual(found['best_epoch'], wanted['best_epoch'])
      for row, wanted_row in zip(
          found['history'], wanted['history'], strict=True
      ):
        for key, value in wanted_row.items():
          np.testing.assert_allclose(row[key], value, 2e-4, err_msg=key)
    save, saved = seed_state.SeedState.save, []

    def save_and_fail(run, checkpoints):
      save(run, checkpoints)
      saved.append(len(run.history))
      # Of three seeds two have done their second epoch: the third one's has
      # another lesson than the others' third epoch.
      if len(saved) == 5:
        raise KeyboardInterrupt

    with mock.patch.object(seed_state.SeedState, 'save', save_and_fail):
      with self.assertRaises(KeyboardInterrupt):
        train('killed', at_once)
    train('killed', at_once)
    names = [f'seed_{seed}/metrics.csv' for seed in range(3)]
    for name in (*names, 'report.json'):
      whole, killed = (self.workdir / run / name for run in ('whole', 'killed'))
      self.assertEqual(whole.read_bytes(), killed.read_bytes(), name)

  def test_one_lesson_at_a_time(self):
    task = made_up_data.SumTask(kind='lessons')
    experiment = mock.Mock(task=task)

    def active(*progress):
      group = [
          mock.Mock(run=mock.Mock(history=[None] * done, stopped=stopped))
          for done, stopped in progress
      ]
      return [group.index(x) for x in loop.find_active(experiment, group)]

    self.assertSequenceEqual(active((0, ''), (1, '')), [0, 1])
    self.assertSequenceEqual(active((2, ''), (1, ''), (0, '')), [1, 2])
    self.assertSequenceEqual(active((2, ''), (1, 'early'), (3, '')), [0])
    self.assertSequenceEqual(active((3, ''), (4, '')), [0, 1])
    self.assertSequenceEqual(active((5, 'all')), [])

  def test_refuses_batches_of_different_lengths(self):
    with self.assertRaisesRegex(ValueError, 'seeds_at_once must be 1 .*length'):
      self.prepare('buckets', 'none', 2)


if __name__ == '__main__':
  absltest.main()
