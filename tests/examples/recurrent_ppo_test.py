"""The example learns; acting and learning see the same policy."""

import functools

from absl.testing import absltest
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import recurrent_ppo


class MemoryChainTest(absltest.TestCase):

  def test_shows_the_bit_first_and_asks_for_it_last(self):
    env = recurrent_ppo.MemoryChain(length=3)
    state = recurrent_ppo.ChainState(jnp.zeros(2, int), jnp.array([0, 1]))
    action, key = jnp.array([1, 1]), jax.random.key(0)
    seen = []
    for _ in range(4):
      observation = env.observe(state)
      state, reward, done = env.step(state, action, key)
      seen.append((observation, reward, done))
    observations, rewards, dones = map(np.array, zip(*seen, strict=True))
    np.testing.assert_array_equal(observations[0, :, 2], [-1, 1])
    np.testing.assert_array_equal(observations[1:, :, 2], 0)
    np.testing.assert_array_equal(observations[:, 0, 1], [0, 0, 0, 1])
    np.testing.assert_array_equal(rewards[:3], 0)
    np.testing.assert_array_equal(rewards[3], [-1, 1])
    np.testing.assert_array_equal(dones[:, 0], [False, False, False, True])
    np.testing.assert_array_equal(state.step, 0)


class RecurrentPPOTest(absltest.TestCase):

  @pytest.mark.slow
  def test_learns_from_the_policy_that_acted(self):
    config = recurrent_ppo.Config(features=4, num_envs=2, memory_length=3)
    env = recurrent_ppo.MemoryChain(config.memory_length)
    agent = recurrent_ppo.Agent(config, env, nnx.Rngs(0))
    graphdef, params = nnx.split(agent)
    actor = recurrent_ppo.Actor(
        env=env.reset(jax.random.key(1), 2),
        carry=(jnp.array([[1.0] * 4, [-1.0] * 4]),),
        begins=jnp.array([False, True]),
    )

    @jax.jit
    def both(params):
      agent = nnx.merge(graphdef, params)
      _, rollout = recurrent_ppo.collect(
          agent, env, actor, jax.random.key(2), num_steps=9
      )
      logits, value = agent.unroll(
          actor.carry, rollout.observation, rollout.begins
      )
      return (
          rollout,
          recurrent_ppo.log_probability(logits, rollout.action),
          value,
      )

    rollout, log_prob, value = both(params)
    self.assertTrue(rollout.begins[1:].any())
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(log_prob, rollout.log_prob)
    close(value, rollout.value)

  def test_advantages_stop_at_the_end_of_an_episode(self):
    zeros = jnp.zeros((4, 1))
    rollout = recurrent_ppo.Rollout(
        observation=zeros,
        begins=zeros,
        action=zeros,
        log_prob=zeros,
        value=jnp.array([[1.0], [2.0], [3.0], [4.0]]),
        reward=jnp.array([[0.0], [1.0], [0.0], [0.0]]),
        done=jnp.array([[False], [True], [False], [False]]),
    )
    config = recurrent_ppo.Config(discount=0.5, gae_lambda=0.5)
    got = recurrent_ppo.advantages(config, rollout, jnp.array([8.0]))
    last = 0.5 * 8 - 4
    third = 0.5 * 4 - 3 + 0.25 * last
    second = 1.0 - 2
    first = 0.5 * 2 - 1 + 0.25 * second
    np.testing.assert_allclose(got[:, 0], [first, second, third, last])

  def test_sizes_that_do_not_fit_are_refused(self):
    for options, message in (
        ({'num_updates': 5}, 'multiple of 10'),
        ({'num_envs': 5}, 'must divide num_envs, got 2 and 5'),
        ({'num_minibatches': 0}, 'must divide'),
        ({'num_steps': 0}, 'at least 1'),
        ({'layer': 'Foo'}, "got 'Foo'"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        recurrent_ppo.Config(**options)

  @pytest.mark.slow
  def test_solves_the_task(self):
    lines = []
    _, returns = recurrent_ppo.train(
        recurrent_ppo.Config(), report=lines.append
    )
    self.assertGreaterEqual(float(returns[-10:].mean()), 0.95)
    self.assertLen(lines, 10)


if __name__ == '__main__':
  absltest.main()
