"""How a recurrence is cut into tiles of rows and units, and who has which."""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

# Units of which a thread has eight in sequence, and their columns of a product.
GROUP = 32

# Rows that a warpgroup multiplies.
ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How the work is cut.

  Attributes:
    warpgroups: number of warpgroups, each with 64 rows of a tile.
    groups: number of groups of 32 units of a tile.
    stages: slots of the ring buffer for slices of products.
    ahead: whether a part is read while the part before it is computed.
    ctas: number of CTAs on the device at once.
    members: CTAs that share out the sum of a tile, a cluster.
  """

  warpgroups: int
  groups: int
  stages: int
  ahead: bool
  ctas: int
  members: int = 1

  @property
  def rows(self) -> int:
    """Rows of a tile."""
    return ROWS * self.warpgroups

  @property
  def units(self) -> int:
    """Units of a tile."""
    return GROUP * self.groups

  @property
  def parts(self) -> int:
    """Parts of a tile that a thread finishes, of two rows in each group."""
    return 2 * self.groups // self.members

  @property
  def sum_words(self) -> int:
    """Shared memory for the sums of all members, in int32."""
    return (self.members > 1) * self.rows * self.units


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
  def teams(self) -> int:
    """Clusters of the grid, or CTAs; all are on the device at once."""
    return min(self.config.ctas // self.config.members, self.total)

  @property
  def ctas(self) -> int:
    """CTAs of the grid."""
    return self.teams * self.config.members

  @property
  def counters(self) -> int:
    """Row blocks of all heads: each runs by itself."""
    return self.heads * self.row_blocks

  @property
  def arrivals(self) -> int:
    """Warpgroups that publish a part of a row block in each step."""
    return self.unit_blocks * self.config.warpgroups * self.config.members

  @property
  def grid(self) -> dict[str, dict[str, int]]:
    """Axes of the grid and of the cluster."""
    members = self.config.members
    cluster = {'member': members} if members > 1 else {}
    return {'grid': {'team': self.teams}, 'cluster': cluster}

  def count(self):
    """Returns the number of tiles of this CTA."""
    others = self.teams - 1 - lax.axis_index('team')
    return lax.div(self.total + others, jnp.int32(self.teams))

  def find(self, i) -> 'Tile':
    """Returns the i-th tile of this CTA."""
    index = lax.axis_index('team') + i * self.teams
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
    counter: index of its row block, among the row blocks of all heads.
    head: its head.
    row: the first row.
    block: index of the tile among the head's units.
  """

  counter: object
  head: object
  row: object
  block: object


# Row blocks: how CTAs learn that the operand of a step is whole.
#
# The tiles of one row block need each other's results, all other tiles do not.
# A row block has a counter in device memory. Warpgroups that have stored their
# part of the operand of a step add one, and the warp that copies that operand
# waits until all have. Counters only grow.
#
# Results are stored by threads and read by TMA, which is another proxy: the
# reader fences, once it knows of new ones. If writers fence too, a step of an
# LSTM of 128 rows of 768 units takes .4 us longer, on an H100.


Array = jax.Array
Ref = Any


class Counters(mailbox.Mailbox):
  """A counter for each row block.

  Args:
    ref: int32 in device memory, one each.
    count: number of counters.
  """

  def __init__(self, ref: Ref, count: int):
    self.ref, self.count = ref, count

  @classmethod
  def type(cls, count: int) -> jax.ShapeDtypeStruct:
    """Returns the type of the array."""
    return jax.ShapeDtypeStruct(
        (-(-count // ptx.LANES) * ptx.LANES,), jnp.int32
    )

  def clear(self) -> None:
    """Every CTA stores every zero, before all CTAs meet."""
    lane = ptx.thread()
    for start in range(0, self.count, ptx.LANES):
      zero = ptx.full(1, 0, jnp.int32)
      memory.store_gmem(self.ref, lane + start, zero, jnp.int32)

  def publish(self, index, first, warpgroups: int = 1) -> None:
    """Adds one, after all stores of some warpgroups.

    One thread releases the stores of all, which the barrier orders before it.

    Args:
      index: the row block's index.
      first: number of the first of the warpgroups in its CTA.
      warpgroups: how many, one after another.
    """
    # Pallas's barriers come first, and 15 is the barrier of the whole CTA.
    barrier = first + 12
    code = (
        f'bar.sync %barrier, {warpgroups * ptx.LANES};'
        ' { .reg .u32 t; .reg .pred p; .reg .u64 a, o; mov.u32 t, %tid.x;'
        ' setp.eq.u32 p, t, %thread; cvt.s64.s32 o, %index;'
        ' shl.b64 o, o, 2; add.u64 a, %base, o;'
        ' @p red.release.gpu.global.add.u32 [a], 1; }'
    )
    operands = {
        'barrier': barrier,
        'thread': first * ptx.LANES,
        'index': index,
        'base': self.ref,
    }
    ptx.emit(code, {}, operands)

  def wait(self, index, count) -> None:
    """Waits until a counter has reached a number.

    Only the first warp of a warpgroup waits: one of its threads starts all of
    the warpgroup's copies, and more that poll would slow down the writers. If
    the counter does not reach the number, the kernel is aborted with an error.
    """
    # The index of the warp is equal in all its threads, and ptxas has to see
    # that: else it takes the code below for divergent, and runs the products of
    # tensor cores in turn.
    code = (
        '{ .reg .u32 v, k, w; .reg .pred p, q; .reg .u64 a, o;'
        ' mov.u32 w, %tid.x; shr.u32 w, w, 5;'
        ' shfl.sync.idx.b32 w, w, 0, 31, 0xFFFFFFFF; and.b32 w, w, 3;'
        ' setp.eq.u32 q, w, 0; mov.b32 k, 0; cvt.s64.s32 o, %index;'
        ' shl.b64 o, o, 2; add.u64 a, %base, o; mov.b32 v, %count;'
        ' again_%%: @q ld.acquire.gpu.global.u32 v, [a];'
        ' setp.ge.s32 p, v, %count; @p bra done_%%; add.u32 k, k, 1;'
        f' setp.lt.u32 p, k, {sync.PATIENCE}; @p bra again_%%; trap;'
        ' done_%%: fence.proxy.async.global; }'
    )
    ptx.emit(code, {}, {'index': index, 'base': self.ref, 'count': count})
