"""Cuts a batch into as few pieces as a kernel can hold at once."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import targets
from pallas_kernels.dense import config as config_lib
from pallas_kernels.dense import head_gradients
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import tuning

Array = jax.Array
Recurrence = plan_lib.Recurrence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
  """Some rows of a batch.

  Attributes:
    plan: plan of the kernel that runs them.
    start: the first row.
  """

  plan: plan_lib.Plan
  start: int

  def cut(self, axis: int, arrays: Any) -> Any:
    """Returns these rows of a tree of arrays.

    Args:
      axis: the batch axis of all arrays.
      arrays: of the whole batch.
    """
    end = self.start + self.plan.shape.batch
    return jax.tree.map(
        lambda x: lax.slice_in_dim(x, self.start, end, axis=axis), arrays
    )


def join(axis: int, parts: Sequence[Any]) -> Any:
  """Concatenates the results of all pieces; undoes `Piece.cut`."""
  if len(parts) == 1:
    return parts[0]
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *parts)


def plan_pieces(
    recurrence: Recurrence,
    x: Array,
    recurrent_kernel: Array,
    *,
    states: int,
    flags: bool,
    adjoint: bool = False,
    save: bool = False,
) -> list[Piece]:
  """Returns the pieces of a batch, with a configured plan each.

  Args:
    recurrence: static facts of the whole batch.
    x: the inputs; their type is read.
    recurrent_kernel: the recurrent kernel; its type is read.
    states: arrays of the carry.
    flags: whether there are flags.
    adjoint: whether to plan the adjoint instead of the forward kernel.
    save: whether the forward kernel returns the arrays that the adjoint reads.

  Raises:
    NotImplementedError: not even 8 rows fit.
  """

  def make_plan(piece: Recurrence) -> plan_lib.Plan:
    batch, time, heads, size = piece.shape
    plan = plan_lib.Plan(
        update=piece.update,
        operand=piece.operand,
        params=piece.params,
        gates=x.shape[2],
        recurrent=recurrent_kernel.shape[0],
        states=states,
        shape=config_lib.Shape(
            batch=batch,
            time=time,
            heads=heads,
            size=size,
            time_major=piece.call.time_major,
            levels=piece.call.levels,
        ),
        call=piece.call,
        flags=flags,
        holds=flags and piece.holds,
        restart_learns=flags and piece.restart_learns,
        x_dtype=x.dtype,
        dtype=jnp.promote_types(x.dtype, recurrent_kernel.dtype),
        adjoint=adjoint,
        save=save,
    )
    return _configured(plan, piece.target)

  return cut_batch(recurrence, make_plan)


def _configured(plan: plan_lib.Plan, target: targets.Target) -> plan_lib.Plan:
  """Returns the plan with the best configuration that fits."""
  kind = tuning.Kind(
      gates=plan.stages[0].gates,
      two=plan.operand is not None,
      adjoint=plan.adjoint,
      split=plan.split,
  )

  def choose(plan: plan_lib.Plan, kind: tuning.Kind) -> plan_lib.Plan:
    needs = functools.partial(plan_lib.needs, plan)
    config = tuning.choose(plan.shape, kind, needs, target)
    return dataclasses.replace(plan, config=config)

  if plan.adjoint and _reads_in_place(plan, target):
    plan = dataclasses.replace(plan, in_place=True)
  if tuning.multiplies_again(plan.shape, kind, target):
    again = choose(
        dataclasses.replace(plan, again=True),
        dataclasses.replace(kind, again=True),
    )
    if again.config.exchange == 'shared':
      return again
  return choose(plan, kind)


def _reads_in_place(plan: plan_lib.Plan, target: targets.Target) -> bool:
  """Returns whether `head_gradients` has the gradient of R."""
  if target.interpret or not target.wgmma:
    return False
  shape = plan.shape
  fits = head_gradients.fits(shape.batch * shape.time, shape.size)
  if not fits or shape.heads == 1 or plan.split:
    return False
  if plan.operand is not None:  # A gate has another factor than h.
    return False
  if shape.levels > 1:
    return False
  return plan_lib.shared_gates(plan) == tuple(range(plan.gates))


def cut_batch(
    recurrence: Recurrence, make_plan: Callable[[Recurrence], plan_lib.Plan]
) -> list[Piece]:
  """Cuts a batch into as few pieces as fit the device.

  Args:
    recurrence: static facts of the whole batch.
    make_plan: returns a plan, or raises NotImplementedError.
  """
  batch, time, heads, size = recurrence.shape
  plans: dict[int, plan_lib.Plan] = {}

  def plan_of(rows: int) -> plan_lib.Plan:
    if rows not in plans:
      shape = (rows, time, heads, size)
      plans[rows] = make_plan(dataclasses.replace(recurrence, shape=shape))
    return plans[rows]

  # Kernels take rows by 8.
  octets = -(-batch // 8)
  sizes = {8 * -(-octets // pieces) for pieces in range(1, octets + 1)}
  if recurrence.call.levels > 1:
    sizes = {8 * octets}  # Arrays hold one level after the other.
  for rows in sorted(sizes, reverse=True):
    starts = range(0, batch, rows)
    try:
      return [
          Piece(plan=plan_of(min(rows, batch - start)), start=start)
          for start in starts
      ]
    except NotImplementedError:
      if rows == min(sizes):
        raise
  raise ValueError('there are no sequences')
