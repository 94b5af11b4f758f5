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
import jax.numpy as jnp

from pallas_kernels.dense import cut
from pallas_kernels.dense import fragments
from pallas_kernels.dense import memory as memory_lib
from pallas_kernels.dense import threads
from pallas_kernels.mosaic import memory

Array = jax.Array
Ref = Any
Config = cut.Config
Cta = threads.Cta
Stream = cut.Stream
flag = threads.flag


def _fragments(cta: Cta, stream: Stream, written: bool) -> Any:
  """Returns how threads hold a stream's tiles; None for element by element."""
  usable = fragments.usable(cta.config, stream.dtype, written)
  if stream.flags or not usable:
    return None
  place = lambda gate, column, unit: (
      gate * memory_lib.tile_bytes(cta.config, 2)
      + memory_lib.place(cta.config, 2, column, unit)
  )
  return fragments.Matrices(cta, stream.tiles, place, written)


class Ring:
  """Ring buffer of the streams that a kernel reads.

  Args:
    cta: coordinates.
    streams: a tree of streams.
    refs: a tree of their arrays in device memory.
    buffer: int32 in shared memory, `words` of it.

  Attributes:
    tiles: `RingTiles` in the same tree.
  """

  def __init__(self, cta: Cta, streams, refs, buffer: Ref):
    self.cta, self.buffer = cta, buffer
    self.distance = cta.config.stages - 1
    flat, tree = jax.tree.flatten(streams)
    offsets = memory_lib.offsets(cta.config, flat)
    self.slot_bytes = memory_lib.slot_bytes(cta.config, flat)
    self._copies = memory_lib.copies(
        cta, flat, jax.tree.leaves(refs), offsets, written=False
    )
    self.tiles = jax.tree.unflatten(
        tree,
        [
            RingTiles(
                self, stream, start, _fragments(cta, stream, written=False)
            )
            for stream, start in zip(flat, offsets, strict=True)
        ],
    )

  @classmethod
  def words(cls, config: Config, streams) -> int:
    """Returns the shared memory for a tree of streams, in int32."""
    size = memory_lib.slot_bytes(config, jax.tree.leaves(streams))
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
    matrices: `fragments.Matrices`, or None.
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
    at = start + memory_lib.own_places(cta, size)
    return [
        memory.load_smem(
            buffer,
            at + gate * memory_lib.tile_bytes(cta.config, size),
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
    self.offsets = memory_lib.offsets(cta.config, self.streams)
    self.slot_bytes = memory_lib.slot_bytes(cta.config, self.streams)
    self._copies = memory_lib.copies(
        cta, self.streams, jax.tree.leaves(refs), self.offsets, written=True
    )
    self._fragments = [
        _fragments(cta, stream, written=True) for stream in self.streams
    ]
    self.late = cta.config.cluster > 1

  @classmethod
  def words(cls, config: Config, streams) -> int:
    """Returns the shared memory for a tree of streams, in int32."""
    return 2 * memory_lib.slot_bytes(config, jax.tree.leaves(streams)) // 4

  def put(
      self, step, arrays: Sequence[Sequence[Array]]
  ) -> Callable[[], Callable[[], None]]:
    """Puts this thread's elements of all streams into tiles.

    Args:
      step: the step.
      arrays: for each stream, an array a gate.

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
      start = start + memory_lib.own_places(cta, size)
      for gate, value in enumerate(values):
        memory.store_smem(
            self.buffer,
            start + gate * memory_lib.tile_bytes(cta.config, size),
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
