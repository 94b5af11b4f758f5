"""The share of a dense recurrence that one CTA has, and where it lies.

A CTA has some batch rows (columns, for the tensor cores) and some units of one
head. It multiplies the recurrent kernel's rows of these units, which stay in
registers for the whole sequence, with what all units of the head have made of
their step. How that gets from CTA to CTA depends on the size of the head:

* 'shared': one CTA has all units of the head; through its shared memory.
* 'cluster': the CTAs of a cluster do, each having the operand in its shared
  memory: they write their parts into each other's.
* 'device': more CTAs than a cluster holds do, through device memory that is
  poisoned first, so that reading it is waiting for it (`Exchange`). Those of a
  cluster read a part each and write it into each other's shared memory.

The warps of a CTA share out the rows, and, where these are few or long, also
the sums, which then meet in shared memory. Threads end up with some elements of
the product, and keep the carry of these elements in registers. Tiles of streams
pass through shared memory: in by asynchronous copies, several steps ahead.

Words: a *half* is 8 rows of a product, half of a tensor core's tile; a *block*
is 32 of the elements that it sums over.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import ptx

Array = jax.Array
Ref = Any

LANES = ptx.LANES


@dataclasses.dataclass(frozen=True)
class Config:
  """How a dense recurrence is cut; chosen by `tuning.py`.

  Attributes:
    exchange: 'shared', 'cluster' or 'device'.
    columns: batch rows of a CTA, a multiple of 8.
    units: of a CTA, a multiple of 8.
    warpgroups: of a CTA.
    sums: into how many parts its warps share out the sums, a power of two.
    cluster: CTAs of a cluster, a divisor of those of a head.
    stages: steps for which inputs are in flight or in use, at least 5.
  """

  exchange: str
  columns: int
  units: int
  warpgroups: int
  sums: int = 1
  cluster: int = 1
  stages: int = 6

  @property
  def through_device(self) -> bool:
    return self.exchange == 'device'

  @property
  def row_warps(self) -> int:
    """Into how many parts the warps share out the units."""
    return 4 * self.warpgroups // self.sums

  @property
  def warp_units(self) -> int:
    """Units of a warp."""
    return 8 * pl.cdiv(self.units, 8 * self.row_warps)


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
    """CTAs of a head."""
    return pl.cdiv(self.size, config.units)

  def stream(self, gates: int | None = None) -> tuple[int, ...]:
    """Returns the shape of an array with all steps."""
    lead = (self.batch, self.time)
    lead = lead[::-1] if self.time_major else lead
    return (*lead, *(() if gates is None else (gates,)), self.features)


@dataclasses.dataclass(frozen=True)
class Stream:
  """An array [B, T, F] or [B, T, G, F], or flags int32 [T, B'].

  Attributes:
    dtype: as stored.
    gates: G, or None where there is no such axis.
    flags: whether it is flags.
  """

  dtype: Any
  gates: int | None = None
  flags: bool = False

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
    dtype: of what is multiplied, float32 in two bfloat16 parts.
  """

  def __init__(self, config: Config, shape: Shape, reverse: bool, dtype: Any):
    self.config, self.shape, self.reverse = config, shape, reverse
    self.dtype = jnp.dtype(dtype)
    self.split = self.dtype == jnp.float32
    self.short = jnp.dtype(jnp.bfloat16) if self.split else self.dtype
    self.threads = config.warpgroups * LANES
    self.warps = 4 * config.warpgroups
    self.row0 = lax.axis_index('slice') * config.columns
    self.head = lax.axis_index('head')
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
    self.tiles = config.columns // 8
    self._elements()

  # Elements: (unit, column) of what this thread keeps.

  def _elements(self):
    config = self.config
    units, columns, own = [], [], []
    if config.sums == 1:
      # As the tensor cores leave them.
      for s in range(config.warp_units // 8):
        for n in range(self.tiles):
          for p in range(2):
            units.append(self.warp * config.warp_units + 8 * s + self.quad)
            columns.append(8 * n + 2 * self.place + p)
            own.append(units[-1] < config.units)
    else:
      total = config.units * config.columns
      count = pl.cdiv(total, self.threads)
      for j in range(count):
        e = (self.group * count + j) * LANES + self.tid
        own.append(e < total)
        # Where there are not enough, some do the work of others.
        octet = lax.rem(e, jnp.int32(total)) >> 3
        tile = lax.div(octet, jnp.int32(config.units))
        units.append(octet - tile * config.units)
        columns.append(8 * tile + (e & 7))
    self.count = len(units)
    self.unit, self.column = ptx.stack(units), ptx.stack(columns)
    inside = self.unit0 + self.unit < self.shape.size
    inside &= self.row0 + self.column < self.shape.batch
    self.valid = _flag(inside) * ptx.stack([_flag(x) for x in own])

  def zeros(self) -> Array:
    return ptx.full(self.count, 0.0)

  def feature(self, unit):
    return self.head * self.shape.size + self.unit0 + unit

  # Arrays in device memory, by element.

  def offset(self, time, gate: int = 0, gates: int = 1) -> Array:
    """Returns where this thread's elements lie in an array with all steps."""
    fixed = self._at(self.row0 + self.column, 0, gate, gates)
    return fixed + self.feature(self.unit) + self._at(0, time, 0, gates)

  def _at(self, row, time, gate, gates):
    """Returns where a row's step starts; the parts that do not change apart."""
    shape = self.shape
    by_row, by_time = shape.time, 1
    if shape.time_major:
      by_row, by_time = 1, shape.batch
    step = gates * shape.features
    return (row * (by_row * step) + gate * shape.features) + (
        time * (by_time * step)
    )

  def read_param(self, ref: Ref, i: int) -> Array:
    """Returns row i of an array float32 [P, F]."""
    unit = jnp.minimum(self.unit0 + self.unit, self.shape.size - 1)
    at = i * self.shape.features + self.head * self.shape.size + unit
    return ptx.load(ref, at, jnp.float32, shared=False, count=self.count)

  def _row_offset(self, i: int):
    """Where elements lie in an array [S, B, F], those outside at the edge."""
    row = jnp.minimum(self.row0 + self.column, self.shape.batch - 1)
    unit = jnp.minimum(self.unit0 + self.unit, self.shape.size - 1)
    at = (i * self.shape.batch + row) * self.shape.features
    return at + self.head * self.shape.size + unit

  def read_rows(self, ref: Ref, count: int) -> tuple[Array, ...]:
    """Returns this thread's elements of an array float32 [S, B, F]."""
    return tuple(
        ptx.load(
            ref, self._row_offset(i), jnp.float32, shared=False,
            count=self.count,
        )
        for i in range(count)
    )

  def write_rows(self, ref: Ref, values: Sequence[Array], first: int = 0):
    """Stores this thread's elements of an array float32 [S, B, F]."""
    for i, value in enumerate(values):
      at = self._row_offset(first + i)
      ptx.store(
          ref, at, value, jnp.float32, shared=False, where=self.valid
      )

  def write(self, ref, time, value, dtype, gate=0, gates=1):
    """Stores this thread's elements of one step to device memory."""
    at = self.offset(time, gate, gates)
    ptx.store(ref, at, value, dtype, shared=False, where=self.valid)

  # Tiles in shared memory: columns of units, 16-byte chunks permuted so that
  # neither a warp's reads nor its writes meet in one bank.

  def tile_bytes(self, size: int) -> int:
    return self.config.columns * _pitch(self.config, size)

  def in_tile(self, size: int) -> Array:
    """Returns where this thread's elements lie in a tile, in bytes."""
    return self.place_in_tile(size, self.column, self.unit)

  def place_in_tile(self, size: int, column, unit):
    pitch = _pitch(self.config, size)
    byte = unit * size
    chunk = (byte >> 4) ^ (_permutation(column) & min(7, pitch // 16 - 1))
    return column * pitch + (chunk << 4) + (byte & 15)

  def time(self, step):
    return self.shape.time - 1 - step if self.reverse else step

  def barrier(self):
    """Waits for all threads of the CTA."""
    ptx.barrier(self.config.warpgroups)

  def meet(self):
    """Waits for all threads of all CTAs of the cluster."""
    if self.config.cluster > 1:
      ptx.cluster_barrier()
    else:
      self.barrier()


def _flag(condition) -> Array:
  return jnp.where(condition, jnp.int32(1), jnp.int32(0))


def _pitch(config: Config, size: int) -> int:
  """Returns bytes from one column of a tile to the next."""
  row = config.units * size
  if row > 64:
    return pl.cdiv(row, 128) * 128
  return next(pitch for pitch in (16, 32, 64) if row <= pitch)


def _permutation(column):
  return ((column & 1) << 2) | ((column >> 1) & 3)


# Steps that are in an exchange.
_SLOTS = 8


class Exchange:
  """What CTAs tell each other, step by step, through device memory.

  A few slots are used in turn, so that they stay in the L2 cache. A slot that
  holds `ptx.POISON` has not been written for its step yet. Its writer poisons
  it again when all have read it, which is certain as soon as all have written
  the next one, and long before it is written again.

  Args:
    cta: coordinates.
    ref: [slots, B, gates, F] in device memory.
    gates: how many arrays there are in a step.
  """

  def __init__(self, cta: Cta, ref: Ref, gates: int):
    self.cta, self.ref, self.gates = cta, ref, gates

  @staticmethod
  def shape(shape: Shape, gates: int) -> tuple[int, ...]:
    return _SLOTS, shape.batch, gates, shape.features

  def offset(self, step, row, gate):
    """Returns where a row of a step's gate starts."""
    shape = self.cta.shape
    per_row = self.gates * shape.features
    fixed = row * per_row + gate * shape.features
    return fixed + (step & (_SLOTS - 1)) * (shape.batch * per_row)

  def publish(self, step, values: Sequence[Array], first: int = 0):
    """Tells all other CTAs this thread's elements, one a gate."""
    cta = self.cta
    row = cta.row0 + cta.column
    feature = cta.feature(cta.unit)
    for gate, value in enumerate(values):
      ptx.store(
          self.ref,
          self.offset(step, row, first + gate) + feature,
          value,
          cta.dtype,
          shared=False,
          where=cta.valid,
          publish=True,
      )

  def retire(self, step):
    """Poisons a step's slot again; by threads that have nothing else to do."""
    cta, config = self.cta, self.cta.config
    size = cta.dtype.itemsize
    per_row = config.units * size // 16
    total = self.gates * config.columns * per_row
    last = cta.index - (cta.threads - LANES)
    for k in range(pl.cdiv(total, LANES)):
      q = last + k * LANES
      gate = lax.div(q, jnp.int32(config.columns * per_row))
      rest = q - gate * (config.columns * per_row)
      row = lax.div(rest, jnp.int32(per_row))
      unit = cta.unit0 + (rest - row * per_row) * (16 // size)
      row += cta.row0
      where = (last >= 0) & (q < total)
      where &= (unit < cta.shape.size) & (row < cta.shape.batch)
      at = self.offset(step, row, gate) + cta.head * cta.shape.size + unit
      ptx.fill(self.ref, jnp.where(where, at, 0), size, _flag(where))

  def settle(self, step):
    """Makes sure, every few steps, that slots are poisoned in time."""
    cta = self.cta
    turn = (step & (_SLOTS // 2 - 1)) == 0
    if cta.config.warpgroups > 1:
      turn &= cta.group == cta.config.warpgroups - 1
    pl.when(turn)(ptx.fence)

  def clear(self):
    for slot in range(_SLOTS):
      self.retire(jnp.int32(slot))


class Ring:
  """Tiles of the streams that a kernel reads, several steps ahead.

  Args:
    cta: coordinates.
    streams: what is read.
    refs: in device memory.
    buffer: int32 in shared memory, `words` of it.
  """

  def __init__(self, cta: Cta, streams, refs, buffer):
    self.cta, self.streams, self.refs = cta, streams, refs
    self.buffer = buffer
    self.offsets, self.slot_bytes = _places(cta, streams)
    self._copies = []
    for stream, ref, start in zip(streams, refs, self.offsets, strict=True):
      self._copies += [
          (ref, stream, start + inner, at, where)
          for inner, at, where in _chunks(cta, stream)
      ]

  @classmethod
  def words(cls, config: Config, streams) -> int:
    return config.stages * _slot_bytes(config, streams) // 4

  def slot(self, step):
    return lax.rem(step, jnp.int32(self.cta.config.stages)) * self.slot_bytes

  def start(self, step):
    """Starts copying the tiles of a step, if there is such a step."""
    cta = self.cta
    exists = jnp.where(step < cta.shape.time, jnp.int32(1), jnp.int32(0))
    time = cta.time(jnp.minimum(step, cta.shape.time - 1))
    slot = self.slot(step)
    for ref, stream, inner, at, where in self._copies:
      size = jnp.dtype(stream.dtype).itemsize
      ptx.fetch(
          self.buffer,
          inner + slot,
          ref,
          at + time * _stride(cta.shape, stream),
          size,
          where * exists,
      )
    ptx.fetch_commit()

  def prologue(self):
    for step in range(self.cta.config.stages - 1):
      self.start(jnp.int32(step))

  def wait(self, ahead: int):
    """Waits for the tiles of the step and `ahead` more: before a barrier."""
    ptx.fetch_wait(self.cta.config.stages - 2 - ahead)

  def read(self, step, i: int) -> list[Array]:
    """Returns this thread's elements of stream i, one array a gate."""
    cta, stream = self.cta, self.streams[i]
    start = self.slot(step) + self.offsets[i]
    if stream.flags:
      at = start + 4 * cta.column
      return [
          ptx.load(self.buffer, at, jnp.int32, shared=True, count=cta.count)
      ]
    size = jnp.dtype(stream.dtype).itemsize
    at = start + cta.in_tile(size)
    return [
        ptx.load(
            self.buffer,
            at + gate * cta.tile_bytes(size),
            stream.dtype,
            shared=True,
            count=cta.count,
        )
        for gate in range(stream.tiles)
    ]

  def read_flags_of(self, step, i: int, column) -> Array:
    """Returns the flags of some columns, int32 [128]."""
    at = self.slot(step) + self.offsets[i] + 4 * column
    return ptx.load(self.buffer, at, jnp.int32, shared=True)


def _stride(shape: Shape, stream: Stream) -> int:
  """Elements from one time to the next."""
  if stream.flags:
    return pl.cdiv(shape.batch, 4) * 4
  return shape.features * stream.tiles * (
      shape.batch if shape.time_major else 1
  )


def _slot_bytes(config: Config, streams) -> int:
  total = 0
  for stream in streams:
    if stream.flags:
      total += max(128, 4 * config.columns)
    else:
      size = jnp.dtype(stream.dtype).itemsize
      total += stream.tiles * config.columns * _pitch(config, size)
  return total


def _places(cta: Cta, streams) -> tuple[list[int], int]:
  """Returns where streams lie in a slot, and its size, in bytes."""
  offsets = [
      _slot_bytes(cta.config, streams[:i]) for i in range(len(streams))
  ]
  return offsets, _slot_bytes(cta.config, streams)


def _chunks(cta: Cta, stream: Stream) -> list[tuple[Array, Array, Array]]:
  """Deals the 16-byte chunks of a step's tiles to the threads of a CTA.

  Returns:
    For each chunk of a thread: where it lies in the stream's tiles, in bytes;
    where it lies in the array at time 0, in elements; and 2 if it lies there, 1
    if it is beyond the array, 0 if there is no such chunk.
  """
  config, shape = cta.config, cta.shape
  size = jnp.dtype(stream.dtype).itemsize
  if stream.flags:
    # [T, B'] with B' the batch rounded up to 4.
    count = pl.cdiv(config.columns, 4)
    at = cta.row0 + 4 * cta.index
    where = _flag(cta.index < count) + _flag(
        (cta.index < count) & (at < shape.batch)
    )
    return [(16 * cta.index, jnp.where(where > 1, at, 0), where)]
  per_row = pl.cdiv(config.units * size, 16)
  per_tile = config.columns * per_row
  total = stream.tiles * per_tile
  chunks = []
  for k in range(pl.cdiv(total, cta.threads)):
    q = cta.index + k * cta.threads
    gate = lax.div(q, jnp.int32(per_tile))
    rest = q - gate * per_tile
    row = lax.div(rest, jnp.int32(per_row))
    chunk = rest - row * per_row
    unit = cta.unit0 + chunk * (16 // size)
    where = (unit < shape.size) & (cta.row0 + row < shape.batch)
    where = _flag(q < total) + _flag(where & (q < total))
    inner = gate * cta.tile_bytes(size)
    inner += cta.place_in_tile(size, row, chunk * (16 // size))
    strides = (1 if shape.time_major else shape.time) * stream.tiles
    at = (cta.row0 + row) * strides + gate
    at = at * shape.features + cta.head * shape.size + unit
    # What is not there must not be addressed beyond the array.
    chunks.append((inner, jnp.where(where > 1, at, 0), where))
  return chunks


class Staging:
  """Tiles that leave through shared memory, so that it happens in 16 bytes.

  Args:
    cta: coordinates.
    streams: what is written.
    refs: in device memory.
    buffer: int32 in shared memory, `words` of it.
  """

  def __init__(self, cta: Cta, streams, refs, buffer):
    self.cta, self.streams, self.refs = cta, streams, refs
    self.buffer = buffer
    self.offsets, self.slot_bytes = _places(cta, streams)
    self._copies = []
    for stream, ref, start in zip(streams, refs, self.offsets, strict=True):
      self._copies += [
          (ref, stream, start + inner, at, where >> 1)
          for inner, at, where in _chunks(cta, stream)
      ]

  @classmethod
  def words(cls, config: Config, streams) -> int:
    return 2 * _slot_bytes(config, streams) // 4

  def write(self, step, i: int, values: Sequence[Array]):
    """Puts this thread's elements of stream i into a tile, one a gate."""
    cta, stream = self.cta, self.streams[i]
    size = jnp.dtype(stream.dtype).itemsize
    start = (step & 1) * self.slot_bytes + self.offsets[i] + cta.in_tile(size)
    for gate, value in enumerate(values):
      ptx.store(
          self.buffer,
          start + gate * cta.tile_bytes(size),
          value,
          stream.dtype,
          shared=True,
          where=cta.valid,
      )

  def flush(self, step):
    """Copies a step's tiles to device memory, after a barrier."""
    cta = self.cta
    time = cta.time(step)
    slot = (step & 1) * self.slot_bytes
    for ref, stream, inner, at, where in self._copies:
      size = jnp.dtype(stream.dtype).itemsize
      at = at + time * _stride(cta.shape, stream)
      ptx.copy_out(ref, at, self.buffer, inner + slot, size, where)


@dataclasses.dataclass(frozen=True)
class Product:
  """Which product: rows and sums of a matrix [gates, N, D, D].

  Attributes:
    gates: how many gates of the matrix, from `first`.
    first: the first gate.
    transposed: whether gates are summed over, as in the adjoint; otherwise each
      has a result of its own.
  """

  gates: int
  first: int
  transposed: bool

  @property
  def results(self) -> int:
    return 1 if self.transposed else self.gates

  @property
  def operands(self) -> int:
    return self.gates if self.transposed else 1

  def halves(self, config: Config) -> int:
    """Halves of the rows that each warp multiplies, an even number."""
    return pl.cdiv(self.results * config.warp_units // 8, 2) * 2

  def blocks(self, config: Config, shape: Shape) -> int:
    """Blocks that each warp sums over."""
    return pl.cdiv(self.operands * shape.blocks, config.sums)


class Multiplier:
  """A product whose matrix stays in registers.

  Args:
    cta: coordinates.
    product: which.
    matrix: [gates of all, N, D, D], indexed [gate, head, row, sum], or two of
      them for the parts of float32.
    operand: int32 in shared memory, `operand_words` of it.
    partials: int32 in shared memory, `partial_words` of it.
    signals: int32 in shared memory, `SIGNAL_WORDS` of it.
  """

  SIGNAL_WORDS = 4

  def __init__(
      self, cta: Cta, product: Product, matrix, operand, partials, signals
  ):
    self.cta, self.product = cta, product
    self.operand, self.partials, self.signals = operand, partials, signals
    config, shape = cta.config, cta.shape
    self.halves = product.halves(config)
    self.blocks = product.blocks(config, shape)
    self.sub = config.warp_units // 8
    self.row_warp = lax.rem(cta.warp, jnp.int32(config.row_warps))
    self.sum_warp = lax.div(cta.warp, jnp.int32(config.row_warps))
    self.plane_bytes = self._plane_bytes(config, shape, product)
    self.matrix = [
        [
            [self._fragment(ref, h, i) for i in range(self.blocks)]
            for h in range(self.halves)
        ]
        for ref in matrix
    ]

  @staticmethod
  def _plane_bytes(config, shape, product) -> int:
    blocks = config.sums * product.blocks(config, shape)
    return config.columns * pl.cdiv(blocks, 2) * 128

  @classmethod
  def operand_words(cls, config, shape, product, split: bool) -> int:
    """Shared memory for what is multiplied."""
    planes = cls.slots(config) * (2 if split else 1)
    return planes * cls._plane_bytes(config, shape, product) // 4

  @staticmethod
  def slots(config: Config) -> int:
    """Steps for which there is an operand.

    Through the device, a step's operand comes after all CTAs have published,
    and thus have used the one before. Otherwise one may be ahead.
    """
    return 1 if config.through_device else 2

  @classmethod
  def partial_words(cls, config, product) -> int:
    """Shared memory for the sums of each warp."""
    if config.sums == 1:
      return 0
    halves = product.halves(config)
    return 4 * config.warpgroups * halves * config.columns * 8

  def _block(self, i: int):
    """Returns gate, first element and existence of this warp's i-th block."""
    blocks = self.cta.shape.blocks
    if self.cta.config.sums == 1:
      gate, block = divmod(i, blocks)
      return gate, jnp.int32(32 * block), None
    index = self.sum_warp * self.blocks + i
    gate = lax.div(index, jnp.int32(blocks))
    return gate, 32 * (index - gate * blocks), gate < self.product.operands

  def _fragment(self, ref, half: int, i: int):
    """Loads 8 elements of one row of the matrix, as four words."""
    cta, product = self.cta, self.product
    result, sub = divmod(half, self.sub)
    if result >= product.results:
      return [ptx.full(1, 0, jnp.int32)] * 4
    unit = self.row_warp * cta.config.warp_units + 8 * sub + cta.quad
    row = cta.unit0 + unit
    gate, start, exists = self._block(i)
    k = start + 8 * cta.place
    where = (row < cta.shape.size) & (k < cta.shape.size)
    where &= unit < cta.config.units
    if exists is not None:
      where &= exists
    gate = product.first + (gate if product.transposed else result)
    at = (gate * cta.shape.heads + cta.head) * cta.shape.size + row
    at = jnp.where(where, at * cta.shape.size + k, 0)
    return ptx.load_words(ref, at, shared=False, size=2, where=_flag(where))

  # The operand's way into this CTA's shared memory.

  @property
  def planes(self) -> int:
    return 2 if self.cta.split else 1

  def clear(self):
    """Fills the operand's tiles with zeros; before a meeting of the cluster."""
    cta = self.cta
    words = self.slots(cta.config) * self.planes * self.plane_bytes // 4
    for k in range(pl.cdiv(words, cta.threads)):
      at = cta.index + k * cta.threads
      ptx.store(
          self.operand,
          4 * at,
          ptx.full(1, 0, jnp.int32),
          jnp.int32,
          shared=True,
          where=_flag(at < words),
      )
    ptx.make_signals(self.signals, 2, _flag(cta.index == 0))

  def _slot(self, step):
    slot = step & (self.slots(self.cta.config) - 1)
    return slot * (self.planes * self.plane_bytes)

  def _place(self, step, plane, gate, column, unit):
    """Returns where an element of the operand lies, in bytes."""
    start = self._slot(step)
    pitch = self.plane_bytes // self.cta.config.columns
    byte = 2 * (gate * (32 * self.cta.shape.blocks) + unit)
    chunk = (byte >> 4) ^ _permutation(column)
    start = start + plane * self.plane_bytes + column * pitch
    return start + (chunk << 4) + (byte & 15)

  def put(self, step, values: Sequence[Array]):
    """Puts this thread's elements of the operand into it, one a gate."""
    cta = self.cta
    for gate, value in enumerate(values):
      unit = cta.unit0 + cta.unit
      parts = (value,)
      if cta.split:
        high = ptx.round_short(value)
        parts = (high, value - high)
      for plane, part in enumerate(parts):
        at = self._place(step, plane, gate, cta.column, unit)
        ptx.store(
            self.operand, at, part, cta.short, shared=True, where=cta.valid
        )

  def share(self, step):
    """Sends what the threads of this CTA have put to the cluster."""
    cta, config = self.cta, self.cta.config
    cta.barrier()
    if config.cluster == 1:
      return
    gates = self.product.operands
    per_row = config.units // 8
    total = gates * self.planes * config.columns * per_row
    peers = config.cluster - 1
    for k in range(pl.cdiv(total * peers, cta.threads)):
      q = cta.index + k * cta.threads
      peer = lax.div(q, jnp.int32(total))
      rest = q - peer * total
      row = lax.div(rest, jnp.int32(per_row))
      unit = cta.unit0 + 8 * (rest - row * per_row)
      column = lax.rem(row, jnp.int32(config.columns))
      gate = lax.div(row, jnp.int32(config.columns))
      plane = lax.div(gate, jnp.int32(gates))
      at = self._place(step, plane, gate - plane * gates, column, unit)
      where = _flag((peer < peers) & (unit < cta.shape.size))
      rank = lax.rem(cta.rank + 1 + peer, jnp.int32(config.cluster))
      words = ptx.load_words(
          self.operand, at, shared=True, size=2, where=where
      )
      ptx.send(
          self.operand, at, words, self.signals, step & 1, rank, where
      )
    own = jnp.clip(cta.shape.size - cta.unit0, 0, config.units)
    self._expect(step, cta.shape.size - own)

  def _expect(self, step, units):
    cta = self.cta
    rows = self.product.operands * self.planes * cta.config.columns
    ptx.expect(
        self.signals, step & 1, 2 * rows * units, _flag(cta.index == 0)
    )

  def ready(self, step):
    """Waits for what the others of the cluster have sent."""
    if self.cta.config.cluster > 1 or self.cta.config.through_device:
      ptx.await_signal(self.signals, step & 1, (step >> 1) & 1)

  def fetch(self, exchange: 'Exchange', told, step, others=()):
    """Reads a part of the operand from an exchange, for all of the cluster.

    Args:
      exchange: where.
      told: the step of the exchange.
      step: the step of this operand.
      others: functions of a column to (int32 condition, reference [B, F]) that
        is read instead where the condition is not 0.
    """
    cta, shape, config = self.cta, self.cta.shape, self.cta.config
    self._expect(step, shape.size)
    per_row = shape.size // 8
    total = self.product.operands * config.columns * per_row
    share = pl.cdiv(total, config.cluster)
    rounds = pl.cdiv(share, cta.threads)
    places, targets = [], []
    for k in range(rounds):
      mine = cta.index + k * cta.threads
      q = cta.rank * share + mine
      exists = (mine < share) & (q < total)
      q = jnp.where(exists, q, 0)
      row = lax.div(q, jnp.int32(per_row))
      unit = 8 * (q - row * per_row)
      gate = lax.div(row, jnp.int32(config.columns))
      column = row - gate * config.columns
      # What is beyond the batch is never published.
      row = jnp.minimum(cta.row0 + column, shape.batch - 1)
      feature = cta.head * shape.size + unit
      at = exchange.offset(told, row, gate) + feature
      alternatives = [
          (condition, ref, row * shape.features + feature)
          for condition, ref in (other(column) for other in others)
      ]
      for j in range(self.planes):
        places.append((
            exchange.ref,
            at + 4 * j,
            *((c, r, o + 4 * j) for c, r, o in alternatives),
        ))
      targets.append((gate, column, unit, _flag(exists)))
    # All in one loop: a wait for one is a wait for all.
    flat = ptx.poll(places, cta.dtype.itemsize)
    for k, (gate, column, unit, exists) in enumerate(targets):
      words = flat[4 * self.planes * k :][: 4 * self.planes]
      parts = [words]
      if cta.split:
        parts = _parts([ptx.as_float(w) for w in words])
      for plane, part in enumerate(parts):
        at = self._place(step, plane, gate, column, unit)
        for peer in range(config.cluster):
          rank = cta.rank + peer
          rank = jnp.where(
              rank < config.cluster, rank, rank - config.cluster
          )
          ptx.send(
              self.operand, at, part, self.signals, step & 1, rank, exists
          )

  def take(self, step) -> Callable[[int, int, int], Any]:
    """Returns a function that loads fragments of the operand."""
    cta = self.cta
    pitch = self.plane_bytes // cta.config.columns
    start = self._slot(step)

    def fragment(plane, i, n):
      column = 8 * n + cta.quad
      block = self.sum_warp * self.blocks + i
      chunk = (4 * block + cta.place) ^ _permutation(column)
      at = start + plane * self.plane_bytes + column * pitch + (chunk << 4)
      return ptx.load_words(self.operand, at, shared=True, size=2)

    return fragment

  def multiply(self, step) -> list[list[Any]]:
    """Returns sums [half][tile], each two float32 [128], of what is there."""
    cta = self.cta
    fragment = self.take(step)
    # (Part of the matrix, part of the operand).
    pairs = [(0, 1), (1, 0), (0, 0)] if cta.split else [(0, 0)]
    chain = 2 * self.blocks * len(pairs)
    rows = self.halves // 2
    # A tensor core takes its time for each product, so a few are under way.
    ways = max(1, min(chain // 4, 8 // (cta.tiles * rows)))
    zero = ptx.full(1, 0.0)
    acc = [
        [[[zero] * 4 for _ in range(ways)] for _ in range(cta.tiles)]
        for _ in range(rows)
    ]
    count = 0
    for i in range(self.blocks):
      parts = [
          [fragment(plane, i, n) for n in range(cta.tiles)]
          for plane in range(self.planes)
      ]
      for of_matrix, of_operand in pairs:
        for j in (0, 2):
          way = count % ways
          count += 1
          for row in range(rows):
            low, high = (
                self.matrix[of_matrix][2 * row + h][i] for h in range(2)
            )
            a = (low[j], high[j], low[j + 1], high[j + 1])
            for n in range(cta.tiles):
              acc[row][n][way] = ptx.mma(
                  acc[row][n][way],
                  a,
                  parts[of_operand][n][j : j + 2],
                  cta.short,
              )

    def total(sums):
      while len(sums) > 1:
        rest = sums[len(sums) // 2 * 2 :]
        sums = [
            [x + y for x, y in zip(p, q, strict=True)]
            for p, q in zip(sums[::2], sums[1::2], strict=False)
        ] + rest
      return sums[0]

    totals = [[total(sums) for sums in row] for row in acc]
    return [
        [totals[h // 2][n][2 * (h % 2) :][:2] for n in range(cta.tiles)]
        for h in range(self.halves)
    ]

  def elements(self, sums) -> list[Array]:
    """Returns this thread's elements of each result from its own sums."""
    cta = self.cta
    return [
        ptx.stack([
            x
            for s in range(self.sub)
            for n in range(cta.tiles)
            for x in sums[result * self.sub + s][n]
        ])
        for result in range(self.product.results)
    ]

  def gather(self, sums) -> list[Array]:
    """Returns this thread's elements of each result, from all warps' sums."""
    cta = self.cta
    if cta.config.sums == 1:
      return self.elements(sums)
    for half, row in enumerate(sums):
      result, sub = divmod(half, self.sub)
      if result >= self.product.results:
        continue
      index = result * self.sub * cta.config.row_warps
      index = index + self.row_warp * self.sub + sub
      for n, pair in enumerate(row):
        at = self._partial(self.sum_warp, index, n) + 8 * cta.lane
        ptx.store_pair(self.partials, at, pair)
    cta.barrier()
    results = []
    for result in range(self.product.results):
      index = result * self.sub * cta.config.row_warps + (cta.unit >> 3)
      within = ((cta.unit & 7) << 5) + ((cta.column & 7) << 2)
      parts = []
      for part in range(cta.config.sums):
        at = self._partial(part, index, cta.column >> 3) + within
        parts.append(
            ptx.load(
                self.partials, at, jnp.float32, shared=True, count=cta.count
            )
        )
      while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
      results.append(parts[0])
    return results

  def _partial(self, part, index, tile):
    """Returns where 8 rows of one tile lie among the sums, in bytes."""
    rows = self.halves * self.cta.config.row_warps
    return ((part * rows + index) * self.cta.tiles + tile) * 256


def _parts(values: Sequence[Array]):
  """Packs eight float32 as words of their high and of their low parts."""
  high, low = [], []
  for a, b in zip(values[::2], values[1::2], strict=True):
    word = ptx.narrow(a, b, jnp.bfloat16)
    high.append(word)
    low.append(
        ptx.narrow(a - ptx.lower(word), b - ptx.upper(word), jnp.bfloat16)
    )
  return high, low


# Steps that are in an exchange.
_SLOTS = 8
