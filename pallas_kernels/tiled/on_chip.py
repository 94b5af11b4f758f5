"""Tiles whose matrix stays on chip: who has which part of a tile, and its sums.

A CTA has one tile for all steps. One warpgroup multiplies and hands the sums
on; others update. In the forward pass a CTA has all of its tile's matrix:

    multiplies    product   [64 rows, columns]: the gates of a tile side by side
                  put       -> shared memory, where slices of the operand were
                            ==barrier==>
    update        gates     [64 rows, units] of each gate

In the adjoint the sum is over all gates, too long for one CTA. A team of four
CTAs has a part of the sum each. Warp w of a product has its rows 16 w and
following, and CTA w of the team finishes the sums of these rows:

    multiplies    product   [64 rows, units], a part of the sum
                  send      warp w: 16 rows -> shared memory of CTA w
                            ==mbarrier, which counts the bytes==>
    update        total     [16 rows, units], the whole sum

A group is 16 columns. A warp leaves 512 bytes for a group and eight rows, 16 of
each thread. Sums that a CTA of a team sends to itself lie where a slice of the
operand was. `low_tiles` has the order of tiles of 32 rows.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync
from pallas_kernels.tiled import cut
from pallas_kernels.tiled import fragments
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import low_tiles
from pallas_kernels.tiled import plan as plan_lib

Array = jax.Array
Ref = Any

# CTAs of a team: one for each warp of a product.
MEMBERS = 4

# Units of a part, and of a group: four threads side by side.
UNITS, GROUP = 4, 16

# Warpgroups of a CTA that update; one before them multiplies.
WARPGROUPS = 2

# Rows of a block.
_HALF = 8

# Bytes of the sums of a group and eight rows.
_BLOCK = 512

# Pallas uses the first of the sixteen barriers, `cut.Counters` 12 and up.
_BARRIER = 11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the work is cut.

  Attributes:
    units: number of units of a tile.
    stages: slots of the ring buffer for slices of the operand.
    rows: number of rows of a tile, 64, or 32 as in `low_tiles`.
    held: slices of the matrix in registers, of low tiles only.
  """

  units: int
  stages: int
  rows: int = cut.ROWS
  held: int = 0

  @property
  def low(self) -> bool:
    """Whether tiles have 32 rows, and 64 columns of the matrix."""
    return self.rows == low_tiles.ROWS

  @property
  def members(self) -> int:
    """CTAs that share out a tile."""
    return 1

  @property
  def warpgroups(self) -> int:
    """Warpgroups of a CTA."""
    return 1 + WARPGROUPS

  @property
  def updating(self) -> int:
    """Warpgroups that update; of low tiles the last one copies."""
    return WARPGROUPS - self.low


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateConfig(Config):
  """How a forward pass is cut: a CTA has all gates of its tile.

  Attributes:
    gates: number of gates of a tile.
  """

  gates: int

  @property
  def columns(self) -> int:
    """Columns of a product; of low tiles 16 a gate, and zeros behind them."""
    return low_tiles.COLUMNS if self.low else self.gates * self.units

  @property
  def per_row(self) -> int:
    """Parts of a row of a tile."""
    return self.units // UNITS

  @property
  def parts(self) -> int:
    """Parts of a tile that a thread has; the last one may be beyond it."""
    return pl.cdiv(self.rows * self.per_row, self.updating * ptx.LANES)

  @property
  def sum_bytes(self) -> int:
    """Bytes of the sums."""
    return 4 * self.rows * self.columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeamConfig(Config):
  """How an adjoint is cut: a team of CTAs shares out the sum of a tile."""

  @property
  def members(self) -> int:
    return MEMBERS

  @property
  def groups(self) -> int:
    """Groups of units of a tile."""
    return self.units // GROUP

  @property
  def blocks(self) -> int:
    """Blocks of a group and eight rows that a CTA finishes."""
    return self.rows * self.groups // (MEMBERS * _HALF)

  @property
  def parts(self) -> int:
    """Parts of a tile that a thread has; the last one may be beyond it."""
    return pl.cdiv(self.blocks, 4 * self.updating)

  @property
  def sum_bytes(self) -> int:
    """Bytes of the sums that a CTA receives from each of the team."""
    return self.blocks * _BLOCK

  @property
  def sum_words(self) -> int:
    """Shared memory for sums of all members but this CTA, in int32."""
    return (MEMBERS - 1) * self.sum_bytes // 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles(cut.Tiles):
  """All tiles of the only head, each with CTAs of its own in all steps."""

  config: Any
  heads: int = 1

  @property
  def unit_blocks(self) -> int:
    """Tiles over the units; the last one may be beyond them in part."""
    return pl.cdiv(self.size, self.config.units)

  @property
  def teams(self) -> int:
    return self.total

  @property
  def arrivals(self) -> int:
    """CTAs that publish a part of a row block in each step."""
    return self.unit_blocks * self.config.members

  def find(self, i: int = 0) -> cut.Tile:
    """Returns the tile of this CTA."""
    del i  # There is one.
    index = lax.axis_index('team')
    counter = lax.div(index, jnp.int32(self.unit_blocks))
    return cut.Tile(
        counter=counter,
        head=jnp.int32(0),
        row=counter * self.config.rows,
        block=index - counter * self.unit_blocks,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(plan_lib.Plan):
  """Static (hashable) facts of a kernel of either pass."""

  @property
  def tiles(self) -> Tiles:
    return Tiles(config=self.config, batch=self.batch, size=self.size)

  @property
  def part(self) -> int:
    return UNITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardPlan(Plan):
  """Static facts of a forward kernel; config is a `GateConfig`."""

  @property
  def columns(self) -> int:
    return self.config.columns

  def arrange(self, kernel: Array) -> Array:
    """Orders R, [G', 1, D, D], as [columns of all tiles, D]."""
    gates, _, size, _ = kernel.shape
    # [gate, from, to] -> [from, tile, gate, unit]
    kernel = kernel[:, 0].astype(self.dtype)
    kernel = kernel.reshape(gates, size, -1, self.config.units)
    kernel = jnp.transpose(kernel, (1, 2, 0, 3))
    if self.config.low:
      missing = self.columns // self.config.units - gates
      kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, missing), (0, 0)))
      return low_tiles.order(kernel).reshape(size, -1).T
    return fragments.permute(kernel.reshape(size, -1), UNITS).T

  def slice_of_tile(self, matrix: Ref, tile) -> Callable[[int], Ref]:
    """Returns (k) -> a slice of a tile's part of the matrix of `arrange`."""
    rows = pl.ds(tile.block * self.columns, self.columns)
    return lambda k: matrix.at[rows, pl.ds(k * limits.DEPTH, limits.DEPTH)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdjointPlan(Plan):
  """Static facts of an adjoint by teams; config is a `TeamConfig`."""

  def arrange(self, kernel: Array) -> Array:
    """Orders R, [G', 1, D, D], as [D, G' D]: a row for each column of tiles."""
    gates, _, size, _ = kernel.shape
    # [gate, to, from]
    kernel = jnp.swapaxes(kernel[:, 0].astype(self.dtype), 1, 2)
    if self.config.low:
      kernel = low_tiles.order(kernel)
    else:
      kernel = fragments.permute(kernel, UNITS)
    return jnp.transpose(kernel, (2, 0, 1)).reshape(size, gates * size)

  def slice_of_tile(self, matrix: Ref, tile) -> Callable[[int], Ref]:
    """Returns (k) -> a slice of this CTA's part of the matrix of `arrange`.

    Rows beyond the matrix are copied as zeros.
    """
    units = self.config.units

    def slice_of(k):
      first = (lax.axis_index('member') * self.turns + k) * limits.DEPTH
      rows = pl.ds(tile.block * units, units)
      return matrix.at[rows, pl.ds(first, limits.DEPTH)]

    return slice_of


def publish(counters, tile: cut.Tile, warpgroups: int) -> None:
  """Tells all that the warpgroups that update have stored their part.

  Args:
    counters: `cut.Counters`.
    tile: the tile of this CTA.
    warpgroups: how many update; the one before them multiplies.
  """
  counters.publish(tile.counter, jnp.int32(1), warpgroups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A part of the tile that a thread updates, with all gates.

  Attributes:
    place: its place.
    row: a row of the tile, int32 [128].
    index: index of the part of the row, int32 [128].
  """

  place: fragments.Place
  row: Array
  index: Array

  @classmethod
  def of(cls, tiles: Tiles, tile, warpgroup, i: int) -> 'Part':
    """Returns the i-th part of this thread of a warpgroup that updates."""
    config: Any = tiles.config
    first = i * config.updating
    number = ptx.thread() + (first + warpgroup - 1) * ptx.LANES
    own = lax.div(number, jnp.int32(config.per_row))
    index = number - own * config.per_row
    exists = own < config.rows
    own = jnp.minimum(own, config.rows - 1)
    row = tile.row + own
    place = fragments.Place(
        row=jnp.minimum(row, tiles.batch - 1),
        feature=tile.block * config.units + index * UNITS,
        valid=(exists & (row < tiles.batch)).astype(jnp.int32),
    )
    return cls(place=place, row=own, index=index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeamPart:
  """A part of the tile that a thread finishes.

  Attributes:
    place: its place.
    block: its sums of a group and eight rows, int32 [128].
    octet: its eight rows of the batch, int32 [128].
    inside: int32 [128], not 0 where the tile has it and its units exist.
  """

  place: fragments.Place
  block: Array
  octet: Array
  inside: Array

  @classmethod
  def of(cls, tiles: Tiles, tile, warpgroup, i: int) -> 'TeamPart':
    """Returns the i-th part of this thread of a warpgroup that updates."""
    config: Any = tiles.config
    thread = ptx.thread()
    lane = thread & 31
    block = (i * config.updating + warpgroup - 1) * 4 + (thread >> 5)
    exists = block < config.blocks
    block = jnp.minimum(block, config.blocks - 1)
    if config.low:
      group, octet = lax.axis_index('member'), block
    else:
      half = block & 1
      group, octet = block >> 1, lax.axis_index('member') * 2 + half
    row = tile.row + octet * _HALF + (lane >> 2)
    unit = tile.block * config.units + group * GROUP
    unit = unit + (lane & 3) * UNITS
    inside = exists & (unit < tiles.size)
    valid = inside & (row < tiles.batch)
    place = fragments.Place(
        row=jnp.minimum(row, tiles.batch - 1),
        feature=jnp.minimum(unit, tiles.size - UNITS),
        valid=valid.astype(jnp.int32),
    )
    octet = tile.counter * (config.rows // _HALF) + octet
    inside = inside.astype(jnp.int32)
    return cls(place=place, block=block, octet=octet, inside=inside)


def _words(product: Array, low: bool) -> Iterator[Sequence[Array]]:
  """Yields the four words that a thread leaves of each group and eight rows.

  Args:
    product: [64, columns], of low tiles [columns, 32].
    low: whether it is of a low tile.
  """
  if low:
    yield from low_tiles.words(product)
    return
  for part in fragments.parts(product, UNITS):
    yield [instructions.as_word(x) for x in ptx.unstack(part)]


def _read(ref: Ref, at: Array, low: bool) -> Array:
  """Returns four units of a row from shared memory, float32 [4 * 128]."""
  if low:
    return low_tiles.read(ref, at)
  words = memory.load_words_smem(ref, at)
  return ptx.stack([instructions.as_float(word) for word in words])


class Sums:
  """Sums in shared memory, from one warpgroup to the rest of its CTA.

  Args:
    config: how the work is cut.
    ref: shared memory that nobody needs when sums are put.
  """

  def __init__(self, config: GateConfig, ref: Ref):
    self.config, self.ref = config, ref

  def put(self, product: Array) -> None:
    """Stores a product, [64, columns], of low tiles [columns, 32]."""
    thread, groups = ptx.thread(), self._groups
    if self.config.low:
      # A warp has a gate.
      at = low_tiles.sender() + (thread >> 5) * self._gate_bytes
    else:
      at = (thread & 31) * 16 + (thread >> 5) * (2 * groups * _BLOCK)
    for i, words in enumerate(_words(product, self.config.low)):
      group, half = divmod(i, 2)
      place = i if self.config.low else half * groups + group
      memory.store_words_smem(self.ref, at + place * _BLOCK, words)
    self._meet('arrive')

  @property
  def _groups(self) -> int:
    return self.config.columns // GROUP

  @property
  def _gate_bytes(self) -> int:
    """Bytes of the sums of a gate of a low tile."""
    return low_tiles.ROWS // low_tiles.OCTET * _BLOCK

  def wait(self) -> None:
    """Waits until a product has been put."""
    self._meet('sync')

  def _meet(self, how: str) -> None:
    threads = (1 + self.config.updating) * ptx.LANES
    ptx.emit(f'bar.{how} {_BARRIER}, {threads};', {}, {})

  def gates(self, part: Part) -> tuple[Array, ...]:
    """Returns a part of each gate, float32 [4 * 128]."""
    config, found = self.config, []
    if config.low:
      row = (part.row >> 3) * _BLOCK
    else:
      row = (part.row >> 3) * (self._groups * _BLOCK) + (part.row & 7) * 64
    for gate in range(config.gates):
      if config.low:
        at = row + gate * self._gate_bytes
      else:
        number = part.index + gate * config.per_row
        at = row + (number >> 2) * _BLOCK + (number & 3) * 16
      found.append(_read(self.ref, at, config.low))
    return tuple(found)


class TeamSums:
  """Sums in shared memory of all CTAs of a team.

  Args:
    config: how the work is cut.
    ref: int32 in shared memory, `TeamConfig.sum_words` of it.
    signal: an mbarrier, int32 in shared memory.
    free: shared memory that no CTA of the team needs when it sends.
  """

  def __init__(self, config: TeamConfig, ref: Ref, signal: Ref, free: Ref):
    self.config, self.ref, self.signal = config, ref, signal
    self._own = sync.distance(ref, free)

  def open(self, where) -> None:
    """Makes the mbarrier; before a barrier of the cluster.

    Args:
      where: int32, not 0 in the one thread that does it.
    """
    sync.make_signals(self.signal, (1,), where)

  def _start(self, receiver, sender) -> Array:
    """Returns where sums lie in the shared memory of their receiver."""
    index = (sender - receiver - 1) & (MEMBERS - 1)
    others = index * self.config.sum_bytes
    return jnp.where(index == MEMBERS - 1, self._own, others)

  def send(self, product: Array) -> None:
    """Sends a product to those who finish its rows or, of low tiles, units.

    Args:
      product: [64, units], of low tiles [units, 32].
    """
    thread = ptx.thread()
    warp = thread >> 5
    start = self._start(warp, lax.axis_index('member'))
    all_threads = ptx.full(1, 1, jnp.int32)
    if self.config.low:
      at = low_tiles.sender() + start
    else:
      at = (thread & 31) * 16 + start
    for i, words in enumerate(_words(product, self.config.low)):
      sync.send(
          *(self.ref, at + i * _BLOCK, words),
          *(self.signal, 0, warp, all_threads),
      )

  def expect(self, where) -> None:
    """Tells the mbarrier how much comes; once for each product.

    Args:
      where: int32, not 0 in the one thread that does it.
    """
    size = jnp.int32(MEMBERS * self.config.sum_bytes)
    sync.expect(self.signal, 0, size, where)

  def wait(self, count) -> None:
    """Waits until so many products have been sent by all, one or more."""
    # A thread with several parts comes late, and takes little from the warps
    # that multiply. 256 rows of 768 units took 7.0 instead of 8.0 us a step;
    # 128 rows and one part 5.9 instead of 5.4.
    busy = self.config.parts > 1
    sync.await_signal(self.signal, 0, (count - 1) & 1, busy)

  def total(self, part: TeamPart) -> Array:
    """Returns the sum of all CTAs of a team for a part, float32 [4 * 128]."""
    at = part.block * _BLOCK
    if not self.config.low:
      at = (ptx.thread() & 31) * 16 + at
    own = lax.axis_index('member')
    all_sums = []
    for sender in range(MEMBERS):
      start = self._start(own, jnp.int32(sender))
      all_sums.append(_read(self.ref, at + start, self.config.low))
    return functools.reduce(jnp.add, all_sums)
