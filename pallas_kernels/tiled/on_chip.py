"""Teams: CTAs of a cluster that share out the sum of a tile.

A matrix that stays in shared memory need not be read again in every step, but
one CTA cannot hold it for a sum over all gates. So a team of four has a part of
the sum each. Warp w of a product has its rows 16 w and following, and the sums
of these rows are what CTA w of the team finishes:

    multiplies    product   [64 rows, units], a part of the sum
                  send      warp w: 16 rows -> shared memory of CTA w
                            ==mbarrier, which counts the bytes==>
    update        total     [16 rows, units], the whole sum

A group is 16 units; of a group and eight rows a warp sends 512 bytes, 16 of
each thread. What a CTA sends to itself lies where a slice of the operand was.
"""

from collections.abc import Iterable, Sequence
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
from pallas_kernels.tiled import low_tiles

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the work is cut.

  Attributes:
    units: of a tile.
    stages: slots of the ring buffer for slices of the operand.
    rows: of a tile, 64, or 32 as in `low_tiles`.
    held: slices of the matrix in registers, of low tiles only.
  """

  units: int
  stages: int
  rows: int = cut.ROWS
  held: int = 0

  @property
  def low(self) -> bool:
    """Whether tiles have 32 rows, and 64 units."""
    return self.rows == low_tiles.ROWS

  @property
  def members(self) -> int:
    """CTAs that share out a tile."""
    return MEMBERS

  @property
  def warpgroups(self) -> int:
    """Warpgroups of a CTA."""
    return 1 + WARPGROUPS

  @property
  def updating(self) -> int:
    """Warpgroups that update; of low tiles the last one copies."""
    return WARPGROUPS - self.low

  @property
  def groups(self) -> int:
    """Groups of units of a tile."""
    return self.units // GROUP

  @property
  def blocks(self) -> int:
    """Of a group and eight rows, those that a CTA finishes."""
    return self.rows * self.groups // (MEMBERS * _HALF)

  @property
  def parts(self) -> int:
    """Parts of a tile that a thread has; the last one may be beyond it."""
    return pl.cdiv(self.blocks, 4 * self.updating)

  @property
  def sum_bytes(self) -> int:
    """Bytes of the sums that a CTA receives from each of the team."""
    return self.blocks * _BLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """All tiles of a step, each with CTAs of its own in all steps.

  Attributes:
    config: how the work is cut; `resident.Config` has teams of a single CTA.
    batch: B.
    size: D, units of the only head.
  """

  config: Any
  batch: int
  size: int

  @property
  def row_blocks(self) -> int:
    """Tiles over the batch."""
    return pl.cdiv(self.batch, self.config.rows)

  @property
  def unit_blocks(self) -> int:
    """Tiles over the units; the last one may be beyond them in part."""
    return pl.cdiv(self.size, self.config.units)

  @property
  def teams(self) -> int:
    """Tiles of a step."""
    return self.row_blocks * self.unit_blocks

  @property
  def ctas(self) -> int:
    """CTAs of the grid; all are on the device at once."""
    return self.teams * self.config.members

  @property
  def grid(self) -> dict[str, dict[str, int]]:
    """Axes of the grid and of the cluster."""
    members = self.config.members
    cluster = {'member': members} if members > 1 else {}
    return {'grid': {'team': self.teams}, 'cluster': cluster}

  @property
  def counters(self) -> int:
    """Row blocks: each runs by itself."""
    return self.row_blocks

  @property
  def arrivals(self) -> int:
    """CTAs that publish a part of a row block in each step."""
    return self.unit_blocks * self.config.members

  def find(self) -> cut.Tile:
    """Returns the tile of this CTA."""
    index = lax.axis_index('team')
    counter = lax.div(index, jnp.int32(self.unit_blocks))
    return cut.Tile(
        counter=counter,
        head=jnp.int32(0),
        row=counter * self.config.rows,
        block=index - counter * self.unit_blocks,
    )


def publish(counters, tile: cut.Tile, warpgroups: int) -> None:
  """Tells all that the warpgroups that update have stored their part.

  Args:
    counters: `cut.Counters`.
    tile: of this CTA.
    warpgroups: that update.
  """
  # The warpgroup before them multiplies.
  counters.publish(tile.counter, jnp.int32(1), warpgroups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A part of the tile that a thread finishes.

  Attributes:
    place: where it lies.
    block: its sums of a group and eight rows, int32 [128].
    octet: eight rows of the batch that it is of, int32 [128].
    inside: int32 [128], not 0 where the tile has it and its units exist.
  """

  place: fragments.Place
  block: Array
  octet: Array
  inside: Array

  @classmethod
  def of(cls, tiles: Tiles, tile, warpgroup, i: int) -> 'Part':
    """Returns the i-th part of this thread of a warpgroup that updates."""
    thread = ptx.thread()
    lane, config = thread & 31, tiles.config
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


class Sums:
  """Sums in shared memory of all CTAs of a team.

  Args:
    config: how the work is cut.
    ref: int32 in shared memory, `words` of it.
    signal: an mbarrier, int32 in shared memory, `SIGNAL_WORDS` of it.
    free: shared memory that no CTA of the team needs when it sends.
  """

  SIGNAL_WORDS = 2

  def __init__(self, config: Config, ref: Ref, signal: Ref, free: Ref):
    self.config, self.ref, self.signal = config, ref, signal
    self._own = sync.distance(ref, free)

  @classmethod
  def words(cls, config: Config) -> int:
    """Returns the shared memory for sums of the others, in int32."""
    return (MEMBERS - 1) * config.sum_bytes // 4

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
    all_words: Iterable[Sequence[Array]]
    if self.config.low:
      at, all_words = low_tiles.sender() + start, low_tiles.words(product)
    else:
      at = (thread & 31) * 16 + start
      all_words = (
          [instructions.as_word(x) for x in ptx.unstack(part)]
          for part in fragments.parts(product, UNITS)
      )
    for i, words in enumerate(all_words):
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
    # Where a thread has several parts it comes late, and little is taken from
    # the warps that multiply. Of 256 rows of 768 units that took 7.0 instead of
    # 8.0 us a step, of 128 rows and one part 5.9 instead of 5.4.
    busy = self.config.parts > 1
    sync.await_signal(self.signal, 0, (count - 1) & 1, busy)

  def total(self, part: Part) -> Array:
    """Returns the sum of all CTAs of a team for a part, float32 [4 * 128]."""
    at = part.block * _BLOCK
    if not self.config.low:
      at = (ptx.thread() & 31) * 16 + at
    own = lax.axis_index('member')
    all_sums = []
    for sender in range(MEMBERS):
      start = self._start(own, jnp.int32(sender))
      if self.config.low:
        all_sums.append(low_tiles.read(self.ref, at + start))
        continue
      words = memory.load_words_smem(self.ref, at + start)
      all_sums.append(ptx.stack([instructions.as_float(w) for w in words]))
    return functools.reduce(jnp.add, all_sums)
