"""Products of tiles whose matrix stays in shared memory, in two shapes.

One warpgroup multiplies. It also copies slices of the operand to a ring buffer.
All slots are free when a step begins: whoever reads the sums of the step
before, some of which lie in a slot, publishes a part of the operand after it.

The matrix of a low tile takes nearly all of the shared memory, so a step may
have more slices of the operand than there are slots. A warpgroup of its own
waits for free slots and copies: the four warps in turn, since a slice is only
4 KiB. Some slices of the matrix are in registers, which leaves room for more
slots. Arrows are mbarriers, one for each slot:

    copy       operand -> slot          ==arrived==>  multiply
               waits for a free slot    <==consumed== multiply

Slices take the slots in one order in every step, from the first slot on.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync
from pallas_kernels.mosaic import wgmma_smem
from pallas_kernels.tiled import cut
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import low_tiles

Array = jax.Array
Ref = Any

# Warps of a warpgroup: each copies every fourth slice of a low tile.
_WARPS = 4

# Turns of a loop's body for low tiles; slots are a multiple of it. With more
# turns, ptxas keeps too many addresses live and spills registers.
TURNS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
  """Shared memory of a CTA.

  Attributes:
    operand: slices of the operand, [stages, rows, DEPTH].
    matrix: this CTA's part of the matrix but for the first slices, which are
      in registers, transposed, [slices, columns, DEPTH].
    arrived: mbarriers, a slot is full.
    consumed: mbarriers, a slot is free; with low tiles, mbarriers of `sync`.
    loaded: mbarrier, the matrix is there.
    sums: a team's sums, see `on_chip.TeamSums`.
    signal: a team's mbarrier, see `on_chip.TeamSums`.
  """

  operand: Ref
  matrix: Ref
  arrived: Ref
  consumed: Ref
  loaded: Ref
  sums: Ref = None
  signal: Ref = None

  @classmethod
  def types(cls, plan) -> dict[str, Any]:
    """Returns the types of the buffers by name, except for a team's sums.

    Args:
      plan: an `on_chip.Plan`.
    """
    config = plan.config
    matrices = functools.partial(wgmma_smem.matrices, dtype=plan.dtype)
    stages, slices = config.stages, plan.turns - config.held
    consumed: Any = plgpu.Barrier(num_arrivals=1, num_barriers=stages)
    if config.low:
      consumed = plgpu.SMEM((2 * stages,), jnp.int32)
    return {
        'operand': matrices(stages, config.rows, limits.DEPTH),
        'matrix': matrices(slices, plan.columns, limits.DEPTH),
        'arrived': plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        'consumed': consumed,
        'loaded': plgpu.Barrier(num_arrivals=slices),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
  """The products of a tile in all steps.

  Attributes:
    plan: an `on_chip.Plan`.
    first: the first step that has a product.
    steps: number of steps.
    operand: (step, slice) -> reference to the slice [rows, DEPTH].
    matrix: (slice) -> reference to the slice [columns, DEPTH].
    wait: (step) -> None, returns when the operand is whole, in the
      warp that copies.
    send: (product) -> None, passes a step's product on: [64, columns], of low
      tiles [columns, 32].
    buffers: shared memory.
  """

  plan: Any
  first: int
  steps: int
  operand: Callable[..., Ref]
  matrix: Callable[..., Ref]
  wait: Callable[..., None]
  send: Callable[[Array], None]
  buffers: Buffers

  def open(self, where) -> None:
    """Makes the mbarriers of low tiles; before a barrier of the CTA.

    Args:
      where: int32, not 0 in the one thread that does it.
    """
    counts = (_WARPS,) * self.plan.config.stages
    sync.make_signals(self.buffers.consumed, counts, where)

  def run(self, own, update: Callable[[], None]) -> None:
    """Runs the work of each warpgroup in all steps.

    Args:
      own: number of this warpgroup.
      update: the work of warpgroups that update.
    """
    pl.when(own == 0)(self._multiply)
    if self.plan.config.low:
      pl.when(own == 1)(update)
      pl.when(own == 2)(self._copy_all)
    else:
      pl.when(own > 0)(update)

  def _multiply(self) -> None:
    """Multiplies in all steps."""
    plan, count = self.plan, self.plan.config.held
    for k in range(plan.turns - count):
      plgpu.copy_gmem_to_smem(
          self.matrix(count + k),
          wgmma_smem.for_tma(self.buffers.matrix, (k,)),
          self.buffers.loaded,
      )
    # Its arguments differ between releases, in some of which it is typed.
    load: Any = functools.partial(
        plgpu.load, layout=plgpu.Layout.WGMMA, optimized=False
    )
    held = [load(self.matrix(k)) for k in range(count)]
    plgpu.barrier_wait(self.buffers.loaded)

    @pl.loop(self.first, self.steps)
    def _(step):
      if plan.config.low:
        multiply = functools.partial(self._low_product, held)
        shape = low_tiles.COLUMNS, plan.config.rows
      else:
        step = step.astype(jnp.int32)
        self.wait(step)
        for k in range(min(plan.config.stages, plan.turns)):
          self._copy(step, k, k)
        multiply = functools.partial(self._product, step)
        shape = cut.ROWS, plan.columns
      product = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
      # All warps have read the operand.
      ptx.emit(f'bar.sync 12, {ptx.LANES};', {}, {})
      self.send(product)

  def _product(self, step, total) -> Array:
    """Returns the product of a step, [64, columns]."""
    buffers, stages = self.buffers, self.plan.config.stages

    def turn(k, slots):
      k = k.astype(jnp.int32)
      before, slot = slots
      plgpu.barrier_wait(buffers.arrived.at[slot])
      plgpu.wgmma(total, buffers.operand.at[slot], buffers.matrix.at[k].T)
      # The product of the turn before is done.
      plgpu.wgmma_wait(1)
      later = k - 1 + stages

      def copy():
        # All four warps have done it.
        plgpu.barrier_arrive(buffers.consumed.at[before])
        plgpu.barrier_wait(buffers.consumed.at[before])
        self._copy(step, later, before)

      pl.when((k > 0) & (later < self.plan.turns))(copy)
      following = jnp.where(slot == stages - 1, 0, slot + 1)
      return slot, following

    zero = jnp.int32(0)
    lax.fori_loop(0, self.plan.turns, turn, (zero, zero))
    return total[...]

  def _copy(self, step, k, slot) -> None:
    plgpu.copy_gmem_to_smem(
        self.operand(step, k),
        wgmma_smem.for_tma(self.buffers.operand, (slot,)),
        self.buffers.arrived.at[slot],
    )

  def _copy_all(self) -> None:
    """Copies slices of a low tile's operand in all steps."""
    turns = self.plan.turns

    def copy_by_warp() -> None:
      warp = lax.axis_index('warp')

      @pl.loop(self.first, self.steps)
      def _(step):
        step = step.astype(jnp.int32)
        self.wait(step)
        # The first warp has waited, and all copy by another proxy.
        code = f'bar.sync 14, {ptx.LANES}; fence.proxy.async.global;'
        ptx.emit(code, {}, {})

        @pl.loop(0, pl.cdiv(turns, _WARPS))
        def _(i):
          k = i.astype(jnp.int32) * _WARPS + warp
          pl.when(k < turns)(lambda: self._copy_when_free(step, k))

    pl.kernel(copy_by_warp, mesh=plgpu.WarpMesh(axis_name='warp'))()

  def _copy_when_free(self, step, k) -> None:
    """Copies slice k of a step, by one warp."""
    stages = self.plan.config.stages
    turn = lax.div(k, jnp.int32(stages))
    slot = k - turn * stages
    # How many slices had the slot before; the first one finds it free.
    each = lax.div(self.plan.turns - slot + stages - 1, jnp.int32(stages))
    count = (step - self.first) * each + turn
    sync.await_signal(self.buffers.consumed, slot, (count - 1) & 1, scope='cta')
    self._copy(step, k, slot)

  def _low_product(self, held: Sequence[Array], total) -> Array:
    """Returns the product of a step, [columns, 32].

    The first slices of the matrix, `held`, are in registers.
    """
    stages, turns = self.plan.config.stages, self.plan.turns

    def add(k, slot, matrix) -> None:
      plgpu.barrier_wait(self.buffers.arrived.at[slot])
      plgpu.wgmma(total, matrix, self.buffers.operand.at[slot].T)
      # The product of the turn before is done.
      plgpu.wgmma_wait(1)
      self._free(jnp.where(slot == 0, stages, slot) - 1, k > 0)

    def some(i, number: int = TURNS) -> None:
      first = lax.rem(i, jnp.int32(stages // TURNS)) * TURNS
      for j in range(number):
        k = i * TURNS + j
        add(k, first + j, self.buffers.matrix.at[k - len(held)])

    for k, matrix in enumerate(held):
      add(jnp.int32(k), jnp.int32(k), matrix)
    count, rest = divmod(turns, TURNS)
    start = len(held) // TURNS
    if count > start:
      pl.loop(start, count)(lambda i: some(i.astype(jnp.int32)))
    some(jnp.int32(count), rest)
    result = total[...]
    self._free(jnp.int32((turns - 1) % stages), True)
    return result

  def _free(self, slot, where) -> None:
    """Tells that a slot, where it had a slice, is free; once for each warp."""
    lane = jnp.where(where, ptx.thread() & 31, 1)
    sync.arrive(self.buffers.consumed, slot, lane)
