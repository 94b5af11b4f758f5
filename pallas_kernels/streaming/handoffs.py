"""Hand-off of a linear recurrence between the warpgroups of one CTA.

Blocks are dealt round-robin to warpgroups. Each loads, computes gates and
stores independently; only the recurrence itself, one multiplication and
addition a step, is passed on in order: a warpgroup waits for the h that its
predecessor ends with, runs through its block and hands its own h on. So h is
computed in the order of time for any number of warpgroups.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import itertools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import linear_maps
from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import cells
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
#
# If segments are many, every eight have a leader. It composes the maps of its
# group a wave before they are needed, and publishes that too. A CTA then polls
# the maps of its own group and of the other groups, and no more.


Plan = kernel_call.Plan

# Segments of a group.
GROUP = 8


def groups(config: blocks.Config) -> int:
  """Returns the number of groups that segments form, 0 for none."""
  segments = config.segments
  # A leader collects maps a wave before they are needed.
  is_many = segments > GROUP and segments % GROUP == 0 and config.ahead
  return segments // GROUP if is_many else 0


class MapRing(mailbox.MailboxRing):
  """A slot holds maps of one wave, of all sequences.

  All CTAs have read a slot as soon as all have published the map of `ahead + 1`
  waves later, so its writer empties it then.

  Args:
    walk: walk over time.
    like: an affine map, of which only the form is read.
    ref: an array in device memory, of `MapRing.shape`.
    count: number of maps of a sequence and wave, even.
    own: index of the map that this CTA writes.
    writes: whether it writes it; None for yes.
  """

  slots = 32
  steps_between_fences = 8

  def __init__(
      self, walk: blocks.Walk, like: Any, ref: Ref, count: int, own, writes=None
  ):
    self.walk, self.ref = walk, ref
    self.count, self.own, self.writes = count, own, writes
    leaves, self.form = jax.tree.flatten(like)
    self.numbers, self.words = len(leaves), words(len(leaves))
    self.lane = ptx.thread() + walk.features.start

  @staticmethod
  def shape(layout: blocks.Layout, like: Any, count: int) -> tuple[int, ...]:
    """Returns the shape of the array: maps side by side, 16 bytes or more."""
    size = words(len(jax.tree.leaves(like)))
    width = max(size, 4)
    places = count * size // width
    return MapRing.slots, layout.batch, places, layout.padded, width

  def _place(self, wave, index):
    """Returns where a place lies: two maps of two words each, or one map."""
    layout, width = self.walk.layout, max(self.words, 4)
    row = self.slot(jnp.int32(wave))
    row = row * layout.batch + self.walk.batch
    row = row * (self.count * self.words // width) + index
    return (row * layout.padded + self.lane) * width

  def places(self, wave, first=0, count: int | None = None):
    """Returns the places of maps of a wave, for `mailbox.poll`.

    Args:
      wave: index of the wave.
      first: index of the first map, even.
      count: number of maps, even; None for all.
    """
    width = max(self.words, 4)
    maps = width // self.words
    count = self.count if count is None else count
    start, stride = self._place(wave, first // maps), self.walk.layout.padded
    return [
        (self.ref, start + (place * stride * width + offset))
        for place in range(count // maps)
        for offset in range(0, width, 4)
    ]

  def maps(self, found: Sequence[Array]) -> list[affine_maps.Map]:
    """Returns maps, given the words of their places."""
    values = [instructions.as_float(word) for word in found]
    starts = range(0, len(values), self.words)
    return [
        jax.tree.unflatten(self.form, values[i : i + self.numbers])
        for i in starts
    ]

  def publish(self, wave, pair: affine_maps.Map):
    """Publishes this CTA's map."""
    found = map(mailbox.without_sentinel, jax.tree.leaves(pair))
    self._write(wave, list(found))

  def _write(self, wave, found: Sequence[Array]):
    own = self.own
    at = self._place(wave, own)
    if self.words == 2:
      at = self._place(wave, own >> 1) + 2 * (own & 1)
    found = [*found, *found[: self.words - self.numbers]]
    for i in range(0, self.words, 2):
      mailbox.publish_pair(self.ref, at + i, found[i : i + 2])

  def _empty(self, wave):
    self._write(wave, [mailbox.sentinel()] * self.numbers)

  def retire(self, wave):
    """Empties the place of this CTA's map; none before the first wave."""
    is_due = wave >= 0
    is_due = is_due if self.writes is None else is_due & self.writes
    pl.when(is_due)(lambda: self._empty(wave))

  def clear(self) -> None:
    clear = lambda: pl.loop(0, self.slots)(self._empty)
    clear() if self.writes is None else pl.when(self.writes)(clear)


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
  segments = plan.config.segments
  if segments == 1:
    return []
  counts = [n for n in (segments, groups(plan.config)) if n]
  shapes = [MapRing.shape(plan.layout, like, n) for n in counts]
  return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


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
    ref: the mailbox of segments.
    totals: the mailbox of groups, if there are any.
  """

  def __init__(
      self,
      inputs: blocks.Inputs,
      like: Any,
      find: Callable[..., Any],
      ref: Ref,
      totals: Ref | None = None,
  ):
    super().__init__(inputs)
    self.find, walk = find, inputs.walk
    self.ahead, segments = walk.config.ahead, walk.config.segments
    if self.ahead > MOST_AHEAD:
      raise ValueError(f'ahead is at most {MOST_AHEAD}, got {self.ahead}')
    self.maps = MapRing(walk, like, ref, segments, walk.segment)
    self.totals: Any = None
    self.group: Any = None
    rings = [self.maps]
    if totals is not None:
      self.group, member = walk.segment // GROUP, walk.segment % GROUP
      leads = member == GROUP - 1
      count = groups(walk.config)
      self.totals = MapRing(walk, like, totals, count, self.group, leads)
      rings.append(self.totals)
    layout = walk.layout
    tiles = layout.batch * layout.padded // blocks.LANES
    mailbox.open_all(rings, tiles * segments, 1)
    pl.loop(0, min(self.ahead, walk.waves))(self._publish)
    self._collect(jnp.int32(0))

  def _publish(self, wave):
    """Publishes the map of this CTA's block, once its inputs are there."""
    self.inputs.wait(wave)
    self.maps.publish(wave, affine_maps.compose(self.find(wave)))

  def _collect(self, wave):
    """Publishes the map of this CTA's group, if it leads one."""
    if self.totals is None:
      return
    is_due = self.totals.writes & (wave < self.walk.waves)

    @pl.when(is_due)
    def _():
      found = self.maps.maps(mailbox.poll(self._of_group(wave), 4))
      self.totals.publish(wave, affine_maps.compose(found))

  def _of_group(self, wave):
    return self.maps.places(wave, self.group * GROUP, GROUP)

  def _polled(self, wave) -> list[list[Any]]:
    """Returns places, as many at a time as fit into registers."""
    places = self.maps.places(wave)
    if self.totals is not None:
      places = self.totals.places(wave) + self._of_group(wave)
    return [places[i : i + 16] for i in range(0, len(places), 16)]

  def arrive(self, wave):
    """Waits for the inputs of a later wave, and publishes its map."""
    self.seen = mailbox.peek(self._polled(wave)[0])
    later = wave + self.ahead
    pl.when(later < self.walk.waves)(lambda: self._publish(later))
    self._collect(wave + 1)

  def _found(self, wave) -> Iterator[affine_maps.Map]:
    """Yields maps as they are polled: of groups, if any, then of segments."""
    parts, seen = self._polled(wave), self.seen
    for places, following in zip(parts, [*parts[1:], []], strict=True):
      later = mailbox.peek(following)
      yield from self.maps.maps(mailbox.poll(places, 4, seen))
      seen = later

  def before(self, wave, h: Vector) -> Vector:
    found = self._found(wave)
    if self.totals is None:
      start, self.whole = _through(found, self.walk.segment, h)
    else:
      of_groups = itertools.islice(found, self.totals.count)
      start, self.whole = _through(of_groups, self.group, h)
      start, _ = _through(found, self.walk.segment % GROUP, start)
      self.totals.retire(wave - self.ahead - 1)
    self.maps.retire(wave - self.ahead - 1)
    self.maps.settle(wave)
    return start

  def after(self, h: Vector) -> Vector:
    """Returns h after the whole wave."""
    return self.whole


def _through(
    maps: Iterable[affine_maps.Map], own, h: Vector
) -> tuple[Vector, Vector]:
  """Returns h before the map of index `own`, and after all maps."""
  start, apply = h, cells.traced_once(affine_maps.apply)
  for i, each in enumerate(maps):
    start = linear_maps.where(own == i, h, start)
    h = apply(each, h)
  return start, h
