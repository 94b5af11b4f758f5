"""Diagonal recurrences: every feature on its own, its carry in registers.

carry_t = plan.step(theta, inputs_t, carry_{t-1}), pointwise and not linear, so
time is sequential and the latency of one step decides. Each thread has one
feature of one batch row: its carry never leaves the registers, inputs arrive by
TMA several blocks ahead and carries leave the same way. Enough threads to hide
the latency come from several CTAs on a multiprocessor.

The carries are all that is saved for the adjoint, in `diagonal_adjoint`.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import pointwise
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import block_flags
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import ring_buffers
from pallas_kernels.streaming import streams

Array = jax.Array
Plan = kernel_call.Plan
Stream = streams.Stream


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
  ins = streams.streams_of(arrays)
  outs = tuple(Stream(i, None, out_dtype) for i in range(outputs))
  states = carry.shape[0]
  step = pointwise.legalize(plan.step, kernel_call.accuracy(plan))

  def body(theta, carry, restart, flags, *refs):
    refs = kernel_call.split(refs, len(arrays), outputs + 1, ins, outs)
    *out_refs, last_ref = refs.outputs
    walk = kernel_call.walk(plan, plan.reverse)
    inputs = ring_buffers.Inputs(
        walk, ins, refs.arrays, refs.in_rings, refs.barriers
    )
    results = ring_buffers.Outputs(walk, outs, out_refs, refs.out_rings)
    read = lambda ref: tuple(
        walk.read(ref, i, walk.batch) for i in range(states)
    )
    theta = tuple(walk.read(theta, k) for k in range(plan.params))
    flags = flags if plan.has_flags else None
    restart = read(restart) if plan.has_flags else None
    inputs.prefetch()

    def wave(k, carry):
      block = block_flags.BlockFlags(walk, flags, k)
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
  )(theta, carry, restart, block_flags.pack(plan, flags), *arrays)
  return tuple(map(layout.narrow, carries)), last
