"""Products with a recurrent kernel: which, and how a CTA's warps share them.

Words: a *half* is 8 rows of a product, half of a tensor core's tile; a *block*
is 32 of the elements that it sums over.
"""

from collections.abc import Sequence
import dataclasses

from jax.experimental import pallas as pl

from pallas_kernels.dense import config as config_lib

Config = config_lib.Config
Shape = config_lib.Shape


@dataclasses.dataclass(frozen=True)
class Product:
  """Which product: rows and sums of a matrix [gates, N, D, D].

  Attributes:
    gates: how many gates of the matrix, from `first`.
    first: the first gate.
    transposed: whether gates are summed over, as in the adjoint; otherwise each
      has a result of its own.
    late: whether it has the operand of the product before it, and its result is
      not needed for what is multiplied next.
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
    """CTAs that share out the gates of the operand."""
    return config.team if self.operands % config.team == 0 else 1

  def units(self, config: Config) -> int:
    """Units that a CTA multiplies for."""
    return config.units * self.team(config)

  def sums(self, config: Config) -> int:
    """Into how many parts the warps of a CTA share out the sums."""
    sums = config.sums
    # With a single half of rows, half of each tensor core would do nothing.
    while 1 < sums < 4 * config.warpgroups:
      if self.results * self._octets(config, sums) > 1:
        break
      sums *= 2
    return sums

  def row_warps(self, config: Config) -> int:
    """Into how many parts the warps of a CTA share out the units."""
    return 4 * config.warpgroups // self.sums(config)

  def octets(self, config: Config) -> int:
    """Groups of 8 units that a warp has."""
    return self._octets(config, self.sums(config))

  def _octets(self, config: Config, sums: int) -> int:
    return pl.cdiv(self.units(config), 8 * (4 * config.warpgroups // sums))

  def halves(self, config: Config) -> int:
    """Halves of the rows that each warp multiplies, an even number."""
    return pl.cdiv(self.results * self.octets(config), 2) * 2

  def _all_blocks(self, config: Config, shape: Shape) -> int:
    return self.operands // self.team(config) * shape.blocks

  def folded(self, config: Config, shape: Shape) -> bool:
    """Whether the halves of a tile share out the sums.

    With a single half of rows, and columns that a tile has twice, a tensor core
    would do everything four times. So the other half of the rows and the other
    columns have the second part of the sums. For short sums it does not pay.
    """
    single = self.results * self.octets(config) == 1
    alone = config.twice and config.sums == 1 and single
    return alone and self._all_blocks(config, shape) > 3

  def parts(self, config: Config, shape: Shape) -> int:
    """Into how many parts sums are shared out."""
    return self.sums(config) * (2 if self.folded(config, shape) else 1)

  def blocks(self, config: Config, shape: Shape) -> int:
    """Blocks of a part."""
    return pl.cdiv(self._all_blocks(config, shape), self.parts(config, shape))


def kept_blocks(
    products: Sequence[Product],
    config: Config,
    shape: Shape,
    split: bool,
) -> list[tuple[int, int]]:
  """Returns for each product the blocks, and registers, that stay in threads.

  Args:
    products: of a step.
    config: the cut.
    shape: sizes.
    split: whether the matrix has the two parts of float32.
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
