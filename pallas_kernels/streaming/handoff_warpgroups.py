"""Turns: how warpgroups of a CTA share out the steps of one recurrence.

Each has every so many blocks of a sequence. All that takes long, reading
inputs, computing gates and writing results, it does on its own; for the
recurrence itself, one multiplication and addition a step, warpgroups take
turns: each waits for the h that its predecessor ends with, runs through its
block and hands its own on. So h is computed in the order of time whatever the
number of warpgroups.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.streaming import time_blocks

Array = jax.Array


class Alone:
  """No turns: one warpgroup has all blocks.

  Args:
    walk: over time.
    barriers: by which arriving blocks are waited for.
  """

  def __init__(self, walk: time_blocks.Walk, barriers):
    self.walk, self.barriers = walk, barriers

  def begin(self, h: Array) -> None:
    """Says what the first block starts from."""

  def arrive(self, wave) -> None:
    """Waits for this warpgroup's block."""
    self.walk.wait(self.barriers, wave)

  def before(self, wave, h: Array) -> Array:
    """Returns h before this warpgroup's block.

    Args:
      wave: index of the wave.
      h: what `after` returned for the wave before.
    """
    return h

  def after(self, h: Array) -> Array:
    """Takes h after this warpgroup's block; returns what to keep."""
    return h

  def end(self) -> None:
    """After the last wave: leaves no turn that nobody has taken.

    Interpret mode wants all barriers to have been waited for.
    """


class Turns(Alone):
  """Warpgroups hand h on through shared memory.

  A place is written again only when all warpgroups have had their turn, so by
  then it has been read.

  Args:
    walk: over time.
    barriers: by which arriving blocks are waited for.
    places: scratch, as `types` lists it.
    turns: likewise.
  """

  def __init__(self, walk: time_blocks.Walk, barriers, places, turns):
    super().__init__(walk, barriers)
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
      plgpu.SMEM((config.warpgroups, time_blocks.LANES), jnp.float32),
      plgpu.Barrier(num_barriers=config.warpgroups),
  ]
