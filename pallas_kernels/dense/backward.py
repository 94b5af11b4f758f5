"""The kernel that runs the adjoint of a dense recurrence.

The loop runs against the order of the recurrence. A step is
linearised one step ahead, while a hand-off is under way. Within a
CTA or cluster the time of one step is, downwards:

    threads and tensor cores               under way meanwhile
    -------------------------------------  -----------------------------------
    pull the cotangent d_c[t] back through the update of step t
    d_gates -> operand slot; wait for inputs of step t + 1
    ======= barrier of the CTA ==========
    send d_gates to the peers              d_gates -> peers' operand slots
    store d_x, copy inputs, linearise t+1  d_x -> staging -> device memory
    wait: mbarrier, all d_gates are here
    multiply R' d_gates, gather sums
    add up d_c[t + 1]

(One CTA alone sends nothing and multiplies right after the barrier.) Over the
device:

    threads and tensor cores               under way meanwhile
    -------------------------------------  -----------------------------------
    pull the cotangent d_c[t] back through the update of step t
    publish d_gates                        d_gates -> exchange (L2)
    write d_x, linearise t + 1             d_x -> device memory
    poll d_gates of all -> operand
    ======= barrier of the CTA ==========
    multiply R' d_gates, gather sums
    sentinel -> slot of step t - 1
    add up d_c[t + 1]

Where warps poll the operand straight into registers (`polled_fragments.py`),
each polls while it multiplies, and the only barrier is that which gathers sums.

A cell with an operand u of its own has a first hand-off and product inside the
pull, which give the cotangent of u.
"""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dense import backward_loops
from pallas_kernels.dense import backward_step
from pallas_kernels.dense import gmem_io
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import streams as streams_lib

Array = jax.Array


@functools.partial(jax.jit, static_argnums=0)
def backward(
    plan: plan_lib.Plan,
    theta: Array,
    x: Array,
    h_gates: Sequence[Array],
    starts: Sequence[Array],
    matrix: Sequence[Array],
    again: Sequence[Array],
    flags: Array | None,
    d_carries: Sequence[Array],
    d_last: Array,
) -> tuple[Array, Sequence[Array], Array, Array, Array]:
  """Runs the adjoint of `forward`.

  Args:
    plan: static facts of the kernel, with `adjoint`.
    theta: as for `forward`.
    x: as for `forward`.
    h_gates: the recurrent gates of every step, [N, B, T, G', D], those of the
      second product apart from those of the first, float32; none with
      `plan.again`.
    starts: the carries that every step starts from, as `forward` returns them.
    matrix: R, [G', N, D, D] indexed [gate, head, from, to], as for `forward`.
    again: with `plan.again`, R transposed as `forward` gets it, else nothing.
    flags: as for `forward`.
    d_carries: cotangents of the first of the carries, each [B, T, F].
    d_last: cotangent of the last carry, float32 [S, B, F].

  Returns:
    The cotangents of x, [B, T, G, F]; of the recurrent gates, as `h_gates`, or
    nothing where these are those of x in the same order; of the carry before
    the first step, [S, B, F]; and, to be summed over the batch, of theta
    [P, B, F] and of the restart [S, B, F].
  """
  shape = plan.shape
  inputs = backward_step.Inputs(
      theta_gmem=theta,
      d_last_gmem=d_last,
      matrix_gmem=tuple(matrix),
      again_gmem=tuple(again),
      streams_gmem=streams_lib.AdjointInputs(
          x, tuple(h_gates), tuple(starts), tuple(d_carries), flags
      ),
  )
  rows = lambda n: jax.ShapeDtypeStruct(
      (n, shape.batch, shape.features), jnp.float32
  )
  out_type = backward_step.Outputs(
      streams_gmem=kernel_call.stream_types(plan),
      d_carry_gmem=rows(plan.states),
      d_theta_gmem=rows(max(plan.params, 1)),
      d_restart_gmem=rows(plan.states),
      exchanges_gmem=kernel_call.exchange_types(plan),
  )

  def body(ins, outs, smem):
    steps = backward_step.Steps(plan, ins, smem)
    if plan.config.through_device:
      sums = backward_loops.over_device(steps, outs)
    else:
      sums = backward_loops.within_cluster(steps, outs, smem)
    gmem_io.write_rows(steps.cta, outs.d_carry_gmem, sums.d_carry)
    gmem_io.write_rows(steps.cta, outs.d_theta_gmem, sums.d_theta)
    gmem_io.write_rows(steps.cta, outs.d_restart_gmem, sums.d_restart)

  name = 'dense_recurrence_adjoint'
  kernel = kernel_call.kernel(plan, name, body, inputs, out_type)
  results = kernel(*jax.tree.leaves(inputs))
  outs = jax.tree.unflatten(jax.tree.structure(out_type), results)
  return (
      outs.streams_gmem.d_x,
      outs.streams_gmem.d_gates,
      outs.d_carry_gmem,
      outs.d_theta_gmem,
      outs.d_restart_gmem,
  )
