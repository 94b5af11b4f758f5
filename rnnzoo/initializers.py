"""Initialisers that the layers use, beside those of `jax.nn.initializers`."""

import jax

Initializer = jax.nn.initializers.Initializer

lecun_normal = jax.nn.initializers.lecun_normal()
orthogonal = jax.nn.initializers.orthogonal()
xavier_uniform = jax.nn.initializers.xavier_uniform()
zeros = jax.nn.initializers.zeros

# N(0, 1 / fan_in), not truncated.
fan_in_normal = jax.nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')


def uniform(low: float, high: float) -> Initializer:
  """Returns an initialiser U(low, high)."""

  def init(key, shape, dtype, out_sharding=None):
    del out_sharding
    return jax.random.uniform(key, shape, dtype, low, high)

  return init


def shifted(init: Initializer, offset: float) -> Initializer:
  """Returns an initialiser that adds `offset` to what `init` gives."""

  def shifted_init(key, shape, dtype, out_sharding=None):
    del out_sharding
    return init(key, shape, dtype) + offset

  return shifted_init
