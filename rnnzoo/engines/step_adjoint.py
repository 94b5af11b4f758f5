"""The adjoint of the pointwise part of a step, from a cell's own equations.

A step is linearised around the carry that it starts from. Its pullbacks then
take the cotangent of the carry after it to those of all that it read; the
products with the recurrent kernel are the caller's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib

Array = jax.Array
Carry = cell_lib.Carry
Gates = cell_lib.Gates


class Pullbacks(NamedTuple):
  """Linearised step functions; callable pytrees, so they can be scanned."""

  update: Callable[[Carry], Any]
  operand: Callable[[Array], Any] | None


def linearize(
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    x_gates: Gates,
    h_gates: Gates,
    carry: Carry,
) -> tuple[Pullbacks, Array | None]:
  """Linearises a step around a carry, each [B, F].

  Returns:
    The pullbacks, and the operand of the second stage (None for a cell of one
    stage).
  """
  pull = lambda fn, gates: jax.vjp(fn, params, x_gates, gates, carry)
  operand = pull_operand = None
  if isinstance(cell, cell_lib.TwoStageCell):
    operand, pull_operand = pull(cell.operand, h_gates[:-1])
  return Pullbacks(pull(cell.update, h_gates)[1], pull_operand), operand


def is_large(pullbacks: Pullbacks, at: Any) -> bool:
  """Returns whether a linearisation has twice the arrays of its point.

  An IRevRNN's has, at any number of inner steps. The others' have not: on a CPU
  a GRU took 15 to 30 % longer with its linearisation in the loop.
  """
  return len(jax.tree.leaves(pullbacks)) >= 2 * len(jax.tree.leaves(at))


def pull(pullbacks: Pullbacks, d_new: Carry, d_operand) -> tuple[Any, Any]:
  """Pulls a carry's cotangent back through the pointwise part of a step.

  Args:
    pullbacks: of this step.
    d_new: cotangent of the carry after the step.
    d_operand: maps the last recurrent gate's cotangent to the operand's.

  Returns:
    Cotangents of (params, x_gates, h_gates, carry), and that of the operand.
  """
  cotangents = pullbacks.update(d_new)
  if pullbacks.operand is None:
    return cotangents, None
  params, x_gates, h_gates, carry = cotangents
  d_operand = d_operand(h_gates[-1])
  first = pullbacks.operand(d_operand)
  params, x_gates, carry = jax.tree.map(
      jnp.add, (params, x_gates, carry), (first[0], first[1], first[3])
  )
  h_gates = (*map(jnp.add, h_gates[:-1], first[2]), h_gates[-1])
  return (params, x_gates, h_gates, carry), d_operand
