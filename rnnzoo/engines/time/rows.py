"""Rows of `jax.vmap` under Newton's method: they share one bound of memory.

Sequences of a batch do not see each other. So rows that share their parameters
are folded into the batch, and the plan of windows sees all of them. Rows with
parameters of their own keep windows of their own, which are as much shorter as
there are rows. Rows that are sharded over an Explicit axis of a mesh run on the
devices that have them.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import sharding
from rnnzoo.engines.time import plan as newton_plan

Carry = cell_lib.Carry
Operands = call_lib.Operands
Plan = newton_plan.Plan

# The carry after the last step, each [B, F], and arrays of the carries after
# every step, each [T, B, F].
Results = tuple[Carry, Carry]
Run = Callable[[Plan, Operands], Results]


def together(run: Run, plan: Plan, operands: Operands) -> Results:
  """Returns run(plan, operands); under `jax.vmap` all rows share the memory.

  Args:
    run: is not differentiated.
    plan: static arguments.
    operands: time-major.
  """

  def rule(size, is_row, operands):
    own = is_row.params, is_row.weights, is_row.recurrent_kernel
    if any(jax.tree.leaves(own)):
      replanned = lambda rows, operands: run(
          plan.again(operands, plan.rows * rows), operands
      )
      return _side_by_side(replanned, size, is_row, operands)
    batch = operands.carry[0].shape[-2]
    folded = _folded(size, batch, is_row, operands)
    again = plan.again(folded, plan.rows)
    return _unfolded(size, batch, together(run, again, folded))

  return _mapped(functools.partial(run, plan), rule)(operands)


def _side_by_side(
    run: Callable[[Any, Operands], Results],
    size: Any,
    is_row: Operands,
    operands: Operands,
) -> Results:
  """Runs rows that have windows of their own.

  Args:
    run: (number of rows that share the memory, operands of one) -> results.
    size: number of rows.
    is_row: for each array, whether there is one for each row.
    operands: with rows as the leading axis.
  """
  axes = jax.tree.map(lambda yes: 0 if yes else None, is_row)

  def every(rows, operands):
    return jax.vmap(functools.partial(run, rows * size), (axes,))(operands)

  rule = functools.partial(_side_by_side, every)
  return _mapped(functools.partial(every, 1), rule)(operands)


def _mapped(function: Callable[[Operands], Results], rule: Any):
  """Returns the function with a rule for `jax.vmap`.

  Args:
    function: of the operands.
    rule: (number of rows, whether each array has them, operands) -> results for
      all rows. The leading axis is that of the rows.
  """
  mapped = jax.custom_batching.custom_vmap(function)

  @mapped.def_vmap
  def _(size, batched, operands):
    (is_row,) = batched
    leaves, tree = jax.tree.flatten(operands)
    axes = [0 if yes else None for yes in jax.tree.leaves(is_row)]

    @promotion.of_ranks
    def own(leaves):
      rows = next(
          x.shape[0]
          for x, axis in zip(leaves, axes, strict=True)
          if axis is not None
      )
      return rule(rows, is_row, jax.tree.unflatten(tree, leaves))

    results = sharding.over_rows(own, size, axes, leaves)
    return results, jax.tree.map(lambda _: True, results)

  return mapped


def _folded(size: Any, batch: Any, is_row: Operands, operands: Operands):
  """Returns operands of one batch; an array of all rows is repeated."""

  def fold(axis):
    def one(x, yes):
      row = x.shape[1:] if yes else x.shape
      if yes:
        x = jnp.moveaxis(x, 0, axis)
      else:
        x = jnp.expand_dims(x, axis)
        x = jnp.broadcast_to(x, (*row[:axis], size, *row[axis:]))
      return x.reshape(*row[:axis], size * batch, *row[axis + 1 :])

    return one

  over = lambda axis, name: jax.tree.map(
      fold(axis), getattr(operands, name), getattr(is_row, name)
  )
  return operands._replace(
      **{name: over(0, name) for name in ('carry', 'restart')},
      **{name: over(1, name) for name in ('x', 'reset', 'mask')},
  )


def _unfolded(size: Any, batch: Any, results: Results) -> Results:
  """Returns results with rows as the leading axis."""
  final, carries = results
  split = lambda x: x.reshape(*x.shape[:-2], size, batch, x.shape[-1])
  return tuple(map(split, final)), tuple(
      jnp.moveaxis(split(x), 1, 0) for x in carries
  )
