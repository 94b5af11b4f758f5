"""Rows of `jax.vmap` under Newton's method: one batch if parameters are shared.

Sequences of a batch do not see each other, and the plan of windows counts them.
Rows with parameters of their own are mapped as they are. Rows that are sharded
over an Explicit axis of a mesh run on the devices that have them.
"""

from collections.abc import Callable
import functools

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

# Axis of the batch in each operand that rows may have.
_AXES = {'carry': 0, 'restart': 0, 'x': 1, 'reset': 1, 'mask': 1}


def together(
    run: Callable[[Plan, Operands], Results], plan: Plan, operands: Operands
) -> Results:
  """Returns run(plan, operands); `jax.vmap` over it enlarges the batch.

  Args:
    run: function that is not differentiated.
    plan: static arguments.
    operands: time-major arrays.
  """

  @jax.custom_batching.custom_vmap
  def mapped(operands):
    return run(plan, operands)

  @mapped.def_vmap
  def _(size, batched, operands):
    leaves, tree = jax.tree.flatten(operands)
    is_row = jax.tree.leaves(batched)
    axes = [0 if yes else None for yes in is_row]

    @promotion.of_ranks
    def own(leaves):
      args = jax.tree.unflatten(tree, leaves), *batched
      parameters = [args[1].params, args[1].weights, args[1].recurrent_kernel]
      if any(jax.tree.leaves(parameters)):
        one = functools.partial(run, plan)
        return jax.vmap(one, (jax.tree.unflatten(tree, axes),))(args[0])
      return _as_one_batch(run, plan, *args)

    results = sharding.over_rows(own, size, axes, leaves)
    return results, jax.tree.map(lambda _: True, results)

  return mapped(operands)


def _as_one_batch(run, plan: Plan, operands: Operands, is_row: Operands):
  """Returns results with rows as the leading axis."""
  sizes = jax.tree.map(
      lambda x, yes: x.shape[0] if yes else 0, operands, is_row
  )
  size = max(jax.tree.leaves(sizes))
  batch = operands.carry[0].shape[-2]

  def fold(axis, x, yes):
    """Puts rows inside the batch; an array of all rows is repeated."""
    if yes:
      x = jnp.moveaxis(x, 0, axis)
    else:
      x = jnp.expand_dims(x, axis)
      x = jnp.broadcast_to(x, (*x.shape[:axis], size, *x.shape[axis + 1 :]))
    return x.reshape(*x.shape[:axis], size * batch, *x.shape[axis + 2 :])

  folded = {
      name: jax.tree.map(
          functools.partial(fold, axis),
          getattr(operands, name),
          getattr(is_row, name),
      )
      for name, axis in _AXES.items()
  }
  operands = operands._replace(**folded)
  final, carries = together(run, plan.again(operands), operands)
  split = lambda x: x.reshape(*x.shape[:-2], size, batch, x.shape[-1])
  return (
      tuple(map(split, final)),
      tuple(jnp.moveaxis(split(x), 1, 0) for x in carries),
  )
