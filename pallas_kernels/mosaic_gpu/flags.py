"""Steps that restart, are held or do not exist: choices by scalars in a kernel.

A condition here is a scalar, the same for all lanes, or None for never: what a
call does not use costs nothing.
"""

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
  flags = jnp.int32(0)
  if reset is not None:
    flags = flags | jnp.where(reset, RESET, 0)
  if mask is not None:
    flags = flags | jnp.where(mask, 0, HOLD)
  return flags.astype(jnp.int32)


class Block:
  """The flags of a block's steps.

  Args:
    walk: over time.
    ref: flags int32 [B, T] in device memory, or None without flags.
    wave: which block.
  """

  def __init__(self, walk, ref: Any, wave):
    self.walk = walk
    self.wave = wave
    self.codes = None
    if ref is not None:
      last = walk.layout.time - 1
      self.codes = [
          ref[walk.batch, jnp.clip(walk.time(wave, i), 0, last)]
          for i in range(walk.config.rows)
      ]

  def restarts(self, i: int):
    """Whether the carry restarts before the i-th step."""
    return None if self.codes is None else (self.codes[i] & RESET) != 0

  def held(self, i: int):
    """Whether the carry is held over the i-th step."""
    return None if self.codes is None else (self.codes[i] & HOLD) != 0

  def beyond(self, i: int):
    """Whether the i-th step lies beyond the sequence."""
    if not self.walk.ragged:
      return None
    return self.walk.first_step(self.wave) + i >= self.walk.layout.time

  def idle(self, i: int):
    """Whether the i-th step leaves the carry alone, for either reason."""
    held, beyond = self.held(i), self.beyond(i)
    if held is None or beyond is None:
      return beyond if held is None else held
    return held | beyond


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
