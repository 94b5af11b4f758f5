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

  @pytest.mark.slow
  def test_equals_separate_runs(self):
    self.equals_separate_runs('arrays')

  @pytest.mark.slow
  def test_with_lessons_equals_separate_runs(self):
    # Patience counts from the end of the lessons.
    self.equals_separate_runs('lessons', num_epochs=8)

  @pytest.mark.exhaustive
  def test_of_a_generator_equals_separate_runs(self):
    self.equals_separate_runs('generator')

  def equals_separate_runs(self, kind, **fields):
    train = lambda name, at_once: training.train_and_evaluate(
        self.prepare(kind, name, at_once, **fields)
    )
    train('one', 1)
    # A group of two, and one that is left over.
    train('two', 2)
    groups = ['two']
    if kind == 'arrays':
      train('all', 3)
      groups.append('all')
    one = self.results('one')
    lengths = [result['num_epochs'] for result in one]
    self.assertGreater(len(set(lengths)), 1)
    for name in groups:
      for found, wanted in zip(self.results(name), one, strict=True):
        self.assertEqual(found['stopped'], wanted['stopped'])
        self.assertEqual(found['best_epoch'], wanted['best_epoch'])
        for row, wanted_row in zip(
            found['history'], wanted['history'], strict=True
        ):
          for key, value in wanted_row.items():
            np.testing.assert_allclose(row[key], value, 2e-4, err_msg=key)

  @parameterized.parameters('arrays', 'lessons')
  @pytest.mark.slow
  def test_resumed_equals_uninterrupted(self, kind):
    training.train_and_evaluate(self.prepare(kind, 'whole', 3))
    save, saved = seed_state.SeedState.save, []

    def save_and_fail(run, checkpoints):
      save(run, checkpoints)
      saved.append(len(run.history))
      # After the second seed's second epoch, before the third one's, which has
      # another lesson than the others' third epoch.
      if len(saved) == 5:
        raise KeyboardInterrupt

    with mock.patch.object(seed_state.SeedState, 'save', save_and_fail):
      with self.assertRaises(KeyboardInterrupt):
        training.train_and_evaluate(self.prepare(kind, 'killed', 3))
    training.train_and_evaluate(self.prepare(kind, 'killed', 3))
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
