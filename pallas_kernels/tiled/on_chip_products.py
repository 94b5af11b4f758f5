"""Products of low tiles: one warpgroup copies, another one multiplies.

The matrix takes nearly all of the shared memory, so a step may have more slices
of the operand than there are slots. A warpgroup of its own waits for free slots
and copies: the four warps in turn, since a slice is only 4 KiB. Some slices of
the matrix are in registers, which leaves room for more slots. Arrows are
mbarriers, one for each slot:

    copy       operand -> slot          ==arrived==>  multiply
               waits for a free slot    <==consumed== multiply

In every step slices take the slots in the same order, from the first one on.
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
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import low_tiles

Array = jax.Array
Ref = Any

# Warps of a warpgroup: each copies every fourth slice.
_WARPS = 4

# Turns of a loop's body; slots are a multiple of it. Of more turns ptxas keeps
# so many addresses that registers spill.
TURNS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
  """Shared memory of a CTA.

  Attributes:
    operand: slices of the operand, [stages, ROWS, DEPTH].
    matrix: this CTA's part of the matrix but for the first slices, which are
      in registers, transposed, [slices, COLUMNS, DEPTH].
    arrived: mbarriers, a slot is full.
    consumed: mbarriers as `sync` has them, a slot is free.
    loaded: mbarrier, the matrix is there.
  """

  operand: Ref
  matrix: Ref
  arrived: Ref
  consumed: Ref
  loaded: Ref

  @classmethod
  def types(cls, config, turns: int, dtype) -> dict[str, Any]:
    """Returns the types of the buffers by name.

    Args:
      config: how the work is cut.
      turns: slices of a CTA.
      dtype: of the factors.
    """
    matrices = functools.partial(wgmma_smem.matrices, dtype=dtype)
    stages = config.stages
    return {
        'operand': matrices(stages, config.rows, limits.DEPTH),
        'matrix': matrices(
            turns - config.held, low_tiles.COLUMNS, limits.DEPTH
        ),
        'arrived': plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        'consumed': plgpu.SMEM((2 * stages,), jnp.int32),
        'loaded': plgpu.Barrier(num_arrivals=turns - config.held),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
  """The products of a tile in all steps, by two warpgroups.

  Attributes:
    config: how the work is cut.
    turns: slices of this CTA.
    first: the first step that has a product.
    steps: number of steps.
    operand: (step, slice) -> reference to the slice [ROWS, DEPTH].
    matrix: (slice) -> reference to the slice [COLUMNS, DEPTH].
    wait: (step) -> None, returns when the operand is whole, in the
      warp that copies.
    send: (product) -> None, passes a step's product on, [COLUMNS, ROWS].
    buffers: shared memory.
  """

  config: Any
  turns: int
  first: int
  steps: int
  operand: Callable[..., Ref]
  matrix: Callable[..., Ref]
  wait: Callable[..., None]
  send: Callable[[Array], None]
  buffers: Buffers

  def open(self, where) -> None:
    """Makes the mbarriers; before a barrier of the CTA.

    Args:
      where: int32, not 0 in the one thread that does it.
    """
    counts = (_WARPS,) * self.config.stages
    sync.make_signals(self.buffers.consumed, counts, where)

  def copy(self) -> None:
    """Copies slices of the operand in all steps."""

    def copy_by_warp() -> None:
      warp = lax.axis_index('warp')

      @pl.loop(self.first, self.steps)
      def _(step):
        step = step.astype(jnp.int32)
        self.wait(step)
        # The first warp has waited, and all copy by another proxy.
        code = f'bar.sync 14, {ptx.LANES}; fence.proxy.async.global;'
        ptx.emit(code, {}, {})

        @pl.loop(0, pl.cdiv(self.turns, _WARPS))
        def _(i):
          k = i.astype(jnp.int32) * _WARPS + warp
          pl.when(k < self.turns)(lambda: self._copy(step, k))

    pl.kernel(copy_by_warp, mesh=plgpu.WarpMesh(axis_name='warp'))()

  def _copy(self, step, k) -> None:
    """Copies slice k of a step, by one warp."""
    stages = self.config.stages
    turn = lax.div(k, jnp.int32(stages))
    slot = k - turn * stages
    # How many slices had the slot before; the first one finds it free.
    each = lax.div(self.turns - slot + stages - 1, jnp.int32(stages))
    count = (step - self.first) * each + turn
    sync.await_signal(self.buffers.consumed, slot, (count - 1) & 1, scope='cta')
    plgpu.copy_gmem_to_smem(
        self.operand(step, k),
        wgmma_smem.for_tma(self.buffers.operand, (slot,)),
        self.buffers.arrived.at[slot],
    )

  def multiply(self) -> None:
    """Multiplies in all steps."""
    count = self.config.held
    for k in range(self.turns - count):
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
      del step
      product = pl.run_scoped(
          functools.partial(self._product, held),
          plgpu.ACC((low_tiles.COLUMNS, self.config.rows), jnp.float32),
      )
      # All warps have read the operand.
      ptx.emit(f'bar.sync 12, {ptx.LANES};', {}, {})
      self.send(product)

  def _product(self, held: Sequence[Array], total) -> Array:
    """Returns the product of a step.

    Args:
      held: the first slices of the matrix, in registers.
      total: the accumulator.
    """
    stages = self.config.stages

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
    count, rest = divmod(self.turns, TURNS)
    start = len(held) // TURNS
    if count > start:
      pl.loop(start, count)(lambda i: some(i.astype(jnp.int32)))
    some(jnp.int32(count), rest)
    result = total[...]
    self._free(jnp.int32((self.turns - 1) % stages), True)
    return result

  def _free(self, slot, where) -> None:
    """Tells that a slot is free, once for each warp.

    Args:
      slot: its number.
      where: bool, whether it had a slice.
    """
    lane = jnp.where(where, ptx.thread() & 31, 1)
    sync.arrive(self.buffers.consumed, slot, lane)
