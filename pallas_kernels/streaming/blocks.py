"""How a kernel cuts [batch, time, features] arrays into blocks of steps.

A kernel sees time as loop steps 0, 1, 2, ... in the order of the recurrence.
Loop step s is time s, or time S - 1 - s where the recurrence runs backwards,
with S the number of steps of all blocks. So one kernel body serves both
directions, and nothing is flipped in memory.

Features are the lanes: a warpgroup of 128 threads has a tile of 128 features of
one batch row, one feature a thread. Time is cut into blocks of `rows` steps.
Blocks are dealt round-robin to the CTAs of a sequence (its segments) and to
their warpgroups; one block for each is a wave:

    loop step   0 .. R-1   R .. 2R-1  2R .. 3R-1 3R .. 4R-1  4R ..
    segment     0          0          1          1           0
    warpgroup   0          1          0          1           0
    wave        0          0          0          0           1

Blocks may reach beyond the end of the sequence, and before its start where a
stream is read with a shift. TMA reads zeros there, and drops rows written
beyond the end. Before the start it cannot write.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import projection

# Arrays in device memory as kernels see them: streams of [B, T, F].


Array = jax.Array
Ref = Any

# Threads of a warpgroup, which is a thread to Mosaic GPU; features of a tile.
LANES = 128


@dataclasses.dataclass(frozen=True)
class Layout:
  """The arrays that a kernel walks over.

  Attributes:
    batch: B.
    time: T.
    features: F.
    time_major: whether arrays are [T, B, F] instead of [B, T, F].
    margin: steps by which arrays are longer on either side. Interpret mode
      knows no copies that reach beyond an array; on a GPU it is 0.
  """

  batch: int
  time: int
  features: int
  time_major: bool = False
  margin: int = 0

  @property
  def shape(self) -> tuple[int, int, int]:
    """Shape of a stream."""
    time = self.time + 2 * self.margin
    if self.time_major:
      return time, self.batch, self.features
    return self.batch, time, self.features

  def widen(self, x: Array) -> Array:
    """Adds the margins to a stream."""
    if not self.margin:
      return x
    pads = [(0, 0)] * x.ndim
    pads[0 if self.time_major else 1] = (self.margin, self.margin)
    return jnp.pad(x, pads)

  def narrow(self, x: Array) -> Array:
    """Removes the margins."""
    axis = 0 if self.time_major else 1
    end = x.shape[axis] - self.margin
    return lax.slice_in_dim(x, self.margin, end, axis=axis)

  @property
  def padded(self) -> int:
    """F rounded up to whole tiles, as small operands are padded."""
    return round_up(self.features, LANES)

  def is_contiguous(self, array: Any) -> bool:
    """Whether consecutive steps of a tile of features are contiguous."""
    axis = 0 if self.time_major else 1
    return math.prod(array.shape[axis + 1 :]) == LANES

  def block(self, ref: Ref, gate: int | None, batch, start, size, features):
    """Returns one block [size, features] of a stream in device memory."""
    lead = (batch, pl.ds(start + self.margin, size))
    if self.time_major:
      lead = lead[::-1]
    gate_index = () if gate is None else (gate,)
    return ref.at[(*lead, *gate_index, features)]


@dataclasses.dataclass(frozen=True)
class Stream:
  """One [B, T, F] stream: an array, or one gate of a [B, T, G, F] array.

  Attributes:
    array: position among the kernel's arrays.
    gate: index of the third axis, or None where there is none.
    dtype: dtype as stored.
    shift: number of steps of time by which it is read later.
    conjugate: whether a complex stream is conjugated on its way.
  """

  array: int
  gate: int | None
  dtype: Any
  shift: int = 0
  conjugate: bool = False

  @property
  def is_complex(self) -> bool:
    """Whether each element is a pair of float32."""
    return jnp.issubdtype(self.dtype, jnp.complexfloating)

  @property
  def numbers(self) -> int:
    """Number of values that a row of the stream has for each feature."""
    return 2 if self.is_complex else 1


def streams_of(arrays: Sequence[Any]) -> tuple[Stream, ...]:
  """Returns the streams in arrays [B, T, F] or [B, T, G, F], in order."""
  streams: list[Stream] = []
  for i, array in enumerate(arrays):
    gates = range(array.shape[2]) if array.ndim == 4 else (None,)
    streams += [Stream(i, gate, array.dtype) for gate in gates]
  return tuple(streams)


def of_carry(outputs: int, dtype: Any) -> tuple[Stream, ...]:
  """Returns the streams of the first arrays of a carry, each an array.

  Args:
    outputs: number of arrays; a complex array holds two.
    dtype: their dtype.
  """
  is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
  count = outputs // 2 if is_complex else outputs
  return tuple(Stream(i, None, jnp.dtype(dtype)) for i in range(count))


def numbers(streams: Sequence[Stream]) -> int:
  """Returns the number of values of a step of all streams."""
  return sum(stream.numbers for stream in streams)


def zeros() -> Array:
  """Returns zeros in registers, in the layout of rows of a stream."""
  layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
  return plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), layout)


def round_up(size: int, multiple: int) -> int:
  """Returns the next multiple that is at least `size`."""
  return pl.cdiv(size, multiple) * multiple


def pad_features(x: Array, size: int) -> Array:
  """Pads the last axis to `size`."""
  missing = size - x.shape[-1]
  if not missing:
    return x
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def pad_to_tiles(features: int, small: Any) -> Any:
  """Pads a tree of small operands, [..., F], to whole tiles of features."""
  padded = round_up(features, LANES)
  return jax.tree.map(lambda x: projection.pad(x, 1, padded), small)


# Blocks of time in device memory, and the warpgroups that copy them.


@dataclasses.dataclass(frozen=True)
class Config:
  """How a kernel cuts its work; chosen by `tuning.py`.

  Attributes:
    rows: time steps in a block, at least 2: Pallas takes a single row for
      contiguous whatever its end.
    warpgroups: warpgroups of a CTA; 1 for a recurrence that is not linear.
    segments: number in a sequence: 1, or any even number for a linear
      recurrence with 1 warpgroup.
    stages: slots of each warpgroup's ring buffer of inputs.
    ahead: number of waves, with several segments, between the first time that a
      block is read, for its map, and the second.
    by_thread: whether each thread copies for itself (`lanes.py`), not TMA.
  """

  rows: int
  warpgroups: int
  segments: int
  stages: int
  ahead: int = 0
  by_thread: bool = False


def waves(layout: Layout, config: Config) -> int:
  """Returns the number of blocks of each warpgroup."""
  a_wave = config.segments * config.warpgroups * config.rows
  return pl.cdiv(layout.time, a_wave)


def steps(layout: Layout, config: Config) -> int:
  """Returns the number of steps of all blocks, at least T."""
  a_wave = config.segments * config.warpgroups * config.rows
  return waves(layout, config) * a_wave


@dataclasses.dataclass(frozen=True)
class Walk:
  """The blocks of one warpgroup, in the order of its loop.

  Attributes:
    layout: the arrays.
    config: the cut.
    reverse: whether loop steps run from the last time to the first.
    batch: index of the batch row.
    features: the `pl.ds` of the features.
    segment: index of the segment.
    warpgroup: index in the CTA.
  """

  layout: Layout
  config: Config
  reverse: bool
  batch: Any
  features: Any
  segment: Any = 0
  warpgroup: Any = 0

  @property
  def waves(self) -> int:
    """Number of blocks of each warpgroup."""
    return waves(self.layout, self.config)

  @property
  def steps(self) -> int:
    """Number of steps of all blocks, at least T."""
    return steps(self.layout, self.config)

  @property
  def ragged(self) -> bool:
    """Whether some blocks reach beyond the sequence."""
    return self.layout.time != self.steps

  def _block(self, wave):
    """Returns which block it is, in the order of the loop."""
    block = wave * self.config.segments + self.segment
    return block * self.config.warpgroups + self.warpgroup

  def place(self, wave):
    """Returns which block it is, in the order of time."""
    block = self._block(wave)
    return self.steps // self.config.rows - 1 - block if self.reverse else block

  def first_step(self, wave):
    """Returns the loop step of the block's first row."""
    return self._block(wave) * self.config.rows

  def start(self, wave):
    """Returns the earliest time in the block."""
    return self.place(wave) * self.config.rows

  def row(self, i: int) -> int:
    """Returns the block's row in memory that holds its i-th loop step."""
    return self.config.rows - 1 - i if self.reverse else i

  def time(self, wave, i: int):
    """Returns the time of the block's i-th loop step."""
    step = self.first_step(wave) + i
    return self.steps - 1 - step if self.reverse else step

  def slot(self, wave, slots: int):
    """Returns the slot of a wave's block in the ring buffers of a CTA."""
    return self.warpgroup * slots + lax.rem(wave, slots)

  def read(self, ref: Ref, *index) -> Array:
    """Returns one row of a small operand [..., Fp] in registers.

    Under `shard_map` a value read from device memory has a type that varies
    over mesh axes, and one read from shared memory has not; loops and
    derivatives want one type. Adding zeros drops it.
    """
    return ref[(*index, self.features)] + zeros()


# Ring buffers in shared memory that blocks of time pass through.
#
# Each warpgroup has its own slots, copies its own blocks in and out by TMA and
# waits for no other warpgroup in doing so. Inputs of the next waves are in
# flight while a wave is computed; an mbarrier for each slot says that they are
# there. Outputs leave two waves behind.


# Slots of each warpgroup for blocks on their way to device memory.
OUT_SLOTS = 2


class Inputs:
  """Ring buffers of the streams that a warpgroup reads.

  Args:
    walk: walk over time.
    streams: the streams to be read.
    arrays: references to device memory that hold the streams.
    rings: a ring buffer [slots, rows, LANES] for each stream.
    barriers: an mbarrier for each slot.
  """

  def __init__(
      self,
      walk: Walk,
      streams: Sequence[Stream],
      arrays: Sequence[Ref],
      rings: Sequence[Ref],
      barriers: Ref,
  ):
    self.walk, self.streams, self.arrays = walk, streams, arrays
    self.rings, self.barriers = rings, barriers
    self.stages = walk.config.stages

  def _copy(self, wave):
    """Starts copying a wave's blocks into its slot."""
    walk, slot = self.walk, self.walk.slot(wave, self.stages)
    for stream, ring in zip(self.streams, self.rings, strict=True):
      source = walk.layout.block(
          self.arrays[stream.array],
          stream.gate,
          walk.batch,
          walk.start(wave) + stream.shift,
          walk.config.rows,
          walk.features,
      )
      plgpu.copy_gmem_to_smem(source, ring.at[slot], self.barriers.at[slot])

  def prefetch(self):
    """Fills the rings before the first wave."""
    # A loop, so that starts beyond an array, which TMA can do with, are not
    # numbers that could be checked while tracing.
    pl.loop(0, min(self.stages, self.walk.waves))(self._copy)

  def refill(self, wave):
    """Reuses a wave's slot, once every thread has read it."""

    @pl.when(wave + self.stages < self.walk.waves)
    def _():
      self._copy(wave + self.stages)

  def wait(self, wave):
    """Waits for a wave's blocks to arrive."""
    slot = self.walk.slot(wave, self.stages)
    plgpu.barrier_wait(self.barriers.at[slot])

  def rows(self, wave) -> list[tuple[Array, ...]]:
    """Returns the rows of a wave that has arrived, in loop order, float32."""
    walk, slot = self.walk, self.walk.slot(wave, self.stages)
    return [
        tuple(
            ring[slot, walk.row(i)].astype(jnp.float32) for ring in self.rings
        )
        for i in range(walk.config.rows)
    ]


class Outputs:
  """Ring buffers of the streams that a warpgroup writes.

  Args:
    walk: walk over time.
    streams: the streams to be written.
    arrays: references to device memory that hold the streams.
    rings: a ring buffer [slots, rows, LANES] for each stream.
  """

  def __init__(
      self,
      walk: Walk,
      streams: Sequence[Stream],
      arrays: Sequence[Ref],
      rings: Sequence[Ref],
  ):
    self.walk, self.streams = walk, streams
    self.arrays, self.rings = arrays, rings

  def write(self, wave, rows):
    """Copies a wave's rows, in loop order, out to device memory.

    Returns once the rows are in shared memory and every thread has got there.
    """
    # The copy before the last has left its slot.
    plgpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
    walk, slot = self.walk, self.walk.slot(wave, OUT_SLOTS)
    for i, row in enumerate(rows):
      for stream, ring, value in zip(
          self.streams, self.rings, row, strict=True
      ):
        ring[slot, walk.row(i)] = value.astype(stream.dtype)
    plgpu.commit_smem()
    for stream, ring in zip(self.streams, self.rings, strict=True):
      array = self.arrays[stream.array]
      self._copy(array, stream.gate, ring.at[slot], wave)
    plgpu.commit_smem_to_gmem_group()

  def _copy(self, array, gate, block, wave):
    """Starts copying one block to device memory, as far as it lies inside."""
    walk, layout = self.walk, self.walk.layout
    rows, start = walk.config.rows, walk.start(wave)
    at = lambda start, size: layout.block(
        array, gate, walk.batch, start, size, walk.features
    )

    def whole():
      plgpu.copy_smem_to_gmem(block, at(start, rows), commit_group=False)

    if not walk.ragged or layout.margin:
      whole()
    elif not layout.is_contiguous(array):
      pl.when(start < layout.time)(whole)
    else:
      # Pallas copies contiguous blocks without regard to the end of an array.
      fits = start + rows <= layout.time
      pl.when(fits)(whole)
      for i in range(rows):
        plgpu.copy_smem_to_gmem(
            block.at[pl.ds(i, 1)],
            at(start + i, 1),
            predicate=~fits & (start + i < layout.time),
            commit_group=False,
        )


def ring_types(streams: Sequence[Stream], config: Config, slots: int):
  """Returns the types of the ring buffers of a CTA.

  Args:
    streams: the streams that pass through them.
    config: the cut.
    slots: number of slots of each warpgroup.
  """
  shape = (config.warpgroups * slots, config.rows, LANES)
  return tuple(
      plgpu.SMEM((*shape, 2), jnp.float32)
      if stream.is_complex
      else plgpu.SMEM(shape, stream.dtype)
      for stream in streams
  )


def barrier_types(streams: Sequence[Stream], config: Config):
  """Returns the type of the mbarriers of `Inputs`, none without TMA."""
  if config.by_thread:
    return ()
  count = config.warpgroups * config.stages
  return (plgpu.Barrier(num_arrivals=len(streams), num_barriers=count),)


def shared_bytes(
    inputs: Sequence[Stream], outputs: Sequence[Stream], config: Config
) -> int:
  """Returns the bytes of shared memory that the rings of a CTA take."""
  block = config.warpgroups * config.rows * LANES
  size = lambda streams: sum(s.dtype.itemsize for s in streams)
  slots = 0 if config.by_thread else OUT_SLOTS
  return block * (config.stages * size(inputs) + slots * size(outputs))
