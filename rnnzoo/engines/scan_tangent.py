"""The tangent of a recurrence: path 1's forward mode, for any cell.

Like the adjoint, it linearises each step around the carries that the unroll
saved. Everything that does not depend on the tangent of the carry comes first,
for a chunk of steps at once: the input projection and its tangent, and dR h.
The loop that is left is linear in the tangent of the carry.
"""

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import derivatives
from rnnzoo.engines import products
from rnnzoo.engines import scan_steps

Carry = cell_lib.Carry
Gates = cell_lib.Gates


def forward(
    plan: scan_steps.Plan,
    saved: scan_steps.Saved,
    tangents: call_lib.Operands,
    loop: scan_steps.Loop = scan_steps.in_turn,
) -> tuple[Carry, Carry]:
  """Returns the tangents of an unroll's results.

  Args:
    plan: static arguments.
    saved: from the unroll.
    tangents: of the operands; None where one is zero.
    loop: runs a chunk's steps, which are linear in the tangent of the carry.

  Returns:
    Tangents of the final carry, each [B, F], and of the returned carries, each
    [T, B, F].
  """
  scan_steps.refuse_clip(plan.call.recurrent_gradient_clip)
  params, weights, x, kernel, carry, restart, reset, mask = saved.operands
  d_params, d_weights, d_x, d_kernel, d_carry, d_restart, _, _ = tangents
  cell, reverse = plan.cell, plan.call.reverse
  stop = plan.call.stop_recurrent_gradient
  kernels = scan_steps.pack(cell, kernel)
  d_kernels = scan_steps.pack(cell, d_kernel)
  staged = cell if isinstance(cell, cell_lib.TwoStageCell) else None

  def through(stage, d_operand, d_gates):
    """Returns the tangents of a stage's gates, R doperand + dR operand."""
    if stop:
      return d_gates
    moved = products.multiply(kernels[stage], d_operand)
    return tuple(
        m if d is None else m + d for m, d in zip(moved, d_gates, strict=True)
    )

  def body(d_carry, xs):
    start, x_gates, h_gates, d_x_gates, d_given, reset, mask = xs
    d_start = scan_steps.select(reset, d_restart, d_carry)
    d_gates: tuple[Any, ...] = ()
    if kernels:
      d_gates = through(0, d_start[0], d_given[0])
    if staged is not None:
      _, d_operand = derivatives.pushforward(
          staged.operand,
          (params, x_gates, h_gates[:-1], start),
          (d_params, d_x_gates, d_gates, d_start),
      )
      d_gates += through(1, d_operand, d_given[1])
    _, d_new = derivatives.pushforward(
        cell.update,
        (params, x_gates, h_gates, start),
        (d_params, d_x_gates, d_gates, d_start),
    )
    d_new = tuple(d.astype(c.dtype) for d, c in zip(d_new, start, strict=True))
    d_carry = d_new if mask is None else scan_steps.select(mask, d_new, d_start)
    return d_carry, d_carry[: plan.call.outputs]

  def chunk(d_carry, xs):
    x, reset, mask, in_chunk, h_gates, d_x, index = xs
    start = in_chunk
    if saved.start is None:
      before = scan_steps.previous(
          saved.carries, in_chunk, carry, index, reverse
      )
      start = scan_steps.select(reset, restart, before)
    x_gates, d_x_gates = derivatives.pushforward(
        functools.partial(scan_steps.project, plan.project, carry, mask),
        (weights, x),
        (d_weights, d_x),
    )
    if plan.joint and h_gates is not None:
      h_gates = products.split(h_gates[0], cell.recurrent_gates)
    if h_gates is None:
      h_gates = scan_steps.multiply(
          cell, params, kernels, x_gates, start, stop=stop
      )
    # dR times its operand, one tuple for each stage.
    d_given: list[tuple[Any, ...]] = [(None,) * len(h_gates)]
    if staged is not None:
      d_given = [(None,) * (len(h_gates) - 1), (None,)]
    if d_kernels:
      multiplied = [start[0]]
      if staged is not None:
        first = h_gates[:-1]
        multiplied.append(staged.operand(params, x_gates, first, start))
      if stop:  # A constant in second derivatives, too.
        multiplied = lax.stop_gradient(multiplied)
      d_given = list(map(products.multiply, d_kernels, multiplied))
    return loop(
        body,
        d_carry,
        (start, x_gates, h_gates, d_x_gates, d_given, reset, mask),
        scan_steps.Linearization(x_gates, h_gates, start, reset, mask),
        reverse=reverse,
    )

  d_carry, d_restart = _instantiated((d_carry, d_restart), (carry, restart))
  return scan_steps.scan_chunks(
      chunk,
      d_carry,
      (
          x,
          reset,
          mask,
          saved.carries if saved.start is None else saved.start,
          saved.h_gates,
          d_x,
          jnp.arange(x.shape[0]),
      ),
      plan.chunk,
      reverse,
  )


def _instantiated(tangents, primals):
  """Returns tangents with zeros in place of None."""
  return jax.tree.map(
      lambda x, d: jnp.zeros_like(x) if d is None else d, primals, tangents
  )
