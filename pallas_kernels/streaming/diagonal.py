"""Diagonal recurrences: every feature on its own, its carry in registers.

carry_t = plan.step(theta, inputs_t, carry_{t-1}), pointwise and not linear, so
time is sequential and the latency of one step decides. Each thread has one
feature of one batch row: its carry never leaves the registers, inputs arrive by
TMA several blocks ahead and carries leave the same way. Enough threads to hide
the latency come from several CTAs on a multiprocessor.

The carries are all that is saved for the adjoint.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import blocks
from pallas_kernels.streaming import kernel_call

Array = jax.Array
Plan = kernel_call.Plan
Stream = blocks.Stream


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=('outputs', 'out_dtype')
)
def forward(
    plan: Plan,
    theta: Array,
    arrays: Sequence[Array],
    carry: Array,
    restart: Array,
    flags: Array,
    *,
    outputs: int,
    out_dtype: Any,
) -> tuple[tuple[Array, ...], Array]:
  """Runs the recurrence.

  Args:
    plan: the static arguments.
    theta: [plan.params, Fp], with Fp the padded features.
    arrays: the inputs, each [B, T, F] or [B, T, G, F].
    carry: before the first step, [S, B, Fp].
    restart: the carry after a reset, [S, B, Fp].
    flags: int32 [B, T], bits RESET and HOLD. Without `plan.has_flags` neither
      flags nor `restart` are read, without `plan.params` not theta.
    outputs: number of arrays of the carry that are returned for all steps.
    out_dtype: dtype of these.

  Returns:
    The first `outputs` carries, each [B, T, F], and the carry after the last
    step, float32 [S, B, Fp].
  """
  layout = plan.layout
  arrays = [layout.widen(x) for x in arrays]
  ins = blocks.streams_of(arrays)
  outs = tuple(Stream(i, None, out_dtype) for i in range(outputs))
  states = carry.shape[0]
  step = cells.legalize(plan.step, kernel_call.accuracy(plan))

  def body(theta, carry, restart, flags, *refs):
    refs = kernel_call.split(refs, len(arrays), outputs + 1, ins, outs)
    *out_refs, last_ref = refs.outputs
    walk = kernel_call.walk(plan, plan.reverse)
    inputs = blocks.Inputs(walk, ins, refs.arrays, refs.in_rings, refs.barriers)
    results = blocks.Outputs(walk, outs, out_refs, refs.out_rings)
    read = lambda ref: tuple(
        walk.read(ref, i, walk.batch) for i in range(states)
    )
    theta = tuple(walk.read(theta, k) for k in range(plan.params))
    flags = flags if plan.has_flags else None
    restart = read(restart) if plan.has_flags else None
    inputs.prefetch()

    def wave(k, carry):
      block = kernel_call.BlockFlags(walk, flags, k)
      out = []
      inputs.wait(k)
      for i, row in enumerate(inputs.rows(k)):
        start = step_flags.select(block.restarts(i), restart, carry)
        carry = step(theta, row, start)
        carry = step_flags.select(block.idle(i), start, carry)
        out.append(carry[:outputs])
      results.write(k, out)
      inputs.refill(k)
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
  )(theta, carry, restart, kernel_call.pack(plan, flags), *arrays)
  return tuple(map(layout.narrow, carries)), last


# The adjoint of `diagonal`, backwards in time.
#
# Each step is run again for the values that its derivative needs, so memory
# does not grow with the operations inside a step. That part needs no cotangent:
# it is done for all steps of a block at once, and its latency is hidden.


@functools.partial(jax.jit, static_argnums=0)
def backward(
    plan: Plan,
    theta: Array,
    arrays: Sequence[Array],
    carries: Sequence[Array],
    carry: Array,
    restart: Array,
    flags: Array,
    d_carries: Sequence[Array],
    d_last: Array,
) -> tuple[tuple[Array, ...], Array, Array, Array]:
  """Runs the adjoint of `diagonal.forward`.

  Args:
    plan: as for `forward`, except `config`.
    theta: as for `forward`, and so are arrays, carry, restart and flags.
    arrays: each [B, T, F] or [B, T, G, F].
    carries: all arrays of the carry after every step, each [B, T, F].
    carry: [S, B, Fp].
    restart: [S, B, Fp].
    flags: int32 [B, T].
    d_carries: cotangents of the first of `carries`, each [B, T, F].
    d_last: cotangent of the last carry, float32 [S, B, Fp].

  Returns:
    The cotangents of `arrays`, of `carry` [S, B, Fp], and, to be summed over
    the batch, of theta [B, plan.params, Fp]; of `restart` [S, B, Fp].
  """
  layout = plan.layout
  states, outputs, count = len(carries), len(d_carries), len(arrays)
  arrays = [layout.widen(x) for x in (*arrays, *carries, *d_carries)]
  # The carry before a step is the one after the step before.
  shifts = [1 if plan.reverse else -1] * states + [0] * outputs
  outs = blocks.streams_of(arrays[:count])
  others = [
      Stream(count + i, None, x.dtype, shift)
      for i, (x, shift) in enumerate(zip(arrays[count:], shifts, strict=True))
  ]
  adjoint = _Adjoint(
      plan=plan,
      ins=(*outs, *others),
      outs=outs,
      read=len(arrays),
      arrays=count,
      states=states,
      outputs=outputs,
  )
  small = jax.ShapeDtypeStruct(carry.shape, jnp.float32)
  d_theta = (layout.batch, max(plan.params, 1), layout.padded)
  *d_arrays, d_carry, d_theta, d_restart = kernel_call.kernel(
      plan,
      lambda *refs: adjoint.body(*refs),
      'diagonal_recurrence_adjoint',
      adjoint.ins,
      outs,
      (
          *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:count]),
          small,
          jax.ShapeDtypeStruct(d_theta, jnp.float32),
          small,
      ),
  )(theta, carry, restart, kernel_call.pack(plan, flags), d_last, *arrays)
  return tuple(map(layout.narrow, d_arrays)), d_carry, d_theta, d_restart


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Adjoint:
  """The kernel.

  Attributes:
    plan: the static arguments.
    ins: the streams that are read: inputs, carries and cotangents of carries.
    outs: the streams that are written: cotangents of inputs.
    read: number of arrays that hold `ins`.
    arrays: number of arrays that hold the inputs.
    states: number of arrays of the carry.
    outputs: number of these that have a cotangent.
  """

  plan: Plan
  ins: Sequence[Stream]
  outs: Sequence[Stream]
  read: int
  arrays: int
  states: int
  outputs: int

  def body(self, theta, carry, restart, flags, d_last, *refs):
    plan, states = self.plan, self.states
    accuracy = kernel_call.accuracy(plan)
    refs = kernel_call.split(
        refs, self.read, self.arrays + 3, self.ins, self.outs
    )
    *d_arrays, d_carry_ref, d_theta_ref, d_restart_ref = refs.outputs
    walk = kernel_call.walk(plan, not plan.reverse)
    inputs = blocks.Inputs(
        walk, self.ins, refs.arrays, refs.in_rings, refs.barriers
    )
    results = blocks.Outputs(walk, self.outs, d_arrays, refs.out_rings)
    read = lambda ref: tuple(
        walk.read(ref, i, walk.batch) for i in range(states)
    )
    theta = tuple(walk.read(theta, k) for k in range(plan.params))
    first = read(carry)
    flags = flags if plan.has_flags else None
    restart = read(restart) if plan.has_flags else None
    inputs.prefetch()

    def linearise(theta, given):
      row, start = given
      return jax.vjp(plan.step, theta, row, start)[1]

    def wave(k, state):
      d_carry, d_theta, d_restart = state
      block = kernel_call.BlockFlags(walk, flags, k)
      inputs.wait(k)
      given, cotangents = self._rows(inputs, k, block, first, restart)
      out = []
      pullbacks = cells.map_rows(linearise, theta, given, accuracy)
      for i, (g, pullback) in enumerate(
          zip(cotangents, pullbacks, strict=True)
      ):
        seen = tuple(map(jnp.add, d_carry, g))
        d_carry = (*seen, *d_carry[self.outputs :])
        zeros = (0.0,) * states
        d_new = step_flags.select(block.idle(i), zeros, d_carry)
        d_params, d_row, d_start = cells.pull(pullback, d_new, accuracy)
        d_carry = step_flags.select(block.idle(i), d_carry, d_start)
        d_theta = tuple(map(jnp.add, d_theta, d_params))
        if plan.has_flags:
          d_in = step_flags.select(block.restarts(i), d_carry, zeros)
          d_restart = tuple(map(jnp.add, d_restart, d_in))
          d_carry = step_flags.select(block.restarts(i), zeros, d_carry)
        out.append(d_row)
      results.write(k, out)
      inputs.refill(k)
      return d_carry, d_theta, d_restart

    d_carry = read(d_last)
    zero = blocks.zeros()
    d_theta = tuple(zero for _ in theta)
    d_restart = (zero,) * states if plan.has_flags else ()
    d_carry, d_theta, d_restart = lax.fori_loop(
        0, walk.waves, wave, (d_carry, d_theta, d_restart)
    )
    for i, value in enumerate(d_carry):
      d_carry_ref[i, walk.batch, walk.features] = value
    for i, value in enumerate(d_theta):
      d_theta_ref[walk.batch, i, walk.features] = value
    for i, value in enumerate(d_restart):
      d_restart_ref[i, walk.batch, walk.features] = value
    plgpu.wait_smem_to_gmem(0)

  def _rows(self, inputs, wave, block, first, restart):
    """Returns (inputs, carry before) and cotangents of each step in a block.

    Args:
      inputs: ring buffers.
      wave: of the block.
      block: its flags.
      first: the carry before the first step.
      restart: the carry after a reset.
    """
    walk, gates, states = inputs.walk, len(self.outs), self.states
    first_time = walk.layout.time - 1 if self.plan.reverse else 0
    given, cotangents = [], []
    for i, values in enumerate(inputs.rows(wave)):
      row, values = values[:gates], values[gates:]
      start, g = values[:states], values[states:]
      is_first = walk.time(wave, i) == first_time
      start = step_flags.select(is_first, first, start)
      start = step_flags.select(block.restarts(i), restart, start)
      given.append((row, start))
      cotangents.append(g)
    return given, cotangents
