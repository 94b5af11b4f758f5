"""Initialisers that the layers use, beside those of `jax.nn.initializers`."""

from collections.abc import Callable, Sequence
from typing import Any

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
  """Returns an initialiser that adds `offset` to the values of `init`."""

  def shifted_init(key, shape, dtype=None, out_sharding=None):
    del out_sharding
    return init(key, shape, dtype) + offset

  return shifted_init


def draw(
    init: Initializer | Sequence[Initializer],
    next_key: Callable[[], jax.Array],
    gates: int,
    shape: tuple[int, ...],
    dtype: Any,
    heads: int | None = None,
) -> jax.Array:
  """Draws parameters gate by gate.

  Args:
    init: one initialiser, or one for each gate.
    next_key: returns a new random key.
    gates: number of gates.
    shape: the argument of an initialiser.
    dtype: of the parameters.
    heads: number of heads, each drawn on its own; None for no such axis.

  Returns:
    [gates, *shape] or [gates, heads, *shape].

  Raises:
    ValueError: there are several initialisers, but not one for each gate.
  """
  inits = list(init) if isinstance(init, Sequence) else [init] * gates
  if len(inits) != gates:
    raise ValueError(
        f'An initialiser must be one, or {gates}, one for each gate; got'
        f' {len(inits)}.'
    )
  if heads is None:
    return jnp.stack([f(next_key(), shape, dtype) for f in inits])
  each_head = lambda f: jax.vmap(lambda key: f(key, shape, dtype))
  keys = [jax.random.split(next_key(), heads) for _ in inits]
  return jnp.stack(
      [each_head(f)(key) for f, key in zip(inits, keys, strict=True)]
  )
