"""Hand-off of a linear recurrence between the warpgroups of one CTA.

Blocks are dealt round-robin to warpgroups. Each loads, computes gates and
stores independently; only the recurrence itself, one multiplication and
addition a step, is passed on in order: a warpgroup waits for the h that its
predecessor ends with, runs through its block and hands its own h on. So h is
computed in the order of time for any number of warpgroups.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import ptx
from pallas_kernels.streaming import blocks
from pallas_kernels.streaming import kernel_call

Array = jax.Array
Ref = Any


class Alone:
  """No hand-off: one warpgroup has all blocks of a sequence.

  Args:
    inputs: ring buffers of this warpgroup's blocks.
  """

  def __init__(self, inputs: blocks.Inputs):
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

  def __init__(self, inputs: blocks.Inputs, places: Ref, turns: Ref):
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


def types(config: blocks.Config) -> list:
  """Returns the scratch of `Turns`, none for one warpgroup."""
  if config.warpgroups == 1:
    return []
  return [
      plgpu.SMEM((config.warpgroups, blocks.LANES), jnp.float32),
      plgpu.Barrier(num_barriers=config.warpgroups),
  ]


# Hand-off of a linear recurrence between the CTAs of one sequence.
#
# If batch and features alone do not fill the device, several CTAs share a
# sequence. Each wave of blocks is dealt to them, one block each; the blocks of
# one CTA are a segment. A block amounts to one affine map h -> A h + B. A CTA
# composes the map of its block some waves before the recurrence gets there, and
# publishes it in a mailbox. When its turn comes it polls the maps of all
# segments of the wave, and applies the earlier maps to h. So polling takes
# no time unless another CTA is behind, and inputs are read from device memory
# once.


Plan = kernel_call.Plan


class MapRing(mailbox.MailboxRing):
  """A slot holds the maps of all blocks of one wave, of all sequences.

  All CTAs have read a slot as soon as all have published the map of `ahead + 1`
  waves later, so its writer empties it then.

  Args:
    walk: walk over time.
    ref: an array in device memory, of `MapRing.shape`.
  """

  slots = 32
  steps_between_fences = 8

  def __init__(self, walk: blocks.Walk, ref: Ref):
    self.walk, self.ref = walk, ref
    self.pairs = walk.config.segments // 2
    self.lane = ptx.thread() + walk.features.start

  @staticmethod
  def shape(plan: Plan) -> tuple[int, ...]:
    """Returns the shape of the array: two maps (A, B) side by side."""
    layout = plan.layout
    pairs = plan.config.segments // 2
    return MapRing.slots, layout.batch, pairs, layout.padded, 2, 2

  def _place(self, wave, pair):
    """Returns where the maps of two segments lie."""
    layout = self.walk.layout
    row = self.slot(jnp.int32(wave))
    row = row * layout.batch + self.walk.batch
    row = row * self.pairs + pair
    return (row * layout.padded + self.lane) * 4

  def places(self, wave):
    """Returns the places of all maps of a wave, for `mailbox.poll`."""
    return [(self.ref, self._place(wave, pair)) for pair in range(self.pairs)]

  def publish(self, wave, words):
    """Publishes the two words of this CTA's map."""
    segment = self.walk.segment
    at = self._place(wave, segment >> 1) + 2 * (segment & 1)
    mailbox.publish_pair(self.ref, at, words)

  def retire(self, wave):
    """Empties the place of this CTA's map; none before the first wave."""
    empty = mailbox.sentinel()
    pl.when(wave >= 0)(lambda: self.publish(wave, (empty, empty)))

  def clear(self) -> None:
    empty = mailbox.sentinel()
    for slot in range(self.slots):
      self.publish(jnp.int32(slot), (empty, empty))


# The life of a slot, by waves, with a = `ahead`:
#
#   w                  its map is published
#   w + a + 1          its writer empties it
#   w + a + 8          at the latest, the writer's next fence
#   w + 2 a + 9        the first map published after that fence
#   w + 2 a + 17       at the latest, the reader's next fence
#   w + slots          it is read again
MOST_AHEAD = (MapRing.slots - 2 * MapRing.steps_between_fences - 1) // 2


def mailboxes(plan: Plan) -> list[jax.ShapeDtypeStruct]:
  """Returns the array in device memory for a `Relay`, none for one segment."""
  if plan.config.segments == 1:
    return []
  return [jax.ShapeDtypeStruct(MapRing.shape(plan), jnp.float32)]


def handoff(
    inputs: blocks.Inputs,
    find: Callable[..., Any],
    scratch: Sequence[Ref],
    mailboxes: Sequence[Ref],
) -> Alone:
  """Returns the hand-off that the cut asks for.

  Args:
    inputs: ring buffers of this warpgroup's blocks.
    find: wave -> the map of each step in this warpgroup's block, once its
      inputs are there.
    scratch: memory of warpgroups, as `types` lists it.
    mailboxes: mailboxes of CTAs, as `mailboxes` lists them.
  """
  config = inputs.walk.config
  if config.segments > 1:
    return Relay(inputs, find, *mailboxes)
  if config.warpgroups > 1:
    return Turns(inputs, *scratch)
  return Alone(inputs)


class Relay(Alone):
  """CTAs publish the maps of their blocks, some waves ahead.

  Args:
    inputs: ring buffers of this CTA's blocks.
    find: wave -> the map of each step in this CTA's block.
    ref: the mailbox.
  """

  def __init__(self, inputs: blocks.Inputs, find: Callable[..., Any], ref: Ref):
    super().__init__(inputs)
    self.find, walk = find, inputs.walk
    self.ahead, self.count = walk.config.ahead, walk.config.segments
    if self.ahead > MOST_AHEAD:
      raise ValueError(f'ahead is at most {MOST_AHEAD}, got {self.ahead}')
    self.maps = MapRing(walk, ref)
    layout = walk.layout
    tiles = layout.batch * layout.padded // blocks.LANES
    mailbox.open_all([self.maps], tiles * self.count, 1)
    pl.loop(0, min(self.ahead, walk.waves))(self._publish)

  def _publish(self, wave):
    """Publishes the map of this CTA's block, once its inputs are there."""
    self.inputs.wait(wave)
    total = affine_maps.compose(self.find(wave))
    self.maps.publish(wave, [mailbox.without_sentinel(x) for x in total])

  def arrive(self, wave):
    """Waits for the inputs of a later wave, and publishes its map."""
    self.seen = mailbox.peek(self.maps.places(wave))
    later = wave + self.ahead
    pl.when(later < self.walk.waves)(lambda: self._publish(later))

  def before(self, wave, h: Array) -> Array:
    start = h
    words = mailbox.poll(self.maps.places(wave), 4, self.seen)
    values = [instructions.as_float(word) for word in words]
    for i in range(self.count):
      start = jnp.where(self.walk.segment == i, h, start)
      h = affine_maps.apply((values[2 * i], values[2 * i + 1]), h)
    self.whole = h
    self.maps.retire(wave - self.ahead - 1)
    self.maps.settle(wave)
    return start

  def after(self, h: Array) -> Array:
    """Returns h after the whole wave."""
    return self.whole
