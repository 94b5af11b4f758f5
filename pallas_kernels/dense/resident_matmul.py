"""Products with a matrix that stays on chip, step by step.

Words are those of `product.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.dense import matmul_partition
from pallas_kernels.dense import operand as operand_lib
from pallas_kernels.dense import thread_layout
from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any
Cta = thread_layout.Cta
flag = thread_layout.flag
LANES = ptx.LANES


class Multiplier:
  """A product whose matrix stays in registers and, if need be, shared memory.

  Args:
    cta: coordinates.
    product: which.
    matrix: [gates of all, N, D, D], indexed [gate, head, row, sum], or two of
      them for the parts of float32.
    operand: what it is multiplied with.
    partials: int32 in shared memory, `partial_words` of it.
    rest: int32 in shared memory, `rest_words` of it.
    kept: blocks of the matrix that registers hold, see `kept_blocks`.
  """

  def __init__(
      self,
      cta: Cta,
      product: matmul_partition.Product,
      matrix,
      operand: operand_lib.Operand,
      partials,
      rest,
      kept: int,
  ):
    self.cta, self.product = cta, product
    self.operand, self.partials, self.rest = operand, partials, rest
    config, shape = cta.config, cta.shape
    self.halves = product.halves(config)
    self.blocks = product.blocks(config, shape)
    self.units = product.units(config)
    self.unit0 = cta.unit0 - operand.member * config.units
    self.sums = product.sums(config)
    self.folded = product.folded(config, shape)
    self.sub = product.octets(config)
    self.row_warps = product.row_warps(config)
    self.row_warp = lax.rem(cta.warp, jnp.int32(self.row_warps))
    self.sum_warp = lax.div(cta.warp, jnp.int32(self.row_warps))
    self.kept = kept
    self.matrix = [
        [
            [self._fragment(ref, h, i) for i in range(kept)]
            for h in range(self.halves)
        ]
        for ref in matrix
    ]
    for plane, ref in enumerate(matrix):
      for half in range(self.halves):
        for i in range(kept, self.blocks):
          words = self._fragment(ref, half, i)
          at = self._in_rest(plane, half, i)
          memory.store_words_smem(rest, at, words)

  @classmethod
  def partial_words(cls, config, product) -> int:
    """Shared memory for the sums of each warp."""
    if config.sums == 1:
      return 0
    words = 4 * config.warpgroups * product.halves(config) * config.tiles * 64
    if product.team(config) > 1:
      words += product.units(config) * config.columns
    return words

  @classmethod
  def rest_words(cls, config, product, shape, split: bool, kept: int) -> int:
    """Shared memory for what registers do not hold of the matrix."""
    blocks = product.blocks(config, shape) - kept
    fragments = product.halves(config) * blocks * (2 if split else 1)
    return 4 * LANES * config.warpgroups * fragments

  def _in_rest(self, plane: int, half: int, i: int):
    """Returns where this thread's own part of a fragment lies, in bytes."""
    index = plane * self.halves + half
    index = index * (self.blocks - self.kept) + i - self.kept
    return 16 * (index * self.cta.threads + self.cta.index)

  def _of_matrix(self, plane: int, half: int, i: int):
    """Returns a fragment from where it is."""
    if i < self.kept:
      return self.matrix[plane][half][i]
    at = self._in_rest(plane, half, i)
    return memory.load_words_smem(self.rest, at)

  def _block(self, half: int, i: int):
    """Returns gate, first element and existence of this warp's i-th block."""
    blocks = self.cta.shape.blocks
    if self.sums == 1:
      there = half * self.blocks + i if self.folded else i
      last = min(there // blocks, self.operand.operands - 1)
      # What is beyond the last gate's blocks is beyond its elements.
      return last, jnp.int32(32 * (there - last * blocks)), None
    index = self.sum_warp * self.blocks + i
    gate = lax.div(index, jnp.int32(blocks))
    return gate, 32 * (index - gate * blocks), gate < self.operand.operands

  def _fragment(self, ref, half: int, i: int):
    """Loads 8 elements of one row of the matrix, as four words."""
    cta, product = self.cta, self.product
    result, sub = (0, 0) if self.folded else divmod(half, self.sub)
    if result >= product.results:
      return [ptx.full(1, 0, jnp.int32)] * 4
    unit = 8 * (self.row_warp * self.sub + sub) + cta.quad
    row = self.unit0 + unit
    gate, start, exists = self._block(half, i)
    k = start + 8 * cta.place
    where = (row < cta.shape.size) & (k < cta.shape.size)
    where &= unit < self.units
    if exists is not None:
      where &= exists
    if product.transposed:
      gate = product.first + self.operand.gate0 + gate
    else:
      gate = product.first + result
    at = (gate * cta.shape.heads + cta.head) * cta.shape.size + row
    at = jnp.where(where, at * cta.shape.size + k, 0)
    return memory.load_words_gmem(ref, at, size=2, where=flag(where))

  def multiply(self, step) -> list[list[Any]]:
    """Returns sums [half][tile], each two float32 [128], of what is there."""
    cta = self.cta
    operand = self.operand
    first = self.sum_warp * self.blocks
    if self.folded:
      # The first of the four columns, and the second.
      first = (cta.quad >> 2) * self.blocks
    # (Part of the matrix, part of the operand).
    pairs = [(0, 1), (1, 0), (0, 0)] if cta.split else [(0, 0)]
    chain = 2 * self.blocks * len(pairs)
    rows = self.halves // 2
    # A tensor core takes its time for each product, so a few are under way.
    most = max(1, 8 // (cta.tiles * rows))
    ways = min(most, max(chain // 4, min(chain // 2, 4)))
    zero = ptx.full(1, 0.0)
    acc: list[list[list[Sequence[Array]]]] = [
        [[[zero] * 4 for _ in range(ways)] for _ in range(cta.tiles)]
        for _ in range(rows)
    ]
    count = 0
    for i in range(self.blocks):
      parts = [
          [
              operand.fragment(step, plane, first + i, n)
              for n in range(cta.tiles)
          ]
          for plane in range(operand.planes)
      ]
      matrix = [
          [self._of_matrix(plane, half, i) for half in range(self.halves)]
          for plane in range(len(self.matrix))
      ]
      for of_matrix, of_operand in pairs:
        for j in (0, 2):
          way = count % ways
          count += 1
          for row in range(rows):
            low, high = matrix[of_matrix][2 * row :][:2]
            a = (low[j], high[j], low[j + 1], high[j + 1])
            for n in range(cta.tiles):
              acc[row][n][way] = instructions.mma(
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
    if self.folded:
      # Of one part this thread has two columns, of the other its neighbour.
      (low,), (high,) = sums
      upper = cta.upper != 0
      given = jnp.where(upper, high[0], low[1])
      kept = jnp.where(upper, high[1], low[0])
      return [kept + instructions.shuffle(given, 2)]
    return [
        ptx.stack(
            [
                x
                for s in range(self.sub)
                for n in range(cta.tiles)
                for x in cta.own_of(sums[result * self.sub + s][n])
            ]
        )
        for result in range(self.product.results)
    ]

  def gather(self, step, sums) -> list[Array]:
    """Returns this thread's elements of each result, from all warps' sums."""
    self.spread(sums)
    if self.operand.team > 1:
      self._expect_team()
    if self.sums > 1:
      self.cta.barrier()
    return self.collect(step, sums)

  def spread(self, sums):
    """Puts this warp's sums where other warps find them after a barrier."""
    if self.sums == 1:
      return
    cta = self.cta
    where = flag(cta.upper == 0) if cta.config.twice else None
    for half, row in enumerate(sums):
      result, sub = divmod(half, self.sub)
      if result >= self.product.results:
        continue
      index = self.row_warp * self.sub + sub
      index += result * self.sub * self.row_warps
      for n, pair in enumerate(row):
        at = self._partial(self.sum_warp, index, n) + 8 * cta.lane
        memory.store_pair_smem(self.partials, at, pair, where)

  def collect(self, step, sums) -> list[Array]:
    """Returns this thread's elements of each result, after the barrier."""
    if self.sums == 1:
      return self.elements(sums)
    cta = self.cta
    if self.operand.team > 1:
      return [self._gather_team(step)]
    return [
        self._sum(result, cta.unit, cta.column, cta.count)
        for result in range(self.product.results)
    ]

  def _sum(self, result: int, unit, column, count: int) -> Array:
    """Returns elements of a result, summed over this CTA's warps."""
    index = result * self.sub * self.row_warps + (unit >> 3)
    within = ((unit & 7) << 5) + ((column & 7) << 2)
    parts = []
    for part in range(self.sums):
      at = self._partial(part, index, column >> 3) + within
      parts.append(
          memory.load_smem(self.partials, at, jnp.float32, count=count)
      )
    return _total(parts)

  def _sum_four(self, unit, column) -> list[Array]:
    """Returns four columns of the only result, as int32 words."""
    within = ((unit & 7) << 5) + ((column & 7) << 2)
    parts = []
    for part in range(self.sums):
      at = self._partial(part, unit >> 3, column >> 3) + within
      words = memory.load_words_smem(self.partials, at)
      parts.append([instructions.as_float(word) for word in words])
    return [instructions.as_word(_total(x)) for x in zip(*parts, strict=True)]

  def _expect_team(self):
    """Expects what the team sends, before any of it can be of a later step.

    That is sure before a CTA's own sums are sent. Of one without units nothing
    else is waited for.
    """
    config = self.cta.config
    size = 4 * self.operand.team * config.units * config.columns
    first = flag(self.cta.index == 0)
    sync.expect(self.operand.signals, 2, size, first)

  def _gather_team(self, step) -> Array:
    """Sends each CTA of the team what it needs, and sums what it has got."""
    cta, config, operand = self.cta, self.cta.config, self.operand
    own = config.units * config.columns
    base = self.partial_words(config, self.product) - operand.team * own
    total = self.units * config.columns
    # Four columns at a time.
    for k in range(pl.cdiv(total // 4, cta.threads)):
      e = 4 * (cta.index + k * cta.threads)
      exists = flag(e < total)
      octet = lax.rem(e, jnp.int32(total)) >> 3
      tile = lax.div(octet, jnp.int32(self.units))
      unit = octet - tile * self.units
      column = 8 * tile + (e & 7)
      words = self._sum_four(unit, column)
      owner = lax.div(unit, jnp.int32(config.units))
      place = (unit - owner * config.units) * config.columns + column
      at = 4 * (base + operand.member * own + place)
      sync.send(self.partials, at, words, operand.signals, 2, owner, exists)
    sync.await_signal(operand.signals, 2, step & 1)
    place = cta.unit * config.columns + cta.column
    parts = [
        memory.load_smem(
            self.partials,
            4 * (base + member * own + place),
            jnp.float32,
            count=cta.count,
        )
        for member in range(operand.team)
    ]
    return sum(parts[1:], parts[0])

  def _partial(self, part, index, tile):
    """Returns where 8 rows of one tile lie among the sums, in bytes."""
    rows = self.halves * self.row_warps
    return ((part * rows + index) * self.cta.tiles + tile) * 256


def _total(parts: Sequence[Array]) -> Array:
  """Adds up a power of two of arrays, in pairs."""
  while len(parts) > 1:
    parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
  return parts[0]
