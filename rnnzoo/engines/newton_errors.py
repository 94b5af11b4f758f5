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


def scales(new: Carry, reverse: bool, together: bool) -> Carry:
  """Returns the largest of a sequence's numbers up to each step, [T, B, 1].

  A trajectory may grow by many orders of magnitude, and what is small at its
  end was large at its beginning.

  Args:
    new: the carry after the steps, each [T, B, F].
    reverse: whether time runs from the last step to the first.
    together: whether all arrays of the carry have one scale.
  """
  scale = [jnp.max(jnp.abs(x), axis=2, keepdims=True) for x in new]
  if together:
    scale = [functools.reduce(jnp.maximum, scale)] * len(new)
  return tuple(lax.cummax(x, axis=0, reverse=reverse) for x in scale)


def largest(values: Carry, scale: Carry) -> Array:
  """Returns the largest of all values, each in its scale."""
  tiny = float(jnp.finfo(values[0].dtype).tiny)
  found = [
      jnp.max(jnp.abs(x) / jnp.maximum(y, tiny))
      for x, y in zip(values, scale, strict=True)
  ]
  return jnp.max(jnp.stack(found))
