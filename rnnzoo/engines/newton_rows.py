"""Rows of `jax.vmap` under Newton's method: one batch if parameters are shared.

Sequences of a batch do not see each other, and the plan of windows counts them.
Rows with parameters of their own are mapped as they are.
"""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import ranks
from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import newton_plan

Carry = cell_lib.Carry
Operands = call_lib.Operands
Plan = newton_plan.Plan

# The carry after the last step, each [B, F], and arrays of the carries after
# every step, each [T, B, F].
Results = tuple[Carry, Carry]

# Where the batch stands in each of the operands that rows may have.
_AXES = {'carry': 0, 'restart': 0, 'x': 1, 'reset': 1, 'mask': 1}


def together(
    run: Callable[[Plan, Operands], Results], plan: Plan, operands: Operands
) -> Results:
  """Returns run(plan, operands); `jax.vmap` over it enlarges the batch.

  Args:
    run: is not differentiated.
    plan: static arguments.
    operands: time-major.
  """

  @jax.custom_batching.custom_vmap
  def mapped(operands):
    return run(plan, operands)

  @mapped.def_vmap
  @ranks.promoted
  def _(size, batched, operands):
    (is_row,) = batched
    own = is_row.params, is_row.weights, is_row.recurrent_kernel
    if any(jax.tree.leaves(own)):
      axes = jax.tree.map(lambda yes: 0 if yes else None, is_row)
      one = functools.partial(run, plan)
      results = jax.vmap(one, (axes,), axis_size=size)(operands)
    else:
      batch = operands.carry[0].shape[-2]
      folded = operands._replace(
          **{
              name: jax.tree.map(
                  lambda x, yes, axis=axis: _fold(x, yes, axis, size),
                  getattr(operands, name),
                  getattr(is_row, name),
              )
              for name, axis in _AXES.items()
          }
      )
      final, carries = together(run, plan.again(folded), folded)
      split = lambda x: x.reshape(*x.shape[:-2], size, batch, x.shape[-1])
      results = (
          tuple(map(split, final)),
          tuple(jnp.moveaxis(split(x), 1, 0) for x in carries),
      )
    return results, jax.tree.map(lambda _: True, results)

  return mapped(operands)


def _fold(x: jax.Array, is_row: bool, axis: int, size: int) -> jax.Array:
  """Returns x with its rows inside the batch; what they share is repeated."""
  if is_row:
    x = jnp.moveaxis(x, 0, axis)
  else:
    x = jnp.expand_dims(x, axis)
    x = jnp.broadcast_to(x, (*x.shape[:axis], size, *x.shape[axis + 1 :]))
  batch = x.shape[axis] * x.shape[axis + 1]
  return x.reshape(*x.shape[:axis], batch, *x.shape[axis + 2 :])
