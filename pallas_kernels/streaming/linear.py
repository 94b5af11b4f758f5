"""Linear recurrences: h_t = a_t h_{t-1} + b_t, at the speed of memory.

(a_t, b_t) come from `plan.step(theta, inputs_t)`, a pointwise function that is
traced into the kernel. So a cell's gates are computed where they are used, and
only its pre-activations and h cross device memory. For a plain scan it is the
identity.

Time is shared out at two levels:

* Warpgroups of a CTA have a block of steps each. They compute (a, b) of all
  steps in it independently, and take turns for the recurrence itself, which is
  one operation a step (`handoffs.py`).
* If batch and features alone do not fill the device, CTAs share a sequence.
  A block of steps amounts to one affine map h -> A h + B (Martin and Cundy,
  2018); CTAs publish their maps in device memory, so that each can compute the
  h that it starts from.

"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
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
    plan: Plan, operands: kernel_call.Operands, *, out_dtype: Any
) -> tuple[Array, Array]:
  """Runs the recurrence.

  Args:
    plan: the static arguments.
    operands: without `plan.has_flags` neither flags nor restart are read,
      without `plan.params` not theta, without `plan.has_carry` not the carry,
      without `plan.has_restart` not restart.
    out_dtype: dtype of h.

  Returns:
    h, [B, T, F], and h after the last step, float32 [B, Fp].
  """
  layout = plan.layout
  accuracy = kernel_call.accuracy(plan)

  def body(loop, theta, carry, restart):
    last, *mailbox = loop.others
    theta = loop.theta(theta)
    if plan.has_flags:
      restart = _initial(loop.walk, restart, plan.has_restart)

    def find(k):
      block = loop.flags(k)
      pairs = cells.map_rows(plan.step, theta, loop.inputs.rows(k), accuracy)
      return block.maps(pairs, restart)

    loop.inputs.prefetch()
    handoff = handoffs.handoff(loop.inputs, find, loop.scratch, mailbox)

    def wave(k, h):
      handoff.arrive(k)
      maps = find(k)
      h = handoff.before(k, h)
      out = []
      for pair in maps:
        h = affine_maps.step(pair, h)
        out.append((h,))
      return handoff.after(h), out

    h = _initial(loop.walk, carry, plan.has_carry)
    handoff.begin(h)
    h = loop.run(wave, h)
    handoff.end()
    _write_last(loop.walk, last, h)

  (h,), (last, *_) = kernel_call.run(
      plan,
      'linear_recurrence',
      body,
      operands,
      None,
      blocks.streams_of(operands.arrays),
      (blocks.Stream(0, None, out_dtype),),
      (
          jax.ShapeDtypeStruct((layout.batch, layout.padded), jnp.float32),
          *handoffs.mailboxes(plan),
      ),
      handoffs.types(plan.config),
  )
  return h, last


def _initial(walk: blocks.Walk, ref: Any, given: bool) -> Array:
  """Returns h to start or restart from: zero if none is given."""
  return walk.read(ref, walk.batch) if given else blocks.zeros()


def _write_last(walk: blocks.Walk, ref: Any, h: Array):
  """Writes h after the last wave."""

  @pl.when((walk.segment == 0) & (walk.warpgroup == walk.config.warpgroups - 1))
  def _():
    ref[walk.batch, walk.features] = h


# The adjoint of `linear`: a recurrence of this kind, backwards in time.
#
# With g_t the cotangent of h_t, λ_t = g_t + μ_{t+1} and μ_t = a_t λ_t,
#
#     μ_t = a_t μ_{t+1} + a_t g_t,    da_t = λ_t h_{t-1},    db_t = λ_t,
#
# and the cotangents of inputs and theta follow from da and db by the derivative
# of the step. So (a_t, a_t g_t) are the maps that warpgroups and CTAs hand on,
# exactly as in the forward kernel.


@functools.partial(jax.jit, static_argnums=0)
def backward(
    plan: Plan,
    operands: kernel_call.Operands,
    cotangents: kernel_call.Cotangents,
) -> tuple[tuple[Array, ...], Array, Array, Array]:
  """Runs the adjoint of `forward`.

  Args:
    plan: the plan of `forward`, except `config`.
    operands: the operands of `forward`, and h, [B, T, F].
    cotangents: cotangents of h and of the last h.

  Returns:
    The cotangents of the inputs, of the carry [B, Fp], and, to be summed over
    the P segments and warpgroups, of theta [B, P, plan.params, Fp] and of
    restart [B, P, Fp].
  """
  layout, config = plan.layout, plan.config
  outs, others = kernel_call.streams(plan, operands, cotangents)
  reads = needed(plan.step, plan.params, len(outs))
  ins = [s for s, read in zip(outs, reads, strict=True) if read]
  batch, padded = layout.batch, layout.padded
  parts = (batch, config.segments * config.warpgroups)
  shapes = (
      (batch, padded),
      (*parts, max(plan.params, 1), padded),
      (*parts, padded),
  )
  d_arrays, (d_carry, d_theta, d_restart, *_) = kernel_call.run(
      plan,
      'linear_recurrence_adjoint',
      functools.partial(_adjoint, plan, reads),
      operands,
      cotangents,
      (*ins, *others),
      outs,
      (
          *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
          *handoffs.mailboxes(plan),
      ),
      handoffs.types(config),
  )
  return d_arrays, d_carry, d_theta, d_restart


def _adjoint(
    plan: Plan, reads: Sequence[bool], loop, theta, carry, restart, d_last
):
  """The kernel; `reads` says for each input whether it is read."""
  accuracy = kernel_call.accuracy(plan)
  walk, inputs = loop.walk, loop.inputs
  d_carry_ref, d_theta_ref, d_restart_ref, *mailbox = loop.others
  theta = loop.theta(theta)
  again = None
  if plan.has_flags:
    again = _initial(walk, restart, plan.has_restart)
  carry = _initial(walk, carry, plan.has_carry)

  def find(k):
    block = loop.flags(k)
    rows, _, cotangents = _rows(inputs, reads, k)
    pairs = cells.map_rows(plan.step, theta, rows, accuracy)
    return _maps([a for a, _ in pairs], cotangents, block)

  inputs.prefetch()
  handoff = handoffs.handoff(inputs, find, loop.scratch, mailbox)
  first_time = plan.layout.time - 1 if plan.reverse else 0

  linearise = functools.partial(jax.vjp, plan.step)

  def wave(k, state):
    mu, d_theta, d_restart = state
    handoff.arrive(k)
    block = loop.flags(k)
    rows, befores, cotangents = _rows(inputs, reads, k)
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
    d_pairs, d_restart = _pairs(
        block, lambdas, befores, scales, again, d_restart
    )
    pullbacks = [pullback for _, pullback in values]
    given = list(zip(pullbacks, d_pairs, strict=True))
    out = []
    for d_params, d_row in cells.map_rows(_pull, (), given, accuracy):
      d_theta = tuple(map(jnp.add, d_theta, d_params))
      out.append(d_row)
    return (mu, d_theta, d_restart), out

  mu = walk.read(d_last, walk.batch)
  handoff.begin(mu)
  zero = blocks.zeros()
  state = (mu, (zero,) * len(theta), zero if plan.has_flags else ())
  mu, d_theta, d_restart = loop.run(wave, state)
  handoff.end()
  _write_last(walk, d_carry_ref, mu)
  part = walk.segment * plan.config.warpgroups + walk.warpgroup
  for k, value in enumerate(d_theta):
    d_theta_ref[walk.batch, part, k, walk.features] = value
  if plan.has_flags:
    d_restart_ref[walk.batch, part, walk.features] = d_restart


def _rows(inputs: blocks.Inputs, reads: Sequence[bool], wave):
  """Returns inputs, h_{t-1} and g of each step in a block.

  Inputs that are not read are zeros.
  """
  rows = inputs.rows(wave)
  zero = blocks.zeros()
  whole = []
  for values in map(iter, rows):
    row = tuple(next(values) if read else zero for read in reads)
    whole.append((row, *values))
  return zip(*whole, strict=True)


def _pairs(
    block: kernel_call.BlockFlags, lambdas, befores, scales, restart, d_restart
):
  """Returns (da, db) of each step in a block, and the cotangent of restart.

  Args:
    block: the flags.
    lambdas: cotangent of h after each step.
    befores: h before each step.
    scales: a of each step without flags.
    restart: h after a reset, or None without flags.
    d_restart: its cotangent so far.
  """

  def with_flags():
    d_pairs, d_sum = [], d_restart
    for i, (mu, before) in enumerate(zip(lambdas, befores, strict=True)):
      restarts, idle = block.restarts(i), block.idle(i)
      (before,) = step_flags.select(restarts, (restart,), (before,))
      d_pairs.append(step_flags.select(idle, (0.0, 0.0), (mu * before, mu)))
      if restart is not None:
        (a,) = step_flags.select(idle, (1.0,), (scales[i],))
        d_in = step_flags.select(restarts, (a * mu,), (0.0,))
        d_sum = d_sum + d_in[0]
    return d_pairs, d_sum

  def without():
    pairs = zip(lambdas, befores, strict=True)
    return [(mu * before, mu) for mu, before in pairs], d_restart

  return block.either(with_flags, without)


def _maps(scales, cotangents, block: kernel_call.BlockFlags):
  """Returns the adjoint's map of each step, from a without flags, and g."""
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
