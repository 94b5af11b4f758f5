"""The share of a dense recurrence that one CTA has, and where it lies.

A CTA has some batch rows (columns, for the tensor cores) and some units of one
head. It multiplies the recurrent kernel's rows of these units, which stay in
registers, and if need be in shared memory, for the whole sequence, with what
all units of the head have made of their step. How that gets from CTA to CTA
depends on the size of the head:

* 'shared': one CTA has all units of the head; through its shared memory.
* 'cluster': the CTAs of a cluster do, each having the operand in its shared
  memory: they write their parts into each other's.
* 'device': more CTAs than a cluster holds do, through device memory that is
  poisoned first, so that reading it is waiting for it (`Exchange`).

The warps of a CTA share out the rows, and, where these are few or long, also
the sums, which then meet in shared memory. Threads end up with some elements of
the product, and keep the carry of these elements in registers. Tiles of streams
pass through shared memory: in by asynchronous copies, several steps ahead.

Words: a *half* is 8 rows of a product, half of a tensor core's tile; a *block*
is 32 of the elements that it sums over.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any

LANES = ptx.LANES


@dataclasses.dataclass(frozen=True)
class Config:
  """How a dense recurrence is cut; chosen by `dense_tuning.py`.

  Attributes:
    exchange: 'shared', 'cluster' or 'device'.
    columns: batch rows of a CTA, a multiple of 8, or 4: then the 8 columns of a
      tensor core's tile are these twice, and threads have half as many elements
      each.
    units: of a CTA, a multiple of 8.
    warpgroups: of a CTA.
    sums: into how many parts its warps share out the sums, a power of two, with
      'device' at least 2.
    cluster: CTAs of a cluster: with 'cluster' all of a head, with 'device' a
      team. Its CTAs share out the gates that are summed over: each multiplies
      some of the gates for the units of all. Less has to be read, at the price
      of an exchange in the cluster.
    delay: cycles for which a CTA does not ask whether others have published:
      too early it would only be in their way.
    stages: steps for which inputs are in flight or in use, at least 5.
    registers: of a thread, that hold the recurrent kernel, or None for as many
      as it takes; what goes beyond lies in shared memory.
  """

  exchange: str
  columns: int
  units: int
  warpgroups: int
  sums: int = 1
  cluster: int = 1
  delay: int = 0
  stages: int = 6
  registers: int | None = None

  @property
  def through_device(self) -> bool:
    return self.exchange == 'device'

  @property
  def team(self) -> int:
    """CTAs that may share out gates."""
    return self.cluster if self.through_device else 1

  @property
  def slots(self) -> int:
    """Steps for which there is an operand.

    With two, a CTA may be sent the next step's while it multiplies this one's.
    It cannot be sent the one after: that is made of what it makes when it has
    multiplied. What it reads itself, through the device, it does not read
    before all its warps have multiplied.
    """
    return 1 if self.through_device else 2

  @property
  def tiles(self) -> int:
    """Tiles of a tensor core, side by side, that have all columns."""
    return pl.cdiv(self.columns, 8)

  @property
  def twice(self) -> bool:
    """Whether the columns of a tile are 4, twice."""
    return self.columns == 4


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of a recurrence: features are heads times size."""

  batch: int
  time: int
  heads: int
  size: int
  time_major: bool

  @property
  def features(self) -> int:
    return self.heads * self.size

  @property
  def blocks(self) -> int:
    """Blocks of a head."""
    return pl.cdiv(self.size, 32)

  def parts(self, config: 'Config') -> int:
    """CTAs of a head; whole clusters, so the last ones may have no units."""
    parts = pl.cdiv(self.size, config.units)
    return pl.cdiv(parts, config.cluster) * config.cluster

  def stream(self, stream: 'Stream') -> tuple[int, ...]:
    """Returns the shape of an array with all steps."""
    lead = (self.batch, self.time)
    lead = lead[::-1] if self.time_major else lead
    if stream.by_head:
      return (self.heads, *lead, stream.tiles, self.size)
    gates = () if stream.gates is None else (stream.gates,)
    return (*lead, *gates, self.features)


@dataclasses.dataclass(frozen=True)
class Stream:
  """An array [B, T, F] or [B, T, G, F], or flags int32 [T, G, B'].

  Attributes:
    dtype: as stored.
    gates: G, or None where there is no such axis; of flags, the directions.
    flags: whether it is flags.
    by_head: whether it is [N, B, T, G, D] instead.
  """

  dtype: Any
  gates: int | None = None
  flags: bool = False
  by_head: bool = False

  @property
  def tiles(self) -> int:
    return self.gates or 1


def split_parts(x: Array) -> tuple[Array, Array]:
  """Returns two bfloat16 arrays whose sum is x but for 2^-17 of it."""
  high = lax.reduce_precision(x, 8, 7)
  return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


class Cta:
  """Inside a kernel: this thread's coordinates, and what they are good for.

  Args:
    config: the cut.
    shape: sizes.
    reverse: whether the kernel's loop runs from the last time to the first.
    both: whether it does for the other half of the heads, the second one or,
      with `reverse`, the first.
    dtype: of what is multiplied, float32 in two bfloat16 parts.
  """

  def __init__(
      self, config: Config, shape: Shape, reverse: bool, both: bool, dtype: Any
  ):
    self.config, self.shape = config, shape
    self.dtype = jnp.dtype(dtype)
    self.split = self.dtype == jnp.float32
    self.short = jnp.dtype(jnp.bfloat16) if self.split else self.dtype
    self.threads = config.warpgroups * LANES
    self.warps = 4 * config.warpgroups
    self.row0 = lax.axis_index('slice') * config.columns
    self.head = lax.axis_index('head')
    self.half = jnp.int32(0)
    self.reverse: Any = reverse
    if both:
      self.half = lax.div(self.head, jnp.int32(shape.heads // 2))
      self.reverse = self.half == (0 if reverse else 1)
    self.part = self.unit0 = jnp.int32(0)
    self.rank = jnp.int32(0)
    if config.cluster > 1:
      self.part = self.rank = lax.axis_index('rank')
    if config.through_device:
      self.part = lax.axis_index('group') * config.cluster + self.rank
    self.unit0 = self.part * config.units
    self.group = jnp.int32(0)
    if config.warpgroups > 1:
      self.group = lax.axis_index('warpgroup')
    self.tid = ptx.thread()
    self.index = self.tid + self.group * LANES
    lane = self.tid & 31
    self.lane = lane
    self.warp = (self.tid >> 5) + 4 * self.group
    self.quad, self.place = lane >> 2, lane & 3
    self.tiles = config.tiles
    self._elements()

  # Elements: (unit, column) of what this thread keeps.

  def _elements(self):
    config = self.config
    units, columns, own = [], [], []
    if config.sums == 1:
      # As the tensor cores leave them.
      octets = pl.cdiv(config.units, 8 * self.warps)
      for s in range(octets):
        for n in range(self.tiles):
          for p in range(1 if config.twice else 2):
            units.append(8 * (self.warp * octets + s) + self.quad)
            column = 2 * self.place + p
            if config.twice:
              column = 2 * (self.place & 1) + self.upper
            columns.append(8 * n + column)
            own.append(units[-1] < config.units)
    else:
      total = config.units * config.columns
      count = pl.cdiv(total, self.threads)
      for j in range(count):
        e = (self.group * count + j) * LANES + self.tid
        own.append(e < total)
        # Where there are not enough, some do the work of others.
        width = min(config.columns, 8)
        row = lax.div(lax.rem(e, jnp.int32(total)), jnp.int32(width))
        tile = lax.div(row, jnp.int32(config.units))
        units.append(row - tile * config.units)
        columns.append(8 * tile + (e & (width - 1)))
    self.count = len(units)
    self.unit, self.column = ptx.stack(units), ptx.stack(columns)
    inside = self.unit0 + self.unit < self.shape.size
    inside &= self.row0 + self.column < self.shape.batch
    self.valid = flag(inside) * ptx.stack([flag(x) for x in own])

  @property
  def upper(self) -> Array:
    """Which of two columns is this thread's, where tiles have each twice."""
    return self.place >> 1

  def own_of(self, pair: Sequence[Array]) -> Sequence[Array]:
    """Returns a thread's of two elements: one where tiles have each twice."""
    if not self.config.twice:
      return pair
    return [jnp.where(self.upper != 0, pair[1], pair[0])]

  def tile_column(self, tile: int, column):
    """Returns which of the CTA's columns a column of a tile is."""
    return column & 3 if self.config.twice else 8 * tile + column

  def zeros(self) -> Array:
    return ptx.full(self.count, 0.0)

  def feature(self, unit):
    return self.head * self.shape.size + self.unit0 + unit

  # Arrays in device memory, by element.

  def offset(self, time, stream: Stream, gate: int) -> Array:
    """Returns where this thread's elements lie in an array with all steps."""
    shape, gates = self.shape, stream.tiles
    row = shape.size if stream.by_head else shape.features
    by_row, by_time = shape.time, 1
    if shape.time_major:
      by_row, by_time = 1, shape.batch
    # What does not change from step to step, and what does.
    fixed = (self.row0 + self.column) * (by_row * gates * row) + gate * row
    if stream.by_head:
      head = self.head * (shape.batch * shape.time * gates * row)
      fixed = fixed + head + self.unit0 + self.unit
    else:
      fixed = fixed + self.feature(self.unit)
    return fixed + time * (by_time * gates * row)

  def read_param(self, ref: Ref, i: int) -> Array:
    """Returns row i of an array float32 [P, F]."""
    unit = jnp.minimum(self.unit0 + self.unit, self.shape.size - 1)
    at = i * self.shape.features + self.head * self.shape.size + unit
    return memory.load_gmem(ref, at, jnp.float32, count=self.count)

  def _row_offset(self, i: int):
    """Where elements lie in an array [S, B, F], those outside at the edge."""
    row = jnp.minimum(self.row0 + self.column, self.shape.batch - 1)
    unit = jnp.minimum(self.unit0 + self.unit, self.shape.size - 1)
    at = (i * self.shape.batch + row) * self.shape.features
    return at + self.head * self.shape.size + unit

  def read_rows(self, ref: Ref, count: int) -> tuple[Array, ...]:
    """Returns this thread's elements of an array float32 [S, B, F]."""
    return tuple(
        memory.load_gmem(
            ref, self._row_offset(i), jnp.float32, count=self.count
        )
        for i in range(count)
    )

  def write_rows(self, ref: Ref, values: Sequence[Array]):
    """Stores this thread's elements of an array float32 [S, B, F]."""
    for i, value in enumerate(values):
      at = self._row_offset(i)
      memory.store_gmem(ref, at, value, jnp.float32, where=self.valid)

  def write(self, ref, time, value, dtype, stream: Stream, gate: int = 0):
    """Stores this thread's elements of one step to device memory."""
    at = self.offset(time, stream, gate)
    memory.store_gmem(ref, at, value, dtype, where=self.valid)

  # Tiles in shared memory: columns of units, 16-byte chunks permuted so that
  # neither a warp's reads nor its writes meet in one bank.

  def tile_bytes(self, size: int) -> int:
    return self.config.columns * pitch(self.config, size)

  def in_tile(self, size: int) -> Array:
    """Returns where this thread's elements lie in a tile, in bytes."""
    return self.place_in_tile(size, self.column, self.unit)

  def place_in_tile(self, size: int, column, unit):
    row = pitch(self.config, size)
    byte = unit * size
    chunk = (byte >> 4) ^ (permutation(column) & min(7, row // 16 - 1))
    return column * row + (chunk << 4) + (byte & 15)

  def time(self, step):
    backwards = self.shape.time - 1 - step
    if isinstance(self.reverse, bool):
      return backwards if self.reverse else step
    return jnp.where(self.reverse, backwards, step)

  def barrier(self):
    """Waits for all threads of the CTA."""
    sync.barrier(self.config.warpgroups)

  def meet(self):
    """Waits for all threads of all CTAs of the cluster."""
    if self.config.cluster > 1:
      sync.cluster_barrier()
    else:
      self.barrier()


def flag(condition) -> Array:
  """Returns int32, 1 where a condition is true and 0 elsewhere."""
  return jnp.where(condition, jnp.int32(1), jnp.int32(0))


def pitch(config: Config, size: int) -> int:
  """Returns bytes from one column of a tile to the next."""
  row = config.units * size
  if row > 64:
    return pl.cdiv(row, 128) * 128
  return next(size for size in (16, 32, 64) if row <= size)


def permutation(column):
  """Returns what a column's chunks are permuted by, exclusive or."""
  return ((column & 1) << 2) | ((column >> 1) & 3)
