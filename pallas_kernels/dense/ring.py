"""Streams on their way through shared memory: a ring buffer in, staging out.

A `Ring` copies tiles from device memory several steps ahead (cp.async), and a
`Staging` stores them to device memory; both move chunks of 16 bytes, dealt to
the threads of the CTA. With S = `config.stages` slots, during step t:

    slot (t + S - 1) % S     is being filled, for step t + S - 1
    slots (t + 1) % S ...    are in flight or there
    slot t % S               is read

    staging slot t % 2       gets the results of step t, element by element
    staging slot t % 2, or (t - 1) % 2 in a cluster, leaves in chunks
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import cut
from pallas_kernels.dense import threads
from pallas_kernels.mosaic import memory

Array = jax.Array
Ref = Any
Config = cut.Config
Cta = threads.Cta
Shape = cut.Shape
Stream = cut.Stream
flag = threads.flag


# Tiles in shared memory: one gate of one step, columns of units.
#
# A column's units lie side by side, in chunks of 16 bytes. The chunks of a
# column are permuted (exclusive or with a function of the column), so that the
# 32 lanes of a warp hit different banks both when they copy chunks and when
# they read or write the elements of fragments:
#
#     column 0   chunk 0 1 2 3 4 5 6 7
#     column 1   chunk 4 5 6 7 0 1 2 3
#     column 2   chunk 1 0 3 2 5 4 7 6
#     ...


def pitch(config: Config, size: int) -> int:
  """Returns bytes from one column of a tile to the next.

  Args:
    config: the cut.
    size: bytes of an element.
  """
  row = config.units * size
  if row > 64:
    return pl.cdiv(row, 128) * 128
  return next(size for size in (16, 32, 64) if row <= size)


def tile_bytes(config: Config, size: int) -> int:
  """Returns the bytes of a tile."""
  return config.columns * pitch(config, size)


def permutation(column):
  """Returns the number that a column's chunk indices are xor-ed with."""
  return ((column & 1) << 2) | ((column >> 1) & 3)


def place(config: Config, size: int, column, unit):
  """Returns the byte of an element in its tile."""
  row = pitch(config, size)
  byte = unit * size
  chunk = (byte >> 4) ^ (permutation(column) & min(7, row // 16 - 1))
  return column * row + (chunk << 4) + (byte & 15)


def own_places(cta: Cta, size: int) -> Array:
  """Returns the bytes of this thread's elements in a tile."""
  return place(cta.config, size, cta.own.column, cta.own.unit)


def slot_bytes(config: Config, streams) -> int:
  """Returns the bytes that one step's tiles of some streams take."""
  total = 0
  for stream in streams:
    if stream.flags:
      total += max(128, 4 * config.columns)
    else:
      size = jnp.dtype(stream.dtype).itemsize
      total += stream.tiles * tile_bytes(config, size)
  return total


def offsets(config: Config, streams) -> list[int]:
  """Returns the byte in a slot at which each stream's tiles start."""
  return [slot_bytes(config, streams[:i]) for i in range(len(streams))]


def time_stride(shape: Shape, stream: Stream) -> int:
  """Returns elements from one time to the next in a stream's array."""
  if stream.flags:
    return stream.tiles * pl.cdiv(shape.batch, 4) * 4
  row = shape.size if stream.by_head else shape.row
  return row * stream.tiles * (shape.batch if shape.time_major else 1)


def chunks(cta: Cta, stream: Stream) -> list[tuple[Array, Array, Array]]:
  """Deals the 16-byte chunks of a step's tiles to the threads of a CTA.

  Returns:
    For each chunk of a thread: its byte in the stream's tiles; its element in
    the stream's array at time 0; and 2 if that element exists, 1 if it lies
    beyond the array, 0 if the thread has no such chunk.
  """
  if stream.flags:
    return [_chunk_of_flags(cta, stream)]
  config, shape, thread = cta.config, cta.shape, cta.thread
  size = jnp.dtype(stream.dtype).itemsize
  per_row = pl.cdiv(config.units * size, 16)
  per_tile = config.columns * per_row
  total = stream.tiles * per_tile
  found = []
  for k in range(pl.cdiv(total, config.threads)):
    q = thread.index + k * config.threads
    gate = lax.div(q, jnp.int32(per_tile))
    rest = q - gate * per_tile
    row = lax.div(rest, jnp.int32(per_row))
    chunk = rest - row * per_row
    unit = cta.unit0 + chunk * (16 // size)
    where = (unit < shape.size) & (cta.row0 + row < shape.batch)
    where = flag(q < total) + flag(where & (q < total))
    inner = gate * tile_bytes(config, size)
    inner += place(config, size, row, chunk * (16 // size))
    strides = (1 if shape.time_major else shape.time) * stream.tiles
    at = (cta.row0 + row) * strides + gate
    if stream.by_head:
      before = cta.head * (shape.batch * shape.time * stream.tiles)
      at = (before + at) * shape.size + unit
    else:
      at = at * shape.row + cta.first_of_head(stream.tiles) + unit
    # No address may lie beyond the array, even where nothing is copied.
    found.append((inner, jnp.where(where > 1, at, 0), where))
  return found


def _chunk_of_flags(cta: Cta, stream: Stream) -> tuple[Array, Array, Array]:
  """Returns a thread's chunk of flags [T, G, B'], as `chunks` does."""
  config, shape, thread = cta.config, cta.shape, cta.thread
  count = pl.cdiv(config.columns, 4)
  at = cta.row0 + 4 * thread.index
  where = flag(thread.index < count) + flag(
      (thread.index < count) & (at < shape.batch)
  )
  if stream.tiles > 1:
    at += cta.part_of_heads * (pl.cdiv(shape.batch, 4) * 4)
  return 16 * thread.index, jnp.where(where > 1, at, 0), where


@dataclasses.dataclass(frozen=True)
class Copy:
  """A chunk of 16 bytes of every step that this thread copies.

  Attributes:
    ref: the stream's array in device memory.
    stream: the stream.
    smem_offset: byte in a slot.
    gmem_offset: element in the array at time 0.
    where: int32; inputs: 2 to copy, 1 to fill with zeros, 0 for no chunk;
      outputs: 1 to copy, else 0.
  """

  ref: Ref
  stream: Stream
  smem_offset: Array
  gmem_offset: Array
  where: Array

  @property
  def itemsize(self) -> int:
    return jnp.dtype(self.stream.dtype).itemsize

  def gmem(self, cta: Cta, time) -> Array:
    """Returns the element in the array at a time."""
    return self.gmem_offset + time * time_stride(cta.shape, self.stream)


def copies(cta: Cta, streams, refs, offsets, written: bool) -> list[Copy]:
  """Returns all chunks of a step that this thread copies.

  Args:
    cta: coordinates.
    streams: a list of streams.
    refs: their arrays in device memory.
    offsets: the byte in a slot at which each starts.
    written: whether chunks go to device memory; then nothing is filled with
      zeros, and `where` is 0 or 1.
  """
  return [
      Copy(ref, stream, start + inner, at, where >> 1 if written else where)
      for stream, ref, start in zip(streams, refs, offsets, strict=True)
      for inner, at, where in chunks(cta, stream)
  ]


# The ring buffer and the staging.


def _fragments(cta: Cta, stream: Stream, written: bool) -> Any:
  """Returns how threads hold a stream's tiles; None for element by element."""
  usable = threads.usable(cta.config, stream.dtype, written)
  if stream.flags or not usable:
    return None
  byte_of = lambda gate, column, unit: (
      gate * tile_bytes(cta.config, 2) + place(cta.config, 2, column, unit)
  )
  return threads.Matrices(cta, stream.tiles, byte_of, written)


class Ring:
  """Ring buffer of the streams that a kernel reads.

  Args:
    cta: coordinates.
    streams: a tree of streams.
    refs: a tree of their arrays in device memory.
    buffer: int32 in shared memory, `words` of it.

  Attributes:
    tiles: tree of `RingTiles`, one for each stream.
  """

  def __init__(self, cta: Cta, streams, refs, buffer: Ref):
    self.cta, self.buffer = cta, buffer
    self.distance = cta.config.stages - 1
    flat, tree = jax.tree.flatten(streams)
    starts = offsets(cta.config, flat)
    self.slot_bytes = slot_bytes(cta.config, flat)
    self._copies = copies(
        cta, flat, jax.tree.leaves(refs), starts, written=False
    )
    self.tiles = jax.tree.unflatten(
        tree,
        [
            RingTiles(
                self, stream, start, _fragments(cta, stream, written=False)
            )
            for stream, start in zip(flat, starts, strict=True)
        ],
    )

  @classmethod
  def words(cls, config: Config, streams) -> int:
    """Returns the shared memory for a tree of streams, in int32."""
    size = slot_bytes(config, jax.tree.leaves(streams))
    return config.stages * size // 4

  def slot(self, step):
    """Returns the first byte of a step's slot."""
    stages = self.cta.config.stages
    if stages & (stages - 1) == 0:
      return (step & (stages - 1)) * self.slot_bytes
    return lax.rem(step, jnp.int32(stages)) * self.slot_bytes

  def prologue(self):
    """Starts copying the tiles of the first steps."""
    for step in range(self.distance):
      self._start(jnp.int32(step))

  def advance(self, step):
    """Starts copying the tiles of step + stages - 1."""
    self._start(step + self.distance)

  def _start(self, step):
    cta = self.cta
    exists = jnp.where(step < cta.shape.time, jnp.int32(1), jnp.int32(0))
    time = cta.time(jnp.minimum(step, cta.shape.time - 1))
    slot = self.slot(step)
    for copy in self._copies:
      memory.fetch(
          self.buffer,
          copy.smem_offset + slot,
          copy.ref,
          copy.gmem(cta, time),
          copy.itemsize,
          copy.where * exists,
      )
    memory.fetch_commit()

  def wait(self, ahead: int):
    """Waits for this thread's copies; a barrier then shows them to all threads.

    Args:
      ahead: number of steps after the current one whose tiles have to be there,
        if `advance` is called later in the step; one less if it was called
        before.
    """
    memory.fetch_wait(self.distance - 1 - ahead)


@dataclasses.dataclass(frozen=True)
class RingTiles:
  """The tiles of one stream in a ring buffer.

  Attributes:
    ring: the ring buffer.
    stream: the stream.
    offset: byte in a slot at which they start.
    matrices: `threads.Matrices`, or None.
  """

  ring: Ring
  stream: Stream
  offset: int
  matrices: Any

  def read(self, step) -> list[Array]:
    """Returns this thread's elements of a step, one array a gate."""
    cta, stream, buffer = self.ring.cta, self.stream, self.ring.buffer
    count = cta.own.count
    start = self.ring.slot(step) + self.offset
    if stream.flags:
      at = start + 4 * cta.own.column
      return [memory.load_smem(buffer, at, jnp.int32, count=count)]
    if self.matrices is not None:
      return self.matrices.read(buffer, start, stream.dtype)
    size = jnp.dtype(stream.dtype).itemsize
    at = start + own_places(cta, size)
    return [
        memory.load_smem(
            buffer,
            at + gate * tile_bytes(cta.config, size),
            stream.dtype,
            count=count,
        )
        for gate in range(stream.tiles)
    ]

  def read_flags_of(self, step, column) -> Array:
    """Returns the flags of given columns, int32 [128]."""
    at = self.ring.slot(step) + self.offset + 4 * column
    return memory.load_smem(self.ring.buffer, at, jnp.int32)


class Staging:
  """Tiles that leave through shared memory, in chunks of 16 bytes.

  In a cluster, a step's tiles are written after the barrier that precedes the
  hand-off of h, so that they do not delay it, and leave a step later.

  Args:
    cta: coordinates.
    streams: a tree of streams.
    refs: a tree of their arrays in device memory.
    buffer: int32 in shared memory, `words` of it.
  """

  def __init__(self, cta: Cta, streams, refs, buffer: Ref):
    self.cta, self.buffer = cta, buffer
    self.streams = jax.tree.leaves(streams)
    self.offsets = offsets(cta.config, self.streams)
    self.slot_bytes = slot_bytes(cta.config, self.streams)
    self._copies = copies(
        cta, self.streams, jax.tree.leaves(refs), self.offsets, written=True
    )
    self._fragments = [
        _fragments(cta, stream, written=True) for stream in self.streams
    ]
    self.late = cta.config.cluster > 1

  @classmethod
  def words(cls, config: Config, streams) -> int:
    """Returns the shared memory for a tree of streams, in int32."""
    return 2 * slot_bytes(config, jax.tree.leaves(streams)) // 4

  def put(
      self, step, arrays: Sequence[Sequence[Array]]
  ) -> Callable[[], Callable[[], None]]:
    """Puts this thread's elements of all streams into tiles.

    Args:
      step: the step.
      arrays: arrays of each stream, an array a gate.

    Returns:
      A function to call after the next barrier of the CTA. It loads chunks of
      the tiles and returns a function that stores them in device memory; work
      between the two calls hides the latency of the loads.
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
    """Stores the last step's tiles; after the loop and a barrier."""
    if self.late:
      step = jnp.int32(self.cta.shape.time - 1)
      self._store(step, self._load(step), None)

  def _write(self, step, arrays: Sequence[Sequence[Array]]):
    """Writes this thread's elements into the tiles of a step's slot."""
    cta = self.cta
    slot = (step & 1) * self.slot_bytes
    for stream, offset, matrices, values in zip(
        self.streams, self.offsets, self._fragments, arrays, strict=True
    ):
      start = slot + offset
      if matrices is not None:
        matrices.write(self.buffer, start, values, stream.dtype)
        continue
      size = jnp.dtype(stream.dtype).itemsize
      start = start + own_places(cta, size)
      for gate, value in enumerate(values):
        memory.store_smem(
            self.buffer,
            start + gate * tile_bytes(cta.config, size),
            value,
            stream.dtype,
            where=cta.own.valid,
        )

  def _load(self, step) -> list[Sequence[Array]]:
    """Returns this thread's chunks of a step's tiles."""
    slot = (step & 1) * self.slot_bytes
    return [
        memory.load_words_smem(
            self.buffer, copy.smem_offset + slot, where=copy.where
        )
        for copy in self._copies
    ]

  def _store(self, step, loaded: Sequence[Sequence[Array]], exists):
    time = self.cta.time(step)
    for copy, words in zip(self._copies, loaded, strict=True):
      at = copy.gmem(self.cta, time)
      where = copy.where if exists is None else copy.where * exists
      memory.store_words_gmem(
          copy.ref, at, words, size=copy.itemsize, where=where
      )


# A thread's own elements in device memory, one by one.
#
# The small arrays (parameters, first and last carry) go this way, and with an
# exchange through the device the outputs too.


def read_param(cta: Cta, ref: Ref, i: int) -> Array:
  """Returns this thread's elements of row i of an array float32 [P, F]."""
  shape, own = cta.shape, cta.own
  unit = jnp.minimum(cta.unit0 + own.unit, shape.size - 1)
  at = i * shape.features + cta.head * shape.size + unit
  return memory.load_gmem(ref, at, jnp.float32, count=own.count)


def read_rows(cta: Cta, ref: Ref, count: int) -> tuple[Array, ...]:
  """Returns this thread's elements of an array float32 [S, B, F]."""
  return tuple(
      memory.load_gmem(
          ref, _row_offset(cta, i), jnp.float32, count=cta.own.count
      )
      for i in range(count)
  )


def write_rows(cta: Cta, ref: Ref, values: Sequence[Array]) -> None:
  """Stores this thread's elements of an array float32 [S, B, F]."""
  for i, value in enumerate(values):
    at = _row_offset(cta, i)
    memory.store_gmem(ref, at, value, jnp.float32, where=cta.own.valid)


def _row_offset(cta: Cta, i: int) -> Array:
  """Returns the offsets in an array [S, B, F], clamped to its edges."""
  shape, own = cta.shape, cta.own
  row = jnp.minimum(cta.row0 + own.column, shape.batch - 1)
  unit = jnp.minimum(cta.unit0 + own.unit, shape.size - 1)
  at = (i * shape.batch + row) * shape.features
  return at + cta.head * shape.size + unit


def write_step(
    cta: Cta,
    ref: Ref,
    stream: Stream,
    time: Array,
    values: Sequence[Array],
) -> None:
  """Stores this thread's elements of one time of a stream, one array a gate."""
  for gate, value in enumerate(values):
    at = _step_offset(cta, time, stream, gate)
    memory.store_gmem(ref, at, value, stream.dtype, where=cta.own.valid)


def _step_offset(cta: Cta, time, stream: Stream, gate: int) -> Array:
  """Returns the offsets of this thread's elements in a stream's array."""
  shape, gates, own = cta.shape, stream.tiles, cta.own
  row = shape.size if stream.by_head else shape.row
  by_row, by_time = shape.time, 1
  if shape.time_major:
    by_row, by_time = 1, shape.batch
  # The first term is equal for all steps.
  fixed = (cta.row0 + own.column) * (by_row * gates * row) + gate * row
  if stream.by_head:
    head = cta.head * (shape.batch * shape.time * gates * row)
    fixed = fixed + head + cta.unit0 + own.unit
  else:
    fixed = fixed + cta.first_of_head(gates) + cta.unit0 + own.unit
  return fixed + time * (by_time * gates * row)
