"""Products of a team: each CTA has a part of the matrix in shared memory.

One warpgroup copies slices of the operand to a ring buffer and multiplies. All
slots are free when a step begins: whoever reads the sums of the step before,
some of which lie in a slot, publishes a part of the operand after it.
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

from pallas_kernels.mosaic import ptx
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
    matrix: this CTA's part of the matrix, transposed, [turns, columns, DEPTH].
    arrived: mbarriers, a slot is full.
    consumed: mbarriers, a slot is free.
    loaded: mbarrier, the matrix is there.
  """

  operand: Ref
  matrix: Ref
  arrived: Ref
  consumed: Ref
  loaded: Ref

  @classmethod
  def types(cls, config, columns: int, turns: int, dtype) -> dict[str, Any]:
    """Returns the types of the buffers by name.

    Args:
      config: how the work is cut.
      columns: of a product.
      turns: slices of a CTA.
      dtype: of the factors.
    """
    matrices = functools.partial(wgmma_smem.matrices, dtype=dtype)
    stages = config.stages
    return {
        'operand': matrices(stages, config.rows, limits.DEPTH),
        'matrix': matrices(turns, columns, limits.DEPTH),
        'arrived': plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        'consumed': plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        'loaded': plgpu.Barrier(num_arrivals=turns),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
  """The products of a tile in all steps, by one warpgroup.

  Attributes:
    config: how the work is cut.
    columns: of a product.
    turns: slices of this CTA.
    first: the first step that has a product.
    steps: number of steps.
    operand: (step, slice) -> reference to the slice [rows, DEPTH].
    matrix: (slice) -> reference to the slice [columns, DEPTH].
    wait: (step) -> None, returns when the operand is whole, in the
      warp that copies.
    send: (product) -> None, passes a step's product on.
    buffers: shared memory.
  """

  config: Any
  columns: int
  turns: int
  first: int
  steps: int
  operand: Callable[..., Ref]
  matrix: Callable[..., Ref]
  wait: Callable[..., None]
  send: Callable[[Array], None]
  buffers: Buffers

  def run(self) -> None:
    """Multiplies in all steps."""
    for k in range(self.turns):
      plgpu.copy_gmem_to_smem(
          self.matrix(k),
          wgmma_smem.for_tma(self.buffers.matrix, (k,)),
          self.buffers.loaded,
      )
    plgpu.barrier_wait(self.buffers.loaded)

    @pl.loop(self.first, self.steps)
    def _(step):
      step = step.astype(jnp.int32)
      self.wait(step)
      for k in range(min(self.config.stages, self.turns)):
        self._copy(step, k, k)
      product = pl.run_scoped(
          functools.partial(self._product, step),
          plgpu.ACC((cut.ROWS, self.columns), jnp.float32),
      )
      self._meet()
      self.send(product)

  def _meet(self) -> None:
    """Waits for all warps, which have read the operand then."""
    ptx.emit(f'bar.sync 12, {ptx.LANES};', {}, {})

  def _product(self, step, total) -> Array:
    """Returns the product of a step."""
    buffers, stages = self.buffers, self.config.stages

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

      pl.when((k > 0) & (later < self.turns))(copy)
      following = jnp.where(slot == stages - 1, 0, slot + 1)
      return slot, following

    zero = jnp.int32(0)
    lax.fori_loop(0, self.turns, turn, (zero, zero))
    return total[...]

  def _copy(self, step, k, slot) -> None:
    plgpu.copy_gmem_to_smem(
        self.operand(step, k),
        wgmma_smem.for_tma(self.buffers.operand, (slot,)),
        self.buffers.arrived.at[slot],
    )
