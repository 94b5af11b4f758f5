"""Partial sums of warps: how they meet in a CTA's shared memory.

A warp stores its fragments pair by pair: 8 rows of a tile take 256 bytes, and
lane l stores bytes 8 l ... 8 l + 7, which are row l / 4, columns 2 (l mod 4)
and the next.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dense import config as config_lib
from pallas_kernels.dense import matmul_partition
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory

Array = jax.Array
Ref = Any
Config = config_lib.Config
Cta = thread_layout.Cta
Product = matmul_partition.Product
# Sums of one thread: [half][tile], each two float32 [128].
Sums = list[list[Any]]
flag = thread_layout.flag


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
