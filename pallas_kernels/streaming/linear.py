"""Linear recurrences: h_t = a_t h_{t-1} + b_t, at the speed of memory.

(a_t, b_t) come from `plan.step(theta, inputs_t)`, a pointwise function that is
traced into the kernel. So a cell's gates are computed where they are used, and
only its pre-activations and h cross device memory. For a plain scan it is the
identity.

Time is shared out at two levels:

* Warpgroups of a CTA have a block of steps each. They compute (a, b) of all
  steps in it independently, and take turns for the recurrence itself, which is
  one operation a step (`handoff_warpgroups`).
* Where batch and features alone do not fill the device, CTAs share a sequence.
  A block of steps amounts to one affine map h -> A h + B (Martin and Cundy,
  2018); CTAs publish their maps in device memory, so that each can compute the
  h that it starts from (`handoff_ctas`).

The adjoint is in `linear_adjoint`.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import pointwise
from pallas_kernels.streaming import block_flags
from pallas_kernels.streaming import handoff_ctas
from pallas_kernels.streaming import handoff_warpgroups
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import ring_buffers
from pallas_kernels.streaming import small_operands
from pallas_kernels.streaming import streams

Array = jax.Array
Plan = kernel_call.Plan


@functools.partial(jax.jit, static_argnums=0, static_argnames='out_dtype')
def forward(
    plan: Plan,
    theta: Array,
    arrays: Sequence[Array],
    carry: Array,
    restart: Array,
    flags: Array,
    *,
    out_dtype: Any,
) -> tuple[Array, Array]:
  """Runs the recurrence.

  Args:
    plan: the static arguments.
    theta: [plan.params, Fp], with Fp the padded features.
    arrays: the inputs, each [B, T, F] or [B, T, G, F].
    carry: h before the first step, [B, Fp].
    restart: h after a reset, [B, Fp].
    flags: int32 [B, T], bits RESET and HOLD. Without `plan.has_flags` neither
      flags nor `restart` are read, without `plan.params` not theta, without
      `plan.has_carry` not `carry`, without `plan.has_restart` not `restart`.
    out_dtype: dtype of h.

  Returns:
    h, [B, T, F], and h after the last step, float32 [B, Fp].
  """
  layout = plan.layout
  arrays = [layout.widen(x) for x in arrays]
  ins = streams.streams_of(arrays)
  outs = (streams.Stream(0, None, out_dtype),)
  mailboxes = handoff_ctas.mailboxes(plan)
  accuracy = kernel_call.accuracy(plan)

  def body(theta, carry, restart, flags, *refs):
    refs = kernel_call.split(refs, len(arrays), 2 + len(mailboxes), ins, outs)
    h_ref, last_ref, *mailbox = refs.outputs
    walk = kernel_call.walk(plan, plan.reverse)
    inputs = ring_buffers.Inputs(
        walk, ins, refs.arrays, refs.in_rings, refs.barriers
    )
    results = ring_buffers.Outputs(walk, outs, (h_ref,), refs.out_rings)
    theta, restart, flags = small_operands.read(
        plan, walk, theta, restart, flags
    )

    def find(k):
      block = block_flags.BlockFlags(walk, flags, k)
      pairs = pointwise.map_rows(plan.step, theta, inputs.rows(k), accuracy)
      return block.maps(pairs, restart)

    inputs.prefetch()
    handoff = handoff_ctas.handoff(inputs, find, refs.scratch, mailbox)

    def wave(k, h):
      handoff.arrive(k)
      maps = find(k)
      h = handoff.before(k, h)
      out = []
      for pair in maps:
        h = affine_maps.step(pair, h)
        out.append((h,))
      h = handoff.after(h)
      results.write(k, out)
      inputs.refill(k)
      return h

    h = small_operands.initial(walk, carry, plan.has_carry)
    handoff.begin(h)
    h = lax.fori_loop(0, walk.waves, wave, h)
    handoff.end()
    small_operands.write_last(walk, last_ref, h)
    plgpu.wait_smem_to_gmem(0)

  h, last, *_ = kernel_call.kernel(
      plan,
      body,
      'linear_recurrence',
      ins,
      outs,
      (
          jax.ShapeDtypeStruct(layout.shape, out_dtype),
          jax.ShapeDtypeStruct((layout.batch, layout.padded), jnp.float32),
          *mailboxes,
      ),
      handoff_warpgroups.types(plan.config),
  )(theta, carry, restart, block_flags.pack(plan, flags), *arrays)
  return layout.narrow(h), last
