"""Flags of the steps of one block, and the maps of steps with flags."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import time_blocks


class BlockFlags:
  """The flags of a block's steps; steps beyond the sequence are held.

  Args:
    walk: over time.
    ref: flags int32 [B, T] in device memory, or None without flags.
    wave: of the block.
  """

  def __init__(self, walk: time_blocks.Walk, ref: Any, wave):
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
            jnp.where(time >= end, step_flags.HOLD, code)
            for time, code in zip(times, codes, strict=True)
        ]
      self._codes = codes

  def restarts(self, i: int):
    """Whether the carry restarts before the i-th step."""
    if self._codes is None:
      return None
    return (self._codes[i] & step_flags.RESET) != 0

  def idle(self, i: int):
    """Whether the carry is held over the i-th step."""
    if self._codes is None:
      return None if self._beyond is None else self._beyond[i]
    return (self._codes[i] & step_flags.HOLD) != 0

  def map(self, i: int, pair, restart) -> affine_maps.Map:
    """Returns the map of the i-th step of a linear recurrence, with flags.

    Args:
      i: index of the step in the block.
      pair: the map without flags.
      restart: value that a restart starts from.
    """
    pair = step_flags.select(self.idle(i), (1.0, 0.0), pair)
    forget = 0.0, lambda: affine_maps.step(pair, restart)
    return step_flags.select(self.restarts(i), forget, pair)
