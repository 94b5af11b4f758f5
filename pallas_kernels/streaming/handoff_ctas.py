"""Segments of a linear recurrence: what makes one long sequence parallel.

Each wave of blocks is dealt to the CTAs of a sequence, its segments. A CTA
finds the map that its block amounts to some waves before it needs to know what
the others found, and tells them through device memory. That is poisoned first,
so that reading is waiting (`waiting.poll`), and takes no time if the
others are not behind. So everything is read once.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync
from pallas_kernels.streaming import handoff_warpgroups
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import time_blocks

Array = jax.Array
Ref = Any
Plan = kernel_call.Plan

# Waves for which there is a place to tell maps, a power of two.
_SLOTS = 32

# Every so many waves a fence makes sure that poisoned places are seen.
_SETTLED = 8

# A place is poisoned `ahead + 1` waves after its own. The next fence of its
# writer comes at most 7 waves later, the first map told after that `ahead + 1`,
# and the next fence of who has read it 8: all before the place is read again.
MOST_AHEAD = (_SLOTS - 2 * _SETTLED - 1) // 2


def relays(plan: Plan) -> list[jax.ShapeDtypeStruct]:
  """Returns the array in device memory for a `Relay`, none for one segment."""
  if plan.config.segments == 1:
    return []
  return [jax.ShapeDtypeStruct(Relay.shape(plan), jnp.float32)]


def exchange(walk, barriers, find, scratch, relay: Sequence[Ref]):
  """Returns how a block learns what h is before it, as `turns.Alone` does.

  Args:
    walk: over time.
    barriers: by which arriving blocks are waited for.
    find: wave -> the map of each step in this warpgroup's block, once it has
      arrived.
    scratch: as `turns.types` lists it, for warpgroups.
    relay: a reference to `relays`, for segments.
  """
  if walk.config.segments > 1:
    return Relay(walk, barriers, find, *relay)
  if walk.config.warpgroups > 1:
    return handoff_warpgroups.Turns(walk, barriers, *scratch)
  return handoff_warpgroups.Alone(walk, barriers)


class Relay(handoff_warpgroups.Alone):
  """How CTAs tell each other the maps of their blocks, a wave at a time.

  A slot is poisoned again by its writer when all have read it, which is certain
  when all have told the map of `ahead + 1` waves later.

  Args:
    walk: over time.
    barriers: by which arriving blocks are waited for.
    find: wave -> the map of each step in this CTA's block.
    ref: in device memory, of `Relay.shape`.
  """

  def __init__(self, walk: time_blocks.Walk, barriers, find, ref: Ref):
    super().__init__(walk, barriers)
    self.find, self.ref = find, ref
    self.ahead, self.count = walk.config.ahead, walk.config.segments
    if self.ahead > MOST_AHEAD:
      raise ValueError(f'ahead is at most {MOST_AHEAD}, got {self.ahead}')
    self.lane = ptx.thread() + walk.features.start
    self._meet()
    pl.loop(0, min(self.ahead, walk.waves))(self._tell)

  @staticmethod
  def shape(plan: Plan) -> tuple[int, ...]:
    """Returns the shape of the array in device memory."""
    layout = plan.layout
    pairs = plan.config.segments // 2
    return _SLOTS, layout.batch, pairs, layout.padded, 2, 2

  def _place(self, wave, pair):
    """Returns where the maps of two segments lie."""
    layout = self.walk.layout
    row = jnp.int32(wave) & (_SLOTS - 1)
    row = row * layout.batch + self.walk.batch
    row = row * (self.count // 2) + pair
    return (row * layout.padded + self.lane) * 4

  def _places(self, wave):
    pairs = range(self.count // 2)
    return [(self.ref, self._place(wave, pair)) for pair in pairs]

  def _write(self, wave, words):
    segment = self.walk.segment
    at = self._place(wave, segment >> 1) + 2 * (segment & 1)
    sync.publish_pair(self.ref, at, words)

  def _meet(self):
    """Poisons this CTA's places, and waits until all CTAs have."""
    poison = sync.poison()
    for slot in range(_SLOTS):
      self._write(jnp.int32(slot), (poison, poison))
    layout = self.walk.layout
    tiles = layout.batch * layout.padded // time_blocks.LANES
    sync.meet(tiles * self.count)

  def _tell(self, wave):
    """Tells the map of this CTA's block, as soon as that has arrived."""
    self.walk.wait(self.barriers, wave)
    total = affine_maps.compose(self.find(wave))
    self._write(wave, [sync.publishable(x) for x in total])

  def arrive(self, wave):
    """Waits for the block of a later wave, and tells its map."""
    self.seen = sync.peek(self._places(wave))
    later = wave + self.ahead
    pl.when(later < self.walk.waves)(lambda: self._tell(later))

  def before(self, wave, h: Array) -> Array:
    start = h
    words = sync.poll(self._places(wave), 4, self.seen)
    values = [instructions.as_float(word) for word in words]
    for i in range(self.count):
      start = jnp.where(self.walk.segment == i, h, start)
      h = affine_maps.apply((values[2 * i], values[2 * i + 1]), h)
    self.whole = h
    done = wave - self.ahead - 1
    poison = sync.poison()
    pl.when(done >= 0)(lambda: self._write(done, (poison, poison)))
    pl.when((wave & (_SETTLED - 1)) == 0)(sync.fence)
    return start

  def after(self, h: Array) -> Array:
    """Returns h after the whole wave."""
    return self.whole


def small(plan: Plan, walk, params: Ref, restart: Ref, flags: Ref):
  """Returns parameters and restart in registers, and flags if there are any."""
  theta = tuple(walk.read(params, k) for k in range(plan.params))
  if not plan.flags:
    return theta, None, None
  return theta, initial(walk, restart, plan.restart), flags


def initial(walk, ref: Ref, given: bool) -> Array:
  """Returns what to start or restart from: zero if nothing is given."""
  return walk.read(ref, walk.batch) if given else time_blocks.zeros()


def leave(walk, ref: Ref, h: Array):
  """Writes h after the last wave."""

  @pl.when((walk.segment == 0) & (walk.warpgroup == walk.config.warpgroups - 1))
  def _():
    ref[walk.batch, walk.features] = h
