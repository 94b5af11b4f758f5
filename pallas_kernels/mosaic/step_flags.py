"""Flags of a step: whether it restarts or holds the carry.

A condition is a scalar, equal for all lanes (an array where lanes have
several sequences), or None for never: a flag that no call gives costs nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

# Bits of a step's flags.
RESET, HOLD = 1, 2


def pack(reset: Array | None, mask: Array | None) -> Array | None:
  """Returns the flags int32 of boolean arrays, or None where both are None.

  Args:
    reset: true where the carry restarts before the step.
    mask: false where the carry is held over the step.
  """
  if reset is None and mask is None:
    return None
  bits = []
  if reset is not None:
    bits.append(reset.astype(jnp.int32) * RESET)
  if mask is not None:
    bits.append(jnp.logical_not(mask).astype(jnp.int32) * HOLD)
  return functools.reduce(jnp.bitwise_or, jnp.broadcast_arrays(*bits))


def select(condition, chosen, other) -> tuple[Any, ...]:
  """Chooses between two tuples.

  Args:
    condition: a scalar, or None for never.
    chosen: numbers, arrays, or functions that are called if they are needed.
    other: numbers or arrays.
  """
  if condition is None:
    return tuple(other)
  force = lambda x: x() if callable(x) else x
  return tuple(
      jnp.where(condition, force(x), y)
      for x, y in zip(chosen, other, strict=True)
  )
