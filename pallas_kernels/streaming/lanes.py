"""Blocks that each thread copies for itself, where TMA cannot or is not there.

TMA knows no pairs of float32, complex arrays, and came with compute capability
9.0. Here a thread copies the numbers of its own feature: one element a step,
asynchronously, into its own places in shared memory. So no thread waits for
another one, and steps beyond an array are zeros. The smallest copy has four
bytes: the even lanes copy two numbers of 16 bits, and warps wait for their
lanes. Results go from registers to device memory.
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
  """This thread's feature in arrays [B, T, F], [B, T, g, F] or [T, B, ...].

  Args:
    walk: walk over time.
  """

  def __init__(self, walk: blocks.Walk):
    self._walk, layout = walk, walk.layout
    self._lane = ptx.thread()
    self._feature = self._lane + walk.features.start
    self._inside = (self._feature < layout.features).astype(jnp.int32)

  def rows(
      self, stream: blocks.Stream, array: Ref, first: Array
  ) -> tuple[Array, memory.Rows]:
    """Returns the element of a block's first row, and the block's rows.

    Args:
      stream: a stream.
      array: the array that holds it, in device memory.
      first: time of the first row.
    """
    walk, layout = self._walk, self._walk.layout
    gate = 0 if stream.gate is None else stream.gate
    width = layout.features * (1 if stream.gate is None else array.shape[2])
    stride = width * (layout.batch if layout.time_major else 1)
    between = width * (1 if layout.time_major else layout.time)
    element = first * stride + self._feature + gate * layout.features
    element += walk.batch * between
    return element, memory.Rows(
        count=walk.config.rows,
        first=first,
        end=layout.time,
        inside=self._inside,
        dtype=stream.dtype,
        stride=stream.dtype.itemsize * stride,
        shared=stream.dtype.itemsize * blocks.LANES,
    )

  def place(self, slot, stream: blocks.Stream) -> Array:
    """Returns the byte of this thread's first element in a slot of a ring."""
    rows = slot * self._walk.config.rows
    return (rows * blocks.LANES + self._lane) * stream.dtype.itemsize


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
    self._feature = _Feature(walk)
    self._in_twos = any(stream.dtype.itemsize == 2 for stream in streams)

  def _copy(self, wave):
    slot = self.walk.slot(wave, self.stages)
    for stream, ring in zip(self.streams, self.rings, strict=True):
      first = self.walk.start(wave) + stream.shift
      array = self.arrays[stream.array]
      element, rows = self._feature.rows(stream, array, first)
      place = self._feature.place(slot, stream)
      memory.copy_rows(ring, place, array, element, rows)
    memory.fetch_commit()

  def refill(self, wave):
    if self._in_twos:
      memory.sync_warp()
    # Copies beyond the last wave copy nothing, and keep `wait` in step.
    self._copy(wave + self.stages)

  def wait(self, wave):
    del wave
    # In order: of the waves on their way, only these may still be missing.
    memory.fetch_wait(self.stages - 1 - self.walk.config.ahead)
    if self._in_twos:
      memory.sync_warp()

  def rows(self, wave) -> list[tuple[Array, ...]]:
    walk = self.walk
    slot, first = walk.slot(wave, self.stages), walk.start(wave)
    found: list[list[Array]] = [[] for _ in range(walk.config.rows)]
    for stream, ring in zip(self.streams, self.rings, strict=True):
      array, place = self.arrays[stream.array], self._feature.place(
          slot, stream
      )
      _, rows = self._feature.rows(stream, array, first)
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
    self._feature = _Feature(walk)

  def write(self, wave, rows):
    in_memory = [rows[self.walk.row(i)] for i in range(len(rows))]
    number = 0
    for stream in self.streams:
      array = self.arrays[stream.array]
      element, place = self._feature.rows(stream, array, self.walk.start(wave))
      written = [row[number : number + stream.numbers] for row in in_memory]
      if stream.conjugate and stream.is_complex:
        written = [(re, -1.0 * im) for re, im in written]
      memory.store_rows(array, element, written, place)
      number += stream.numbers
