"""The sizes of errors in a trajectory: their scale, and roundings to follow."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from rnnzoo import cell as cell_lib

Array = jax.Array
Carry = cell_lib.Carry


def rounding(s: Carry) -> float:
  """Returns the relative size of one rounding."""
  return float(jnp.finfo(s[0].dtype).eps)


def signs(shape, seed: int) -> Array:
  """Returns random signs, the same for every run: [T, 1, F]."""
  time, _, features = shape
  # Behind a barrier, or XLA would compute all of them while it compiles.
  steps = lax.optimization_barrier(lax.iota(jnp.uint32, time))
  index = steps[:, None, None] * np.uint32(features)
  index += lax.iota(jnp.uint32, features) + np.uint32(seed << 16)
  # A hash by two multiplications.
  mixed = (index ^ (index >> 15)) * np.uint32(0x85EBCA6B)
  mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
  return 1 - 2 * (mixed >> 31).astype(jnp.int32)


def scales(
    new: Carry,
    *,
    heads: int,
    begins: Array | None,
    reverse: bool,
    together: bool,
) -> Carry:
  """Returns the largest of a head's numbers up to each step, [T, B, F or 1].

  A trajectory may grow by many orders of magnitude, and an error that is small
  at its end was large at its beginning. Steps before a reset do not count.

  Args:
    new: the carry after the steps, each [T, B, F].
    heads: N; none of them sees another one.
    begins: bool [T, B, 1], the steps that do not depend on the carry before, or
      None.
    reverse: whether time runs from the last step to the first.
    together: whether all arrays of the carry have one scale.
  """
  scale = [_of_heads(jnp.abs(x), heads) for x in new]
  if together:
    scale = [functools.reduce(jnp.maximum, scale)] * len(new)
  if begins is None:
    return tuple(lax.cummax(x, axis=0, reverse=reverse) for x in scale)
  so_far = functools.partial(
      lax.associative_scan, _larger, reverse=reverse, axis=0
  )
  flags = [jnp.broadcast_to(begins, x.shape) for x in scale]
  return tuple(so_far((f, x))[1] for f, x in zip(flags, scale, strict=True))


def scale_after(scale: Carry, new: Carry, heads: int, begins) -> Carry:
  """Returns the next of `scales`, each [B, F or 1], for steps in turn.

  Args:
    scale: of the step before.
    new: the carry after the step, each [B, F].
    heads: N.
    begins: bool [B, 1], or None.
  """
  own = tuple(_of_heads(jnp.abs(x), heads) for x in new)
  if begins is not None:
    scale = tuple(jnp.where(begins, 0, x) for x in scale)
  return tuple(map(jnp.maximum, scale, own))


def _of_heads(x: Array, heads: int) -> Array:
  """Returns the largest of each head, [..., F]; [..., 1] for one head."""
  if heads == 1:
    return jnp.max(x, axis=-1, keepdims=True)
  if heads == x.shape[-1]:
    return x
  own = x.reshape(*x.shape[:-1], heads, -1)
  worst = jnp.max(own, axis=-1, keepdims=True)
  return jnp.broadcast_to(worst, own.shape).reshape(x.shape)


def _larger(before, after):
  """Joins the largest of two stretches of steps, each (begins, largest)."""
  begins, own = after
  return before[0] | begins, jnp.where(begins, own, jnp.maximum(before[1], own))


def largest(values: Carry, scale: Carry) -> Array:
  """Returns the largest of all values, each in its scale."""
  tiny = float(jnp.finfo(values[0].dtype).tiny)
  found = [
      jnp.max(jnp.abs(x) / jnp.maximum(y, tiny))
      for x, y in zip(values, scale, strict=True)
  ]
  return jnp.max(jnp.stack(found))
