"""Flags of the steps of one block, and the maps of steps with flags.

A kernel reads the flags of a block as a few words. Where no bit of them is set,
as in most blocks of a sequence with some resets, it skips what flags need.
"""

from collections.abc import Callable, Sequence
import functools
import operator
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import time_blocks

Array = jax.Array

# Steps of a word, which has bits of each.
_STEPS, _BITS = 16, 2


def pack(plan: kernel_call.Plan, flags: Array) -> Array:
  """Returns the flags of all blocks as words.

  Args:
    plan: of the kernel.
    flags: int32 [B, T]; returned as it is where the plan has no flags.

  Returns:
    int32 [B, words of all blocks], the first block in time first. Steps beyond
    the sequence are held.
  """
  if not plan.has_flags:
    return flags
  layout, rows = plan.layout, plan.config.rows
  steps = time_blocks.steps(layout, plan.config)
  pad = lambda x, count, code: jnp.pad(
      x, [(0, 0)] * (x.ndim - 1) + [(0, count)], constant_values=code
  )
  flags = pad(flags, steps - layout.time, step_flags.HOLD)
  flags = flags.reshape(layout.batch, steps // rows, rows)
  flags = pad(flags, _words(rows) * _STEPS - rows, 0)
  flags = flags.reshape(layout.batch, -1, _STEPS)
  places = _BITS * lax.broadcasted_iota(jnp.int32, flags.shape, 2)
  return jnp.sum(flags << places, 2, dtype=jnp.int32)


def _words(rows: int) -> int:
  return -(-rows // _STEPS)


class BlockFlags:
  """The flags of a block's steps; steps beyond the sequence are held.

  Args:
    walk: over time.
    ref: what `pack` returned, in device memory, or None without flags.
    wave: of the block.
  """

  def __init__(self, walk: time_blocks.Walk, ref: Any, wave):
    self._walk = walk
    self._beyond = None
    self._words: Sequence[Any] = ()
    if ref is not None:
      count = _words(walk.config.rows)
      first = walk.place(wave) * count
      self._words = [ref[walk.batch, first + i] for i in range(count)]
    elif walk.ragged:
      times = [walk.time(wave, i) for i in range(walk.config.rows)]
      self._beyond = [time >= walk.layout.time for time in times]

  def restarts(self, i: int):
    """Whether the carry restarts before the i-th step."""
    return self._has(i, step_flags.RESET)

  def idle(self, i: int):
    """Whether the carry is held over the i-th step."""
    if self._beyond is not None:
      return self._beyond[i]
    return self._has(i, step_flags.HOLD)

  def _has(self, i: int, flag: int):
    if not self._words:
      return None
    word, place = divmod(self._walk.row(i), _STEPS)
    bit = int(np.uint32(flag << (_BITS * place)).astype(np.int32))
    return (self._words[word] & bit) != 0

  def either(self, with_flags: Callable[[], Any], without: Callable[[], Any]):
    """Returns what one of two functions returns, by whether a flag is set.

    Args:
      with_flags: is right for any flags.
      without: is right where no flag of the block is set, and returns arrays of
        the same types.
    """
    if not self._words:
      return with_flags()
    is_set = functools.reduce(operator.or_, self._words) != 0
    return lax.cond(is_set, with_flags, without)

  def maps(
      self, pairs: Sequence[affine_maps.Map], restart
  ) -> Sequence[affine_maps.Map]:
    """Returns the maps of a linear recurrence's steps, with flags.

    Args:
      pairs: the maps without flags.
      restart: value that a restart starts from.
    """
    return self.either(
        lambda: [self.map(i, pair, restart) for i, pair in enumerate(pairs)],
        lambda: [tuple(pair) for pair in pairs],
    )

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
