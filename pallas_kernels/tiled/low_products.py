"""Products of low tiles: one warpgroup copies, another one multiplies.

All of the matrix is in shared memory, so little is left for slices of the
operand: a step has several times as many as there are slots. So a warpgroup of
its own waits for free slots and copies. Arrows are mbarriers, one each slot:

    copy       operand -> slot          ==arrived==>  multiply
               waits for a free slot    <==consumed== multiply

In every step slices take the slots in the same order, from the first one on.
"""

from collections.abc import Callable
from collections.abc import Sequence
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

# Warps of a warpgroup.
_WARPS = 4

# The most turns of a loop's body.
_MOST_AT_ONCE = 4


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

    @pl.loop(self.first, self.steps)
    def _(step):
      step = step.astype(jnp.int32)
      self.wait(step)
      self._in_turn(functools.partial(self._copy, step))

  def _copy(self, step, turn: 'Turn') -> None:
    # How often the slot was free before; at first it is.
    count = (step - self.first) * self._uses(turn.slot) + turn.round
    sync.await_signal(
        self.buffers.consumed, turn.slot, (count - 1) & 1, scope='cta'
    )
    plgpu.copy_gmem_to_smem(
        self.operand(step, turn.slice),
        wgmma_smem.for_tma(self.buffers.operand, (turn.slot,), False),
        self.buffers.arrived.at[turn.slot],
    )

  def _uses(self, slot) -> Any:
    """Returns the slices of a step that a slot takes."""
    stages = self.config.stages
    if isinstance(slot, int):
      return -(-(self.turns - slot) // stages)
    return lax.div(self.turns - slot + stages - 1, jnp.int32(stages))

  def _in_turn(self, body: Callable[['Turn'], None], apart: int = 0) -> None:
    """Calls `body` for all slices of a step, for the first ones with numbers."""
    stages = self.config.stages
    at_once = slots_at_once(stages)
    # Of each slot.
    parts = stages // at_once
    count, rest = divmod(self.turns, at_once)

    def some(i, number: int) -> None:
      turn = i if parts == 1 else lax.div(i, jnp.int32(parts))
      first = 0 if parts == 1 else (i - turn * parts) * at_once
      for j in range(number):
        body(Turn(slice=i * at_once + j, slot=first + j, round=turn))

    start = -(-apart // at_once)
    for k in range(min(start * at_once, self.turns)):
      body(Turn(slice=k, slot=k % stages, round=k // stages))
    if count > start:
      pl.loop(start, count)(lambda i: some(i.astype(jnp.int32), at_once))
    if count >= start:
      some(jnp.int32(count), rest)

  def multiply(self) -> None:
    """Multiplies in all steps."""
    count = self.config.held
    for k in range(self.turns - count):
      plgpu.copy_gmem_to_smem(
          self.matrix(count + k),
          wgmma_smem.for_tma(self.buffers.matrix, (k,), False),
          self.buffers.loaded,
      )
    held = [
        plgpu.load(self.matrix(k), layout=plgpu.Layout.WGMMA, optimized=False)
        for k in range(count)
    ]
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
    buffers, stages = self.buffers, self.config.stages

    def add(turn: Turn) -> None:
      plgpu.barrier_wait(buffers.arrived.at[turn.slot])
      factor = buffers.operand.at[turn.slot].T
      if isinstance(turn.slice, int) and turn.slice < len(held):
        plgpu.wgmma(total, held[turn.slice], factor)
      else:
        matrix = buffers.matrix.at[turn.slice - len(held)]
        plgpu.wgmma(total, matrix, factor)
      # The product of the turn before is done.
      plgpu.wgmma_wait(1)
      self._free(_before(turn.slot, stages), turn.slice > 0)

    self._in_turn(add, len(held))
    result = total[...]
    self._free((self.turns - 1) % stages, True)
    return result

  def _free(self, slot, exists) -> None:
    """Tells that a slot is free, once for each warp; where a slice was."""
    lane = jnp.where(exists, ptx.thread() & 31, 1)
    sync.arrive(self.buffers.consumed, slot, lane)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
  """A slice of a step.

  Attributes:
    slice: its number.
    slot: that it takes.
    round: how many slices of the step the slot had before.
  """

  slice: Any
  slot: Any
  round: Any


def slots_at_once(stages: int) -> int:
  """Returns the turns of a loop's body, a divisor of the slots.

  In a loop of more of them, ptxas keeps so many addresses that registers spill.
  """
  return max(n for n in range(1, _MOST_AT_ONCE + 1) if stages % n == 0)


def _before(slot, stages: int) -> Any:
  """Returns the slot before another one."""
  if isinstance(slot, int):
    return (slot - 1) % stages
  return jnp.where(slot == 0, stages, slot) - 1
