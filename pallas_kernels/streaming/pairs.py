"""Blocks of complex arrays, pairs of float32 that TMA cannot copy.

A thread copies the pairs of its own feature: 8 bytes a step, asynchronously,
into its own places in shared memory. So no thread waits for another one, rows
need no alignment, and steps beyond an array are zeros. Results go from
registers to device memory.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.streaming import blocks

Array = jax.Array
Ref = Any


class _Places:
  """The elements of this thread's feature in arrays [B, T, F] or [T, B, F].

  Args:
    walk: walk over time.
  """

  def __init__(self, walk: blocks.Walk):
    self._walk = walk
    self._feature = ptx.thread() + walk.features.start

  def element(self, time) -> tuple[Array, Array]:
    """Returns an index, and int32 that is 0 outside of the array."""
    layout, batch = self._walk.layout, self._walk.batch
    row = batch * layout.time + time
    if layout.time_major:
      row = time * layout.batch + batch
    inside = (time >= 0) & (time < layout.time)
    inside &= self._feature < layout.features
    return row * layout.features + self._feature, inside.astype(jnp.int32)


class Inputs(blocks.Inputs):
  """Ring buffers of complex streams, as `blocks.Inputs`.

  Args:
    walk: walk over time.
    streams: the streams to be read.
    arrays: references to device memory that hold the streams.
    rings: a ring buffer [slots, rows, LANES, 2] for each stream.
  """

  def __init__(
      self,
      walk: blocks.Walk,
      streams: Sequence[blocks.Stream],
      arrays: Sequence[Ref],
      rings: Sequence[Ref],
  ):
    super().__init__(walk, streams, arrays, rings, None)
    self._places = _Places(walk)
    self._lane = ptx.thread()

  def _place(self, wave, row: int) -> Array:
    """Returns the byte of this thread's pair in a ring."""
    walk = self.walk
    slot = walk.slot(wave, self.stages) * walk.config.rows + row
    return (slot * blocks.LANES + self._lane) * 8

  def _copy(self, wave):
    walk = self.walk
    for stream, ring in zip(self.streams, self.rings, strict=True):
      for row in range(walk.config.rows):
        time = walk.start(wave) + row + stream.shift
        element, inside = self._places.element(time)
        memory.copy_pair(
            ring,
            self._place(wave, row),
            self.arrays[stream.array],
            element,
            inside * 8,
        )
    memory.fetch_commit()

  def refill(self, wave):
    # Copies beyond the last wave copy nothing, and keep `wait` in step.
    self._copy(wave + self.stages)

  def wait(self, wave):
    del wave
    # In order: of the waves on their way, only these may still be missing.
    memory.fetch_wait(self.stages - 1 - self.walk.config.ahead)

  def rows(self, wave) -> list[tuple[Array, ...]]:
    found = []
    for i in range(self.walk.config.rows):
      values: list[Array] = []
      for stream, ring in zip(self.streams, self.rings, strict=True):
        place = self._place(wave, self.walk.row(i))
        re, im = memory.load_pair(ring, place)
        values += re, -im if stream.conjugate else im
      found.append(tuple(values))
    return found


class Outputs(blocks.Outputs):
  """Complex streams that a warpgroup writes, as `blocks.Outputs`.

  Args:
    walk: walk over time.
    streams: the streams to be written.
    arrays: references to device memory that hold the streams.
    rings: none.
  """

  def __init__(self, walk, streams, arrays, rings):
    super().__init__(walk, streams, arrays, rings)
    self._places = _Places(walk)

  def write(self, wave, rows):
    for i, row in enumerate(rows):
      element, inside = self._places.element(self.walk.time(wave, i))
      values = iter(row)
      for stream in self.streams:
        re, im = next(values), next(values)
        im = -im if stream.conjugate else im
        array = self.arrays[stream.array]
        memory.store_pair(array, element, (re, im), inside)
