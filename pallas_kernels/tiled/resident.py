"""CTAs that have all of a tile's matrix in shared memory.

A CTA has the same tile in all steps. One warpgroup multiplies and leaves the
sums in shared memory, where slices of the operand were; two others update:

    multiplies    product   [64 rows, columns]
                  put       -> shared memory
                            ==barrier==>
    update        gates     [64 rows, units] of each gate

The columns of a product are the gates of a tile side by side. A group is 16 of
them; of a group and eight rows a warp stores 512 bytes, 16 of each thread.
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
from pallas_kernels.tiled import cut
from pallas_kernels.tiled import fragments
from pallas_kernels.tiled import low_tiles
from pallas_kernels.tiled import teams

Array = jax.Array
Ref = Any

UNITS, WARPGROUPS = teams.UNITS, teams.WARPGROUPS

# Bytes of the sums of a group and eight rows.
_BLOCK = 512

# Pallas uses the first of the sixteen barriers, `cut.Counters` those from 12.
_BARRIER = 11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the work is cut.

  Attributes:
    units: of a tile.
    gates: of a tile.
    stages: slots of the ring buffer for slices of the operand.
    rows: of a tile, 64, or 32 as in `low_tiles`.
    held: slices of the matrix in registers, of low tiles only.
  """

  units: int
  gates: int
  stages: int
  rows: int = cut.ROWS
  held: int = 0

  @property
  def low(self) -> bool:
    """Whether tiles have 32 rows, and 16 units of at most four gates."""
    return self.rows == low_tiles.ROWS

  @property
  def members(self) -> int:
    """CTAs of a tile."""
    return 1

  @property
  def warpgroups(self) -> int:
    """Warpgroups of a CTA."""
    return 1 + WARPGROUPS

  @property
  def updating(self) -> int:
    """Warpgroups that update; of low tiles the last one copies."""
    return WARPGROUPS - self.low

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A part of the tile that a thread updates.

  Attributes:
    place: where it lies.
    row: of the tile, int32 [128].
    index: which part of the row, int32 [128].
  """

  place: fragments.Place
  row: Array
  index: Array

  @classmethod
  def of(cls, tiles: teams.Tiles, tile, warpgroup, i: int) -> 'Part':
    """Returns the i-th part of this thread of a warpgroup that updates."""
    per_row = tiles.config.per_row
    first = i * tiles.config.updating
    number = ptx.thread() + (first + warpgroup - 1) * ptx.LANES
    own = lax.div(number, jnp.int32(per_row))
    index = number - own * per_row
    exists = own < tiles.config.rows
    own = jnp.minimum(own, tiles.config.rows - 1)
    row = tile.row + own
    place = fragments.Place(
        row=jnp.minimum(row, tiles.batch - 1),
        feature=tile.block * tiles.config.units + index * UNITS,
        valid=(exists & (row < tiles.batch)).astype(jnp.int32),
    )
    return cls(place=place, row=own, index=index)


class Sums:
  """Sums in shared memory, from one warpgroup to the others.

  Args:
    config: how the work is cut.
    ref: shared memory that nobody needs when sums are put.
  """

  def __init__(self, config: Config, ref: Ref):
    self.config, self.ref = config, ref

  @classmethod
  def size(cls, config: Config) -> int:
    """Returns the bytes of the sums."""
    return 4 * config.rows * config.columns

  def put(self, product: Array) -> None:
    """Stores a product, [64, columns], of low tiles [columns, 32]."""
    thread = ptx.thread()
    if self.config.low:
      # A warp has a gate.
      at = low_tiles.sender() + (thread >> 5) * self._gate_bytes
      for i, words in enumerate(low_tiles.words(product)):
        memory.store_words_smem(self.ref, at + i * _BLOCK, words)
      self._meet('arrive')
      return
    groups = self.config.columns // (4 * UNITS)
    at = (thread & 31) * 16 + (thread >> 5) * (2 * groups * _BLOCK)
    for i, part in enumerate(fragments.parts(product, UNITS)):
      group, half = divmod(i, 2)
      words = [instructions.as_word(x) for x in ptx.unstack(part)]
      start = (half * groups + group) * _BLOCK
      memory.store_words_smem(self.ref, at + start, words)
    self._meet('arrive')

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
    config = self.config
    if config.low:
      at = (part.row >> 3) * _BLOCK
      return tuple(
          low_tiles.read(self.ref, at + gate * self._gate_bytes)
          for gate in range(config.gates)
      )
    groups = config.columns // (4 * UNITS)
    row = (part.row >> 3) * (groups * _BLOCK) + (part.row & 7) * 64
    found = []
    for gate in range(config.gates):
      number = part.index + gate * config.per_row
      at = row + (number >> 2) * _BLOCK + (number & 3) * 16
      words = memory.load_words_smem(self.ref, at)
      found.append(ptx.stack([instructions.as_float(word) for word in words]))
    return tuple(found)
