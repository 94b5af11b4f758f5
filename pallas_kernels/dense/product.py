"""Products with a matrix that stays on chip for the whole sequence.

Each warp holds fragments of the recurrent kernel in registers and, if need be,
in shared memory, and multiplies them with the operand in shared memory by mma
(m16n8k16: 16 rows, 8 columns, 16 deep). A *half* is 8 rows, half of an mma's
tile; a *block* is 32 elements to sum over. Lane 4 q + p loads 16 bytes of a
block, the 8 elements 8 p ... 8 p + 7 of row q:

                  words of 2 elements
    row q   | p=0: 0 1 2 3 | p=1: 0 1 2 3 | p=2: 0 1 2 3 | p=3: 0 1 2 3 |
    element   0 .........7   8 ........15   16 .......23   24 .......31

and 16 bytes of column q of the operand. Two mma consume a block: one
takes words 0, 1 of both factors, the second words 2, 3. This permutes the order
of the sum alike in both. A lane then has row q of each half, columns 2 p and
2 p + 1:

                 columns 0 1    2 3    4 5    6 7
    half 0   row q:     p=0    p=1    p=2    p=3      acc[0], acc[1]
    half 1   row q:     p=0    p=1    p=2    p=3      acc[2], acc[3]

`partition.py` says which rows and blocks a warp has.
"""

from collections.abc import Sequence
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dense import cut
from pallas_kernels.dense import operand as operand_lib
from pallas_kernels.dense import partition
from pallas_kernels.dense import threads
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx

Array = jax.Array
Config = cut.Config
Cta = threads.Cta
Product = partition.Product
Shape = cut.Shape
Sums = partition.Sums
flag = threads.flag


class Smem(NamedTuple):
  """Shared memory of one product: words of int32, or references.

  Attributes:
    operand: the operand, unless it goes straight to registers; None for a late
      product, which shares the operand of the product before it.
    signals: mbarriers of the operand; None for a late product.
    partials: partial sums of the warps.
    rest: fragments of the matrix for which there are no registers.
  """

  operand: Any
  signals: Any
  partials: Any
  rest: Any


def smem_words(
    products: Sequence[Product], config: Config, shape: Shape, split: bool
) -> tuple[Smem, ...]:
  """Returns the shared memory of a step's products, in int32.

  Args:
    products: the products of a step.
    config: the cut.
    shape: sizes.
    split: whether factors have two bfloat16 parts.
  """
  kept = partition.kept_blocks(products, config, shape, split)
  found = []
  for i, (product, (blocks, _)) in enumerate(zip(products, kept, strict=True)):
    operand = signals = None
    if not product.late:
      operand = 0
      if not config.direct:
        operand = operand_lib.Operand.words(
            config, shape, sharing(products, i), split
        )
      signals = operand_lib.Operand.SIGNAL_WORDS
    fragments = product.blocks(config, shape) - blocks
    fragments *= product.halves(config) * (2 if split else 1)
    found.append(
        Smem(
            operand=operand,
            signals=signals,
            partials=partition.words(product, config),
            rest=4 * config.threads * fragments,
        )
    )
  return tuple(found)


def matrix_words(product: Product, config: Config, shape: Shape) -> int:
  """Returns the words of a 16-bit matrix that lies in shared memory whole."""
  fragments = product.blocks(config, shape) * product.halves(config)
  return 4 * config.threads * fragments


def sharing(products: Sequence[Product], i: int) -> list[Product]:
  """Returns the i-th product and the late ones that share its operand."""
  late = itertools.takewhile(lambda product: product.late, products[i + 1 :])
  return [products[i], *late]


def multipliers(
    cta: Cta, products: Sequence[Product], matrix, smem: Sequence[Smem]
) -> list['Multiplier']:
  """Returns the products of a step, inside a kernel.

  Args:
    cta: coordinates.
    products: the products of a step.
    matrix: see `Multiplier`.
    smem: references to the shared memory of each.
  """
  kept = partition.kept_blocks(products, cta.config, cta.shape, cta.split)
  made: list[Multiplier] = []
  for i, (blocks, _) in enumerate(kept):
    operand: Any
    if products[i].late:
      operand = made[-1].operand
    elif cta.config.direct:
      operand = operand_lib.PolledFragments(cta, products[i], smem[i].signals)
    else:
      operand = operand_lib.Operand(
          cta, sharing(products, i), smem[i].operand, smem[i].signals
      )
    made.append(
        Multiplier(cta, products[i], operand, matrix, smem[i], kept=blocks)
    )
  return made


class Multiplier:
  """A product whose matrix stays in registers and, if need be, shared memory.

  A step calls `multiply` when the operand is there, then `gather`. If
  something can be done between, `spread`, another product's `gather` and
  `collect` take the place of `gather`.

  Args:
    cta: coordinates.
    product: the product.
    operand: the factor that changes from step to step, an `Operand` or
      `PolledFragments`.
    matrix: R in device memory, [gates of all, N, D, D] indexed [gate, head,
      row, sum]; two references for the parts of float32.
    smem: references to shared memory.
    kept: blocks that registers hold, see `partition.kept_blocks`.
  """

  def __init__(
      self,
      cta: Cta,
      product: Product,
      operand: Any,
      matrix: Sequence[Any],
      smem: Smem,
      *,
      kept: int,
  ):
    self.cta, self.product, self.operand = cta, product, operand
    self.rest, self.kept = smem.rest, kept
    self.halves = product.halves(cta.config)
    self.blocks = product.blocks(cta.config, cta.shape)
    self.unit0 = cta.unit0 - operand.member * cta.config.units
    self.sharing = partition.make(cta, product, operand, smem.partials)
    rows = range(self.halves // 2)
    self.matrix = [
        [[self._load_pair(ref, row, i) for i in range(kept)] for row in rows]
        for ref in matrix
    ]
    for plane, ref in enumerate(matrix):
      for row in rows:
        for i in range(kept, self.blocks):
          for j, words in enumerate(self._load_pair(ref, row, i)):
            at = self._in_rest(plane, 2 * row + j, i)
            memory.store_words_smem(self.rest, at, words, where=None)

  def _load_pair(self, ref, row: int, i: int) -> list[list[Array]]:
    """Loads a block of two halves, as the factors of its two mma."""
    low, high = (self._load_fragment(ref, 2 * row + k, i) for k in range(2))
    return [[low[j], high[j], low[j + 1], high[j + 1]] for j in (0, 2)]

  def _load_fragment(self, ref, half: int, i: int) -> Sequence[Array]:
    """Loads 8 elements of one row of the matrix, as four words."""
    cta, product = self.cta, self.product
    result, sub = self.sharing.rows(half)
    if result >= product.results:
      return [ptx.full(1, 0, jnp.int32)] * 4
    octet = self.sharing.row_warp * self.sharing.octets + sub
    unit = 8 * octet + cta.thread.quad
    row = self.unit0 + unit
    gate, start, exists = self.sharing.block(half, i)
    k = start + 8 * cta.thread.place
    where = (row < cta.shape.size) & (k < cta.shape.size)
    where &= unit < product.units(cta.config)
    if exists is not None:
      where &= exists
    if product.transposed:
      gate = product.first + self.operand.gate0 + gate
    else:
      gate = product.first + result
    at = (gate * cta.shape.heads + cta.head) * cta.shape.size + row
    at = jnp.where(where, at * cta.shape.size + k, 0)
    return memory.load_words_gmem(ref, at, size=2, where=flag(where))

  def _in_rest(self, plane: int, factor: int, i: int) -> Array:
    """Returns the byte of this thread's part of a factor in `rest`."""
    index = plane * self.halves + factor
    index = index * (self.blocks - self.kept) + i - self.kept
    return 16 * (index * self.cta.config.threads + self.cta.thread.index)

  def _pair(self, plane: int, row: int, i: int) -> list[list[Array]]:
    """Returns a block's two factors from registers or shared memory."""
    if i < self.kept:
      return self.matrix[plane][row][i]
    places = [self._in_rest(plane, 2 * row + j, i) for j in range(2)]
    return [memory.load_words_smem(self.rest, at) for at in places]

  def multiply(
      self, step, starts: Sequence[Array | None] | None = None
  ) -> Sums:
    """Returns this thread's sums over this warp's blocks.

    Args:
      step: the operand's step.
      starts: this thread's elements of each result that the sums start from, or
        None for zeros; only where `sharing.starts`.
    """
    cta, operand, tiles = self.cta, self.operand, self.cta.config.tiles
    first = self.sharing.first_block(self.sharing.sum_warp * self.blocks)
    # (Part of the matrix, part of the operand); the product of the two low
    # parts is below the error of the remaining products.
    pairs = [(0, 1), (1, 0), (0, 0)] if cta.split else [(0, 0)]
    rows = self.halves // 2
    ways = self._ways(2 * self.blocks * len(pairs), tiles * rows)
    zero = ptx.full(1, 0.0)
    begin: Sums = [[[zero] * 2] * tiles] * self.halves
    if starts is not None:
      begin = self.sharing.sums_of(starts)
      if tiles * rows >= 4:
        ways = 1  # Several would have to be added up, which took longer.
    acc: list[list[list[Any]]] = [
        [
            [[*begin[2 * row][n], *begin[2 * row + 1][n]]]
            + [[zero] * 4 for _ in range(ways - 1)]
            for n in range(tiles)
        ]
        for row in range(rows)
    ]
    count = 0
    for i in range(self.blocks):
      columns = operand.fragments(step, first, i)
      matrix = [
          [self._pair(plane, row, i) for row in range(rows)]
          for plane in range(len(self.matrix))
      ]
      for of_matrix, of_operand in pairs:
        for j in (0, 2):
          way = count % ways
          count += 1
          for row in range(rows):
            a = matrix[of_matrix][row][j // 2]
            for n in range(tiles):
              b = columns[of_operand][n][j : j + 2]
              acc[row][n][way] = instructions.mma(
                  acc[row][n][way], a, b, cta.short
              )
    totals = [[_add_up(ways) for ways in row] for row in acc]
    return [
        [totals[h // 2][n][2 * (h % 2) :][:2] for n in range(tiles)]
        for h in range(self.halves)
    ]

  @staticmethod
  def _ways(chain: int, independent: int) -> int:
    """Returns the number of accumulators that a sum alternates between.

    An mma waits for the one before it on the same accumulator, so a few have to
    be independent.

    Args:
      chain: mma of one sum.
      independent: sums of a warp.
    """
    most = max(1, 8 // independent)
    return min(most, max(chain // 4, min(chain // 2, 4)))

  def spread(self, sums: Sums) -> None:
    """Puts this warp's sums where other warps find them after a barrier."""
    self.sharing.spread(sums)

  def collect(self, step, sums: Sums) -> list[Array]:
    """Returns this thread's elements of each result, after the barrier."""
    return self.sharing.collect(step, sums)

  def gather(self, step, sums: Sums) -> list[Array]:
    """Returns this thread's elements of each result, from all warps' sums."""
    direct = self.cta.config.direct
    if direct:  # There was no barrier since the sums of the step before.
      self.operand.await_sums(step)
    self.sharing.spread(sums)
    self.sharing.meet()
    results = self.sharing.collect(step, sums)
    if direct:
      self.operand.tell_sums()
    return results


def _add_up(ways: list[Sequence[Array]]) -> Sequence[Array]:
  """Adds up the accumulators of one sum, in pairs."""
  while len(ways) > 1:
    rest = ways[len(ways) // 2 * 2 :]
    ways = [
        [x + y for x, y in zip(p, q, strict=True)]
        for p, q in zip(ways[::2], ways[1::2], strict=False)
    ] + rest
  return ways[0]
