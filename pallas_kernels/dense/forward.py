"""The kernel that runs a dense recurrence.

All CTAs of a head hand the operand of each product to each other. Within a CTA
or cluster that goes through shared memory; the time of one step, downwards:

    threads and tensor cores               under way meanwhile
    -------------------------------------  -----------------------------------
    gather sums of R h[t]                  x[t+1] ... x[t+S-1] -> ring buffer
    update: h[t+1] -> operand slot
    wait: this thread's copies of x[t+1]
    ======= barrier of the CTA ==========
    send h[t+1] to the peers               h[t+1] -> peers' operand slots
    rest of update; store y, copy x[t+S]   y[t] -> staging, y[t-1] -> memory
    wait: mbarrier, all of h[t+1] is here
    multiply R h[t+1]

(One CTA alone sends nothing and multiplies right after the barrier.) Over the
device it goes through an exchange, an array in device memory:

    threads and tensor cores               under way meanwhile
    -------------------------------------  -----------------------------------
    poll h[t] -> operand                   x[t+1] ... x[t+S-2] -> ring buffer
    start copying x[t+S-1], wait for x[t]
    ======= barrier of the CTA ==========
    multiply R h[t], gather sums
    sentinel -> slot of h[t-1]
    update: publish h[t+1]                 h[t+1] -> exchange (L2)
    write y[t]                             y[t] -> device memory

Where warps poll the operand straight into registers (`polled_fragments.py`), h
before the first step is published like all others, each warp polls while it
multiplies, and the only barrier of a step is that which gathers the sums.

Where a cell adds x + b to R h, and a warp has whole sums of eight columns in 16
bits, these start from there (`gate_sums.py`).

A cell with an operand u of its own has a second product in each step, R' u,
whose operand is handed over in the same way between the two.
"""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dense import forward_loops
from pallas_kernels.dense import forward_step
from pallas_kernels.dense import gmem_io
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import streams as streams_lib

Array = jax.Array


@functools.partial(jax.jit, static_argnums=0)
def forward(
    plan: plan_lib.Plan,
    theta: Array,
    x: Array,
    matrix: Sequence[Array],
    carry: Array,
    restart: Array,
    flags: Array | None,
) -> tuple[tuple[Array, ...], Array, tuple[Array, ...], Array | None]:
  """Runs the recurrence.

  Args:
    plan: static facts of the kernel.
    theta: float32 [plan.params or 1, F].
    x: the inputs, [B, T, G, F].
    matrix: R transposed, [G', N, D, D] indexed [gate, head, to, from], in 16
      bits; two of them for the parts of float32.
    carry: carry before the first step, float32 [S, B, F].
    restart: carry after a reset, float32 [S, B, F].
    flags: int32 [T, 1 or 2, B'], as `prepare_flags` returns them, or None.

  Returns:
    The first `plan.call.outputs` arrays of the carry after every step, each [B,
    T, F]; the carry after the last step, [S, B, F]; with `plan.save`, the
    carries that every step starts from, h in `plan.dtype` [N, B, T, 1, D] and
    the others in float32, each [B, T, F]; and, with `plan.save`, the operand of
    the second product, [N, B, T, 1, D], if there is one.
  """
  first = again = carry[0]
  if plan.config.through_device:  # Rounded as an exchange rounds.
    first = again = kernel_call.without_sentinel(carry[0], plan.dtype)
    if plan.flags:
      again = kernel_call.without_sentinel(restart[0], plan.dtype)
  inputs = forward_step.Inputs(
      theta_gmem=theta,
      carry_gmem=carry,
      restart_gmem=restart,
      first_gmem=first,
      again_gmem=again,
      matrix_gmem=tuple(matrix),
      streams_gmem=streams_lib.ForwardInputs(x, flags),
  )
  out_type = forward_step.Outputs(
      streams_gmem=kernel_call.stream_types(plan),
      last_gmem=jax.ShapeDtypeStruct(carry.shape, jnp.float32),
      exchanges_gmem=kernel_call.exchange_types(plan),
  )

  def body(ins, outs, smem):
    steps = forward_step.Steps(plan, ins, smem)
    if plan.config.through_device:
      last = forward_loops.over_device(steps, ins, outs)
    else:
      last = forward_loops.within_cluster(steps, outs, smem)
    gmem_io.write_rows(steps.cta, outs.last_gmem, last)

  kernel = kernel_call.kernel(plan, 'dense_recurrence', body, inputs, out_type)
  results = kernel(*jax.tree.leaves(inputs))
  outs = jax.tree.unflatten(jax.tree.structure(out_type), results)
  streams = outs.streams_gmem
  return streams.carries, outs.last_gmem, streams.starts, streams.operand
