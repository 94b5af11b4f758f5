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

from jax.experimental import pallas as pl

from pallas_kernels.dense import cut

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
