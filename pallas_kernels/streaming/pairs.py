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


class _Feature:
  """This thread's feature in arrays [B, T, F] or [T, B, F].

  Args:
    walk: walk over time.
  """

  def __init__(self, walk: blocks.Walk):
    self._walk, layout = walk, walk.layout
    self._lane = ptx.thread()
    self._feature = self._lane + walk.features.start
    self._inside = (self._feature < layout.features).astype(jnp.int32)
    steps = layout.batch if layout.time_major else 1
    self._stride = steps * layout.features

  def rows(self, first: Array) -> tuple[Array, memory.Rows]:
    """Returns the element of a block's first row, and the block's rows.

    Args:
      first: time of the first row.
    """
    walk, layout = self._walk, self._walk.layout
    element = first * self._stride + self._feature
    between = 1 if layout.time_major else layout.time
    element += walk.batch * between * layout.features
    return element, memory.Rows(
        count=walk.config.rows,
        first=first,
        end=layout.time,
        inside=self._inside,
        stride=8 * self._stride,
        shared=8 * blocks.LANES,
    )

  def place(self, slot) -> Array:
    """Returns the byte of this thread's first pair in a slot of a ring."""
    rows = slot * self._walk.config.rows
    return (rows * blocks.LANES + self._lane) * 8


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
    self._feature = _Feature(walk)

  def _copy(self, wave):
    place = self._feature.place(self.walk.slot(wave, self.stages))
    for stream, ring in zip(self.streams, self.rings, strict=True):
      first = self.walk.start(wave) + stream.shift
      element, rows = self._feature.rows(first)
      array = self.arrays[stream.array]
      memory.copy_pairs(ring, place, array, element, rows)
    memory.fetch_commit()

  def refill(self, wave):
    # Copies beyond the last wave copy nothing, and keep `wait` in step.
    self._copy(wave + self.stages)

  def wait(self, wave):
    del wave
    # In order: of the waves on their way, only these may still be missing.
    memory.fetch_wait(self.stages - 1 - self.walk.config.ahead)

  def rows(self, wave) -> list[tuple[Array, ...]]:
    walk = self.walk
    place = self._feature.place(walk.slot(wave, self.stages))
    _, rows = self._feature.rows(walk.start(wave))
    found: list[list[Array]] = [[] for _ in range(walk.config.rows)]
    for stream, ring in zip(self.streams, self.rings, strict=True):
      pairs = memory.load_pairs(ring, place, rows)
      for i, values in enumerate(found):
        re, im = pairs[walk.row(i)]
        values += re, -im if stream.conjugate else im
    return list(map(tuple, found))


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
    self._feature = _Feature(walk)

  def write(self, wave, rows):
    element, place = self._feature.rows(self.walk.start(wave))
    in_memory = [rows[self.walk.row(i)] for i in range(len(rows))]
    for k, stream in enumerate(self.streams):
      sign = -1.0 if stream.conjugate else 1.0
      pairs = [(row[2 * k], sign * row[2 * k + 1]) for row in in_memory]
      memory.store_pairs(self.arrays[stream.array], element, pairs, place)
