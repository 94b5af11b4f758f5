"""How a recurrence is cut into tiles of rows and units, and who has which."""

import dataclasses

from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

# Units of which a thread has eight in sequence, and their columns of a product.
GROUP = 32

# Rows that a warpgroup multiplies.
ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the work is cut.

  Attributes:
    warpgroups: that multiply, each 64 rows of a tile; one more loads.
    groups: of 32 units of a tile.
    stages: slots of the ring buffer for slices of products.
    ahead: whether a part is read while the part before it is computed.
    ctas: on the device at once.
  """

  warpgroups: int
  groups: int
  stages: int
  ahead: bool
  ctas: int

  @property
  def rows(self) -> int:
    """Rows of a tile."""
    return ROWS * self.warpgroups

  @property
  def units(self) -> int:
    """Units of a tile."""
    return GROUP * self.groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """All tiles of a step, dealt round-robin to CTAs.

  Attributes:
    config: how the work is cut.
    batch: B.
    heads: N.
    size: D, units of a head.
  """

  config: Config
  batch: int
  heads: int
  size: int

  @property
  def row_blocks(self) -> int:
    """Tiles over the batch."""
    return pl.cdiv(self.batch, self.config.rows)

  @property
  def unit_blocks(self) -> int:
    """Tiles over the units of a head."""
    return self.size // self.config.units

  @property
  def total(self) -> int:
    """Tiles of a step."""
    return self.heads * self.row_blocks * self.unit_blocks

  @property
  def ctas(self) -> int:
    """CTAs of the grid; all are on the device at once."""
    return min(self.config.ctas, self.total)

  @property
  def counters(self) -> int:
    """Row blocks of all heads: each runs by itself."""
    return self.heads * self.row_blocks

  @property
  def arrivals(self) -> int:
    """Warpgroups that publish a part of a row block in each step."""
    return self.unit_blocks * self.config.warpgroups

  @property
  def grid(self) -> dict[str, dict[str, int]]:
    """Axes of the grid and of the cluster."""
    return {'grid': {'cta': self.ctas}, 'cluster': {}}

  def count(self):
    """Returns the number of tiles of this CTA."""
    others = self.ctas - 1 - lax.axis_index('cta')
    return lax.div(self.total + others, jnp.int32(self.ctas))

  def find(self, i) -> 'Tile':
    """Returns the i-th tile of this CTA."""
    index = lax.axis_index('cta') + i * self.ctas
    counter = lax.div(index, jnp.int32(self.unit_blocks))
    head = lax.div(counter, jnp.int32(self.row_blocks))
    row = counter - head * self.row_blocks
    return Tile(
        counter=counter,
        head=head,
        row=row * self.config.rows,
        block=index - counter * self.unit_blocks,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
  """Some rows and units of one head.

  Attributes:
    counter: index of its row block, that of its head among them.
    head: its head.
    row: the first row.
    block: which tile of the head's units.
  """

  counter: object
  head: object
  row: object
  block: object
