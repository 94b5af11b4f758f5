"""Initialisers that the layers use, beside those of `jax.nn.initializers`."""

import jax
import jax.numpy as jnp

Initializer = jax.nn.initializers.Initializer

lecun_normal = jax.nn.initializers.lecun_normal()
xavier_uniform = jax.nn.initializers.xavier_uniform()
zeros = jax.nn.initializers.zeros

# N(0, 1 / fan_in), not truncated.
fan_in_normal = jax.nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')


def orthogonal(key, shape, dtype=jnp.float32, out_sharding=None):
  """Orthogonal; drawn in float32 or wider, since 16 bits have no QR."""
  wide = jnp.promote_types(dtype, jnp.float32)
  init = jax.nn.initializers.orthogonal()
  return init(key, shape, wide, out_sharding).astype(dtype)


def uniform(low: float, high: float) -> Initializer:
  """Returns an initialiser U(low, high)."""

  def init(key, shape, dtype=None, out_sharding=None):
    del out_sharding
    return jax.random.uniform(key, shape, dtype, low, high)

  return init


def shifted(init: Initializer, offset: float) -> Initializer:
  """Returns an initialiser that adds `offset` to what `init` gives."""

  def shifted_init(key, shape, dtype=None, out_sharding=None):
    del out_sharding
    return init(key, shape, dtype) + offset

  return shifted_init
