"""How the warps of a CTA share out a product, and bring its sums together.

The warps of a CTA form a matrix: `row_warps` parts of the rows (the CTA's
units) times `sums` parts of the blocks to sum over. Each warp multiplies its
rows of every result:

                     sums part 0     sums part 1
    rows, part 0     warp 0          warp 2            row_warps = 2
    rows, part 1     warp 1          warp 3            sums = 2
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import cut
from pallas_kernels.dense import threads
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any
Config = cut.Config
Cta = threads.Cta
Shape = cut.Shape
# `operand.Operand` or `operand.PolledFragments`.
Operand = Any
# Sums of one thread: [half][tile], each two float32 [128].
Sums = list[list[Any]]
flag = threads.flag


@dataclasses.dataclass(frozen=True)
class Product:
  """A product of a step with some gates of a matrix [gates, N, D, D].

  Attributes:
    gates: number of gates, from `first`.
    first: the first gate.
    transposed: whether gates are summed over, as in the adjoint; otherwise each
      has a result of its own.
    late: whether the product shares the operand of the one before it, and the
      next operand does not depend on its result.
  """

  gates: int
  first: int
  transposed: bool
  late: bool = False

  @property
  def results(self) -> int:
    return 1 if self.transposed else self.gates

  @property
  def operands(self) -> int:
    return self.gates if self.transposed else 1

  def team(self, config: Config) -> int:
    """Returns the CTAs that share out the gates of the operand."""
    return config.team if self.operands % config.team == 0 else 1

  def units(self, config: Config) -> int:
    """Returns the number of units of a team, which a CTA multiplies for."""
    return config.units * self.team(config)

  def sums(self, config: Config) -> int:
    """Returns the number of parts into which warps cut the sums."""
    sums = config.sums
    # A warp with a single half of rows would leave half of each mma empty.
    while 1 < sums < 4 * config.warpgroups:
      if self.results * self._octets(config, sums) > 1:
        break
      sums *= 2
    return sums

  def row_warps(self, config: Config) -> int:
    """Returns the number of parts into which warps cut the units."""
    return 4 * config.warpgroups // self.sums(config)

  def octets(self, config: Config) -> int:
    """Returns the octets of units that a warp has."""
    return self._octets(config, self.sums(config))

  def _octets(self, config: Config, sums: int) -> int:
    return pl.cdiv(self.units(config), 8 * (4 * config.warpgroups // sums))

  def halves(self, config: Config) -> int:
    """Returns the halves that each warp multiplies, an even number."""
    return pl.cdiv(self.results * self.octets(config), 2) * 2

  def _all_blocks(self, config: Config, shape: Shape) -> int:
    return self.operands // self.team(config) * shape.blocks

  def folded(self, config: Config, shape: Shape) -> bool:
    """Returns whether the two halves of a tile share out the sums.

    With a single half of rows and 4 columns, three quarters of an mma would be
    copies. Instead the second half and columns 4-7 have the second part of
    the sums (`Folded`). For short sums it does not pay.
    """
    single = self.results * self.octets(config) == 1
    alone = config.twice and config.sums == 1 and single
    return alone and self._all_blocks(config, shape) > 3

  def parts(self, config: Config, shape: Shape) -> int:
    """Returns the number of parts into which sums are cut."""
    return self.sums(config) * (2 if self.folded(config, shape) else 1)

  def blocks(self, config: Config, shape: Shape) -> int:
    """Returns the blocks of a part."""
    return pl.cdiv(self._all_blocks(config, shape), self.parts(config, shape))


def kept_blocks(
    products: Sequence[Product],
    config: Config,
    shape: Shape,
    split: bool,
) -> list[tuple[int, int]]:
  """Returns for each product the blocks in registers, and these registers.

  Args:
    products: the products of a step.
    config: the cut.
    shape: sizes.
    split: whether factors have two bfloat16 parts.
  """
  left = config.registers
  found = []
  for product in products:
    registers = 4 * product.halves(config) * (2 if split else 1)
    kept = product.blocks(config, shape)
    if left is not None:
      kept = min(kept, left // registers)
      left -= kept * registers
    found.append((kept, kept * registers))
  return found


def words(product: Product, config: Config) -> int:
  """Returns the shared memory for partial sums, in int32.

  This CTA's warps come first, and sums that a team sends behind them.
  """
  if config.sums == 1:
    return 0
  words = words_of_warps(product, config)
  if product.team(config) > 1:
    words += product.units(config) * config.columns
  return words


def words_of_warps(product: Product, config: Config) -> int:
  """Returns the part of `words` for this CTA's own warps."""
  return config.warps * product.halves(config) * config.tiles * 64


# Kinds of sharing, for one thread.
#
# `multiply` (product.py) leaves each thread with sums of one row of each *half*
# (8 rows of the matrix) for two columns of each tile. Lane 4 q + p has row q
# and columns 2 p, 2 p + 1. Which rows and which *blocks* (32 elements to sum
# over) a warp has depends on the kind:
#
# Plain: a warp has whole sums of its own units. Nothing is exchanged.
#
# Folded: like Plain, for a single half and 4 columns, where three quarters of a
# tile would be copies. Both halves of the rows hold one set of 8 units, with
# different blocks of the matrix. Columns 0-3 and 4-7 are one set of 4 columns
# of the batch, with different blocks of the operand:
#
#                          columns 0-3          columns 4-7
#                          operand, part 0      operand, part 1
#     half 0: R, part 0    sum of part 0        (unused)
#     half 1: R, part 1    (unused)             sum of part 1
#
#     Lanes p and p + 2 exchange one column each and add up the parts.
#
# AcrossWarps: the warps of a CTA have different blocks. Each stores its sums in
# shared memory; after a barrier each thread adds up the sums of its elements.
#
# AcrossTeam: moreover, the CTAs of a team have different gates. Each adds up
# its warps' sums for the units of all, sends every CTA the sums of its units
# through distributed shared memory, and awaits sums from each on an mbarrier.


class Sharing:
  """One kind of sharing, for one thread.

  Args:
    cta: coordinates.
    product: the product.
    operand: its operand.

  Attributes:
    octets: groups of 8 units that a warp has.
    row_warps: number of parts into which warps cut the rows.
    row_warp: the part of this warp.
    blocks: blocks that a warp sums over.
  """

  def __init__(self, cta: Cta, product: Product, operand: Operand):
    self.cta, self.product, self.operand = cta, product, operand
    self.octets = product.octets(cta.config)
    self.row_warps = product.row_warps(cta.config)
    self.row_warp = lax.rem(cta.thread.warp, jnp.int32(self.row_warps))
    self.sum_warp = lax.div(cta.thread.warp, jnp.int32(self.row_warps))
    self.blocks = product.blocks(cta.config, cta.shape)

  @property
  def starts(self) -> bool:
    """Whether there is `sums_of`."""
    return False

  def sums_of(self, results: Sequence[Array | None]) -> Sums:
    """Returns sums that `collect` makes results of, zeros for None."""
    raise NotImplementedError

  def rows(self, half: int) -> tuple[int, int]:
    """Returns the result and the octet of units that a half is."""
    return divmod(half, self.octets)

  def block(self, half: int, i: int) -> tuple[Any, Array, Array | None]:
    """Returns gate, first element and existence of a half's i-th block."""
    raise NotImplementedError

  def first_block(self, of_warp: Array) -> Array:
    """Returns the block of the operand that this thread's 0-th one is.

    Args:
      of_warp: the 0-th block of this warp.
    """
    return of_warp

  def spread(self, sums: Sums) -> None:
    """Puts this warp's sums where other warps find them after `meet`."""

  def meet(self) -> None:
    """Waits for other warps' sums, if there are any."""

  def collect(self, step, sums: Sums) -> list[Array]:
    """Returns this thread's elements of each result, after `meet`."""
    raise NotImplementedError


class Plain(Sharing):
  """A warp has whole sums of its own units."""

  @property
  def starts(self) -> bool:
    return not self.cta.config.twice

  def block(self, half: int, i: int):
    return _block_of_gates(self.cta, self.operand, i)

  def collect(self, step, sums: Sums) -> list[Array]:
    cta = self.cta
    return [
        ptx.stack(
            [
                x
                for s in range(self.octets)
                for n in range(cta.config.tiles)
                for x in cta.kept_of(sums[result * self.octets + s][n])
            ]
        )
        for result in range(self.product.results)
    ]

  def sums_of(self, results: Sequence[Array | None]) -> Sums:
    tiles = self.cta.config.tiles
    zeros = [[ptx.full(1, 0.0)] * 2] * tiles
    sums: Sums = [zeros] * self.product.halves(self.cta.config)
    for result, x in enumerate(results):
      if x is None:
        continue
      values = iter(ptx.unstack(x))
      for s in range(self.octets):
        sums[result * self.octets + s] = [
            [next(values), next(values)] for _ in range(tiles)
        ]
    return sums


class Folded(Sharing):
  """The two halves of a tile have different blocks of one set of 8 units."""

  def rows(self, half: int) -> tuple[int, int]:
    return 0, 0

  def block(self, half: int, i: int):
    return _block_of_gates(self.cta, self.operand, half * self.blocks + i)

  def first_block(self, of_warp: Array) -> Array:
    del of_warp
    # Columns 0-3 and 4-7 of the operand.
    return (self.cta.thread.quad >> 2) * self.blocks

  def collect(self, step, sums: Sums) -> list[Array]:
    (low,), (high,) = sums
    upper = self.cta.thread.upper != 0
    given = jnp.where(upper, high[0], low[1])
    kept = jnp.where(upper, high[1], low[0])
    return [kept + instructions.shuffle(given, 2)]


class _ThroughSmem(Sharing):
  """The warps of a CTA have different blocks and add up in shared memory.

  Partial sums lie in [part of the sums][8 rows][tile], 8 x 8 float32 each: 8
  rows of a tile take 256 bytes, and lane l stores bytes 8 l ... 8 l + 7, which
  are row l / 4, columns 2 (l mod 4) and the next.

  Args:
    cta: coordinates.
    product: the product.
    operand: its operand.
    partials: int32 in shared memory, `words` of it.
  """

  def __init__(self, cta: Cta, product: Product, operand, partials: Ref):
    super().__init__(cta, product, operand)
    self.partials = partials
    self.parts = product.sums(cta.config)

  def block(self, half: int, i: int):
    blocks = self.cta.shape.blocks
    index = self.sum_warp * self.blocks + i
    gate = lax.div(index, jnp.int32(blocks))
    first = 32 * (index - gate * blocks)
    return gate, first, gate < self.operand.operands

  def spread(self, sums: Sums) -> None:
    cta = self.cta
    where = flag(cta.thread.upper == 0) if cta.config.twice else None
    for half, row in enumerate(sums):
      result, sub = divmod(half, self.octets)
      if result >= self.product.results:
        continue
      index = self.row_warp * self.octets + sub
      index += result * self.octets * self.row_warps
      for n, pair in enumerate(row):
        at = self._place(self.sum_warp, index, n) + 8 * cta.thread.lane
        memory.store_pair_smem(self.partials, at, pair, where)

  def _place(self, part, index, tile):
    """Returns the byte at which 8 rows of one tile start."""
    config = self.cta.config
    rows = self.product.halves(config) * self.row_warps
    return ((part * rows + index) * config.tiles + tile) * 256


class AcrossWarps(_ThroughSmem):
  """The warps of a CTA have different blocks."""

  def meet(self) -> None:
    self.cta.barrier()

  def collect(self, step, sums: Sums) -> list[Array]:
    return [self._total(result) for result in range(self.product.results)]

  def _total(self, result: int) -> Array:
    """Returns this thread's elements of a result, summed over all warps."""
    own = self.cta.own
    index = result * self.octets * self.row_warps + (own.unit >> 3)
    within = ((own.unit & 7) << 5) + ((own.column & 7) << 2)
    parts = []
    for part in range(self.parts):
      at = self._place(part, index, own.column >> 3) + within
      found = memory.load_smem(self.partials, at, jnp.float32, count=own.count)
      parts.append(found)
    return _add_up(parts)


class AcrossTeam(_ThroughSmem):
  """The CTAs of a team have different gates, and their warps different blocks.

  The product has one result.
  """

  def meet(self) -> None:
    # The mbarrier is armed before this CTA sends its own sums: until then no
    # peer can have sent sums of the next step. A CTA without units waits for
    # nothing else.
    operand, config = self.operand, self.cta.config
    size = 4 * operand.team * config.units * config.columns
    sync.expect(operand.signals, 2, size, flag(self.cta.thread.index == 0))
    self.cta.barrier()

  def collect(self, step, sums: Sums) -> list[Array]:
    cta, operand = self.cta, self.operand
    own = cta.config.units * cta.config.columns
    base = words_of_warps(self.product, cta.config)
    self._send(base)
    sync.await_signal(operand.signals, 2, step & 1)
    place = cta.own.unit * cta.config.columns + cta.own.column
    parts = [
        memory.load_smem(
            self.partials,
            4 * (base + member * own + place),
            jnp.float32,
            count=cta.own.count,
        )
        for member in range(operand.team)
    ]
    return [sum(parts[1:], parts[0])]

  def _four_totals(self, unit, column) -> list[Array]:
    """Returns the sums of four columns of the result, as int32 words."""
    within = ((unit & 7) << 5) + ((column & 7) << 2)
    parts = []
    for part in range(self.parts):
      at = self._place(part, unit >> 3, column >> 3) + within
      words = memory.load_words_smem(self.partials, at)
      parts.append([instructions.as_float(word) for word in words])
    return [instructions.as_word(_add_up(x)) for x in zip(*parts, strict=True)]

  def _send(self, base: int) -> None:
    """Sends each CTA of the team the sums of its units, 4 columns at a time.

    Args:
      base: word of `partials` at which the team's sums start.
    """
    cta, config, operand = self.cta, self.cta.config, self.operand
    own = config.units * config.columns
    units = self.product.units(config)
    total = units * config.columns
    for k in range(pl.cdiv(total // 4, config.threads)):
      e = 4 * (cta.thread.index + k * config.threads)
      exists = flag(e < total)
      octet = lax.rem(e, jnp.int32(total)) >> 3
      tile = lax.div(octet, jnp.int32(units))
      unit = octet - tile * units
      column = 8 * tile + (e & 7)
      words = self._four_totals(unit, column)
      owner = lax.div(unit, jnp.int32(config.units))
      place = (unit - owner * config.units) * config.columns + column
      at = 4 * (base + operand.member * own + place)
      sync.send(self.partials, at, words, operand.signals, 2, owner, exists)


def make(
    cta: Cta, product: Product, operand: Operand, partials: Ref
) -> Sharing:
  """Returns the kind of sharing that a product has."""
  if operand.team > 1:
    return AcrossTeam(cta, product, operand, partials)
  if product.sums(cta.config) > 1:
    return AcrossWarps(cta, product, operand, partials)
  if product.folded(cta.config, cta.shape):
    return Folded(cta, product, operand)
  return Plain(cta, product, operand)


def _block_of_gates(cta: Cta, operand: Operand, index: int):
  """Returns gate, first element and existence of a block of all gates."""
  blocks = cta.shape.blocks
  gate = min(index // blocks, operand.operands - 1)
  # Elements after the last gate's blocks are outside the head too.
  return gate, jnp.int32(32 * (index - gate * blocks)), None


def _add_up(parts: Sequence[Array]) -> Array:
  """Adds up a power of two of arrays, in pairs."""
  while len(parts) > 1:
    parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
  return parts[0]
