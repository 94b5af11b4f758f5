"""Linear recurrences: h_t = a_t h_{t-1} + b_t, at the speed of memory.

(a_t, b_t) come from `plan.step(params, inputs_t)`, a pointwise function that is
traced into the kernel, so a cell's gates are computed where they are used
and only its pre-activations and h cross device memory. For a plain scan it is
the identity.

Time is shared out at two levels:

* Warpgroups of a CTA have a block of steps each. They compute (a, b) of all
  steps in it on their own, and take turns for the recurrence itself, which is
  one operation a step (`turns.py`).
* Where batch and features alone do not fill the card, CTAs share out a
  sequence. A stretch of steps amounts to one affine map h -> A h + B (Martin
  and Cundy, 2018); CTAs tell each other theirs through device memory, so that
  each knows the h that it starts from (`segments.py`).

The adjoint is a recurrence of the same kind in the other direction. With
λ_t = g_t + μ_{t+1} and μ_t = a_t λ_t,

    μ_t = a_t μ_{t+1} + a_t g_t,    da_t = λ_t h_{t-1},    db_t = λ_t,

and the inputs' gradients follow from da and db by the derivative of
the step.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import pointwise
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import handoff_ctas
from pallas_kernels.streaming import handoff_warpgroups
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import time_blocks

Array = jax.Array
Plan = kernel_call.Plan


def forward(
    plan: Plan,
    params: Array,
    arrays: Sequence[Array],
    h0: Array,
    restart: Array,
    flags: Array,
    out_dtype: Any,
) -> tuple[Array, Array]:
  """Runs the recurrence.

  Args:
    plan: what is static.
    params: [plan.params, Fp], with Fp the padded features.
    arrays: the inputs, each [B, T, F] or [B, T, G, F].
    h0: [B, Fp].
    restart: what a reset restarts from, [B, Fp].
    flags: int32 [B, T], bits RESET and HOLD. Without `plan.flags` neither they
      nor `restart` are read, without `plan.params` not `params`, without
      `plan.carry` not h0, without `plan.restart` not `restart`.
    out_dtype: dtype of h.

  Returns:
    h, [B, T, F], and h after the last step, float32 [B, Fp].
  """
  layout, config = plan.layout, plan.config
  arrays = [layout.widen(x) for x in arrays]
  ins = time_blocks.streams_of(arrays)
  outs = (time_blocks.Stream(0, None, out_dtype),)
  mailboxes = handoff_ctas.mailboxes(plan)
  accuracy = kernel_call.accuracy(plan)

  def body(params, h0, restart, flags, *refs):
    inputs, (h_ref, last_ref, *mailbox), rings, out_rings, barriers, scratch = (
        kernel_call.split(refs, len(arrays), 2 + len(mailboxes), ins, outs)
    )
    walk = kernel_call.walk(plan, plan.reverse)
    theta, restart, flags = handoff_ctas.small(
        plan, walk, params, restart, flags
    )

    def find(k):
      block = step_flags.Block(walk, flags, k)
      pairs = pointwise.map_rows(
          plan.step, theta, walk.rows(rings, k), accuracy
      )
      return [block.map(i, pair, restart) for i, pair in enumerate(pairs)]

    walk.prefetch(ins, inputs, rings, barriers)
    handoff = handoff_ctas.handoff(walk, barriers, find, scratch, mailbox)

    def wave(k, h):
      handoff.arrive(k)
      maps = find(k)
      h = handoff.before(k, h)
      out = []
      for pair in maps:
        h = affine_maps.step(pair, h)
        out.append((h,))
      h = handoff.after(h)
      walk.write(outs, (h_ref,), out_rings, k, out)
      walk.refill(ins, inputs, rings, barriers, k)
      return h

    h = handoff_ctas.initial(walk, h0, plan.carry)
    handoff.begin(h)
    h = lax.fori_loop(0, walk.waves, wave, h)
    handoff.end()
    handoff_ctas.leave(walk, last_ref, h)
    plgpu.wait_smem_to_gmem(0)

  padded = layout.padded
  h, last, *_ = kernel_call.kernel(
      plan,
      body,
      'linear_recurrence',
      ins,
      outs,
      (
          jax.ShapeDtypeStruct(layout.shape, out_dtype),
          jax.ShapeDtypeStruct((layout.batch, padded), jnp.float32),
          *mailboxes,
      ),
      handoff_warpgroups.types(config),
  )(params, h0, restart, flags, *arrays)
  return layout.narrow(h), last


def backward(
    plan: Plan,
    params: Array,
    arrays: Sequence[Array],
    h: Array,
    h0: Array,
    restart: Array,
    flags: Array,
    d_h: Array,
    d_last: Array,
) -> tuple[tuple[Array, ...], Array, Array, Array]:
  """Runs the adjoint of `forward`.

  Args:
    plan: as for `forward`, except `config`.
    params: as for `forward`.
    arrays: as for `forward`.
    h: what `forward` returned.
    h0: as for `forward`.
    restart: as for `forward`.
    flags: as for `forward`.
    d_h: cotangent of h, [B, T, F].
    d_last: cotangent of the last h, float32 [B, Fp].

  Returns:
    The cotangents of `arrays`, of h0 [B, Fp], and, to be summed over the P
    segments and warpgroups, of the parameters [B, P, plan.params, Fp] and of
    `restart` [B, P, Fp].
  """
  layout, config = plan.layout, plan.config
  *arrays, h, d_h = (layout.widen(x) for x in (*arrays, h, d_h))
  count = len(arrays)
  # h_{t-1} is h, read one step of the forward loop earlier.
  shift = 1 if plan.reverse else -1
  previous = time_blocks.Stream(count, None, h.dtype, shift)
  cotangent = time_blocks.Stream(count + 1, None, d_h.dtype)
  outs = time_blocks.streams_of(arrays)
  mailboxes = handoff_ctas.mailboxes(plan)
  accuracy = kernel_call.accuracy(plan)
  for_adjoint = needed(plan.step, plan.params, len(outs))
  some = lambda needed: tuple(s for s, n in zip(outs, needed, strict=True) if n)
  ins = (*some(for_adjoint), previous, cotangent)

  def expand(rows, needed):
    """Puts zeros where inputs are not read; returns inputs and the rest."""
    zero = time_blocks.zeros()
    for values in map(iter, rows):
      row = tuple(next(values) if need else zero for need in needed)
      yield row, *values

  def factors(factors_of_rows, cotangents, block):
    """Returns a, and the adjoint's maps, of each step in a block."""
    maps, kept = [], []
    for i, (a, g) in enumerate(zip(factors_of_rows, cotangents, strict=True)):
      (a,) = step_flags.select(block.idle(i), (1.0,), (a,))
      pair = step_flags.select(block.restarts(i), (0.0, 0.0), (a, a * g))
      maps.append(pair)
      kept.append(a)
    return kept, maps

  def linearise(theta, row):
    return jax.vjp(plan.step, theta, row)

  def pull(_, given):
    pullback, d_pair = given
    return pullback(d_pair)

  def body(params, h0, restart, flags, d_last, *refs):
    inputs, out_refs, rings, out_rings, barriers, scratch = kernel_call.split(
        refs, count + 2, count + 3 + len(mailboxes), ins, outs
    )
    d_arrays, out_refs = out_refs[:count], out_refs[count:]
    d_h0_ref, d_params_ref, d_restart_ref, *mailbox = out_refs
    walk = kernel_call.walk(plan, not plan.reverse)
    theta, restart, flags = handoff_ctas.small(
        plan, walk, params, restart, flags
    )
    h0 = handoff_ctas.initial(walk, h0, plan.carry)

    def find(k):
      block = step_flags.Block(walk, flags, k)
      rows, _, cotangents = zip(
          *expand(walk.rows(rings, k), for_adjoint), strict=True
      )
      pairs = pointwise.map_rows(plan.step, theta, rows, accuracy)
      return factors([a for a, _ in pairs], cotangents, block)[1]

    walk.prefetch(ins, inputs, rings, barriers)
    handoff = handoff_ctas.handoff(walk, barriers, find, scratch, mailbox)
    first_time = layout.time - 1 if plan.reverse else 0

    def wave(k, state):
      mu, d_theta, d_restart = state
      handoff.arrive(k)
      block = step_flags.Block(walk, flags, k)
      rows, befores, cotangents = zip(
          *expand(walk.rows(rings, k), for_adjoint), strict=True
      )
      values = pointwise.map_rows(linearise, theta, rows, accuracy)
      scales, maps = factors([a for (a, _), _ in values], cotangents, block)
      mu = handoff.before(k, mu)
      adjoints = []
      for pair, g in zip(maps, cotangents, strict=True):
        adjoints.append(g + mu)
        mu = affine_maps.step(pair, mu)
      mu = handoff.after(mu)
      given = []
      for i, (_, pullback) in enumerate(values):
        adjoint = adjoints[i]
        is_first = walk.time(k, i) == first_time
        (before,) = step_flags.select(is_first, (h0,), (befores[i],))
        (before,) = step_flags.select(block.restarts(i), (restart,), (before,))
        d_pair = step_flags.select(
            block.idle(i), (0.0, 0.0), (adjoint * before, adjoint)
        )
        given.append((pullback, d_pair))
        if plan.flags:
          d_in = (scales[i] * adjoint,)
          (d_in,) = step_flags.select(block.restarts(i), d_in, (0.0,))
          d_restart = d_restart + d_in
      out = []
      for d_params, d_row in pointwise.map_rows(pull, (), given, accuracy):
        d_theta = tuple(map(jnp.add, d_theta, d_params))
        out.append(d_row)
      walk.write(outs, d_arrays, out_rings, k, out)
      walk.refill(ins, inputs, rings, barriers, k)
      return mu, d_theta, d_restart

    mu = walk.read(d_last, walk.batch)
    handoff.begin(mu)
    zero = time_blocks.zeros()
    d_theta = tuple(zero for _ in theta)
    state = (mu, d_theta, zero if plan.flags else ())
    mu, d_theta, d_restart = lax.fori_loop(0, walk.waves, wave, state)
    handoff.end()
    handoff_ctas.leave(walk, d_h0_ref, mu)
    part = walk.segment * config.warpgroups + walk.warpgroup
    for k, value in enumerate(d_theta):
      d_params_ref[walk.batch, part, k, walk.features] = value
    if plan.flags:
      d_restart_ref[walk.batch, part, walk.features] = d_restart
    plgpu.wait_smem_to_gmem(0)

  batch, padded = layout.batch, layout.padded
  parts = (batch, config.segments * config.warpgroups)
  shapes = (
      (batch, padded),
      (*parts, max(plan.params, 1), padded),
      (*parts, padded),
  )
  results = kernel_call.kernel(
      plan,
      body,
      'linear_recurrence_adjoint',
      ins,
      outs,
      (
          *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays),
          *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
          *mailboxes,
      ),
      handoff_warpgroups.types(config),
  )(params, h0, restart, flags, d_last, *arrays, h, d_h)
  d_arrays, (d_h0, d_params, d_restart, *_) = results[:count], results[count:]
  return tuple(map(layout.narrow, d_arrays)), d_h0, d_params, d_restart


def needed(step, params: int, inputs: int) -> list[bool]:
  """Returns which inputs of a step the adjoint reads.

  Args:
    step: (params, inputs) -> (a, b).
    params: how many per-feature parameters there are.
    inputs: how many inputs there are.
  """
  lane = jax.ShapeDtypeStruct((time_blocks.LANES,), jnp.float32)

  def adjoint(params, cotangents, row):
    (a, _), pull = jax.vjp(step, params, row)
    return a, pull(cotangents)

  avals = (lane,) * params, (lane, lane), (lane,) * inputs
  return pointwise.used(adjoint, *avals)[-inputs:]
