"""How the warps of a CTA share out a product, as far as it is static.

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
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import cut
from pallas_kernels.dense import threads
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory

Config = cut.Config
Shape = cut.Shape


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
    copies. Instead the other half and the other columns have the second part of
    the sums (`sum_sharing.Folded`). For short sums it does not pay.
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


# Partial sums of warps: how they meet in a CTA's shared memory.
#
# A warp stores its fragments pair by pair: 8 rows of a tile take 256 bytes, and
# lane l stores bytes 8 l ... 8 l + 7, which are row l / 4, columns 2 (l mod 4)
# and the next.


Array = jax.Array
Ref = Any
Cta = threads.Cta
# Sums of one thread: [half][tile], each two float32 [128].
Sums = list[list[Any]]
flag = threads.flag


def words(product: Product, config: Config) -> int:
  """Returns the shared memory for partial sums, in int32.

  Those that a team sends follow those of this CTA's warps.
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


class PartialSums:
  """The sums of each warp over its blocks, in shared memory.

  They lie in [part of the sums][8 rows][tile], 8 x 8 float32 each.

  Args:
    cta: coordinates.
    product: the product.
    ref: int32 in shared memory.
    row_warp: part of the rows that this warp has.
    sum_warp: part of the sums that this warp has.
  """

  def __init__(
      self,
      cta: Cta,
      product: Product,
      ref: Ref,
      row_warp: Array,
      sum_warp: Array,
  ):
    self.cta, self.product, self.ref = cta, product, ref
    self.row_warp, self.sum_warp = row_warp, sum_warp
    self.parts = product.sums(cta.config)
    self.octets = product.octets(cta.config)
    self.row_warps = product.row_warps(cta.config)

  def write(self, sums: Sums) -> None:
    """Stores this warp's sums."""
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
        memory.store_pair_smem(self.ref, at, pair, where)

  def total(self, result: int, unit, column, count: int) -> Array:
    """Returns elements of a result, summed over this CTA's warps."""
    index = result * self.octets * self.row_warps + (unit >> 3)
    within = ((unit & 7) << 5) + ((column & 7) << 2)
    parts = []
    for part in range(self.parts):
      at = self._place(part, index, column >> 3) + within
      parts.append(memory.load_smem(self.ref, at, jnp.float32, count=count))
    return _add_up(parts)

  def four_totals(self, unit, column) -> list[Array]:
    """Returns the sums of four columns of the only result, as int32 words."""
    within = ((unit & 7) << 5) + ((column & 7) << 2)
    parts = []
    for part in range(self.parts):
      at = self._place(part, unit >> 3, column >> 3) + within
      words = memory.load_words_smem(self.ref, at)
      parts.append([instructions.as_float(word) for word in words])
    return [instructions.as_word(_add_up(x)) for x in zip(*parts, strict=True)]

  def _place(self, part, index, tile):
    """Returns the byte at which 8 rows of one tile start."""
    config = self.cta.config
    rows = self.product.halves(config) * self.row_warps
    return ((part * rows + index) * config.tiles + tile) * 256


def _add_up(parts: Sequence[Array]) -> Array:
  """Adds up a power of two of arrays, in pairs."""
  while len(parts) > 1:
    parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
  return parts[0]
