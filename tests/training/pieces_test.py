"""Data that stay on the host: the results of data on the device."""

import functools
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.training import feed as feed_lib
from rnnzoo.training import placement as placements
from rnnzoo.training import seed_state
from rnnzoo.training import visits as visits_lib
from tests.testing import compilation
from tests.testing import made_up_data
from tests.testing import made_up_task

TASKS = {
    'arrays': functools.partial(
        made_up_task.SignTask, num_layers=2, norm='batch', dropout_rate=0.2
    ),
    'buckets': functools.partial(made_up_data.SumTask, kind='buckets'),
    'generator': made_up_data.SumTask,
}


class PiecesTest(parameterized.TestCase):

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

  @pytest.mark.slow
  def test_buckets(self):
    train = made_up_data.SumTask(kind='buckets').splits['train']
    visits = visits_lib.Visits(train, 4, placements.ONE_DEVICE)
    program = mock.Mock(steps_per_epoch=9, shuffle=jax.jit(visits.order))
    key = jax.random.key(3)
    feed = feed_lib.Feed(program, placements.ONE_DEVICE, train, key, 1, 'host')
    order = visits.order(key, 1)
    for step, piece in enumerate(feed.epoch(1)):
      bucket = int(order.bucket[step])
      rows = order.orders[bucket][order.place[step]]
      np.testing.assert_array_equal(
          piece.examples[bucket]['x'][0], train[bucket]['x'][rows]
      )
      self.assertEqual(int(piece.order.order.bucket[0]), bucket)
    self.assertEqual(step, 8)

  def prepare(self, kind, name, keep_data_on, **fields):
    self.enter_context(mock.patch.object(tasks, 'TASKS', TASKS))
    config = made_up_task.base_config()
    config.update(
        task=kind, num_epochs=3, eval_batch_size=4, checkpoint_seconds=0.0
    )
    config.update(keep_data_on=keep_data_on, **fields)
    return training.prepare(config, str(self.workdir / name), kind)

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def assert_same_runs(self, one, other):
    for name in ('seed_0/metrics.csv', 'seed_0/result.json', 'report.json'):
      contents = [
          (self.workdir / run / name).read_bytes() for run in (one, other)
      ]
      self.assertEqual(*contents, name)

  @parameterized.parameters('arrays', 'buckets')
  @pytest.mark.slow
  def test_runs_equal_those_of_data_on_the_device(self, kind):
    # The bits of two programs are the same if they are compiled as usual.
    usual = {'compiler_options': compilation.USUAL}
    self.enter_context(
        mock.patch.object(placements.Placement, 'outputs', lambda _: usual)
    )
    training.train_and_evaluate(self.prepare(kind, 'device', 'device'))
    # Two batches of training, and one and a half of evaluation, are a piece.
    self.enter_context(mock.patch.object(placements, '_PIECE_BYTES', 800))
    save = seed_state.SeedState.save

    def save_and_fail(run, checkpoints):
      save(run, checkpoints)
      raise KeyboardInterrupt

    with mock.patch.object(seed_state.SeedState, 'save', save_and_fail):
      with self.assertRaises(KeyboardInterrupt):
        training.train_and_evaluate(self.prepare(kind, 'host', 'host'))
    training.train_and_evaluate(self.prepare(kind, 'host', 'host'))
    self.assert_same_runs('device', 'host')

  def test_not_several_seeds_at_once(self):
    with self.assertRaisesRegex(
        ValueError, "seeds_at_once must be 1 with config.keep_data_on='host'"
    ):
      self.prepare('arrays', 'none', 'host', num_seeds=2, seeds_at_once=2)


if __name__ == '__main__':
  absltest.main()
