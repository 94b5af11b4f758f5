"""Products of tiles, slice by slice, through a ring buffer.

All warpgroups multiply; the first one copies as well. Arrows are mbarriers, one
for each slot:

    copy       matrix, operand -> slot      ==arrived==>  multiply
               waits for a free slot        <==consumed== multiply

The matrix does not depend on the step before, so the first slices of the next
product's are under way while threads update the tile.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import wgmma_smem
from pallas_kernels.tiled import cut
from pallas_kernels.tiled import limits

Array = jax.Array
Ref = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
  """Shared memory of a CTA.

  Attributes:
    operand: slices of the operand, [stages, rows, DEPTH].
    matrix: slices of the matrix, [stages, DEPTH, columns].
    arrived: mbarriers, a slot is full.
    consumed: mbarriers, a slot is free.
    sums, signal: sums of a team, and its mbarrier; None without a team.
  """

  operand: Ref
  matrix: Ref
  arrived: Ref
  consumed: Ref
  sums: Ref = None
  signal: Ref = None

  @classmethod
  def types(cls, config: cut.Config, columns: int, dtype) -> dict[str, Any]:
    """Returns the types of the buffers by name."""
    matrices = functools.partial(wgmma_smem.matrices, dtype=dtype)
    stages = config.stages
    return {
        'operand': matrices(stages, config.rows, limits.DEPTH),
        'matrix': matrices(stages, limits.DEPTH, columns),
        'arrived': plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        'consumed': plgpu.Barrier(
            num_arrivals=config.warpgroups, num_barriers=stages
        ),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
  """The products of all tiles in all steps, for one warpgroup.

  Attributes:
    plan: a `plan.Plan`.
    first: the first step that has products.
    steps: number of steps.
    operand: (step, tile, slice) -> reference to the slice [rows, DEPTH].
    matrix: (tile, slice) -> reference to the slice [DEPTH, columns].
    wait: (step, tile) -> None, returns when the operand is whole, in the
      warp that copies.
    prefetch: (step, tile) -> None, brings inputs of `finish` to the L2 cache.
    buffers: shared memory.
    warpgroup: number of this warpgroup.
    early_operand: (step, tile, slice) -> reference, for the first `plan.early`
      slices, whose operands are there from the start.
    between: (step, tile, product) -> (taken, product), called with the product
      of the early slices; returns the part `finish` gets, and the product to
      which late slices are added. None where there is nothing to take.
  """

  plan: Any
  first: int
  steps: int
  operand: Callable[..., Ref]
  matrix: Callable[..., Ref]
  wait: Callable[..., None]
  prefetch: Callable[..., None]
  buffers: Buffers
  warpgroup: Any
  early_operand: Callable[..., Any] = lambda *_: None
  between: Callable[..., tuple[Any, Array]] | None = None

  def for_each(
      self, finish: Callable[..., None], prepare: Callable[..., Any]
  ) -> None:
    """Calls `finish` for all tiles, step by step.

    Args:
      finish: (step, tile, product, prepared) -> None; the part that `between`
        took comes behind them. Its product is float32 [ROWS, columns], of this
        warpgroup's rows; zeros in steps before the first one with products.
      prepare: (step, tile) -> prepared, called before the product.
    """
    count = self.plan.tiles.count()
    for slot in range(self.plan.config.stages):
      plgpu.barrier_arrive(self.buffers.consumed.at[slot])
    self._when(
        self.first == 0,
        lambda: self._begin(self.plan.tiles.find(0), jnp.int32(0)),
    )

    def body(n, slot):
      n = n.astype(jnp.int32)
      step = lax.div(n, count)
      i = n - step * count
      tile = self.plan.tiles.find(i)
      own = step >= self.first
      self.prefetch(step, tile)
      prepared = prepare(step, tile)
      product, taken, slot = self._multiply(step, tile, slot, own)
      following = jnp.where(i == count - 1, step + 1, step)
      begins = (following >= self.first) & (following < self.steps)
      another = self.plan.tiles.find(jnp.where(i == count - 1, 0, i + 1))
      self._when(begins, lambda: self._begin(another, slot))
      finish(step, tile, product, prepared, *taken)
      return slot

    lax.fori_loop(0, self.steps * count, body, jnp.int32(0))
    # No arrival is left over.
    for slot in range(self.plan.config.stages):
      wait = functools.partial(
          plgpu.barrier_wait, self.buffers.consumed.at[slot]
      )
      self._when(True, wait)

  @property
  def _ahead(self) -> int:
    """Slices that are under way before a product begins."""
    return min(self.plan.config.stages, self.plan.turns)

  def _when(self, condition, body: Callable[[], Any]) -> None:
    """Runs `body` in the warpgroup that copies, where a condition holds."""

    def run():
      body()

    pl.when((self.warpgroup == 0) & condition)(run)

  def _begin(self, tile, slot) -> None:
    """Copies the first slices of a product's matrix."""
    for k in range(self._ahead):
      self._copy_matrix(tile, k, self._after(slot, k))

  def _copy_matrix(self, tile, k, slot) -> None:
    plgpu.barrier_wait(self.buffers.consumed.at[slot])
    plgpu.copy_gmem_to_smem(
        self.matrix(tile, k),
        self.buffers.matrix.at[slot],
        self.buffers.arrived.at[slot],
    )

  def _copy_operand(self, step, tile, k, slot) -> None:
    def copy(ref):
      plgpu.copy_gmem_to_smem(
          ref,
          wgmma_smem.for_tma(self.buffers.operand, (slot,)),
          self.buffers.arrived.at[slot],
      )

    early = lambda: copy(self.early_operand(step, tile, k))
    late = lambda: copy(self.operand(step, tile, k - self.plan.early))
    if not self.plan.early:
      late()
    elif isinstance(k, int):
      early() if k < self.plan.early else late()
    else:
      pl.when(k < self.plan.early)(early)
      pl.when(k >= self.plan.early)(late)

  def _multiply(self, step, tile, slot, own) -> tuple[Array, Any, Array]:
    """Returns a product, the part taken of it, and the following slot.

    The product is zeros unless `own`.
    """
    turns = jnp.where(own, jnp.int32(self.plan.turns), 0)
    accumulator = plgpu.ACC((cut.ROWS, self.plan.columns), jnp.float32)

    def begin():
      for k in range(self._ahead):
        if k == self.plan.early:
          self.wait(step, tile)
        self._copy_operand(step, tile, k, self._after(slot, k))

    self._when(own, begin)

    def whole(total):
      before, following = self._add(step, tile, total, 0, turns, (slot, slot))
      result = total[...]
      pl.when(turns > 0)(lambda: self._free(before))
      return result, (), following

    if self.between is None:
      return pl.run_scoped(whole, accumulator)

    def first(total):
      slots = self._add(
          step, tile, total, 0, jnp.int32(self.plan.early), (slot, slot)
      )
      return total[...], slots

    result, slots = pl.run_scoped(first, accumulator)
    taken, result = self.between(step, tile, result)

    def others(total):
      start = jnp.int32(self.plan.early)
      before, _ = self._add(step, tile, total, start, turns, slots)
      plgpu.wgmma_wait(0)
      self._free(before)

    result = pl.run_state(others)(plgpu.ACC.init(result))
    following = lax.rem(
        slot + self.plan.turns, jnp.int32(self.plan.config.stages)
    )
    return result, (taken,), following

  def _add(self, step, tile, total, start, stop, slots) -> tuple[Array, Array]:
    """Adds the products of slices from `start` up to `stop`.

    Takes the slots of the slice before the first one and of the first one.
    Returns the slots of the last one, which is not free yet, and of the next.
    """
    buffers = self.buffers
    rows = pl.ds(self.warpgroup * cut.ROWS, cut.ROWS)

    def turn(k, slots):
      before, slot = slots
      plgpu.barrier_wait(buffers.arrived.at[slot])
      plgpu.wgmma(
          total, buffers.operand.at[slot, rows], buffers.matrix.at[slot]
      )
      # The product of the turn before is done.
      plgpu.wgmma_wait(1)
      pl.when(k > 0)(lambda: self._free(before))
      later = k - 1 + self.plan.config.stages

      def copy():
        self._copy_matrix(tile, later, before)
        if self.plan.early >= self._ahead:
          pl.when(later == self.plan.early)(lambda: self.wait(step, tile))
        self._copy_operand(step, tile, later, before)

      self._when((k > 0) & (later < self.plan.turns), copy)
      return slot, self._after(slot, 1)

    return lax.fori_loop(start, stop, turn, slots)

  def _free(self, slot) -> None:
    plgpu.barrier_arrive(self.buffers.consumed.at[slot])

  def _after(self, slot, count: int):
    """Returns the slot `count` after another, at most all slots."""
    slot = slot + count
    stages = self.plan.config.stages
    return jnp.where(slot >= stages, slot - stages, slot)
