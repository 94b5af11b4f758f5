"""Coordinates inside a kernel: which CTA, warp and thread has which elements.

A CTA has `columns` rows of the batch (columns of a tensor core's result) and
`units` units of one head. Each thread keeps the carry of some (unit, column)
elements in registers for the whole sequence:

    sums = 1: a thread keeps the elements of its tensor core fragment. Lane
    4 q + p of a warp has unit q and columns 2 p, 2 p + 1 of every 8 x 8 tile:

                columns  0   1   2   3   4   5   6   7
        unit 0          l0  l0  l1  l1  l2  l2  l3  l3
        unit 1          l4  l4  l5  l5  l6  l6  l7  l7
        ...
        unit 7         l28 l28 l29 l29 l30 l30 l31 l31

    With 4 columns the tile holds them twice; lanes with p < 2 keep the first
    column of their pair, lanes with p >= 2 the second.

    sums > 1: warps add up their sums in shared memory, and elements are dealt
    out in order, 8 columns of a unit to 8 threads.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels import call as call_lib
from pallas_kernels.dense import cut
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any
Config = cut.Config
LANES = ptx.LANES


@dataclasses.dataclass(frozen=True)
class Thread:
  """Coordinates of a thread, int32.

  Attributes:
    group: warpgroup of the CTA.
    tid: thread of the warpgroup.
    index: thread of the CTA.
    lane: thread of the warp.
    warp: warp of the CTA.
    quad: group of four lanes; the row of a fragment.
    place: lane of the four; the column pair of a fragment.
  """

  group: Array
  tid: Array
  index: Array
  lane: Array
  warp: Array
  quad: Array
  place: Array

  @classmethod
  def current(cls, config: Config) -> 'Thread':
    group = jnp.int32(0)
    if config.warpgroups > 1:
      group = lax.axis_index('warpgroup')
    tid = ptx.thread()
    index = tid + group * LANES
    lane = tid & 31
    warp = (tid >> 5) + 4 * group
    quad, place = lane >> 2, lane & 3
    return cls(group, tid, index, lane, warp, quad, place)

  @property
  def upper(self) -> Array:
    """1 where a thread keeps the second of two columns that are there twice."""
    return self.place >> 1


@dataclasses.dataclass(frozen=True)
class Elements:
  """The elements that a thread keeps in registers, [count * 128] each.

  Attributes:
    unit: unit of the CTA.
    column: column of the CTA.
    valid: int32, 0 for elements outside the arrays and for copies.
    count: elements of a thread.
  """

  unit: Array
  column: Array
  valid: Array
  count: int


class Cta:
  """Coordinates of this CTA and thread.

  Args:
    config: the cut.
    shape: sizes.
    reverse: whether the kernel's loop runs from the last time to the first.
    call: options of the run. With `both_directions` the loop of half of the
      heads runs backwards: the second half, or the first with `reverse`.
    dtype: dtype of the products' factors; float32 becomes two bfloat16 parts.

  Attributes:
    row0: first row of the batch.
    head: head.
    part_of_heads: the direction or the level that the head belongs to.
    reverse: flag as given, or int32 with `both_directions`.
    rank: CTA of the cluster.
    unit0: first unit of the head.
    thread: this thread.
    own: the elements that this thread keeps.
  """

  def __init__(
      self,
      config: Config,
      shape: cut.Shape,
      reverse: bool,
      call: call_lib.Call,
      dtype: Any,
  ):
    self.config, self.shape = config, shape
    self.dtype = jnp.dtype(dtype)
    number, self.head = lax.axis_index('slice'), lax.axis_index('head')
    self.row0 = number * config.columns
    self.part_of_heads = jnp.int32(0)
    self.reverse: Any = reverse
    if call.groups > 1:
      heads = jnp.int32(shape.heads // call.groups)
      self.part_of_heads = lax.div(self.head, heads)
    if call.both_directions:
      self.reverse = self.part_of_heads == (0 if reverse else 1)
    part = self.rank = jnp.int32(0)
    if config.cluster > 1:
      part = self.rank = lax.axis_index('rank')
    if config.through_device:
      part = lax.axis_index('group') * config.cluster + self.rank
    self.unit0 = part * config.units
    self.thread = Thread.current(config)
    self.own = self._elements()

  @property
  def split(self) -> bool:
    """Whether a factor has two bfloat16 parts."""
    return self.dtype == jnp.float32

  @property
  def short(self) -> Any:
    """The 16-bit dtype that tensor cores multiply."""
    return jnp.dtype(jnp.bfloat16) if self.split else self.dtype

  def _elements(self) -> Elements:
    config = self.config
    deal = self._fragment_elements if config.sums == 1 else self._dealt_elements
    units, columns, own = zip(*deal(), strict=True)
    unit, column = ptx.stack(units), ptx.stack(columns)
    inside = self.unit0 + unit < self.shape.size
    inside &= self.row0 + column < self.shape.batch
    valid = flag(inside) * ptx.stack([flag(x) for x in own])
    return Elements(unit, column, valid, len(units))

  def _fragment_elements(self) -> list[tuple[Array, Array, Array]]:
    """Returns unit, column and existence of elements as tensor cores do."""
    config, thread = self.config, self.thread
    elements = []
    octets = pl.cdiv(config.units, 8 * config.warps)
    for s in range(octets):
      for n in range(config.tiles):
        for p in range(1 if config.twice else 2):
          unit = 8 * (thread.warp * octets + s) + thread.quad
          column = 2 * thread.place + p
          if config.twice:
            column = 2 * (thread.place & 1) + thread.upper
          elements.append((unit, 8 * n + column, unit < config.units))
    return elements

  def _dealt_elements(self) -> list[tuple[Array, Array, Array]]:
    """Returns unit, column and existence of elements dealt out in order."""
    config, thread = self.config, self.thread
    total = config.units * config.columns
    count = pl.cdiv(total, config.threads)
    elements = []
    for j in range(count):
      e = (thread.group * count + j) * LANES + thread.tid
      exists = e < total
      # Threads beyond the last element copy the work of others.
      width = min(config.columns, 8)
      row = lax.div(lax.rem(e, jnp.int32(total)), jnp.int32(width))
      tile = lax.div(row, jnp.int32(config.units))
      unit = row - tile * config.units
      elements.append((unit, 8 * tile + (e & (width - 1)), exists))
    return elements

  def kept_of(self, pair: Sequence[Array]) -> Sequence[Array]:
    """Returns the kept ones of a fragment's two columns: one if 4 columns."""
    if not self.config.twice:
      return pair
    return [jnp.where(self.thread.upper != 0, pair[1], pair[0])]

  def tile_column(self, tile: int, column):
    """Returns the CTA's column of a tile's column."""
    return column & 3 if self.config.twice else 8 * tile + column

  def first_of_head(self, gates: int) -> Array:
    """Returns the first element of this head in an array of all steps.

    Args:
      gates: arrays of features side by side in a step.
    """
    shape, head = self.shape, self.head
    if shape.levels == 1:
      return head * shape.size
    level = self.part_of_heads
    head = head - level * (shape.heads // shape.levels)
    level_size = shape.batch * shape.time * gates * shape.row
    return level * level_size + head * shape.size

  def feature(self, unit):
    """Returns the feature of a unit of the CTA."""
    return self.head * self.shape.size + self.unit0 + unit

  def zeros(self) -> Array:
    return ptx.full(self.own.count, 0.0)

  def spread(self, x: Array) -> Array:
    """Returns x in the layout of threads, also where it is a constant."""
    return ptx.spread(x, self.own.count)

  def time(self, step):
    """Returns the time of a step of the loop."""
    backwards = self.shape.time - 1 - step
    if isinstance(self.reverse, bool):
      return backwards if self.reverse else step
    return jnp.where(self.reverse, backwards, step)

  def barrier(self):
    """Waits for all threads of the CTA."""
    sync.barrier(self.config.warpgroups)

  def cluster_barrier(self):
    """Waits for all threads of all CTAs of the cluster."""
    if self.config.cluster > 1:
      sync.cluster_barrier()
    else:
      self.barrier()


def flag(condition) -> Array:
  """Returns int32, 1 where a condition is true and 0 elsewhere."""
  return jnp.where(condition, jnp.int32(1), jnp.int32(0))


# 16-bit tiles between shared memory and fragments, 8 x 8 elements at a time.
#
# With `sums` = 1 a thread keeps the elements of its tensor core fragment.
# ldmatrix and stmatrix move up to four 8 x 8 matrices of such elements at once,
# two elements to a word. Element by element it would take two instructions
# each. They need 8 units side by side.


def usable(config: Config, dtype, written: bool) -> bool:
  """Returns whether ldmatrix, or stmatrix, can move a thread's elements.

  Args:
    config: the cut.
    dtype: the elements' dtype in shared memory.
    written: whether they are stored.
  """
  # With 4 columns a thread keeps one column of each pair. It can read both, but
  # has only one to write. stmatrix came with 9.0.
  if written and (config.twice or config.capability < (9, 0)):
    return False
  return config.sums == 1 and jnp.dtype(dtype).itemsize == 2


class Matrices:
  """The 8 x 8 matrices of some tiles that a warp moves.

  Args:
    cta: coordinates.
    count: number of tiles.
    place: (tile, column, unit) -> byte at which 8 units start.
    written: whether they are stored, so that none may lie beyond the units.
  """

  def __init__(
      self,
      cta: Cta,
      count: int,
      place: Callable[[int, Any, Any], Any],
      written: bool,
  ):
    config, size = cta.config, cta.shape.size
    self.count = count
    self.cta = cta
    octets = pl.cdiv(config.units, 8 * cta.config.warps)
    self.per_array = octets * cta.config.tiles
    rest = config.units % (8 * octets * cta.config.warps)
    all_there = rest == 0 and size % config.units == 0
    unit0 = cta.thread.warp * (8 * octets)
    last = jnp.minimum(config.units, size - cta.unit0) - 8
    matrix, row = cta.thread.lane >> 3, cta.thread.lane & 7
    # For each instruction: its matrices (tile, index), the byte of this
    # thread's row, and where the matrices exist.
    self.groups: list[tuple[list[tuple[int, int]], Array, Array | None]] = []

    def group(members):
      addresses = []
      for array, octet, tile in members:
        unit = unit0 + 8 * octet
        if not all_there:
          unit = jnp.minimum(unit, last)
        addresses.append(place(array, cta.tile_column(tile, row), unit))
      address = addresses[0]
      for i, other in enumerate(addresses[1:], 1):
        address = jnp.where(matrix == i, other, address)
      exists = None
      if written and not all_there:
        exists = flag(unit0 + 8 * members[0][1] <= last)
      indices = [
          (a, octet * cta.config.tiles + tile) for a, octet, tile in members
      ]
      self.groups.append((indices, address, exists))

    together = [range(octets)]
    if written and not all_there:
      together = [range(octet, octet + 1) for octet in range(octets)]
    for part in together:
      members = [
          (array, octet, tile)
          for array in range(count)
          for octet in part
          for tile in range(cta.config.tiles)
      ]
      while members:
        number = 1 << (min(4, len(members)).bit_length() - 1)
        group(members[:number])
        members = members[number:]

  def read(self, ref: Ref, start, dtype) -> list[Array]:
    """Returns this thread's elements, float32, one array a tile.

    Args:
      ref: shared memory.
      start: byte at which the tiles start.
      dtype: dtype of the elements.
    """
    words: list[list[Any]] = [
        [None] * self.per_array for _ in range(self.count)
    ]
    for indices, address, _ in self.groups:
      found = memory.load_matrices(ref, address + start, len(indices))
      for (array, i), word in zip(indices, found, strict=True):
        words[array][i] = word
    halves = instructions.lower, instructions.upper
    elements = lambda word: self.cta.kept_of([f(word, dtype) for f in halves])
    return [
        ptx.stack([x for word in row for x in elements(word)]) for row in words
    ]

  def write(self, ref: Ref, start, values: Sequence[Array], dtype) -> None:
    """Stores this thread's elements.

    Args:
      ref: shared memory.
      start: byte at which the tiles start.
      values: float32, one array a tile.
      dtype: dtype of the elements.
    """
    words = []
    for value in values:
      elements = ptx.unstack(value)
      pairs = zip(elements[::2], elements[1::2], strict=True)
      words.append([instructions.narrow(*pair, dtype) for pair in pairs])
    for indices, address, exists in self.groups:
      memory.store_matrices(
          ref,
          address + start,
          [words[array][i] for array, i in indices],
          exists,
      )
