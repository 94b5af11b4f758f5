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

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.streaming import streams

Array = jax.Array
Ref = Any


@dataclasses.dataclass(frozen=True)
class Config:
  """How a kernel cuts its work; chosen by `tuning.py`.

  Attributes:
    rows: time steps in a block, at least 2: Pallas takes a single row for
      contiguous whatever its end.
    warpgroups: of a CTA; 1 for a recurrence that is not linear.
    segments: of a sequence: 1, or of a linear recurrence with 1 warpgroup any
      even number.
    stages: slots of each warpgroup's ring buffer of inputs.
    ahead: with several segments, the waves between the first time that a block
      is read, for its map, and the second.
  """

  rows: int
  warpgroups: int
  segments: int
  stages: int
  ahead: int = 0


def waves(layout: streams.Layout, config: Config) -> int:
  """Returns the number of blocks of each warpgroup."""
  a_wave = config.segments * config.warpgroups * config.rows
  return pl.cdiv(layout.time, a_wave)


def steps(layout: streams.Layout, config: Config) -> int:
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

  layout: streams.Layout
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
    return ref[(*index, self.features)] + streams.zeros()
