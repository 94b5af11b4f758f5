"""Path 1: `lax.scan` over time.

This is the reference that every other path is tested against, and the path
that runs everywhere. Forward and backward work through time in chunks: a
chunk's input projection comes first, then its steps one by one, so the gates of
all T steps never exist at once. Saved for the backward pass (`adjoint.py`) are
the inputs and the carries. The path knows cells with one stage and with two,
and no cell by name.
"""

import functools

import jax
from jax import lax

from rnnzoo import adjoint
from rnnzoo import cell as cell_lib
from rnnzoo import steps

Carry = cell_lib.Carry


def chunk_length(time: int, rows: int) -> int:
  """Returns how many steps to take at once.

  On a CPU a chunk's gates should stay in cache: on two cores, chunks of about
  2 MiB made forward and backward twice as fast at T = 784 as one pass, most of
  it page faults saved. An accelerator wants few, large operations.

  Args:
    time: T.
    rows: elements of all gates in one step, B G F.
  """
  budget = 2**19 if jax.default_backend() == 'cpu' else 2**26
  target = max(1, min(time, budget // max(rows, 1)))
  # A divisor of T near the target spares a remainder, compiled on its own.
  for length in range(target, target // 2, -1):
    if time % length == 0:
      return length
  return target


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def unroll(plan: steps.Plan, operands: steps.Operands) -> tuple[Carry, Carry]:
  """Runs a cell over time.

  Args:
    plan: what is static.
    operands: arrays; the dtype of `carry` is that of all state.

  Returns:
    The carry after the last step, each [B, F], and the first `plan.outputs`
    arrays of the carries after every step, each [T, B, F].
  """
  carry, carries = _forward(plan, operands)
  return carry, carries[: plan.outputs]


def _forward(plan: steps.Plan, operands: steps.Operands) -> tuple[Carry, Carry]:
  params, weights, inputs, kernel, carry, restart, reset, mask = operands
  kernels = steps.pack(plan.cell, kernel)

  def body(carry, xs):
    x_gates, reset, mask = xs
    start = steps.select(reset, restart, carry)
    new = steps.step(plan.cell, params, kernels, x_gates, start)
    carry = new if mask is None else steps.select(mask, new, start)
    return carry, carry

  def chunk(carry, xs):
    inputs, reset, mask = xs
    x_gates = steps.project(plan.project, carry, mask, weights, inputs)
    return lax.scan(body, carry, (x_gates, reset, mask), reverse=plan.reverse)

  return steps.scan_chunks(
      chunk, carry, (inputs, reset, mask), plan.chunk, plan.reverse
  )


def _forward_with_residuals(plan: steps.Plan, operands: steps.Operands):
  carry, carries = _forward(plan, operands)
  return (carry, carries[: plan.outputs]), (operands, carries)


def _backward(plan: steps.Plan, residuals, cotangents):
  return (adjoint.backward(plan, *residuals, cotangents),)


unroll.defvjp(_forward_with_residuals, _backward)
