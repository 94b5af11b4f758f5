"""Loss scaling: the factor, steps that are skipped, and runs in float16."""

import functools
import math

from absl.testing import absltest
from absl.testing import parameterized
from flax.training import dynamic_scale
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from rnnzoo import training
from rnnzoo.training import optimization
from rnnzoo.training import step
from tests.testing import made_up_task
from tests.training import made_up_runs


class LossScalingTest(parameterized.TestCase):

  @parameterized.parameters(
      ('float16', 7), ('half', 7), ('bfloat16', None), (None, None)
  )
  def test_interval(self, dtype, wanted):
    config = ml_collections.ConfigDict(
        {'model': {'dtype': dtype}, 'optimizer': {'loss_scale_interval': 7}}
    )
    found = optimization.make_loss_scale(config)
    # flax doubles in the step after so many.
    self.assertEqual(found and found.growth_interval + 1, wanted)

  @pytest.mark.slow
  def test_a_skipped_step_changes_nothing_else(self):
    task = made_up_task.SignTask(norm='batch', dtype=jnp.float16)
    huge = dynamic_scale.DynamicScale(
        growth_interval=99, fin_steps=jnp.int32(0), scale=jnp.float32(2.0**40)
    )
    program = step.Program(task, optax.adam(1e-2), 4, loss_scale=huge)
    key = jax.random.key(0)
    state = program.init(key)
    before = jax.tree.map(np.asarray, state[:3])
    order = program.shuffle(key, 1)
    train = task.splits['train']
    state = program.train_steps(state, train, order, 1, 1.0, key)
    jax.tree.map(np.testing.assert_array_equal, before, state[:3])
    self.assertEqual((int(state.skipped), int(state.step)), (1, 1))
    self.assertEqual(float(state.gradient_norm), 0.0)
    self.assertTrue(np.isfinite(state.loss))
    self.assertEqual(state.loss_scale.scale, 2.0**39)


@pytest.mark.slow
class RunTest(made_up_runs.RunsTestCase):
  TASKS = {'sign': functools.partial(made_up_task.SignTask, dtype=jnp.float16)}

  def test_whole_resumed_and_at_once(self):
    fields = {'model.dtype': 'float16', 'optimizer.loss_scale_interval': 3}
    fields |= {'optimizer.warmup_steps': 20, 'num_epochs': 4}
    experiment = self.prepare('sign', 'whole', **fields)
    training.train_and_evaluate(experiment)
    rows = self.result('whole')['history']
    skipped = sum(row['skipped_steps'] for row in rows)
    # 28 steps; a doubling every third, until gradients overflow.
    self.assertBetween(skipped, 1, 14)
    self.assertLess(rows[-1]['train_loss'], rows[0]['train_loss'])
    for row in rows:
      self.assertTrue(math.isfinite(row['gradient_norm']), row)
      self.assertEqual(math.log2(row['loss_scale']) % 1, 0)
    # The warm-up counts no skipped steps. The rate is that of the last step.
    for epoch in (1, 2, 3, 4):
      known = 7 * epoch - sum(row['skipped_steps'] for row in rows[:epoch])
      rate = 1e-3 * min((known - 1) / 20, 1)
      self.assertAlmostEqual(rows[epoch - 1]['learning_rate'], rate, places=8)
    head = (self.workdir / 'whole/seed_0/metrics.csv').read_text()
    self.assertIn('skipped_steps,loss_scale\n', head)

    killed = self.again(experiment, 'killed')
    self.train_killed(killed, at=2)
    training.train_and_evaluate(killed)
    self.check_same('whole', 'killed')
    self.check_same('whole', 'killed', 'report.json')
    # Two seeds in one call.
    two = self.again(experiment, 'two', num_seeds=2, seeds_at_once=2)
    training.train_and_evaluate(two)
    for one, two in zip(rows, self.result('two')['history'], strict=True):
      self.assertEqual(one['skipped_steps'], two['skipped_steps'])
      self.assertAlmostEqual(one['train_loss'], two['train_loss'], delta=2e-3)


if __name__ == '__main__':
  absltest.main()
