"""Data on the host, and several seeds at once: the results of plain runs."""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from rnnzoo import training
from rnnzoo.training import feed as feed_lib
from rnnzoo.training import loop
from rnnzoo.training import placement as placements
from rnnzoo.training import visits as visits_lib
from tests.testing import compilation
from tests.testing import made_up_data
from tests.testing import made_up_task
from tests.training import made_up_runs

TASKS = {
    'arrays': functools.partial(
        made_up_task.SignTask, num_layers=2, norm='batch', dropout_rate=0.2
    ),
    'generator': made_up_data.SumTask,
    'lessons': functools.partial(made_up_data.SumTask, kind='lessons'),
    'buckets': functools.partial(made_up_data.SumTask, kind='buckets'),
}


class PiecesTest(made_up_runs.RunsTestCase):
  TASKS = TASKS

  @parameterized.parameters(1, 100, 300, 10**6)
  @pytest.mark.few(2)
  def test_the_batches_of_an_epoch(self, piece_bytes):
    rows = np.arange(50, dtype=np.float32)
    examples = {'x': rows[:, None], 'y': rows + 100}
    visits = visits_lib.Visits(examples, 8, placements.ONE_DEVICE)
    program = mock.Mock(steps_per_epoch=7, shuffle=jax.jit(visits.order))
    self.enter_context(
        mock.patch.object(placements, '_PIECE_BYTES', piece_bytes)
    )
    key = jax.random.key(3)
    feed = feed_lib.Feed(
        program, placements.ONE_DEVICE, examples, key, 4, 'host'
    )
    for epoch in (2, 3, 4):
      order = visits.order(key, epoch)
      found, step, sizes = [], 7 * (epoch - 1), set()
      for piece in feed.epoch(epoch):
        sizes.add(piece.examples['x'].shape)
        for _ in range(piece.num_steps):
          batch = visits.visit(dict, piece.examples, piece.order, step)
          np.testing.assert_array_equal(batch['x'][:, 0] + 100, batch['y'])
          found.append(batch['x'][:, 0])
          step += 1
      np.testing.assert_array_equal(np.stack(found), order)
      self.assertLen(sizes, 1)

  @parameterized.parameters('arrays', 'buckets')
  @pytest.mark.slow
  def test_runs_equal_those_of_data_on_the_device(self, kind):
    # The bits of two programs are the same if they are compiled as usual.
    usual = {'compiler_options': compilation.USUAL}
    self.enter_context(
        mock.patch.object(placements.Placement, 'outputs', lambda _: usual)
    )
    training.train_and_evaluate(self.prepare(kind, 'device', num_epochs=2))
    # Two batches of training, and one and a half of evaluation, are a piece.
    self.enter_context(mock.patch.object(placements, '_PIECE_BYTES', 800))
    host = self.prepare(kind, 'host', keep_data_on='host', num_epochs=2)
    self.train_killed(host)
    training.train_and_evaluate(host)
    self.check_same('device', 'host')
    self.check_same('device', 'host', 'report.json')


class SeedsAtOnceTest(made_up_runs.RunsTestCase):
  TASKS = TASKS

  @parameterized.parameters(('arrays', 3), ('generator', 3), ('lessons', 2))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_equals_separate_runs(self, kind, num_seeds):
    # Seeds stop after different epochs. Patience counts from the lessons' end.
    fields = {'early_stopping.patience': 1, 'optimizer.learning_rate': 0.03}
    fields |= {'num_epochs': 8 if kind == 'lessons' else 7}
    fields['num_seeds'] = num_seeds
    fields['checkpoint_seconds'] = 1e9
    experiment = self.prepare(kind, 'separate', **fields)
    training.train_and_evaluate(experiment)
    whole = self.again(experiment, 'whole', seeds_at_once=2)
    training.train_and_evaluate(whole)
    separate = [self.result('separate', seed) for seed in range(num_seeds)]
    self.assertGreater(len({result['num_epochs'] for result in separate}), 1)
    for seed, wanted in enumerate(separate):
      found = self.result('whole', seed)
      self.assertEqual(found['stopped'], wanted['stopped'])
      self.assertEqual(found['best_epoch'], wanted['best_epoch'])
      for row, wanted_row in zip(
          found['history'], wanted['history'], strict=True
      ):
        for key, value in wanted_row.items():
          np.testing.assert_allclose(row[key], value, 2e-4, err_msg=key)
    # One of two seeds has done its second epoch: the other one's has another
    # lesson than its third epoch.
    killed = self.again(whole, 'killed', checkpoint_seconds=0.0)
    self.train_killed(killed, at=3)
    training.train_and_evaluate(killed)
    names = [f'seed_{seed}/metrics.csv' for seed in range(num_seeds)]
    self.check_same('whole', 'killed', *names, 'report.json')

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

  def test_refused(self):
    for kind, fields, message in (
        ('arrays', {'keep_data_on': 'host'}, "1 with .*keep_data_on='host'"),
        ('buckets', {'num_seeds': 2}, '1 .*length'),
    ):
      with self.assertRaisesRegex(
          ValueError, f'seeds_at_once must be {message}'
      ):
        self.prepare(kind, seeds_at_once=2, **fields)


if __name__ == '__main__':
  absltest.main()
