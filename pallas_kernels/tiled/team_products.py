"""Products of a team: each CTA has a part of the matrix in shared memory.

The first warpgroup copies slices of the operand to a ring buffer and
multiplies. All slots are free when a step begins: then they held the team's
sums (`teams`), and whoever reads these publishes a part of the operand after
it.
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

from pallas_kernels.mosaic import sync
from pallas_kernels.streaming import wgmma_smem
from pallas_kernels.tiled import config as config_lib
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import teams

Array = jax.Array
Ref = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
  """Shared memory of a CTA.

  Attributes:
    operand: slices of the operand, [stages, rows, DEPTH]; then the sums.
    matrix: this CTA's part of the matrix, transposed, [turns, units, DEPTH].
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
  def types(cls, config: teams.Config, turns: int, dtype) -> dict[str, Any]:
    """Returns the types of the buffers by name."""
    matrices = functools.partial(wgmma_smem.matrices, dtype=dtype)
    stages = config.stages
    return {
        'operand': matrices(stages, config.rows, limits.DEPTH),
        'matrix': matrices(turns, config.units, limits.DEPTH),
        'arrived': plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        'consumed': plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        'loaded': plgpu.Barrier(num_arrivals=turns),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
  """The products of a tile in all steps, for one warpgroup.

  Attributes:
    config: how the work is cut.
    turns: slices of this CTA.
    operand: (step, slice) -> reference to the slice [rows, DEPTH].
    matrix: (slice) -> reference to the slice [units, DEPTH].
    wait: (step) -> None, returns when the operand is whole.
    buffers: shared memory.
    warpgroup: number of this warpgroup.
  """

  config: teams.Config
  turns: int
  operand: Callable[..., Ref]
  matrix: Callable[..., Ref]
  wait: Callable[..., None]
  buffers: Buffers
  warpgroup: Any

  def load(self) -> None:
    """Copies this CTA's part of the matrix, and waits for it."""

    def run():
      for k in range(self.turns):
        plgpu.copy_gmem_to_smem(
            self.matrix(k),
            wgmma_smem.for_tma(self.buffers.matrix, (k,), False),
            self.buffers.loaded,
        )
      plgpu.barrier_wait(self.buffers.loaded)

    pl.when(self.warpgroup == 0)(run)

  def begin(self, step) -> None:
    """Waits for the operand of a step and copies its first slices.

    The first step has none.
    """

    def run():
      self.wait(step)
      for k in range(min(self.config.stages, self.turns)):
        self._copy(step, k, k)

    pl.when((self.warpgroup == 0) & (step > 0))(run)

  def multiply(self, step) -> None:
    """Leaves the sums of all CTAs of the team in their shared memory."""

    def first():
      product = pl.run_scoped(
          functools.partial(self._product, step),
          plgpu.ACC((config_lib.ROWS, self.config.units), jnp.float32),
      )
      sync.cluster_barrier()
      teams.send(self.buffers.operand.ref, product)

    pl.when(self.warpgroup == 0)(first)
    pl.when(self.warpgroup != 0)(sync.cluster_barrier)
    sync.cluster_barrier()

  def _product(self, step, total) -> Array:
    """Returns the product of a step, zeros in the first one."""
    buffers, stages = self.buffers, self.config.stages
    turns = jnp.where(step > 0, jnp.int32(self.turns), 0)

    def turn(k, slots):
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
    lax.fori_loop(zero, turns, turn, (zero, zero))
    return total[...]

  def _copy(self, step, k, slot) -> None:
    plgpu.copy_gmem_to_smem(
        self.operand(step, k),
        wgmma_smem.for_tma(self.buffers.operand, (slot,), False),
        self.buffers.arrived.at[slot],
    )
