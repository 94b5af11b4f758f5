"""Steps that restart, are held or do not exist: choices in a kernel.

A condition here is a scalar, the same for all lanes (an array where lanes have
several sequences), or None for never: what a call does not use costs nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import affine_maps

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
  """The flags of a block's steps; those beyond the sequence are held.

  Args:
    walk: over time.
    ref: flags int32 [B, T] in device memory, or None without flags.
    wave: which block.
  """

  def __init__(self, walk, ref: Any, wave):
    end = walk.layout.time
    times = [walk.time(wave, i) for i in range(walk.config.rows)]
    self._beyond = None
    if walk.ragged:
      self._beyond = [time >= end for time in times]
    self._codes = None
    if ref is not None:
      codes = [ref[walk.batch, jnp.minimum(t, end - 1)] for t in times]
      if walk.ragged:
        codes = [
            jnp.where(time >= end, HOLD, code)
            for time, code in zip(times, codes, strict=True)
        ]
      self._codes = codes

  def restarts(self, i: int):
    """Whether the carry restarts before the i-th step."""
    return None if self._codes is None else (self._codes[i] & RESET) != 0

  def idle(self, i: int):
    """Whether the carry is held over the i-th step."""
    if self._codes is None:
      return None if self._beyond is None else self._beyond[i]
    return (self._codes[i] & HOLD) != 0

  def map(self, i: int, pair, restart) -> affine_maps.Map:
    """Returns what the i-th step of a linear recurrence does to h.

    Args:
      i: which step.
      pair: the map without flags.
      restart: what a restart starts from.
    """
    pair = select(self.idle(i), (1.0, 0.0), pair)
    forget = 0.0, lambda: affine_maps.step(pair, restart)
    return select(self.restarts(i), forget, pair)


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
