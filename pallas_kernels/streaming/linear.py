"""Linear recurrences: h_t = A_t h_{t-1} + b_t, at the speed of memory.

h has one array or two, and A is a number, a complex number or a 2 x 2 matrix a
feature (`linear_maps`). (A_t, b_t) come from `plan.step(theta, inputs_t)`, a
pointwise function that is traced into the kernel. So a cell's gates are
computed where they are used, and only its pre-activations and h cross device
memory. An A that is free of the inputs is computed once. For a plain scan the
step is the identity.

Time is shared out at two levels:

* Warpgroups of a CTA have a block of steps each. They compute (A, b) of all
  steps in it independently, and take turns for the recurrence itself, which is
  one operation a step (`handoffs.py`).
* If batch and features alone do not fill the device, CTAs share a sequence.
  A block of steps amounts to one affine map (Martin and Cundy, 2018); CTAs
  publish their maps in device memory, so that each can compute the h that it
  starts from.

"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels import linear_maps
from pallas_kernels.mosaic import affine_maps
from pallas_kernels.mosaic import cells
from pallas_kernels.streaming import blocks
from pallas_kernels.streaming import handoffs
from pallas_kernels.streaming import kernel_call

Array = jax.Array
Plan = kernel_call.Plan


def form(plan: Plan, inputs: int) -> Any:
  """Returns types like one step's map (A, b), a number for each feature."""
  lane = jax.ShapeDtypeStruct((blocks.LANES,), jnp.float32)
  return jax.eval_shape(plan.step, (lane,) * plan.params, (lane,) * inputs)


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
      without `plan.params` not theta, without `plan.has_carry` not the carry,
      without `plan.has_restart` not restart.
    outputs: number of arrays of h that are returned for all steps.
    out_dtype: dtype of h.

  Returns:
    The first `outputs` arrays of h, each [B, T, F], and h after the last step,
    float32 [S, B, Fp].
  """
  layout = plan.layout
  accuracy = kernel_call.accuracy(plan)
  ins = blocks.streams_of(operands.arrays)
  like = form(plan, blocks.numbers(ins) + plan.reads_starts)
  states = len(like[1])

  def body(loop, theta, carry, restart):
    last, *mailbox = loop.others
    theta = loop.theta(theta)
    if plan.has_flags:
      restart = _initial(loop, restart, plan.has_restart, states)

    def find(k):
      block = loop.flags(k)
      rows = _with_starts(plan, block, loop.inputs.rows(k))
      pairs = cells.map_rows(plan.step, theta, rows, accuracy)
      return block.maps(pairs, restart)

    loop.inputs.prefetch()
    handoff = handoffs.handoff(loop.inputs, like, find, loop.scratch, mailbox)

    def wave(k, h):
      handoff.arrive(k)
      maps = find(k)
      h = handoff.before(k, h)
      out, step = [], cells.traced_once(affine_maps.step)
      for pair in maps:
        h = step(pair, h)
        out.append(h[:outputs])
      return handoff.after(h), out

    h = _initial(loop, carry, plan.has_carry, states)
    handoff.begin(h)
    h = loop.run(wave, h)
    handoff.end()
    _write_last(loop, last, h)

  h, (last, *_) = kernel_call.run(
      plan,
      'linear_recurrence',
      body,
      operands,
      None,
      ins,
      blocks.of_carry(outputs, out_dtype),
      (
          jax.ShapeDtypeStruct(
              (states, layout.batch, layout.padded), jnp.float32
          ),
          *handoffs.mailboxes(plan, like),
      ),
      handoffs.types(plan.config, states),
  )
  return h, last


def _initial(loop: kernel_call.Loop, ref: Any, given: bool, states: int):
  """Returns h to start or restart from: zero if none is given."""
  return loop.read(ref, states) if given else (blocks.zeros(),) * states


def _with_starts(plan: Plan, block: kernel_call.BlockFlags, rows):
  """Returns the inputs of each step in a block, behind them whether it starts.

  Args:
    plan: says whether the step reads that.
    block: the flags.
    rows: the inputs.
  """
  if not plan.reads_starts:
    return rows
  zero = blocks.zeros()
  starts = [
      zero
      if (restarts := block.restarts(i)) is None
      else jnp.where(restarts, 1.0, zero)
      for i in range(len(rows))
  ]
  return [(*row, start) for row, start in zip(rows, starts, strict=True)]


def _write_last(loop: kernel_call.Loop, ref: Any, h: Sequence[Array]):
  """Writes h after the last wave."""
  walk = loop.walk

  @pl.when((walk.segment == 0) & (walk.warpgroup == walk.config.warpgroups - 1))
  def _():
    loop.write(ref, h)


# The adjoint of `linear`: a recurrence of this kind, backwards in time.
#
# With g_t the cotangent of h_t, λ_t = g_t + μ_{t+1} and μ_t = A_t^T λ_t,
#
#     μ_t = A_t^T μ_{t+1} + A_t^T g_t,    dA_t = λ_t h_{t-1}^T,    db_t = λ_t,
#
# and the cotangents of inputs and theta follow from dA and db by the derivative
# of the step. So (A_t^T, A_t^T g_t) are the maps that warpgroups and CTAs hand
# on, exactly as in the forward kernel. If A is free of the inputs, dA is summed
# over time before the derivative is taken.


@functools.partial(jax.jit, static_argnums=0)
def backward(
    plan: Plan,
    operands: kernel_call.Operands,
    cotangents: kernel_call.Cotangents,
) -> tuple[tuple[Array, ...], Array, Array, Array]:
  """Runs the adjoint of `forward`.

  Args:
    plan: the plan of `forward`, except `config`.
    operands: the operands of `forward`, and h, each [B, T, F].
    cotangents: cotangents of the first arrays of h and of the last h.

  Returns:
    The cotangents of the inputs, of the carry [S, B, Fp], and, to be summed
    over the P segments and warpgroups, of theta [B, P, plan.params, Fp] and of
    restart [S, B, P, Fp].
  """
  layout, config = plan.layout, plan.config
  outs, others = kernel_call.streams(plan, operands, cotangents)
  count = blocks.numbers(outs)
  like = form(plan, count + plan.reads_starts)
  reads = needed(plan.step, plan.params, count, plan.reads_starts)
  ins = read(outs, reads)
  batch, padded, states = layout.batch, layout.padded, len(like[1])
  parts = (batch, config.segments * config.warpgroups)
  shapes = (
      (states, batch, padded),
      (*parts, max(plan.params, 1), padded),
      (states, *parts, padded),
  )
  d_arrays, (d_carry, d_theta, d_restart, *_) = kernel_call.run(
      plan,
      'linear_recurrence_adjoint',
      functools.partial(_adjoint, plan, like, reads),
      operands,
      cotangents,
      (*ins, *others),
      outs,
      (
          *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
          *handoffs.mailboxes(plan, like),
      ),
      handoffs.types(config, states),
  )
  return d_arrays, d_carry, d_theta, d_restart


def _adjoint(
    plan: Plan,
    like: Any,
    reads: Sequence[bool],
    loop,
    theta,
    carry,
    restart,
    d_last,
):
  """The kernel; `reads` says for each input whether it is read."""
  walk, inputs, states = loop.walk, loop.inputs, len(like[1])
  d_carry_ref, d_theta_ref, d_restart_ref, *mailbox = loop.others
  theta = loop.theta(theta)
  if plan.has_flags:
    restart = _initial(loop, restart, plan.has_restart, states)
  carry = _initial(loop, carry, plan.has_carry, states)
  step = _Step(plan, len(reads), theta, kernel_call.accuracy(plan))

  def find(k):
    block = loop.flags(k)
    rows, _, cotangents = _rows(plan, loop, block, reads, states, k)
    return _maps(step.scales(rows), cotangents, block)

  inputs.prefetch()
  handoff = handoffs.handoff(inputs, like, find, loop.scratch, mailbox)
  first_time = plan.layout.time - 1 if plan.reverse else 0

  def wave(k, state):
    mu, d_always, d_restart = state
    handoff.arrive(k)
    block = loop.flags(k)
    rows, befores, cotangents = _rows(plan, loop, block, reads, states, k)
    scales, pullbacks = step.linearise(rows)
    maps = _maps(scales, cotangents, block)
    mu = handoff.before(k, mu)
    lambdas, next_mu = [], cells.traced_once(affine_maps.step)
    for pair, g in zip(maps, cotangents, strict=True):
      lambdas.append(tuple(map(lax.add, g, mu)))
      mu = next_mu(pair, mu)
    mu = handoff.after(mu)
    befores = [
        linear_maps.where(walk.time(k, i) == first_time, carry, before)
        for i, before in enumerate(befores)
    ]
    given = block, lambdas, befores, scales, restart, d_restart
    d_pairs, d_restart = _pairs(*given)
    found, out = step.pull(pullbacks, d_pairs)
    for each in found:
      d_always = tuple(map(lax.add, d_always, each))
    return (mu, d_always, d_restart), out

  mu = loop.read(d_last, states)
  handoff.begin(mu)
  zero = blocks.zeros()
  d_restart = (zero,) * states if plan.has_flags else ()
  state = mu, (zero,) * len(step.always), d_restart
  mu, d_always, d_restart = loop.run(wave, state)
  handoff.end()
  _write_last(loop, d_carry_ref, mu)
  part = walk.segment * plan.config.warpgroups + walk.warpgroup
  for k, value in enumerate(step.d_theta(d_always)):
    d_theta_ref[walk.batch, part, k, walk.features] = value
  for k, value in enumerate(d_restart):
    d_restart_ref[k, walk.batch, part, walk.features] = value


class _Step:
  """The derivative of a step's (A, b).

  Values of theta alone, such as an A that is free of the inputs, are computed
  once, and so is the derivative by them: of their cotangents kernels sum up
  those of all steps.

  Args:
    plan: the static arguments.
    inputs: number of inputs.
    theta: the parameters of each feature.
    accuracy: accuracy of special functions.

  Attributes:
    always: the values of theta that the steps read.
  """

  def __init__(
      self, plan: Plan, inputs: int, theta: Any, accuracy: cells.Accuracy
  ):
    self._accuracy, self._streams, self._theta = accuracy, inputs, theta
    lane = jax.ShapeDtypeStruct((blocks.LANES,), jnp.float32)
    row = (lane,) * (inputs + plan.reads_starts)
    self._early, self._step = cells.hoist(plan.step, (lane,) * plan.params, row)
    self.always = cells.legalize(self._early, accuracy)(theta)

  def scales(self, rows):
    """Returns A of each step."""
    found = cells.map_rows(self._step, self.always, rows, self._accuracy)
    return [a for a, _ in found]

  def linearise(self, rows):
    """Returns A of each step, and pullbacks of (A, b)."""

    def whole(always, row):
      (a, _), pullback = jax.vjp(self._step, always, row)
      return a, pullback

    found = cells.map_rows(whole, self.always, rows, self._accuracy)
    return [a for a, _ in found], [pullback for _, pullback in found]

  def pull(self, pullbacks, d_pairs):
    """Returns the cotangents of `always`, and of the inputs, of each step."""
    given = list(zip(pullbacks, d_pairs, strict=True))
    found = cells.map_rows(_pull, (), given, self._accuracy)
    rows = [d_row[: self._streams] for _, d_row in found]
    return [d_always for d_always, _ in found], rows

  def d_theta(self, d_always):
    """Returns the cotangents of theta by the sum of those of `always`."""
    of_theta = lambda theta, given: jax.vjp(self._early, theta)[1](given)[0]
    pull = cells.legalize(of_theta, self._accuracy)
    return pull(self._theta, list(d_always))


def _rows(plan: Plan, loop, block, reads: Sequence[bool], states: int, wave):
  """Returns inputs, h_{t-1} and g of each step in a block.

  Inputs that are not read, and cotangents that are not there, are zeros.
  """
  zero = blocks.zeros()
  rows, befores, cotangents = [], [], []
  for values in map(iter, loop.inputs.rows(wave)):
    rows.append(tuple(next(values) if read else zero for read in reads))
    befores.append(tuple(next(values) for _ in range(states)))
    given = tuple(values)
    cotangents.append(given + (zero,) * (states - len(given)))
  return _with_starts(plan, block, rows), befores, cotangents


def _pairs(
    block: kernel_call.BlockFlags, lambdas, befores, scales, restart, d_restart
):
  """Returns (dA, db) of each step in a block, and the cotangent of restart.

  Args:
    block: the flags.
    lambdas: cotangent of h after each step.
    befores: h before each step.
    scales: A of each step without flags.
    restart: h after a reset, or None without flags.
    d_restart: its cotangent so far.
  """
  outer = cells.traced_once(linear_maps.outer)

  def without():
    given = zip(scales, lambdas, befores, strict=True)
    return [(outer(a, mu, h), mu) for a, mu, h in given], d_restart

  def with_flags():
    d_pairs, d_sum = [], d_restart
    for i, (mu, before) in enumerate(zip(lambdas, befores, strict=True)):
      restarts, idle = block.restarts(i), block.idle(i)
      if restarts is not None:
        before = linear_maps.where(restarts, restart, before)
        back = linear_maps.transposed(block.held(i, scales[i]))
        d_in = linear_maps.times(back, mu)
        d_in = linear_maps.where(restarts, d_in, (0.0,) * len(mu))
        d_sum = linear_maps.add(d_sum, d_in)
      pair = outer(scales[i], mu, before), mu
      if idle is not None:
        pair = linear_maps.where(idle, 0.0, pair)
      d_pairs.append(pair)
    return d_pairs, d_sum

  return block.either(with_flags, without)


def _maps(scales, cotangents, block: kernel_call.BlockFlags):
  """Returns the adjoint's map of each step, from A without flags, and g."""
  pairs = list(zip(scales, cotangents, strict=True))

  @cells.traced_once
  def map_of(a, g):
    back = linear_maps.transposed(a)
    return back, linear_maps.times(back, g)

  def with_flags():
    maps = []
    for i, (a, g) in enumerate(pairs):
      pair = map_of(block.held(i, a), g)
      if (restarts := block.restarts(i)) is not None:
        pair = linear_maps.where(restarts, 0.0, pair)
      maps.append(pair)
    return maps

  return block.either(with_flags, lambda: [map_of(a, g) for a, g in pairs])


def _pull(_, given):
  pullback, d_pair = given
  return pullback(d_pair)


def read(
    streams: Sequence[blocks.Stream], reads: Sequence[bool]
) -> list[blocks.Stream]:
  """Returns the streams of inputs that an adjoint reads.

  Args:
    streams: the streams of all inputs, of complex numbers or of real ones.
    reads: what `needed` returns for them.
  """
  found, place = [], 0
  for stream in streams:
    if any(reads[place : place + stream.numbers]):
      found.append(dataclasses.replace(stream, conjugate=False))
    place += stream.numbers
  return found


def needed(
    step: Callable[..., Any], params: int, inputs: int, reads_starts: bool
) -> list[bool]:
  """Returns for each input of a step whether the adjoint reads it.

  Args:
    step: (theta, inputs) -> (A, b).
    params: number of per-feature parameters.
    inputs: number of inputs.
    reads_starts: whether the step has an input more, which flags are made of.
  """
  lane = jax.ShapeDtypeStruct((blocks.LANES,), jnp.float32)
  types = (lane,) * params, (lane,) * (inputs + reads_starts)

  def adjoint(theta, cotangents, row):
    (a, _), pull = jax.vjp(step, theta, row)
    return a, pull(cotangents)

  theta, row = types
  used = cells.used(adjoint, theta, jax.eval_shape(step, *types), row)
  return used[-len(row) :][:inputs]
