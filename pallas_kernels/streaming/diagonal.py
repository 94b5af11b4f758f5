"""Diagonal recurrences: every feature on its own, its carry in registers.

carry_t = plan.step(theta, inputs_t, carry_{t-1}), pointwise and not linear, so
time is sequential and the latency of one step decides. Each thread has one
feature of one batch row: its carry never leaves the registers, inputs arrive by
TMA several blocks ahead and carries leave by TMA too. Enough threads to hide
the latency come from several CTAs on a multiprocessor.

The carries are all that is saved for the adjoint.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import blocks
from pallas_kernels.streaming import kernel_call

Array = jax.Array
Plan = kernel_call.Plan


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=('outputs', 'out_dtype')
)
def forward(
    plan: Plan,
    operands: kernel_call.Operands,
    *,
    outputs: int,
    out_dtype: Any,
) -> tuple[tuple[Array, ...], Array]:
  """Runs the recurrence.

  Args:
    plan: the static arguments.
    operands: without `plan.has_flags` neither flags nor restart are read,
      without `plan.params` not theta.
    outputs: number of arrays of the carry that are returned for all steps.
    out_dtype: dtype of the carries.

  Returns:
    The first `outputs` carries, each [B, T, F], and the carry after the last
    step, float32 [S, B, Fp].
  """
  states = operands.carry.shape[0]
  step = cells.legalize(plan.step, kernel_call.accuracy(plan))

  def body(loop, theta, carry, restart):
    theta = loop.theta(theta)
    if plan.has_flags:
      restart = loop.read(restart, states)
    loop.inputs.prefetch()

    def wave(k, carry):
      block = loop.flags(k)
      out = []
      loop.inputs.wait(k)
      for i, row in enumerate(loop.inputs.rows(k)):
        start = step_flags.select(block.restarts(i), restart, carry)
        carry = step(theta, row, start)
        carry = step_flags.select(block.idle(i), start, carry)
        out.append(carry[:outputs])
      return carry, out

    last = loop.run(wave, loop.read(carry, states))
    loop.write(loop.others[0], last)

  carries, (last,) = kernel_call.run(
      plan,
      'diagonal_recurrence',
      body,
      operands,
      None,
      blocks.streams_of(operands.arrays),
      tuple(blocks.Stream(i, None, out_dtype) for i in range(outputs)),
      (jax.ShapeDtypeStruct(operands.carry.shape, jnp.float32),),
  )
  return carries, last


# The adjoint of `diagonal`, backwards in time.
#
# Each step is run again for the values that its derivative needs, so memory
# does not grow with the operations inside a step. That part needs no cotangent:
# it is done for all steps of a block at once, and its latency is hidden.


@functools.partial(jax.jit, static_argnums=0)
def backward(
    plan: Plan,
    operands: kernel_call.Operands,
    cotangents: kernel_call.Cotangents,
) -> tuple[tuple[Array, ...], Array, Array, Array]:
  """Runs the adjoint of `forward`.

  Args:
    plan: the plan of `forward`, except `config`.
    operands: the operands of `forward`, and all carries.
    cotangents: cotangents of the first carries and of the last carry.

  Returns:
    The cotangents of the inputs, of the carry [S, B, Fp], and, to be summed
    over the batch, of theta [B, plan.params, Fp]; of restart [S, B, Fp].
  """
  layout = plan.layout
  outs, others = kernel_call.streams(plan, operands, cotangents)
  small = jax.ShapeDtypeStruct(operands.carry.shape, jnp.float32)
  of_theta = (layout.batch, max(plan.params, 1), layout.padded)
  counts = len(outs), len(operands.carries)
  d_arrays, (d_carry, d_theta, d_restart) = kernel_call.run(
      plan,
      'diagonal_recurrence_adjoint',
      functools.partial(_adjoint, plan, *counts),
      operands,
      cotangents,
      (*outs, *others),
      outs,
      (small, jax.ShapeDtypeStruct(of_theta, jnp.float32), small),
  )
  return d_arrays, d_carry, d_theta, d_restart


def _adjoint(
    plan: Plan, gates: int, states: int, loop, theta, carry, restart, d_last
):
  """The kernel: `gates` inputs, `states` arrays of the carry."""
  accuracy = kernel_call.accuracy(plan)
  walk, inputs = loop.walk, loop.inputs
  theta = loop.theta(theta)
  first = loop.read(carry, states)
  if plan.has_flags:
    restart = loop.read(restart, states)
  inputs.prefetch()
  first_time = walk.layout.time - 1 if plan.reverse else 0
  zeros = (0.0,) * states

  def linearise(theta, given):
    row, start = given
    return jax.vjp(plan.step, theta, row, start)[1]

  def read(k, block):
    """Returns (inputs, carry before) and cotangents of each step in a block."""
    given, cotangents = [], []
    for i, values in enumerate(inputs.rows(k)):
      start = values[gates : gates + states]
      start = step_flags.select(walk.time(k, i) == first_time, first, start)
      start = step_flags.select(block.restarts(i), restart, start)
      given.append((values[:gates], start))
      cotangents.append(values[gates + states :])
    return given, cotangents

  def wave(k, state):
    d_carry, d_theta, d_restart = state
    block = loop.flags(k)
    inputs.wait(k)
    given, cotangents = read(k, block)
    out = []
    pullbacks = cells.map_rows(linearise, theta, given, accuracy)
    for i, (g, pullback) in enumerate(zip(cotangents, pullbacks, strict=True)):
      d_carry = (*map(jnp.add, d_carry, g), *d_carry[len(g) :])
      d_new = step_flags.select(block.idle(i), zeros, d_carry)
      d_params, d_row, d_start = cells.pull(pullback, d_new, accuracy)
      d_carry = step_flags.select(block.idle(i), d_carry, d_start)
      d_theta = tuple(map(jnp.add, d_theta, d_params))
      if plan.has_flags:
        d_in = step_flags.select(block.restarts(i), d_carry, zeros)
        d_restart = tuple(map(jnp.add, d_restart, d_in))
        d_carry = step_flags.select(block.restarts(i), zeros, d_carry)
      out.append(d_row)
    return (d_carry, d_theta, d_restart), out

  d_carry = loop.read(d_last, states)
  zero = blocks.zeros()
  d_theta = tuple(zero for _ in theta)
  d_restart = (zero,) * states if plan.has_flags else ()
  d_carry, d_theta, d_restart = loop.run(wave, (d_carry, d_theta, d_restart))
  d_carry_ref, d_theta_ref, d_restart_ref = loop.others
  loop.write(d_carry_ref, d_carry)
  for i, value in enumerate(d_theta):
    d_theta_ref[walk.batch, i, walk.features] = value
  loop.write(d_restart_ref, d_restart)
