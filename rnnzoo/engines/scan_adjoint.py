"""The adjoint of a recurrence: path 1's backward pass, for any cell.

For a chunk of steps, the products that do not depend on the adjoint come first,
each of them for all steps at once: the input projection, and R h_{t-1} where
the forward pass did not save it. The loop that is left linearises `update`
around a saved carry, a step at a time, and is linear in the adjoint λ,

    λ_{t-1} = g_{t-1} + (d carry_t / d carry_{t-1})ᵀ λ_t

It returns the cotangents of the gates. The gradients of kernels are then one
product a chunk, added up in float32. Adding them step by step, as plain
autodiff of a scan does, is slower and loses digits in bfloat16. One thing need
not be linear: `recurrent_gradient_clip` bounds the cotangent that comes back
through the recurrent kernel.
"""

from collections.abc import Callable
import functools

import jax
from jax import lax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import products
from rnnzoo.engines import scan_steps

Array = jax.Array
Carry = cell_lib.Carry
Gates = cell_lib.Gates


def backward(
    plan: scan_steps.Plan,
    saved: scan_steps.Saved,
    cotangents: tuple[Carry, Carry],
    loop: scan_steps.Loop = scan_steps.in_turn,
) -> call_lib.Operands:
  """Returns the cotangents of an unroll's operands.

  Args:
    plan: static arguments.
    saved: from the unroll.
    cotangents: of the final carry, each [B, F], and of the returned carries,
      each [T, B, F].
    loop: runs a chunk's steps, which are linear in the cotangent of the carry.

  Returns:
    Cotangents with the structure of `Operands`; None for the masks.
  """
  params, weights, x, kernel, carry, restart, reset, mask = saved.operands
  d_carry, d_outputs = cotangents
  call, reverse = plan.call, plan.call.reverse
  kernels = scan_steps.pack(plan.cell, kernel)
  # Transposed here, not in the loop, where each step would do it again.
  transposed = tuple(map(products.transpose, kernels))
  stages = len(kernels)
  stop = call.stop_recurrent_gradient

  def through(stage, d_gates):
    """Returns the cotangent of the operand of a stage's kernel."""
    if stop:
      return jnp.zeros_like(d_gates[0])
    d = products.multiply_transposed(transposed[stage], d_gates)
    clip = call.recurrent_gradient_clip
    if call.zero_not_finite:
      d = jnp.where(jnp.isfinite(d), d, 0)
    return d if clip is None else jnp.clip(d, -clip, clip)

  def body(d_carry, xs):
    (x_gates, h_gates, start, reset, mask), d_outputs = xs
    seen = map(jnp.add, d_carry, d_outputs)
    d_carry = (*seen, *d_carry[call.outputs :])
    d_new = (
        d_carry
        if mask is None
        else scan_steps.select(mask, d_carry, _zeros(d_carry))
    )
    d_params, d_x_gates, d_h_gates, d_start = _pull(
        plan.cell,
        (params, x_gates, h_gates, start),
        d_new,
        lambda d: through(1, (d,)),
    )
    # Where `update` adds the two, they have one cotangent, stored once.
    is_sum = list(map(id, d_x_gates)) == list(map(id, d_h_gates))
    d_local = d_params, d_x_gates, () if is_sum else d_h_gates
    if stages:
      first = d_h_gates if stages == 1 else d_h_gates[:-1]
      d_start = (d_start[0] + through(0, first), *d_start[1:])
    if mask is not None:
      held = scan_steps.select(mask, _zeros(d_carry), d_carry)
      d_start = tuple(map(jnp.add, d_start, held))
    d_restart: Carry = ()
    if reset is not None:
      d_restart = scan_steps.select(reset, d_start, _zeros(d_start))
      d_start = scan_steps.select(reset, _zeros(d_start), d_start)
    return d_start, (d_local, d_restart)

  def chunk(state, xs):
    d_carry, sums = state
    x, reset, mask, carries_in_chunk, h_gates, d_outputs, index = xs
    before = scan_steps.previous(
        saved.carries, carries_in_chunk, carry, index, reverse
    )
    start = scan_steps.select(reset, restart, before)
    x_gates, pull_projection = jax.vjp(
        functools.partial(scan_steps.project, plan.project, carry, mask),
        weights,
        x,
    )
    if h_gates is None:
      h_gates = scan_steps.multiply(
          plan.cell, params, kernels, x_gates, start, stop=stop
      )
    at = scan_steps.Linearization(x_gates, h_gates, start, reset, mask)
    d_carry, (d_local, d_restart) = loop(
        body, d_carry, (at, d_outputs), at, reverse=not reverse
    )
    d_params, d_x_gates, d_h_gates = d_local
    d_h_gates = d_h_gates or d_x_gates
    d_weights, d_x = pull_projection(d_x_gates)
    d_kernels: tuple[Array, ...] = ()
    h = start[0]
    if stop:  # A constant in second derivatives, too.
      h = lax.stop_gradient(h)
    if isinstance(plan.cell, cell_lib.TwoStageCell):
      operand = plan.cell.operand(params, x_gates, h_gates[:-1], start)
      if stop:
        operand = lax.stop_gradient(operand)
      d_kernels = (
          products.outer(kernels[0], h, d_h_gates[:-1]),
          products.outer(kernels[1], operand, d_h_gates[-1:]),
      )
    elif stages:
      d_kernels = (products.outer(kernels[0], h, d_h_gates),)
    time_sum = functools.partial(jnp.sum, axis=0)
    parts = (
        jax.tree.map(time_sum, d_params),
        d_weights,
        d_kernels,
        jax.tree.map(time_sum, d_restart),
    )
    return (d_carry, jax.tree.map(jnp.add, sums, parts)), d_x

  sums = (
      params,
      weights,
      kernels,
      restart if reset is not None else (),
  )
  time = x.shape[0]
  (d_carry, (d_params, d_weights, d_kernels, d_restart)), d_x = (
      scan_steps.scan_chunks(
          chunk,
          (d_carry, jax.tree.map(_zero_sum, sums)),
          (
              x,
              reset,
              mask,
              saved.carries,
              saved.h_gates,
              d_outputs,
              jnp.arange(time),
          ),
          plan.chunk,
          not reverse,
      )
  )
  d_kernel = None
  if kernel is not None:
    gates = kernel.shape[0]
    counts = (gates,) if stages == 1 else (gates - 1, 1)
    d_kernel = jnp.concatenate(
        [products.unpack(d, n) for d, n in zip(d_kernels, counts, strict=True)]
    )
  if reset is None:
    d_restart = _zeros(restart)
  cast = lambda d, x: d.astype(x.dtype)
  d_params, d_weights, d_kernel = jax.tree.map(
      cast, (d_params, d_weights, d_kernel), (params, weights, kernel)
  )
  return call_lib.Operands(
      d_params, d_weights, d_x, d_kernel, d_carry, d_restart, None, None
  )


def _pull(
    cell: cell_lib.Cell, at, d_new: Carry, through: Callable[[Array], Array]
) -> tuple[cell_lib.Params, Gates, Gates, Carry]:
  """Pulls a carry's cotangent back through the pointwise part of a step.

  Args:
    cell: the equations.
    at: (params, x_gates, h_gates, carry) of this step.
    d_new: cotangent of the carry after the step.
    through: maps the last recurrent gate's cotangent to that of its operand.

  Returns:
    Cotangents of `at`.
  """
  params, x_gates, h_gates, carry = jax.vjp(cell.update, *at)[1](d_new)
  if not isinstance(cell, cell_lib.TwoStageCell):
    return params, x_gates, h_gates, carry
  operand_at = (*at[:2], at[2][:-1], at[3])
  pull_operand = jax.vjp(cell.operand, *operand_at)[1]
  first = pull_operand(through(h_gates[-1]))
  params, x_gates, carry = jax.tree.map(
      jnp.add, (params, x_gates, carry), (first[0], first[1], first[3])
  )
  h_gates = (*map(jnp.add, h_gates[:-1], first[2]), h_gates[-1])
  return params, x_gates, h_gates, carry


def _zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)


def _zero_sum(x: Array) -> Array:
  """Zeros to add gradients of x to: float32 or wider."""
  return jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32))
