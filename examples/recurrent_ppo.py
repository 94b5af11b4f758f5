"""Recurrent PPO, wholly in JAX, on a task that cannot be solved without memory.

    python examples/recurrent_ppo.py
    python examples/recurrent_ppo.py --layer=LSTM --memory_length=50

The agent sees a bit in the first step of an episode and is asked for it in the
last one. It learns to answer in well under a minute on a CPU. Three calls of a
layer are all that is recurrent here:

  layer.initial_carry((num_envs,))                  once, before the first step
  layer.step(carry, x, reset=begins)                to act, in the environment
  layer.unroll(x, initial_carry=carry, reset=begins, time_major=True)
                                                    to learn from a rollout

`begins` says where an episode starts; there the carry restarts. A rollout
begins in the middle of episodes, so the update unrolls from the carry that the
agent had then, which the rollout keeps.

Needs optax: pip install -e '.[train]'.
"""

import dataclasses
import functools
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp
import optax

import rnnzoo

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and coefficients; the defaults solve a memory of 20 steps."""

  layer: str = 'GRU'
  features: int = 32
  memory_length: int = 20
  num_envs: int = 64
  num_steps: int = 64
  num_updates: int = 60
  num_epochs: int = 4
  num_minibatches: int = 2
  learning_rate: float = 2e-3
  discount: float = 0.99
  gae_lambda: float = 0.95
  clip: float = 0.2
  value_weight: float = 0.5
  entropy_weight: float = 0.01
  max_grad_norm: float = 0.5
  seed: int = 0

  def __post_init__(self):
    if self.layer not in rnnzoo.LAYERS:
      raise ValueError(
          f'layer must be one of {", ".join(rnnzoo.LAYERS)}, got {self.layer!r}'
      )
    if self.num_updates < 10 or self.num_updates % 10:
      raise ValueError(
          'num_updates must be a multiple of 10, as many as there are reports,'
          f' got {self.num_updates}'
      )
    if self.num_minibatches < 1 or self.num_envs % self.num_minibatches:
      raise ValueError(
          'num_minibatches must divide num_envs, got'
          f' {self.num_minibatches} and {self.num_envs}'
      )
    if self.num_steps < 1:
      raise ValueError(f'num_steps must be at least 1, got {self.num_steps}')


class ChainState(NamedTuple):
  """State of the environments: step of the episode, bit to remember; [B]."""

  step: Array
  bit: Array


@dataclasses.dataclass(frozen=True)
class MemoryChain:
  """The memory chain of bsuite with one bit, for a batch of environments.

  Step 0 shows the bit, step `length` asks for it and ends the episode, with
  reward 1 for the right action and -1 for the other one. No other step has a
  reward, so that guessing returns 0 on average.
  """

  length: int
  observation_size = 3
  num_actions = 2

  def reset(self, key: Array, num_envs: int) -> ChainState:
    bit = jax.random.bernoulli(key, shape=(num_envs,)).astype(jnp.int32)
    return ChainState(jnp.zeros((num_envs,), jnp.int32), bit)

  def observe(self, state: ChainState) -> Array:
    """Returns time left, whether it asks, and the bit as ±1; [B, 3]."""
    left = 1 - state.step / self.length
    asks = jnp.where(state.step == self.length, 1.0, 0.0)
    shown = jnp.where(state.step == 0, 2.0 * state.bit - 1, 0.0)
    return jnp.stack([left, asks, shown], axis=-1)

  def step(
      self, state: ChainState, action: Array, key: Array
  ) -> tuple[ChainState, Array, Array]:
    """Returns the next state, reward and whether the episode ended, each [B].

    Args:
      state: the environments' state; where an episode ends, a new one begins.
      action: the bit as the agent remembers it, [B].
      key: for the bits of new episodes.
    """
    done = state.step == self.length
    reward = jnp.where(done, jnp.where(action == state.bit, 1.0, -1.0), 0.0)
    new = self.reset(key, done.shape[0])
    state = ChainState(
        jnp.where(done, new.step, state.step + 1),
        jnp.where(done, new.bit, state.bit),
    )
    return state, reward, done


class Agent(nnx.Module):
  """Policy and value from one recurrent layer."""

  def __init__(self, config: Config, env: MemoryChain, rngs: nnx.Rngs):
    features = config.features
    self.encoder = nnx.Linear(env.observation_size, features, rngs=rngs)
    layer: Any = rnnzoo.LAYERS[config.layer]
    self.memory = layer(features, features, rngs=rngs)
    self.policy = nnx.Linear(features, env.num_actions, rngs=rngs)
    self.value = nnx.Linear(features, 1, rngs=rngs)

  def step(self, carry: Any, observation: Array, begins: Array):
    """Acts: returns carry, logits [B, actions] and value [B]."""
    x = nnx.relu(self.encoder(observation))
    carry, y = self.memory.step(carry, x, reset=begins)
    return carry, self.policy(y), self.value(y)[..., 0]

  def unroll(self, carry: Any, observations: Array, begins: Array):
    """Learns: returns logits [T, B, actions] and values [T, B]."""
    x = nnx.relu(self.encoder(observations))
    y = self.memory(x, initial_carry=carry, reset=begins, time_major=True)
    return self.policy(y), self.value(y)[..., 0]


class Actor(NamedTuple):
  """All that acting changes from step to step."""

  env: ChainState
  carry: Any  # the layer's
  begins: Array  # [B], whether the next step is an episode's first


class Rollout(NamedTuple):
  """A part of the environments' history, [T, B]; observations [T, B, 3]."""

  observation: Array
  begins: Array
  action: Array
  log_prob: Array
  value: Array
  reward: Array
  done: Array


def log_probability(logits: Array, action: Array) -> Array:
  """Returns the logarithm of the probability of actions, [...]."""
  logs = jax.nn.log_softmax(logits)
  return jnp.take_along_axis(logs, action[..., None], axis=-1)[..., 0]


def collect(
    agent: Agent, env: MemoryChain, actor: Actor, key: Array, num_steps: int
) -> tuple[Actor, Rollout]:
  """Acts for some steps."""

  def act(actor, key):
    action_key, env_key = jax.random.split(key)
    observation = env.observe(actor.env)
    carry, logits, value = agent.step(actor.carry, observation, actor.begins)
    action = jax.random.categorical(action_key, logits)
    state, reward, done = env.step(actor.env, action, env_key)
    seen = Rollout(
        observation=observation,
        begins=actor.begins,
        action=action,
        log_prob=log_probability(logits, action),
        value=value,
        reward=reward,
        done=done,
    )
    return Actor(state, carry, done), seen

  return jax.lax.scan(act, actor, jax.random.split(key, num_steps))


def advantages(config: Config, rollout: Rollout, last_value: Array) -> Array:
  """Returns generalised advantage estimates, [T, B]."""

  def back(carry, step):
    advantage, next_value = carry
    going_on = 1.0 - step.done
    error = step.reward + config.discount * going_on * next_value - step.value
    decay = config.discount * config.gae_lambda * going_on
    advantage = error + decay * advantage
    return (advantage, step.value), advantage

  start = jnp.zeros_like(last_value), last_value
  return jax.lax.scan(back, start, rollout, reverse=True)[1]


def ppo_loss(
    config: Config, agent: Agent, carry: Any, rollout: Rollout, advantage: Array
) -> Array:
  """Returns the loss of a minibatch of environments.

  Args:
    config: coefficients.
    agent: what is differentiated.
    carry: the memory before the rollout's first step.
    rollout: [T, B].
    advantage: [T, B].
  """
  logits, value = agent.unroll(carry, rollout.observation, rollout.begins)
  log_prob = log_probability(logits, rollout.action)
  ratio = jnp.exp(log_prob - rollout.log_prob)
  target = advantage + rollout.value
  normed = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
  clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
  policy_loss = -jnp.minimum(ratio * normed, clipped * normed).mean()
  value_loss = 0.5 * jnp.square(value - target).mean()
  logs = jax.nn.log_softmax(logits)
  entropy = -(jnp.exp(logs) * logs).sum(-1).mean()
  return (
      policy_loss
      + config.value_weight * value_loss
      - config.entropy_weight * entropy
  )


def train(config: Config, report=print) -> tuple[Agent, Array]:
  """Trains an agent.

  Args:
    config: sizes and coefficients.
    report: is given a line of text a few times.

  Returns:
    The agent, and the mean return of the episodes that ended in each update.
  """
  env = MemoryChain(config.memory_length)
  agent = Agent(config, env, nnx.Rngs(config.seed))
  optimizer = optax.chain(
      optax.clip_by_global_norm(config.max_grad_norm),
      optax.adam(
          optax.linear_schedule(
              config.learning_rate,
              0.0,
              config.num_updates * config.num_epochs * config.num_minibatches,
          )
      ),
  )
  graphdef, params = nnx.split(agent)

  def loss(params, *minibatch):
    return ppo_loss(config, nnx.merge(graphdef, params), *minibatch)

  def minibatch_step(learner, minibatch):
    params, optimizer_state = learner
    grads = jax.grad(loss)(params, *minibatch)
    updates, optimizer_state = optimizer.update(grads, optimizer_state)
    return (optax.apply_updates(params, updates), optimizer_state), None

  def split(a, order, axis):
    """[..., B, ...] -> [minibatches, ..., B / minibatches, ...]."""
    a = jnp.take(a, order, axis=axis)
    shape = *a.shape[:axis], config.num_minibatches, -1, *a.shape[axis + 1 :]
    return jnp.moveaxis(a.reshape(shape), axis, 0)

  def update(state, key):
    learner, actor = state
    collect_key, shuffle_key = jax.random.split(key)
    agent = nnx.merge(graphdef, learner[0])
    start = actor.carry
    actor, rollout = collect(agent, env, actor, collect_key, config.num_steps)
    last_value = agent.step(actor.carry, env.observe(actor.env), actor.begins)[
        2
    ]
    advantage = advantages(config, rollout, last_value)

    def epoch(learner, key):
      order = jax.random.permutation(key, config.num_envs)
      by_env = functools.partial(split, order=order, axis=0)
      by_step = functools.partial(split, order=order, axis=1)
      minibatches = (
          jax.tree.map(by_env, start),
          jax.tree.map(by_step, rollout),
          by_step(advantage),
      )
      return jax.lax.scan(minibatch_step, learner, minibatches)

    keys = jax.random.split(shuffle_key, config.num_epochs)
    learner, _ = jax.lax.scan(epoch, learner, keys)
    ended = jnp.maximum(rollout.done.sum(), 1)
    return (learner, actor), rollout.reward.sum() / ended

  env_key, key = jax.random.split(jax.random.key(config.seed))
  actor = Actor(
      env=env.reset(env_key, config.num_envs),
      carry=agent.memory.initial_carry((config.num_envs,)),
      begins=jnp.ones((config.num_envs,), bool),
  )
  state = (params, optimizer.init(params)), actor
  run = jax.jit(functools.partial(jax.lax.scan, update))
  returns = []
  for part in jax.random.split(key, (10, config.num_updates // 10)):
    state, means = run(state, part)
    returns.append(means)
    report(f'{len(returns) * len(part):5d} updates: return {means[-1]:.3f}')
  nnx.update(agent, state[0][0])
  return agent, jnp.concatenate(returns)


def main(argv: list[str]) -> None:
  """Trains by the flags and says how well."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  fields = [field.name for field in dataclasses.fields(Config)]
  values: dict[str, Any] = {n: flags.FLAGS[n].value for n in fields}
  config = Config(**values)
  start = time.perf_counter()
  _, returns = train(config)
  seconds = time.perf_counter() - start
  steps = returns.size * config.num_envs * config.num_steps
  print(
      f'Mean return of the last ten updates: {returns[-10:].mean():.3f}, after'
      f' {steps:,} steps and {seconds:.0f} s.'
  )


def define_flags() -> None:
  """Defines a flag for each field of `Config`."""
  for field in dataclasses.fields(Config):
    kinds: dict[Any, Any] = {
        str: flags.DEFINE_string,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
    }
    define = kinds[type(field.default)]
    define(field.name, field.default, f'Config.{field.name}.')


if __name__ == '__main__':
  define_flags()
  app.run(main)
