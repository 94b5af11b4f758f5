"""Ring buffers in shared memory that blocks of time pass through.

Each warpgroup has its own slots, copies its own blocks in and out by TMA and
waits for no other warpgroup in doing so. Inputs of the next waves are in flight
while a wave is computed; an mbarrier for each slot says that they are there.
Outputs leave two waves behind.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.streaming import streams as streams_lib
from pallas_kernels.streaming import time_blocks

Array = jax.Array
Ref = Any
Config = time_blocks.Config
Stream = streams_lib.Stream
LANES = streams_lib.LANES

# Slots of each warpgroup for blocks on their way to device memory.
OUT_SLOTS = 2


class Inputs:
  """Ring buffers of the streams that a warpgroup reads.

  Args:
    walk: over time.
    streams: to be read.
    arrays: references to device memory that hold the streams.
    rings: a ring buffer [slots, rows, LANES] for each stream.
    barriers: an mbarrier for each slot.
  """

  def __init__(
      self,
      walk: time_blocks.Walk,
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
    walk: over time.
    streams: to be written.
    arrays: references to device memory that hold the streams.
    rings: a ring buffer [slots, rows, LANES] for each stream.
  """

  def __init__(
      self,
      walk: time_blocks.Walk,
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
    streams: that pass through them.
    config: the cut.
    slots: of each warpgroup.
  """
  shape = (config.warpgroups * slots, config.rows, LANES)
  return tuple(plgpu.SMEM(shape, stream.dtype) for stream in streams)


def barrier_type(streams: Sequence[Stream], config: Config):
  """Returns the type of the mbarriers of `Inputs`."""
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
