"""Teams: CTAs of a cluster that share out the sum of a tile.

A matrix that stays in shared memory need not be read again in every step, but
one CTA cannot hold it for a sum over all gates. So a team of four has a part of
the sum each. Warp w of a product has its rows 16 w and following, and the sums
of these rows are what CTA w of the team finishes:

    product   [64 rows, units], a part of the sum     in each CTA
    meet      all products are done, their slices are free
    send      warp w: 16 rows -> shared memory of CTA w
    meet      all sums are there
    total     [16 rows, units], the whole sum         in each CTA

The sums lie where slices of the operand were. A group is 16 units; of a group
and eight rows a warp sends 512 bytes, 16 of each thread.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync
from pallas_kernels.tiled import config as config_lib
from pallas_kernels.tiled import fragments

Array = jax.Array
Ref = Any

# CTAs of a team: one for each warp of a product.
MEMBERS = 4

# Units of a part, and of a group: four threads side by side.
UNITS, GROUP = 4, 16

# Warpgroups of a CTA. The first one multiplies.
WARPGROUPS = 2

# Rows that a CTA finishes, in halves of eight.
ROWS, _HALF = config_lib.ROWS // MEMBERS, 8

# Bytes of the sums of a group and eight rows.
_BLOCK = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the work is cut.

  Attributes:
    units: of a tile.
    stages: slots of the ring buffer for slices of the operand.
  """

  units: int
  stages: int

  @property
  def warpgroups(self) -> int:
    """Warpgroups of a CTA."""
    return WARPGROUPS

  @property
  def rows(self) -> int:
    """Rows of a tile."""
    return config_lib.ROWS

  @property
  def groups(self) -> int:
    """Groups of units of a tile."""
    return self.units // GROUP

  @property
  def parts(self) -> int:
    """Parts of a tile that a thread has; the last one may be beyond it."""
    return pl.cdiv(2 * self.groups, 4 * WARPGROUPS)

  @property
  def sum_bytes(self) -> int:
    """Shared memory for the sums that a CTA receives."""
    return MEMBERS * 2 * self.groups * _BLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """All tiles of a step, one a team.

  Attributes:
    config: how the work is cut.
    batch: B.
    size: D, units of the only head.
  """

  config: Config
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
    """Clusters of the grid."""
    return self.row_blocks * self.unit_blocks

  @property
  def ctas(self) -> int:
    """CTAs of the grid; all are on the device at once."""
    return self.teams * MEMBERS

  @property
  def grid(self) -> dict[str, dict[str, int]]:
    """Axes of the grid and of the cluster."""
    return {'grid': {'team': self.teams}, 'cluster': {'member': MEMBERS}}

  @property
  def counters(self) -> int:
    """Row blocks: each runs by itself."""
    return self.row_blocks

  @property
  def arrivals(self) -> int:
    """Warpgroups that publish a part of a row block in each step."""
    return self.unit_blocks * MEMBERS * WARPGROUPS

  def find(self) -> config_lib.Tile:
    """Returns the tile of this CTA's team."""
    index = lax.axis_index('team')
    counter = lax.div(index, jnp.int32(self.unit_blocks))
    return config_lib.Tile(
        counter=counter,
        head=jnp.int32(0),
        row=counter * self.config.rows,
        block=index - counter * self.unit_blocks,
    )


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
    """Returns the i-th part of this thread."""
    thread = ptx.thread()
    lane = thread & 31
    blocks = 2 * tiles.config.groups
    block = (i * WARPGROUPS + warpgroup) * 4 + (thread >> 5)
    exists = block < blocks
    block = jnp.minimum(block, blocks - 1)
    half = block & 1
    octet = lax.axis_index('member') * 2 + half
    row = tile.row + octet * _HALF + (lane >> 2)
    unit = tile.block * tiles.config.units + (block >> 1) * GROUP
    unit = unit + (lane & 3) * UNITS
    inside = exists & (unit < tiles.size)
    valid = inside & (row < tiles.batch)
    place = fragments.Place(
        row=jnp.minimum(row, tiles.batch - 1),
        feature=jnp.minimum(unit, tiles.size - UNITS),
        valid=valid.astype(jnp.int32),
    )
    octet = tile.counter * (config_lib.ROWS // _HALF) + octet
    inside = inside.astype(jnp.int32)
    return cls(place=place, block=block, octet=octet, inside=inside)


def send(ref: Ref, product: Array) -> None:
  """Stores a product, [64, units], where the team adds it up.

  Args:
    ref: shared memory, at the same address in all CTAs.
    product: of this CTA's part of the sum.
  """
  thread = ptx.thread()
  parts = fragments.parts(product, UNITS)
  start = lax.axis_index('member') * (len(parts) * _BLOCK)
  at = (thread & 31) * 16 + start
  for i, part in enumerate(parts):
    words = [instructions.as_word(x) for x in ptx.unstack(part)]
    sync.store_peer(ref, at + i * _BLOCK, words, thread >> 5)


def total(ref: Ref, part: Part, groups: int) -> Array:
  """Returns the sum of all CTAs of a team for a part, float32 [4 * 128]."""
  at = (ptx.thread() & 31) * 16 + part.block * _BLOCK
  sums: list[Array] | None = None
  for member in range(MEMBERS):
    start = member * (2 * groups * _BLOCK)
    words = memory.load_words_smem(ref, at + start)
    values = [instructions.as_float(word) for word in words]
    if sums is not None:
      values = [a + b for a, b in zip(sums, values, strict=True)]
    sums = values
  assert sums is not None
  return ptx.stack(sums)
