"""Diagonal recurrences: every feature on its own, its carry in registers.

carry_t = plan.step(params, inputs_t, carry_{t-1}), pointwise and not linear, so
time is sequential and what counts is the latency of one step. Each thread has
one feature of one batch row: its carry never leaves the registers, inputs
arrive by TMA several blocks ahead and carries leave the same way. Enough
threads to hide that latency come from several CTAs on a multiprocessor.

Saved for the adjoint are the carries alone. It runs the step again at each step
for what the derivative needs, so memory does not grow with what happens inside
a step. That part does not depend on the adjoint and overlaps with it.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import pointwise
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import time_blocks

Array = jax.Array
Plan = kernel_call.Plan


def forward(
    plan: Plan,
    params: Array,
    arrays: Sequence[Array],
    carry: Array,
    restart: Array,
    flags: Array,
    outputs: int,
    out_dtype: Any,
) -> tuple[tuple[Array, ...], Array]:
  """Runs the recurrence.

  Args:
    plan: what is static.
    params: [plan.params, Fp], with Fp the padded features.
    arrays: the inputs, each [B, T, F] or [B, T, G, F].
    carry: what the first step starts from, [S, B, Fp].
    restart: what a reset restarts from, [S, B, Fp].
    flags: int32 [B, T], bits RESET and HOLD. Without `plan.flags` neither they
      nor `restart` are read, without `plan.params` not `params`.
    outputs: how many arrays of the carry are returned for all steps.
    out_dtype: dtype of these.

  Returns:
    The first `outputs` carries, each [B, T, F], and the carry after the last
    step, float32 [S, B, Fp].
  """
  layout = plan.layout
  arrays = [layout.widen(x) for x in arrays]
  ins = time_blocks.streams_of(arrays)
  outs = tuple(time_blocks.Stream(i, None, out_dtype) for i in range(outputs))
  states = carry.shape[0]
  step = pointwise.legalize(plan.step, kernel_call.accuracy(plan))

  def body(params, carry, restart, flags, *refs):
    inputs, out_refs, in_rings, out_rings, barriers, _ = kernel_call.split(
        refs, len(arrays), outputs + 1, ins, outs
    )
    *out_refs, last_ref = out_refs
    walk = kernel_call.walk(plan, plan.reverse)
    read = lambda ref: tuple(
        walk.read(ref, i, walk.batch) for i in range(states)
    )
    theta = tuple(walk.read(params, k) for k in range(plan.params))
    flags = flags if plan.flags else None
    restart = read(restart) if plan.flags else None
    walk.prefetch(ins, inputs, in_rings, barriers)

    def wave(k, carry):
      block = step_flags.Block(walk, flags, k)
      out = []
      walk.wait(barriers, k)
      for i, row in enumerate(walk.rows(in_rings, k)):
        start = step_flags.select(block.restarts(i), restart, carry)
        carry = step(theta, row, start)
        carry = step_flags.select(block.idle(i), start, carry)
        out.append(carry[:outputs])
      walk.write(outs, out_refs, out_rings, k, out)
      walk.refill(ins, inputs, in_rings, barriers, k)
      return carry

    carry = lax.fori_loop(0, walk.waves, wave, read(carry))
    for i, value in enumerate(carry):
      last_ref[i, walk.batch, walk.features] = value
    plgpu.wait_smem_to_gmem(0)

  stream = jax.ShapeDtypeStruct(layout.shape, out_dtype)
  small = jax.ShapeDtypeStruct(carry.shape, jnp.float32)
  *carries, last = kernel_call.kernel(
      plan,
      body,
      'diagonal_recurrence',
      ins,
      outs,
      (*(stream,) * outputs, small),
  )(params, carry, restart, flags, *arrays)
  return tuple(map(layout.narrow, carries)), last


def backward(
    plan: Plan,
    params: Array,
    arrays: Sequence[Array],
    carries: Sequence[Array],
    carry: Array,
    restart: Array,
    flags: Array,
    d_carries: Sequence[Array],
    d_last: Array,
) -> tuple[tuple[Array, ...], Array, Array, Array]:
  """Runs the adjoint of `forward`.

  Args:
    plan: as for `forward`, except `config`.
    params: as for `forward`.
    arrays: as for `forward`.
    carries: all arrays of the carry after every step, each [B, T, F].
    carry: as for `forward`.
    restart: as for `forward`.
    flags: as for `forward`.
    d_carries: cotangents of the first of them, each [B, T, F].
    d_last: cotangent of the last carry, float32 [S, B, Fp].

  Returns:
    The cotangents of `arrays`, of `carry` [S, B, Fp], and, to be summed over
    the batch, of the parameters [B, plan.params, Fp]; of `restart` [S, B, Fp].
  """
  layout = plan.layout
  states, outputs, count = len(carries), len(d_carries), len(arrays)
  arrays = [layout.widen(x) for x in (*arrays, *carries, *d_carries)]
  shift = 1 if plan.reverse else -1
  outs = time_blocks.streams_of(arrays[:count])
  gates = len(outs)
  ins = (
      *outs,
      *(
          time_blocks.Stream(count + i, None, x.dtype, shift)
          for i, x in enumerate(carries)
      ),
      *(
          time_blocks.Stream(count + states + i, None, x.dtype)
          for i, x in enumerate(d_carries)
      ),
  )

  accuracy = kernel_call.accuracy(plan)

  def linearise(theta, given):
    row, start = given
    return jax.vjp(plan.step, theta, row, start)[1]

  def body(params, carry, restart, flags, d_last, *refs):
    inputs, out_refs, in_rings, out_rings, barriers, _ = kernel_call.split(
        refs, len(arrays), count + 3, ins, outs
    )
    *d_arrays, d_carry_ref, d_params_ref, d_restart_ref = out_refs
    walk = kernel_call.walk(plan, not plan.reverse)
    read = lambda ref: tuple(
        walk.read(ref, i, walk.batch) for i in range(states)
    )
    theta = tuple(walk.read(params, k) for k in range(plan.params))
    first = read(carry)
    flags = flags if plan.flags else None
    restart = read(restart) if plan.flags else None
    walk.prefetch(ins, inputs, in_rings, barriers)
    first_time = layout.time - 1 if plan.reverse else 0

    def wave(k, state):
      d_carry, d_theta, d_restart = state
      block = step_flags.Block(walk, flags, k)
      walk.wait(barriers, k)
      given, cotangents = [], []
      for i, values in enumerate(walk.rows(in_rings, k)):
        row, values = values[:gates], values[gates:]
        start, g = values[:states], values[states:]
        is_first = walk.time(k, i) == first_time
        start = step_flags.select(is_first, first, start)
        start = step_flags.select(block.restarts(i), restart, start)
        given.append((row, start))
        cotangents.append(g)
      out = []
      pullbacks = pointwise.map_rows(linearise, theta, given, accuracy)
      for i, (g, pullback) in enumerate(
          zip(cotangents, pullbacks, strict=True)
      ):
        seen = tuple(map(jnp.add, d_carry, g))
        d_carry = (*seen, *d_carry[outputs:])
        zeros = (0.0,) * states
        d_new = step_flags.select(block.idle(i), zeros, d_carry)
        d_params, d_row, d_start = pointwise.pull(pullback, d_new, accuracy)
        d_carry = step_flags.select(block.idle(i), d_carry, d_start)
        d_theta = tuple(map(jnp.add, d_theta, d_params))
        if plan.flags:
          d_in = step_flags.select(block.restarts(i), d_carry, zeros)
          d_restart = tuple(map(jnp.add, d_restart, d_in))
          d_carry = step_flags.select(block.restarts(i), zeros, d_carry)
        out.append(d_row)
      walk.write(outs, d_arrays, out_rings, k, out)
      walk.refill(ins, inputs, in_rings, barriers, k)
      return d_carry, d_theta, d_restart

    d_carry = read(d_last)
    zero = time_blocks.zeros()
    d_theta = tuple(zero for _ in theta)
    d_restart = (zero,) * states if plan.flags else ()
    d_carry, d_theta, d_restart = lax.fori_loop(
        0, walk.waves, wave, (d_carry, d_theta, d_restart)
    )
    for i, value in enumerate(d_carry):
      d_carry_ref[i, walk.batch, walk.features] = value
    for i, value in enumerate(d_theta):
      d_params_ref[walk.batch, i, walk.features] = value
    for i, value in enumerate(d_restart):
      d_restart_ref[i, walk.batch, walk.features] = value
    plgpu.wait_smem_to_gmem(0)

  small = jax.ShapeDtypeStruct(carry.shape, jnp.float32)
  batch, padded = layout.batch, layout.padded
  d_params = (batch, max(plan.params, 1), padded)
  *d_arrays, d_carry, d_params, d_restart = kernel_call.kernel(
      plan,
      body,
      'diagonal_recurrence_adjoint',
      ins,
      outs,
      (
          *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:count]),
          small,
          jax.ShapeDtypeStruct(d_params, jnp.float32),
          small,
      ),
  )(params, carry, restart, flags, d_last, *arrays)
  return tuple(map(layout.narrow, d_arrays)), d_carry, d_params, d_restart
