"""Time streams: how a kernel walks over [batch, time, features] arrays.

A kernel sees time as loop steps 0, 1, 2, ..., whichever way the recurrence
runs. Step s is time s, or time S - 1 - s where the recurrence runs backwards,
with S the steps that all blocks have together. So one kernel body serves both
directions, and nothing is flipped in memory.

Features are the lanes: a warpgroup of 128 threads holds a tile of 128 features
of one batch row, one a thread. Time is cut into blocks of `rows` steps, which
are dealt in turn to the CTAs of a sequence, its segments, and to their
warpgroups: one block each is a wave. Each warpgroup copies its own blocks in
and out by TMA, several ahead, and waits for nobody else in doing so. Blocks may
reach beyond the end of the sequence, and before its start where a stream is
read with a shift. TMA reads zeros there, and drops what is written beyond the
end; before the start it cannot write.
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

Array = jax.Array
Ref = Any

# Threads of a warpgroup, what Mosaic GPU calls a thread.
LANES = 128


@dataclasses.dataclass(frozen=True)
class Config:
  """How a kernel cuts its work; chosen by `tuning.py`.

  Attributes:
    rows: time steps in a block, at least 2: Pallas takes a single row for
      contiguous whatever its end.
    warpgroups: of a CTA; 1 for a recurrence that is not linear.
    segments: of a sequence: 1, or of a linear recurrence with 1 warpgroup any
      even number.
    stages: blocks in flight from device memory, or waiting, for each warpgroup.
    ahead: with several segments, how many waves before its turn a block is read
      for the first time.
  """

  rows: int
  warpgroups: int
  segments: int
  stages: int
  ahead: int = 0


@dataclasses.dataclass(frozen=True)
class Layout:
  """The arrays that a kernel walks over.

  Attributes:
    batch: B.
    time: T.
    features: F.
    time_major: whether arrays are [T, B, F] instead of [B, T, F].
    margin: steps by which arrays are longer on either side. Interpret mode
      knows no copies that reach beyond an array; kernels do without.
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
    dtype: as stored.
    shift: how many steps of time later it is read.
  """

  array: int
  gate: int | None
  dtype: Any
  shift: int = 0


@dataclasses.dataclass(frozen=True)
class Walk:
  """A warpgroup's way through time.

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
  def _wave(self) -> int:
    return self.config.warpgroups * self.config.rows

  @property
  def waves(self) -> int:
    """How many blocks each warpgroup has."""
    return pl.cdiv(self.layout.time, self.config.segments * self._wave)

  @property
  def steps(self) -> int:
    """How many steps all blocks have together, at least T."""
    return self.waves * self.config.segments * self._wave

  @property
  def ragged(self) -> bool:
    """Whether some blocks reach beyond the sequence."""
    return self.layout.time != self.steps

  def first_step(self, wave):
    """Returns the loop step of the block's first row."""
    block = wave * self.config.segments + self.segment
    return block * self._wave + self.warpgroup * self.config.rows

  def start(self, wave):
    """Returns the earliest time in the block."""
    first = self.first_step(wave)
    if self.reverse:
      return self.steps - first - self.config.rows
    return first

  def row(self, i: int) -> int:
    """Returns the block's row in memory that holds its i-th loop step."""
    return self.config.rows - 1 - i if self.reverse else i

  def time(self, wave, i: int):
    """Returns the time of the block's i-th loop step."""
    step = self.first_step(wave) + i
    return self.steps - 1 - step if self.reverse else step

  def slot(self, wave, slots: int):
    """Returns where a wave's block lies in this warpgroup's ring."""
    return self.warpgroup * slots + lax.rem(wave, slots)

  def load(self, streams, arrays, buffers, barriers, wave):
    """Starts copying a wave's blocks into the ring."""
    slot = self.slot(wave, self.config.stages)
    for stream, buffer in zip(streams, buffers, strict=True):
      source = self.layout.block(
          arrays[stream.array],
          stream.gate,
          self.batch,
          self.start(wave) + stream.shift,
          self.config.rows,
          self.features,
      )
      plgpu.copy_gmem_to_smem(source, buffer.at[slot], barriers.at[slot])

  def prefetch(self, streams, arrays, buffers, barriers):
    """Fills the rings before the first wave."""

    # A loop, so that starts beyond an array, which TMA can do with, are not
    # numbers that could be checked while tracing.
    @pl.loop(0, min(self.config.stages, self.waves))
    def _(wave):
      self.load(streams, arrays, buffers, barriers, wave)

  def refill(self, streams, arrays, buffers, barriers, wave):
    """Reuses a wave's slot, which every thread has read."""

    @pl.when(wave + self.config.stages < self.waves)
    def _():
      self.load(streams, arrays, buffers, barriers, wave + self.config.stages)

  def read(self, ref: Ref, *index) -> Array:
    """Returns one row of a small operand [..., Fp] in registers.

    Under `shard_map` what is read from device memory has a type that varies
    over mesh axes, and what is read from shared memory has not, while loops and
    derivatives want one type. Any operation drops it.
    """
    return ref[(*index, self.features)] + zeros()

  def wait(self, barriers, wave):
    """Waits for a wave's blocks to arrive."""
    plgpu.barrier_wait(barriers.at[self.slot(wave, self.config.stages)])

  def rows(self, buffers, wave) -> list[tuple[Array, ...]]:
    """Returns the rows of a wave that has arrived, in loop order, float32."""
    slot = self.slot(wave, self.config.stages)
    return [
        tuple(
            buffer[slot, self.row(i)].astype(jnp.float32) for buffer in buffers
        )
        for i in range(self.config.rows)
    ]

  def write(self, streams, arrays, buffers, wave, rows):
    """Copies a wave's rows, in loop order, out to device memory.

    Returns once the rows are in shared memory and every thread has got there.
    """
    # The copy before the last has left its slot.
    plgpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
    slot = self.slot(wave, OUT_SLOTS)
    for i, row in enumerate(rows):
      for stream, buffer, value in zip(streams, buffers, row, strict=True):
        buffer[slot, self.row(i)] = value.astype(stream.dtype)
    plgpu.commit_smem()
    for stream, buffer in zip(streams, buffers, strict=True):
      self._store(arrays[stream.array], stream.gate, buffer.at[slot], wave)
    plgpu.commit_smem_to_gmem_group()

  def _store(self, array, gate, block, wave):
    """Starts copying one block to device memory, as far as it lies inside."""
    rows, start = self.config.rows, self.start(wave)
    at = lambda start, size: self.layout.block(
        array, gate, self.batch, start, size, self.features
    )

    def whole():
      plgpu.copy_smem_to_gmem(block, at(start, rows), commit_group=False)

    if not self.ragged or self.layout.margin:
      whole()
    elif not self.layout.is_contiguous(array):
      pl.when(start < self.layout.time)(whole)
    else:
      # Pallas copies what is contiguous without regard to where it ends.
      fits = start + rows <= self.layout.time
      pl.when(fits)(whole)
      for i in range(rows):
        plgpu.copy_smem_to_gmem(
            block.at[pl.ds(i, 1)],
            at(start + i, 1),
            predicate=~fits & (start + i < self.layout.time),
            commit_group=False,
        )


# Blocks being written to device memory, for each warpgroup.
OUT_SLOTS = 2


def ring_types(streams: Sequence[Stream], config: Config, slots: int):
  """Returns the shared memory that the streams of a CTA pass through."""
  shape = (config.warpgroups * slots, config.rows, LANES)
  return tuple(plgpu.SMEM(shape, stream.dtype) for stream in streams)


def barrier_type(streams: Sequence[Stream], config: Config):
  """Returns the barriers by which arriving blocks are waited for."""
  return plgpu.Barrier(
      num_arrivals=len(streams),
      num_barriers=config.warpgroups * config.stages,
  )


def shared_bytes(
    inputs: Sequence[Stream], outputs: Sequence[Stream], config: Config
) -> int:
  """Returns the bytes of shared memory that the rings of a CTA take."""
  block = config.warpgroups * config.rows * LANES
  size = lambda streams: sum(s.dtype.itemsize for s in streams)
  return block * (config.stages * size(inputs) + OUT_SLOTS * size(outputs))


def streams_of(arrays: Sequence[Any]) -> tuple[Stream, ...]:
  """Returns the streams in arrays [B, T, F] or [B, T, G, F], in order."""
  streams: list[Stream] = []
  for i, array in enumerate(arrays):
    gates = range(array.shape[2]) if array.ndim == 4 else (None,)
    streams += [Stream(i, gate, array.dtype) for gate in gates]
  return tuple(streams)


def zeros() -> Array:
  """Returns zeros in registers, laid out as what is read from a stream."""
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
