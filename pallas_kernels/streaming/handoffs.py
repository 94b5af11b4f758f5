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

from pallas_kernels import linear_maps
from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import ptx
from pallas_kernels.streaming import blocks
from pallas_kernels.streaming import kernel_call

Array = jax.Array
Vector = linear_maps.Vector
Ref = Any


class Alone:
  """No hand-off: one warpgroup has all blocks of a sequence.

  Args:
    inputs: ring buffers of this warpgroup's blocks.
  """

  def __init__(self, inputs: blocks.Inputs):
    self.inputs, self.walk = inputs, inputs.walk

  def begin(self, h: Vector) -> None:
    """Takes h before the first block."""

  def arrive(self, wave) -> None:
    """Waits for the inputs of this warpgroup's block."""
    self.inputs.wait(wave)

  def before(self, wave, h: Vector) -> Vector:
    """Returns h before this warpgroup's block.

    Args:
      wave: index of the wave.
      h: the result of `after` for the wave before.
    """
    return h

  def after(self, h: Vector) -> Vector:
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
    states: number of arrays of h.
    places: h for each warpgroup, in shared memory.
    turns: an mbarrier for each place.
  """

  def __init__(
      self, inputs: blocks.Inputs, states: int, places: Ref, turns: Ref
  ):
    super().__init__(inputs)
    self.states, self.places, self.turns = states, places, turns

  def begin(self, h: Vector) -> None:
    last = self.walk.config.warpgroups - 1
    pl.when(self.walk.warpgroup == last)(lambda: self._hand_on(h))

  def before(self, wave, h: Vector) -> Vector:
    own = self.walk.warpgroup
    plgpu.barrier_wait(self.turns.at[own])
    return tuple(self.places[own, i] for i in range(self.states))

  def end(self) -> None:
    wait = lambda: plgpu.barrier_wait(self.turns.at[0])
    pl.when(self.walk.warpgroup == 0)(wait)

  def after(self, h: Vector) -> Vector:
    self._hand_on(h)
    return h

  def _hand_on(self, h: Vector) -> None:
    count = jnp.int32(self.walk.config.warpgroups)
    following = lax.rem(self.walk.warpgroup + 1, count)
    for i, value in enumerate(h):
      self.places[following, i] = value
    plgpu.barrier_arrive(self.turns.at[following])


def types(config: blocks.Config, states: int) -> list:
  """Returns the scratch of `Turns`, none for one warpgroup."""
  if config.warpgroups == 1:
    return []
  return [
      plgpu.SMEM((config.warpgroups, states, blocks.LANES), jnp.float32),
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
    like: an affine map, of which only the form is read.
    ref: an array in device memory, of `MapRing.shape`.
  """

  slots = 32
  steps_between_fences = 8

  def __init__(self, walk: blocks.Walk, like: Any, ref: Ref):
    self.walk, self.ref = walk, ref
    leaves, self.form = jax.tree.flatten(like)
    self.numbers, self.words = len(leaves), words(len(leaves))
    self.lane = ptx.thread() + walk.features.start

  @staticmethod
  def shape(plan: Plan, like: Any) -> tuple[int, ...]:
    """Returns the shape of the array: maps side by side, 16 bytes or more."""
    layout, size = plan.layout, words(len(jax.tree.leaves(like)))
    groups = plan.config.segments * size // max(size, 4)
    return MapRing.slots, layout.batch, groups, layout.padded, max(size, 4)

  def _place(self, wave, group):
    """Returns where a group of words lies: two maps of two words, or one map.

    Args:
      wave: index of the wave.
      group: index of the group among those of all segments.
    """
    layout, width = self.walk.layout, max(self.words, 4)
    groups = self.walk.config.segments * self.words // width
    row = self.slot(jnp.int32(wave))
    row = row * layout.batch + self.walk.batch
    row = row * groups + group
    return (row * layout.padded + self.lane) * width

  def places(self, wave):
    """Returns the places of all maps of a wave, for `mailbox.poll`."""
    width = max(self.words, 4)
    groups = self.walk.config.segments * self.words // width
    return [
        (self.ref, self._place(wave, group) + offset)
        for group in range(groups)
        for offset in range(0, width, 4)
    ]

  def maps(self, found: Sequence[Array]) -> list[affine_maps.Map]:
    """Returns the maps of all segments, given the words of their places."""
    values = [instructions.as_float(word) for word in found]
    starts = range(0, len(values), self.words)
    return [
        jax.tree.unflatten(self.form, values[i : i + self.numbers])
        for i in starts
    ]

  def publish(self, wave, found: Sequence[Array]):
    """Publishes the words of this CTA's map."""
    segment = self.walk.segment
    if self.words == 2:
      at = self._place(wave, segment >> 1) + 2 * (segment & 1)
    else:
      at = self._place(wave, segment)
    found = [*found, *found[: self.words - self.numbers]]
    for i in range(0, self.words, 2):
      mailbox.publish_pair(self.ref, at + i, found[i : i + 2])

  def retire(self, wave):
    """Empties the place of this CTA's map; none before the first wave."""
    empty = mailbox.sentinel()
    empty = [empty] * self.numbers
    pl.when(wave >= 0)(lambda: self.publish(wave, empty))

  def clear(self) -> None:
    empty = [mailbox.sentinel()] * self.numbers
    for slot in range(self.slots):
      self.publish(jnp.int32(slot), empty)


def words(numbers: int) -> int:
  """Returns the words that a map of so many numbers takes: 2, 4 or 8."""
  return 1 << (numbers - 1).bit_length()


# The life of a slot, by waves, with a = `ahead`:
#
#   w                  its map is published
#   w + a + 1          its writer empties it
#   w + a + 8          at the latest, the writer's next fence
#   w + 2 a + 9        the first map published after that fence
#   w + 2 a + 17       at the latest, the reader's next fence
#   w + slots          it is read again
MOST_AHEAD = (MapRing.slots - 2 * MapRing.steps_between_fences - 1) // 2


def mailboxes(plan: Plan, like: Any) -> list[jax.ShapeDtypeStruct]:
  """Returns the array in device memory for a `Relay`, none for one segment.

  Args:
    plan: the kernel's plan.
    like: an affine map, of which only the form is read.
  """
  if plan.config.segments == 1:
    return []
  return [jax.ShapeDtypeStruct(MapRing.shape(plan, like), jnp.float32)]


def handoff(
    inputs: blocks.Inputs,
    like: Any,
    find: Callable[..., Any],
    scratch: Sequence[Ref],
    mailboxes: Sequence[Ref],
) -> Alone:
  """Returns the hand-off that the cut asks for.

  Args:
    inputs: ring buffers of this warpgroup's blocks.
    like: an affine map, of which only the form is read.
    find: wave -> the map of each step in this warpgroup's block, once its
      inputs are there.
    scratch: memory of warpgroups, as `types` lists it.
    mailboxes: mailboxes of CTAs, as `mailboxes` lists them.
  """
  config = inputs.walk.config
  if config.segments > 1:
    return Relay(inputs, like, find, *mailboxes)
  if config.warpgroups > 1:
    return Turns(inputs, len(like[1]), *scratch)
  return Alone(inputs)


class Relay(Alone):
  """CTAs publish the maps of their blocks, some waves ahead.

  Args:
    inputs: ring buffers of this CTA's blocks.
    like: an affine map, of which only the form is read.
    find: wave -> the map of each step in this CTA's block.
    ref: the mailbox.
  """

  def __init__(
      self,
      inputs: blocks.Inputs,
      like: Any,
      find: Callable[..., Any],
      ref: Ref,
  ):
    super().__init__(inputs)
    self.find, walk = find, inputs.walk
    self.ahead, self.count = walk.config.ahead, walk.config.segments
    if self.ahead > MOST_AHEAD:
      raise ValueError(f'ahead is at most {MOST_AHEAD}, got {self.ahead}')
    self.maps = MapRing(walk, like, ref)
    layout = walk.layout
    tiles = layout.batch * layout.padded // blocks.LANES
    mailbox.open_all([self.maps], tiles * self.count, 1)
    pl.loop(0, min(self.ahead, walk.waves))(self._publish)

  def _publish(self, wave):
    """Publishes the map of this CTA's block, once its inputs are there."""
    self.inputs.wait(wave)
    total = jax.tree.leaves(affine_maps.compose(self.find(wave)))
    self.maps.publish(wave, list(map(mailbox.without_sentinel, total)))

  def arrive(self, wave):
    """Waits for the inputs of a later wave, and publishes its map."""
    self.seen = mailbox.peek(self._groups(wave)[0])
    later = wave + self.ahead
    pl.when(later < self.walk.waves)(lambda: self._publish(later))

  def _groups(self, wave):
    """Returns the places of a wave's maps, as many as fit into registers."""
    places = self.maps.places(wave)
    return [places[i : i + 16] for i in range(0, len(places), 16)]

  def before(self, wave, h: Vector) -> Vector:
    start = h
    groups, seen, segment = self._groups(wave), self.seen, 0
    for places, following in zip(groups, [*groups[1:], []], strict=True):
      later = mailbox.peek(following)
      words = mailbox.poll(places, 4, seen)
      for each in self.maps.maps(words):
        start = linear_maps.where(self.walk.segment == segment, h, start)
        h = affine_maps.apply(each, h)
        segment += 1
      seen = later
    self.whole = h
    self.maps.retire(wave - self.ahead - 1)
    self.maps.settle(wave)
    return start

  def after(self, h: Vector) -> Vector:
    """Returns h after the whole wave."""
    return self.whole
