"""Blocks that threads copy, where TMA cannot or is not there.

TMA knows no pairs of float32, complex arrays, and came with compute capability
9.0. Here a warp copies the rows of its own 32 features asynchronously, 16 bytes
a lane, and waits for no other warp; steps beyond an array are zeros. Results go
from registers to device memory.
"""

from collections.abc import Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.streaming import blocks

Array = jax.Array
Ref = Any


class _Places:
  """Places of a tile in arrays [B, T, F], [B, T, g, F] or [T, B, ...].

  Args:
    walk: walk over time.
  """

  def __init__(self, walk: blocks.Walk):
    self._walk, self._lane = walk, ptx.thread()

  def rows(
      self, stream: blocks.Stream, array: Ref, first: Array
  ) -> tuple[Array, memory.Rows]:
    """Returns the element of this thread in a block's first row, and the rows.

    Args:
      stream: a stream.
      array: the array that holds it, in device memory.
      first: time of the first row.
    """
    return self._rows(stream, array, first, self._lane, 0)

  def place(self, slot, stream: blocks.Stream) -> Array:
    """Returns the byte of this thread's first element in a slot of a ring."""
    return self._place(slot, stream, self._lane, 0)

  def copy(
      self, slot, ring: Ref, stream: blocks.Stream, array: Ref, first: Array
  ) -> None:
    """Starts copying a block into a slot of a ring; a warp copies its features.

    Args:
      slot: the slot.
      ring: the ring, in shared memory.
      stream: a stream.
      array: the array that holds it, in device memory.
      first: time of the first row.
    """
    size = stream.dtype.itemsize
    chunk = math.gcd(16, self._walk.layout.features * size)
    # Lanes in order: along a row of the warp's 32 features, then the next row.
    lanes, lane = 32 * size // chunk, self._lane & 31
    row = lane // lanes
    feature = (self._lane - lane) + (lane & (lanes - 1)) * (chunk // size)
    element, rows = self._rows(stream, array, first, feature, row, chunk)
    place = self._place(slot, stream, feature, row)
    memory.copy_rows(ring, place, array, element, rows, row)

  def _rows(self, stream, array, first, lane, row, chunk=0):
    walk, layout = self._walk, self._walk.layout
    gate = 0 if stream.gate is None else stream.gate
    width = layout.features * (1 if stream.gate is None else array.shape[2])
    stride = width * (layout.batch if layout.time_major else 1)
    between = width * (1 if layout.time_major else layout.time)
    feature = lane + walk.features.start
    element = (first + row) * stride + feature + gate * layout.features
    element += walk.batch * between
    return element, memory.Rows(
        count=walk.config.rows,
        first=first,
        end=layout.time,
        inside=(feature < layout.features).astype(jnp.int32),
        dtype=stream.dtype,
        stride=stream.dtype.itemsize * stride,
        shared=stream.dtype.itemsize * blocks.LANES,
        chunk=chunk,
    )

  def _place(self, slot, stream, lane, row) -> Array:
    rows = slot * self._walk.config.rows + row
    return (rows * blocks.LANES + lane) * stream.dtype.itemsize


class Inputs(blocks.Inputs):
  """Ring buffers, as `blocks.Inputs`.

  Args:
    walk: walk over time.
    streams: the streams to be read.
    arrays: references to device memory that hold the streams.
    rings: a ring buffer [slots, rows, LANES] for each stream, or [slots, rows,
      LANES, 2] where it is complex.
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

  def _copy(self, wave):
    slot = self.walk.slot(wave, self.stages)
    for stream, ring in zip(self.streams, self.rings, strict=True):
      first = self.walk.start(wave) + stream.shift
      self._places.copy(slot, ring, stream, self.arrays[stream.array], first)
    memory.fetch_commit()

  def refill(self, wave):
    memory.sync_warp()
    # Copies beyond the last wave copy nothing, and keep `wait` in step.
    self._copy(wave + self.stages)

  def wait(self, wave):
    del wave
    # In order: of the waves on their way, only these may still be missing.
    memory.fetch_wait(self.stages - 1 - self.walk.config.ahead)
    memory.sync_warp()

  def rows(self, wave) -> list[tuple[Array, ...]]:
    walk = self.walk
    slot, first = walk.slot(wave, self.stages), walk.start(wave)
    found: list[list[Array]] = [[] for _ in range(walk.config.rows)]
    for stream, ring in zip(self.streams, self.rings, strict=True):
      place = self._places.place(slot, stream)
      _, rows = self._places.rows(stream, self.arrays[stream.array], first)
      read = memory.load_rows(ring, place, rows)
      for i, values in enumerate(found):
        numbers = read[walk.row(i)]
        if stream.conjugate and stream.is_complex:
          numbers = numbers[0], -numbers[1]
        values += numbers
    return list(map(tuple, found))


class Outputs(blocks.Outputs):
  """Streams that a warpgroup writes, as `blocks.Outputs`.

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
    in_memory = [rows[self.walk.row(i)] for i in range(len(rows))]
    number = 0
    for stream in self.streams:
      array = self.arrays[stream.array]
      element, place = self._places.rows(stream, array, self.walk.start(wave))
      written = [row[number : number + stream.numbers] for row in in_memory]
      if stream.conjugate and stream.is_complex:
        written = [(re, -1.0 * im) for re, im in written]
      memory.store_rows(array, element, written, place)
      number += stream.numbers
