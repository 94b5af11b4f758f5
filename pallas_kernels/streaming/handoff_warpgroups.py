"""Hand-off of a linear recurrence between the warpgroups of one CTA.

Blocks are dealt round-robin to warpgroups. Each loads, computes gates and
stores independently; only the recurrence itself, one multiplication and
addition a step, is passed on in order: a warpgroup waits for the h that its
predecessor ends with, runs through its block and hands its own h on. So h is
computed in the order of time for any number of warpgroups.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.streaming import ring_buffers
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import time_blocks

Array = jax.Array
Ref = Any


class Alone:
  """No hand-off: one warpgroup has all blocks of a sequence.

  Args:
    inputs: ring buffers of this warpgroup's blocks.
  """

  def __init__(self, inputs: ring_buffers.Inputs):
    self.inputs, self.walk = inputs, inputs.walk

  def begin(self, h: Array) -> None:
    """Takes h before the first block."""

  def arrive(self, wave) -> None:
    """Waits for the inputs of this warpgroup's block."""
    self.inputs.wait(wave)

  def before(self, wave, h: Array) -> Array:
    """Returns h before this warpgroup's block.

    Args:
      wave: index of the wave.
      h: the result of `after` for the wave before.
    """
    return h

  def after(self, h: Array) -> Array:
    """Takes h after this warpgroup's block; returns h to keep."""
    return h

  def end(self) -> None:
    """Takes the last hand-off, which has no block.

    Interpret mode wants each arrival at a barrier to be waited for.
    """


class Turns(Alone):
  """Warpgroups hand h on through shared memory, in turn.

  A place is written again only after all warpgroups have had their turn, so by
  then it has been read.

  Args:
    inputs: ring buffers of this warpgroup's blocks.
    places: h for each warpgroup, in shared memory.
    turns: an mbarrier for each place.
  """

  def __init__(self, inputs: ring_buffers.Inputs, places: Ref, turns: Ref):
    super().__init__(inputs)
    self.places, self.turns = places, turns

  def begin(self, h: Array) -> None:
    last = self.walk.config.warpgroups - 1
    pl.when(self.walk.warpgroup == last)(lambda: self._hand_on(h))

  def before(self, wave, h: Array) -> Array:
    own = self.walk.warpgroup
    plgpu.barrier_wait(self.turns.at[own])
    return self.places[own]

  def end(self) -> None:
    wait = lambda: plgpu.barrier_wait(self.turns.at[0])
    pl.when(self.walk.warpgroup == 0)(wait)

  def after(self, h: Array) -> Array:
    self._hand_on(h)
    return h

  def _hand_on(self, h: Array) -> None:
    count = jnp.int32(self.walk.config.warpgroups)
    following = lax.rem(self.walk.warpgroup + 1, count)
    self.places[following] = h
    plgpu.barrier_arrive(self.turns.at[following])


def types(config: time_blocks.Config) -> list:
  """Returns the scratch of `Turns`, none for one warpgroup."""
  if config.warpgroups == 1:
    return []
  return [
      plgpu.SMEM((config.warpgroups, streams.LANES), jnp.float32),
      plgpu.Barrier(num_barriers=config.warpgroups),
  ]
