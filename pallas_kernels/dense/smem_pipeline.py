"""Tiles of streams on their way through shared memory.

A tile is what a CTA needs of one gate in one step: columns of units. `Ring`
brings tiles in several steps ahead, `Staging` takes them out; both in pieces of
16 bytes, which are dealt to the threads of the CTA.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import fragments
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import memory

Array = jax.Array
Ref = Any
Cta = thread_layout.Cta
Config = thread_layout.Config
Shape = thread_layout.Shape
Stream = thread_layout.Stream
flag = thread_layout.flag


class Ring:
  """Tiles of the streams that a kernel reads, several steps ahead.

  Args:
    cta: coordinates.
    streams: what is read.
    refs: in device memory.
    buffer: int32 in shared memory, `words` of it.
  """

  def __init__(self, cta: Cta, streams, refs, buffer):
    self.cta, self.streams, self.refs = cta, streams, refs
    self.buffer = buffer
    self.distance = cta.config.stages - 1
    self.offsets, self.slot_bytes = _places(cta, streams)
    self._copies = []
    for stream, ref, start in zip(streams, refs, self.offsets, strict=True):
      self._copies += [
          (ref, stream, start + inner, at, where)
          for inner, at, where in _chunks(cta, stream)
      ]
    self._matrices = _matrices(cta, streams, written=False)

  @classmethod
  def words(cls, config: Config, streams) -> int:
    return config.stages * _slot_bytes(config, streams) // 4

  def slot(self, step):
    stages = self.cta.config.stages
    if stages & (stages - 1) == 0:
      return (step & (stages - 1)) * self.slot_bytes
    return lax.rem(step, jnp.int32(stages)) * self.slot_bytes

  def prologue(self):
    """Starts copying the tiles of the first steps."""
    for step in range(self.distance):
      self._start(jnp.int32(step))

  def advance(self, step):
    """Starts copying the tiles of a later step than this one."""
    self._start(step + self.distance)

  def _start(self, step):
    cta = self.cta
    exists = jnp.where(step < cta.shape.time, jnp.int32(1), jnp.int32(0))
    time = cta.time(jnp.minimum(step, cta.shape.time - 1))
    slot = self.slot(step)
    for ref, stream, inner, at, where in self._copies:
      size = jnp.dtype(stream.dtype).itemsize
      memory.fetch(
          self.buffer,
          inner + slot,
          ref,
          at + time * _stride(cta.shape, stream),
          size,
          where * exists,
      )
    memory.fetch_commit()

  def wait(self, ahead: int):
    """Waits for some tiles; before the barrier that shows them to all threads.

    Args:
      ahead: for how many steps after this one, if `advance` is called later in
        a step; one less than that if it was called before.
    """
    memory.fetch_wait(self.distance - 1 - ahead)

  def read(self, step, i: int) -> list[Array]:
    """Returns this thread's elements of stream i, one array a gate."""
    cta, stream = self.cta, self.streams[i]
    start = self.slot(step) + self.offsets[i]
    if stream.flags:
      at = start + 4 * cta.column
      return [memory.load_smem(self.buffer, at, jnp.int32, count=cta.count)]
    matrices = self._matrices[i]
    if matrices is not None:
      return matrices.read(self.buffer, start, stream.dtype)
    size = jnp.dtype(stream.dtype).itemsize
    at = start + cta.in_tile(size)
    return [
        memory.load_smem(
            self.buffer,
            at + gate * cta.tile_bytes(size),
            stream.dtype,
            count=cta.count,
        )
        for gate in range(stream.tiles)
    ]

  def read_flags_of(self, step, i: int, column) -> Array:
    """Returns the flags of some columns, int32 [128]."""
    at = self.slot(step) + self.offsets[i] + 4 * column
    return memory.load_smem(self.buffer, at, jnp.int32)


def _stride(shape: Shape, stream: Stream) -> int:
  """Elements from one time to the next."""
  if stream.flags:
    return stream.tiles * pl.cdiv(shape.batch, 4) * 4
  row = shape.size if stream.by_head else shape.features
  return row * stream.tiles * (shape.batch if shape.time_major else 1)


def _slot_bytes(config: Config, streams) -> int:
  total = 0
  for stream in streams:
    if stream.flags:
      total += max(128, 4 * config.columns)
    else:
      size = jnp.dtype(stream.dtype).itemsize
      total += stream.tiles * config.columns * thread_layout.pitch(config, size)
  return total


def _places(cta: Cta, streams) -> tuple[list[int], int]:
  """Returns where streams lie in a slot, and its size, in bytes."""
  offsets = [_slot_bytes(cta.config, streams[:i]) for i in range(len(streams))]
  return offsets, _slot_bytes(cta.config, streams)


def _matrices(cta: Cta, streams, written: bool) -> list[Any]:
  """Returns how threads have streams' tiles; None for element by element."""

  def of(stream):
    usable = fragments.usable
    if stream.flags or not usable(cta.config, stream.dtype, written):
      return None
    place = lambda gate, column, unit: (
        gate * cta.tile_bytes(2) + cta.place_in_tile(2, column, unit)
    )
    return fragments.Matrices(cta, stream.tiles, place, written)

  return list(map(of, streams))


def _chunks(cta: Cta, stream: Stream) -> list[tuple[Array, Array, Array]]:
  """Deals the 16-byte chunks of a step's tiles to the threads of a CTA.

  Returns:
    For each chunk of a thread: where it lies in the stream's tiles, in bytes;
    where it lies in the array at time 0, in elements; and 2 if it lies there, 1
    if it is beyond the array, 0 if there is no such chunk.
  """
  config, shape = cta.config, cta.shape
  size = jnp.dtype(stream.dtype).itemsize
  if stream.flags:
    # [T, G, B'] with B' the batch rounded up to 4.
    count = pl.cdiv(config.columns, 4)
    at = cta.row0 + 4 * cta.index
    where = flag(cta.index < count) + flag(
        (cta.index < count) & (at < shape.batch)
    )
    if stream.tiles > 1:
      at += cta.half * (pl.cdiv(shape.batch, 4) * 4)
    return [(16 * cta.index, jnp.where(where > 1, at, 0), where)]
  per_row = pl.cdiv(config.units * size, 16)
  per_tile = config.columns * per_row
  total = stream.tiles * per_tile
  chunks = []
  for k in range(pl.cdiv(total, cta.threads)):
    q = cta.index + k * cta.threads
    gate = lax.div(q, jnp.int32(per_tile))
    rest = q - gate * per_tile
    row = lax.div(rest, jnp.int32(per_row))
    chunk = rest - row * per_row
    unit = cta.unit0 + chunk * (16 // size)
    where = (unit < shape.size) & (cta.row0 + row < shape.batch)
    where = flag(q < total) + flag(where & (q < total))
    inner = gate * cta.tile_bytes(size)
    inner += cta.place_in_tile(size, row, chunk * (16 // size))
    strides = (1 if shape.time_major else shape.time) * stream.tiles
    at = (cta.row0 + row) * strides + gate
    if stream.by_head:
      before = cta.head * (shape.batch * shape.time * stream.tiles)
      at = (before + at) * shape.size + unit
    else:
      at = at * shape.features + cta.head * shape.size + unit
    # What is not there must not be addressed beyond the array.
    chunks.append((inner, jnp.where(where > 1, at, 0), where))
  return chunks


class Staging:
  """Tiles that leave through shared memory, so that it happens in 16 bytes.

  Where CTAs wait for each other, a step's tiles are written after all threads
  have met, so that they are not in the way of that, and leave a step later.

  Args:
    cta: coordinates.
    streams: what is written.
    refs: in device memory.
    buffer: int32 in shared memory, `words` of it.
  """

  def __init__(self, cta: Cta, streams, refs, buffer):
    self.cta, self.streams, self.refs = cta, streams, refs
    self.buffer = buffer
    self.offsets, self.slot_bytes = _places(cta, streams)
    self._copies = []
    for stream, ref, start in zip(streams, refs, self.offsets, strict=True):
      self._copies += [
          (ref, stream, start + inner, at, where >> 1)
          for inner, at, where in _chunks(cta, stream)
      ]
    self._matrices = _matrices(cta, streams, written=True)
    self.late = cta.config.cluster > 1

  @classmethod
  def words(cls, config: Config, streams) -> int:
    return 2 * _slot_bytes(config, streams) // 4

  def put(self, step, arrays: Sequence[Sequence[Array]]):
    """Puts this thread's elements of all streams into tiles, one a gate.

    Args:
      step: which.
      arrays: for each stream, an array a gate.

    Returns:
      A function to be called when all threads have met. What it returns, in
      turn, stores tiles in device memory: not at once, for loads from shared
      memory take their time.
    """
    if not self.late:
      self._write(step, arrays)

    def load():
      there, exists = step, None
      if self.late:
        there, exists = step - 1, flag(step > 0)
      loaded = self._load(there)
      if self.late:
        self._write(step, arrays)
      return lambda: self._store(there, loaded, exists)

    return load

  def finish(self):
    """Stores what is left, after the last step and a meeting."""
    if self.late:
      step = jnp.int32(self.cta.shape.time - 1)
      self._store(step, self._load(step), None)

  def _write(self, step, arrays: Sequence[Sequence[Array]]):
    cta = self.cta
    slot = (step & 1) * self.slot_bytes
    for i, (stream, values) in enumerate(
        zip(self.streams, arrays, strict=True)
    ):
      start = slot + self.offsets[i]
      matrices = self._matrices[i]
      if matrices is not None:
        matrices.write(self.buffer, start, values, stream.dtype)
        continue
      size = jnp.dtype(stream.dtype).itemsize
      start = start + cta.in_tile(size)
      for gate, value in enumerate(values):
        memory.store_smem(
            self.buffer,
            start + gate * cta.tile_bytes(size),
            value,
            stream.dtype,
            where=cta.valid,
        )

  def _load(self, step) -> list[Sequence[Array]]:
    """Returns this thread's share of a step's tiles."""
    slot = (step & 1) * self.slot_bytes
    return [
        memory.load_words_smem(self.buffer, inner + slot, where=where)
        for _, _, inner, _, where in self._copies
    ]

  def _store(self, step, loaded: Sequence[Sequence[Array]], exists):
    time = self.cta.time(step)
    for copy, words in zip(self._copies, loaded, strict=True):
      ref, stream, _, at, where = copy
      at = at + time * _stride(self.cta.shape, stream)
      size = jnp.dtype(stream.dtype).itemsize
      if exists is not None:
        where = where * exists
      memory.store_words_gmem(ref, at, words, size=size, where=where)
