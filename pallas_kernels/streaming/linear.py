"""Linear recurrences: h_t = a_t h_{t-1} + b_t, at the speed of memory.

(a_t, b_t) come from `plan.step(theta, inputs_t)`, a pointwise function that is
traced into the kernel. So a cell's gates are computed where they are used, and
only its pre-activations and h cross device memory. For a plain scan it is the
identity.

Time is shared out at two levels:

* Warpgroups of a CTA have a block of steps each. They compute (a, b) of all
  steps in it independently, and take turns for the recurrence itself, which is
  one operation a step (`handoffs.py`).
* Where batch and features alone do not fill the device, CTAs share a sequence.
  A block of steps amounts to one affine map h -> A h + B (Martin and Cundy,
  2018); CTAs publish their maps in device memory, so that each can compute the
  h that it starts from.

"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import blocks
from pallas_kernels.streaming import handoffs
from pallas_kernels.streaming import kernel_call

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
  ins = blocks.streams_of(arrays)
  outs = (blocks.Stream(0, None, out_dtype),)
  mailboxes = handoffs.mailboxes(plan)
  accuracy = kernel_call.accuracy(plan)

  def body(theta, carry, restart, flags, *refs):
    refs = kernel_call.split(refs, len(arrays), 2 + len(mailboxes), ins, outs)
    h_ref, last_ref, *mailbox = refs.outputs
    walk = kernel_call.walk(plan, plan.reverse)
    inputs = blocks.Inputs(walk, ins, refs.arrays, refs.in_rings, refs.barriers)
    results = blocks.Outputs(walk, outs, (h_ref,), refs.out_rings)
    theta, restart, flags = kernel_call.read(plan, walk, theta, restart, flags)

    def find(k):
      block = kernel_call.BlockFlags(walk, flags, k)
      pairs = cells.map_rows(plan.step, theta, inputs.rows(k), accuracy)
      return block.maps(pairs, restart)

    inputs.prefetch()
    handoff = handoffs.handoff(inputs, find, refs.scratch, mailbox)

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

    h = kernel_call.initial(walk, carry, plan.has_carry)
    handoff.begin(h)
    h = lax.fori_loop(0, walk.waves, wave, h)
    handoff.end()
    kernel_call.write_last(walk, last_ref, h)
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
      handoffs.types(plan.config),
  )(theta, carry, restart, kernel_call.pack(plan, flags), *arrays)
  return layout.narrow(h), last


# The adjoint of `linear`: a recurrence of the same kind, backwards in time.
#
# With g_t the cotangent of h_t, λ_t = g_t + μ_{t+1} and μ_t = a_t λ_t,
#
#     μ_t = a_t μ_{t+1} + a_t g_t,    da_t = λ_t h_{t-1},    db_t = λ_t,
#
# and the cotangents of inputs and theta follow from da and db by the derivative
# of the step. So (a_t, a_t g_t) are the maps that warpgroups and CTAs hand on,
# exactly as in the forward kernel.


Stream = blocks.Stream


@functools.partial(jax.jit, static_argnums=0)
def backward(
    plan: Plan,
    theta: Array,
    arrays: Sequence[Array],
    h: Array,
    carry: Array,
    restart: Array,
    flags: Array,
    d_h: Array,
    d_last: Array,
) -> tuple[tuple[Array, ...], Array, Array, Array]:
  """Runs the adjoint of `linear.forward`.

  Args:
    plan: as for `forward`, except `config`.
    theta: as for `forward`, and so are arrays, carry, restart and flags.
    arrays: each [B, T, F] or [B, T, G, F].
    h: the result of `forward`, [B, T, F].
    carry: [B, Fp].
    restart: [B, Fp].
    flags: int32 [B, T].
    d_h: cotangent of h, [B, T, F].
    d_last: cotangent of the last h, float32 [B, Fp].

  Returns:
    The cotangents of `arrays`, of `carry` [B, Fp], and, to be summed over the P
    segments and warpgroups, of theta [B, P, plan.params, Fp] and of `restart`
    [B, P, Fp].
  """
  layout, config = plan.layout, plan.config
  *arrays, h, d_h = (layout.widen(x) for x in (*arrays, h, d_h))
  count = len(arrays)
  # h_{t-1} is h, read one step of the forward loop earlier.
  shift = 1 if plan.reverse else -1
  outs = blocks.streams_of(arrays)
  reads = needed(plan.step, plan.params, len(outs))
  adjoint = _Adjoint(
      plan=plan,
      ins=(
          *(s for s, read in zip(outs, reads, strict=True) if read),
          Stream(count, None, h.dtype, shift),
          Stream(count + 1, None, d_h.dtype),
      ),
      outs=outs,
      reads=tuple(reads),
      arrays=count,
      mailboxes=len(handoffs.mailboxes(plan)),
  )
  batch, padded = layout.batch, layout.padded
  parts = (batch, config.segments * config.warpgroups)
  shapes = (
      (batch, padded),
      (*parts, max(plan.params, 1), padded),
      (*parts, padded),
  )
  results = kernel_call.kernel(
      plan,
      lambda *refs: adjoint.body(*refs),
      'linear_recurrence_adjoint',
      adjoint.ins,
      outs,
      (
          *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays),
          *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
          *handoffs.mailboxes(plan),
      ),
      handoffs.types(config),
  )(
      theta,
      carry,
      restart,
      kernel_call.pack(plan, flags),
      d_last,
      *arrays,
      h,
      d_h,
  )
  d_arrays, (d_carry, d_theta, d_restart, *_) = results[:count], results[count:]
  return tuple(map(layout.narrow, d_arrays)), d_carry, d_theta, d_restart


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Adjoint:
  """The kernel.

  Attributes:
    plan: the static arguments.
    ins: the streams that are read: some inputs, h_{t-1} and g.
    outs: the streams that are written: cotangents of all inputs.
    reads: for each input, whether it is read.
    arrays: number of arrays that hold the inputs.
    mailboxes: number of arrays that CTAs hand h on through.
  """

  plan: Plan
  ins: Sequence[Stream]
  outs: Sequence[Stream]
  reads: Sequence[bool]
  arrays: int
  mailboxes: int

  def body(self, theta, carry, restart, flags, d_last, *refs):
    plan, count = self.plan, self.arrays
    accuracy = kernel_call.accuracy(plan)
    refs = kernel_call.split(
        refs, count + 2, count + 3 + self.mailboxes, self.ins, self.outs
    )
    d_arrays, out_refs = refs.outputs[:count], refs.outputs[count:]
    d_carry_ref, d_theta_ref, d_restart_ref, *mailbox = out_refs
    walk = kernel_call.walk(plan, not plan.reverse)
    inputs = blocks.Inputs(
        walk, self.ins, refs.arrays, refs.in_rings, refs.barriers
    )
    results = blocks.Outputs(walk, self.outs, d_arrays, refs.out_rings)
    theta, restart, flags = kernel_call.read(plan, walk, theta, restart, flags)
    carry = kernel_call.initial(walk, carry, plan.has_carry)

    def find(k):
      block = kernel_call.BlockFlags(walk, flags, k)
      rows, _, cotangents = self._rows(inputs, k)
      pairs = cells.map_rows(plan.step, theta, rows, accuracy)
      return _maps([a for a, _ in pairs], cotangents, block)

    inputs.prefetch()
    handoff = handoffs.handoff(inputs, find, refs.scratch, mailbox)
    first_time = plan.layout.time - 1 if plan.reverse else 0

    def linearise(theta, row):
      return jax.vjp(plan.step, theta, row)

    def wave(k, state):
      mu, d_theta, d_restart = state
      handoff.arrive(k)
      block = kernel_call.BlockFlags(walk, flags, k)
      rows, befores, cotangents = self._rows(inputs, k)
      values = cells.map_rows(linearise, theta, rows, accuracy)
      scales = [a for (a, _), _ in values]
      maps = _maps(scales, cotangents, block)
      mu = handoff.before(k, mu)
      lambdas = []
      for pair, g in zip(maps, cotangents, strict=True):
        lambdas.append(g + mu)
        mu = affine_maps.step(pair, mu)
      mu = handoff.after(mu)
      befores = [
          jnp.where(walk.time(k, i) == first_time, carry, before)
          for i, before in enumerate(befores)
      ]

      def with_flags():
        d_pairs, d_sum = [], d_restart
        for i, (mu_i, before) in enumerate(zip(lambdas, befores, strict=True)):
          restarts, idle = block.restarts(i), block.idle(i)
          (before,) = step_flags.select(restarts, (restart,), (before,))
          d_pairs.append(
              step_flags.select(idle, (0.0, 0.0), (mu_i * before, mu_i))
          )
          if plan.has_flags:
            (a,) = step_flags.select(idle, (1.0,), (scales[i],))
            d_in = step_flags.select(restarts, (a * mu_i,), (0.0,))
            d_sum = d_sum + d_in[0]
        return d_pairs, d_sum

      def without():
        pairs = zip(lambdas, befores, strict=True)
        return [(mu_i * before, mu_i) for mu_i, before in pairs], d_restart

      d_pairs, d_restart = block.either(with_flags, without)
      given = [
          (pullback, d_pair)
          for (_, pullback), d_pair in zip(values, d_pairs, strict=True)
      ]
      out = []
      for d_params, d_row in cells.map_rows(_pull, (), given, accuracy):
        d_theta = tuple(map(jnp.add, d_theta, d_params))
        out.append(d_row)
      results.write(k, out)
      inputs.refill(k)
      return mu, d_theta, d_restart

    mu = walk.read(d_last, walk.batch)
    handoff.begin(mu)
    zero = blocks.zeros()
    d_theta = tuple(zero for _ in theta)
    state = (mu, d_theta, zero if plan.has_flags else ())
    mu, d_theta, d_restart = lax.fori_loop(0, walk.waves, wave, state)
    handoff.end()
    kernel_call.write_last(walk, d_carry_ref, mu)
    part = walk.segment * plan.config.warpgroups + walk.warpgroup
    for k, value in enumerate(d_theta):
      d_theta_ref[walk.batch, part, k, walk.features] = value
    if plan.has_flags:
      d_restart_ref[walk.batch, part, walk.features] = d_restart
    plgpu.wait_smem_to_gmem(0)

  def _rows(self, inputs: blocks.Inputs, wave):
    """Returns inputs, h_{t-1} and g of each step in a block.

    Inputs that are not read are zeros.
    """
    rows = inputs.rows(wave)
    zero = blocks.zeros()
    whole = []
    for values in map(iter, rows):
      row = tuple(next(values) if read else zero for read in self.reads)
      whole.append((row, *values))
    return zip(*whole, strict=True)


def _maps(scales, cotangents, block: kernel_call.BlockFlags):
  """Returns the adjoint's maps of each step in a block.

  Args:
    scales: a of each step without flags.
    cotangents: g of each step.
    block: the flags.
  """
  pairs = list(zip(scales, cotangents, strict=True))

  def with_flags():
    maps = []
    for i, (a, g) in enumerate(pairs):
      (a,) = step_flags.select(block.idle(i), (1.0,), (a,))
      maps.append(step_flags.select(block.restarts(i), (0.0, 0.0), (a, a * g)))
    return maps

  return block.either(with_flags, lambda: [(a, a * g) for a, g in pairs])


def _pull(_, given):
  pullback, d_pair = given
  return pullback(d_pair)


def needed(step: Callable[..., Any], params: int, inputs: int) -> list[bool]:
  """Returns for each input of a step whether the adjoint reads it.

  Args:
    step: (theta, inputs) -> (a, b).
    params: number of per-feature parameters.
    inputs: number of inputs.
  """
  lane = jax.ShapeDtypeStruct((blocks.LANES,), jnp.float32)

  def adjoint(theta, cotangents, row):
    (a, _), pull = jax.vjp(step, theta, row)
    return a, pull(cotangents)

  avals = (lane,) * params, (lane, lane), (lane,) * inputs
  return cells.used(adjoint, *avals)[-inputs:]
