"""The adjoint and the tangent of a recurrence by path 1, for any cell.

For a chunk of steps, everything that does not depend on the adjoint is computed
at once for the chunk: the input projection, R h_{t-1} as one product, and the
linearisation of `update` around the saved carries. The loop that is left is
linear in the adjoint λ,

    λ_{t-1} = g_{t-1} + (d carry_t / d carry_{t-1})ᵀ λ_t

and the gradients of kernels are then one product a chunk, added up in float32.
Adding them step by step, as plain autodiff of a scan does, is slower and loses
digits in bfloat16. A cell whose linearisation is large, as with many inner
steps, is linearised in the loop instead, a step at a time. One thing need not
be linear: `recurrent_gradient_clip` bounds the cotangent that comes back
through the recurrent kernel. The tangent, `forward`, has the same order: the
projection's tangent and dR h for a chunk, then a loop linear in the carry's.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo.engines import autodiff
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import products
from rnnzoo.engines.scan import steps as scan_steps

Array = jax.Array
Carry = cell_lib.Carry
Gates = cell_lib.Gates


class Pullbacks(NamedTuple):
  """Linearised step functions; callable pytrees, so they can be scanned.

  The products with the recurrent kernel are the caller's.
  """

  update: Callable[[Carry], Any]
  operand: Callable[[Array], Any] | None


def linearize_step(
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    x_gates: Gates,
    h_gates: Gates,
    carry: Carry,
) -> tuple[Pullbacks, Array | None]:
  """Linearises a step around a carry, each [B, F].

  Returns:
    The pullbacks, and the operand of the second stage (None for a cell of one
    stage).
  """
  pull = lambda fn, gates: jax.vjp(fn, params, x_gates, gates, carry)
  operand = pull_operand = None
  if isinstance(cell, cell_lib.TwoStageCell):
    operand, pull_operand = pull(cell.operand, h_gates[:-1])
  return Pullbacks(pull(cell.update, h_gates)[1], pull_operand), operand


def is_large(pullbacks: Pullbacks, at: Any) -> bool:
  """Returns whether a linearisation has twice the arrays of its point.

  An IRevRNN's has, at any number of inner steps. No other cell's has: on a CPU
  a GRU took 15 to 30 % longer with its linearisation in the loop.
  """
  return len(jax.tree.leaves(pullbacks)) >= 2 * len(jax.tree.leaves(at))


def pull(pullbacks: Pullbacks, d_new: Carry, d_operand) -> tuple[Any, Any]:
  """Pulls a carry's cotangent back through the pointwise part of a step.

  Args:
    pullbacks: pullbacks of this step.
    d_new: cotangent of the carry after the step.
    d_operand: maps the last recurrent gate's cotangent to the operand's.

  Returns:
    Cotangents of (params, x_gates, h_gates, carry), and of the operand.
  """
  cotangents = pullbacks.update(d_new)
  if pullbacks.operand is None:
    return cotangents, None
  params, x_gates, h_gates, carry = cotangents
  d_operand = d_operand(h_gates[-1])
  first = pullbacks.operand(d_operand)
  params, x_gates, carry = jax.tree.map(
      jnp.add, (params, x_gates, carry), (first[0], first[1], first[3])
  )
  h_gates = (*map(jnp.add, h_gates[:-1], first[2]), h_gates[-1])
  return (params, x_gates, h_gates, carry), d_operand


def backward(
    plan: scan_steps.Plan,
    saved: scan_steps.Saved,
    cotangents: tuple[Carry, Carry],
    loop: scan_steps.Loop = scan_steps.in_turn,
) -> call_lib.Operands:
  """Returns the cotangents of an unroll's operands.

  Args:
    plan: static arguments.
    saved: arrays saved by the unroll.
    cotangents: cotangents of the final carry, each [B, F], and of the returned
      carries, each [T, B, F].
    loop: runs a chunk's steps, which are linear in the cotangent of the carry.

  Returns:
    Cotangents with the structure of `Operands`; None for the masks.
  """
  adjoint = _Adjoint(plan, saved, loop)
  d_carry, d_outputs = cotangents
  params, weights, _, kernel, _, restart, reset, _ = saved.operands
  sums = (
      params,
      weights,
      adjoint.kernels,
      restart if reset is not None else (),
  )
  (d_carry, (d_params, d_weights, d_kernels, d_restart)), d_x = (
      scan_steps.scan_chunks(
          adjoint.chunk,
          (d_carry, jax.tree.map(_zero_sum, sums)),
          _steps(saved, d_outputs),
          plan.adjoint_chunk,
          not plan.call.reverse,
      )
  )
  d_kernel = None
  if kernel is not None:
    gates = kernel.shape[0]
    counts = (gates,) if adjoint.stages == 1 else (gates - 1, 1)
    parts = [
        products.unpack(d, n) for d, n in zip(d_kernels, counts, strict=True)
    ]
    d_kernel = products.settled(jnp.concatenate(parts))
  if reset is None:
    d_restart = _zeros(restart)
  cast = lambda d, x: d.astype(x.dtype)
  d_params, d_weights, d_kernel = jax.tree.map(
      cast, (d_params, d_weights, d_kernel), (params, weights, kernel)
  )
  return call_lib.Operands(
      d_params, d_weights, d_x, d_kernel, d_carry, d_restart, None, None
  )


class _Adjoint:
  """The loop against the order of the recurrence, chunk by chunk.

  Attributes:
    kernels: the packed recurrent kernels, one a stage.
    stages: how many there are.
  """

  def __init__(
      self,
      plan: scan_steps.Plan,
      saved: scan_steps.Saved,
      loop: scan_steps.Loop,
  ):
    self._plan, self._saved, self._loop = plan, saved, loop
    self._stop = plan.call.stop_recurrent_gradient
    self.kernels = scan_steps.pack(plan.cell, saved.operands.recurrent_kernel)
    self.stages = len(self.kernels)
    # Transposed here, not in the loop, where each step would do it again.
    self._transposed = tuple(map(products.transpose, self.kernels))

  def chunk(self, state, xs):
    """Adds a chunk to the sums of gradients; `scan_chunks` has its form."""
    d_carry, sums = state
    *_, d_outputs, _ = xs
    at, pull_projection = _points(
        self._plan, self._saved, self.kernels, xs, jax.vjp
    )
    run = self._run_joint if self._plan.joint else self._run
    d_carry, d_restart, local, operand = run(d_carry, d_outputs, at)
    d_params, d_x_gates, d_h_gates = local
    d_weights, d_x = pull_projection(d_x_gates)
    time_sum = functools.partial(jnp.sum, axis=0)
    parts = (
        jax.tree.map(time_sum, d_params),
        d_weights,
        self._d_kernels(at.start[0], operand, d_h_gates),
        jax.tree.map(time_sum, d_restart),
    )
    add = lambda total, part: total + part.astype(total.dtype)
    return (d_carry, jax.tree.map(add, sums, parts)), d_x

  def _linearized(self, at: scan_steps.Linearization):
    """Returns pullbacks of all steps, or else their points; and operands."""
    point = at.x_gates, at.h_gates, at.start
    linearize = functools.partial(
        linearize_step, self._plan.cell, self._saved.operands.params
    )
    pullbacks, operand = jax.vmap(linearize)(*point)
    if is_large(pullbacks, point):
      return None, point, operand
    return pullbacks, None, operand

  def _run(self, d_carry, d_outputs, at: scan_steps.Linearization):
    """Runs a chunk's steps.

    Returns:
      Cotangents of the carry before it and of restarts; of params, of input
      gates and of recurrent gates, for all steps; and the operands of the
      second stage.
    """
    pullbacks, points, operand = self._linearized(at)
    d_carry, (local, d_restart) = self._loop(
        self._step,
        d_carry,
        (pullbacks, points, d_outputs, at.reset, at.mask),
        at,
        reverse=not self._plan.call.reverse,
    )
    if pullbacks is not None:
      cotangents, _ = jax.vmap(
          lambda pullbacks, d_new, d: pull(pullbacks, d_new, lambda _: d)
      )(pullbacks, *local)
      local = cotangents[:3]
    return d_carry, d_restart, local, operand

  def _run_joint(self, d_carry, d_outputs, at: scan_steps.Linearization):
    """As `_run`, for `Plan.joint`: steps store cotangents in few arrays.

    Cotangents of recurrent gates are joined. An input gate's is left out where
    it equals a recurrent gate's, as for gates that are sums of both.
    """
    pullbacks, points, operand = self._linearized(at)

    def step(d_carry, xs):
      d_carry, ((d_params, d_x, d_h), d_restart) = self._step(d_carry, xs)
      others = (*d_h, *[None] * len(d_x))[: len(d_x)]
      d_x = tuple(
          None if a is b else a for a, b in zip(d_x, others, strict=True)
      )
      return d_carry, (d_params, d_x, products.join(d_h), d_restart)

    d_carry, (d_params, d_x, d_h, d_restart) = lax.scan(
        step,
        d_carry,
        (pullbacks, points, d_outputs, at.reset, at.mask),
        reverse=not self._plan.call.reverse,
    )
    d_h_gates = products.split(d_h, self._plan.cell.recurrent_gates)
    d_x_gates = tuple(
        d_h_gates[g] if d is None else d for g, d in enumerate(d_x)
    )
    return d_carry, d_restart, (d_params, d_x_gates, d_h_gates), operand

  def _step(self, d_carry, xs):
    """Pulls the cotangent of the carry back through a step.

    Returns:
      The cotangent of the carry before it; and cotangents of params and gates,
      or arrays to compute them for all steps at once, and of a restart.
    """
    plan, outputs = self._plan, self._plan.call.outputs
    pullbacks, at, d_outputs, reset, mask = xs
    if at is not None:
      pullbacks, _ = linearize_step(plan.cell, self._saved.operands.params, *at)
    d_carry = (*map(jnp.add, d_carry, d_outputs), *d_carry[outputs:])
    d_new = d_carry
    if mask is not None:
      d_new = scan_steps.select(mask, d_carry, _zeros(d_carry))
    cotangents, d_operand = pull(
        pullbacks, d_new, lambda d: self._through(1, (d,))
    )
    *_, d_h_gates, d_start = cotangents
    if self.stages:
      first = d_h_gates if self.stages == 1 else d_h_gates[:-1]
      d_start = (d_start[0] + self._through(0, first), *d_start[1:])
    if mask is not None:
      held = scan_steps.select(mask, _zeros(d_carry), d_carry)
      d_start = tuple(map(jnp.add, d_start, held))
    d_restart: Carry = ()
    if reset is not None:
      d_restart = scan_steps.select(reset, d_start, _zeros(d_start))
      d_start = scan_steps.select(reset, _zeros(d_start), d_start)
    after = at is None and not plan.joint
    local = (d_new, d_operand) if after else cotangents[:3]
    return d_start, (local, d_restart)

  def _through(self, stage: int, d_gates: Gates) -> Array:
    """Returns the cotangent of the operand of a stage's kernel."""
    call = self._plan.call
    if self._stop:
      return jnp.zeros_like(d_gates[0])
    d = products.multiply_transposed(self._transposed[stage], d_gates)
    clip = call.recurrent_gradient_clip
    if call.zero_not_finite:
      d = jnp.where(jnp.isfinite(d), d, 0)
    return d if clip is None else jnp.clip(d, -clip, clip)

  def _d_kernels(self, h, operand, d_h_gates) -> tuple[Array, ...]:
    """Returns the cotangents of the packed kernels, summed over a chunk."""
    if not self.stages:
      return ()
    if self._stop:  # A constant in second derivatives, too.
      h, operand = lax.stop_gradient((h, operand))
    first = d_h_gates if self.stages == 1 else d_h_gates[:-1]
    d_first = products.outer(self.kernels[0], h, first, joint=self._plan.joint)
    if self.stages == 1:
      return (d_first,)
    return d_first, products.outer(self.kernels[1], operand, d_h_gates[-1:])


def _steps(saved: scan_steps.Saved, moving: Any):
  """Returns arrays of all steps for `scan_chunks`: `moving`, and a point's."""
  _, _, x, _, _, _, reset, mask = saved.operands
  carries = saved.carries if saved.start is None else saved.start
  return x, reset, mask, carries, saved.h_gates, moving, jnp.arange(x.shape[0])


def _points(
    plan: scan_steps.Plan,
    saved: scan_steps.Saved,
    kernels: tuple[Array, ...],
    xs: Any,
    project: Callable[..., tuple[Gates, Any]],
) -> tuple[scan_steps.Linearization, Any]:
  """Returns the points at which a chunk's steps are linearised.

  Args:
    plan: static arguments.
    saved: arrays saved by the unroll.
    kernels: the packed recurrent kernels.
    xs: the chunk's part of `_steps`.
    project: differentiates the projection: takes a function and its arguments,
      the weights and x.

  Returns:
    The points, and the second result of `project`.
  """
  params, weights, _, _, carry, restart, _, _ = saved.operands
  x, reset, mask, start, h_gates, _, index = xs
  if saved.start is None:
    before = scan_steps.previous(
        saved.carries, start, carry, index, plan.call.reverse
    )
    start = scan_steps.select(reset, restart, before)
  x_gates, derivative = project(
      functools.partial(scan_steps.project, plan.project, carry, mask),
      weights,
      x,
  )
  if h_gates is None:
    stop = plan.call.stop_recurrent_gradient
    h_gates = scan_steps.multiply(
        plan.cell, params, kernels, x_gates, start, stop=stop
    )
  elif plan.joint:
    h_gates = products.split(h_gates[0], plan.cell.recurrent_gates)
  at = scan_steps.Linearization(x_gates, h_gates, start, reset, mask)
  return at, derivative


def _zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)


def _zero_sum(x: Array) -> Array:
  """Zeros to add gradients of x to: float32 or wider."""
  return jnp.zeros_like(x, promotion.wide(x.dtype))


def forward(
    plan: scan_steps.Plan,
    saved: scan_steps.Saved,
    tangents: call_lib.Operands,
    loop: scan_steps.Loop = scan_steps.in_turn,
) -> tuple[Carry, Carry]:
  """Returns the tangents of an unroll's results.

  Args:
    plan: static arguments.
    saved: arrays saved by the unroll.
    tangents: tangents of the operands; None where one is zero.
    loop: runs a chunk's steps, which are linear in the tangent of the carry.

  Returns:
    Tangents of the final carry, each [B, F], and of the returned carries, each
    [T, B, F].
  """
  scan_steps.refuse_clip(plan.call.recurrent_gradient_clip)
  params, _, _, kernel, carry, restart, _, _ = saved.operands
  d_params, d_weights, d_x, d_kernel, d_carry, d_restart, _, _ = tangents
  cell, reverse = plan.cell, plan.call.reverse
  kernels = scan_steps.pack(cell, kernel)
  d_kernels = scan_steps.pack(cell, d_kernel)
  staged = cell if isinstance(cell, cell_lib.TwoStageCell) else None

  def through(stage, d_operand, d_gates):
    """Returns the tangents of a stage's gates, R doperand + dR operand."""
    if plan.call.stop_recurrent_gradient:
      return d_gates
    moved = products.multiply(kernels[stage], d_operand)
    return tuple(
        m if d is None else m + d for m, d in zip(moved, d_gates, strict=True)
    )

  def body(d_carry, xs):
    start, x_gates, h_gates, d_x_gates, d_given, reset, mask = xs
    d_start = scan_steps.select(reset, d_restart, d_carry)
    d_gates: tuple[Any, ...] = ()
    if kernels:
      d_gates = through(0, d_start[0], d_given[0])
    if staged is not None:
      _, d_operand = autodiff.pushforward(
          staged.operand,
          (params, x_gates, h_gates[:-1], start),
          (d_params, d_x_gates, d_gates, d_start),
      )
      d_gates += through(1, d_operand, d_given[1])
    _, d_new = autodiff.pushforward(
        cell.update,
        (params, x_gates, h_gates, start),
        (d_params, d_x_gates, d_gates, d_start),
    )
    d_new = tuple(d.astype(c.dtype) for d, c in zip(d_new, start, strict=True))
    d_carry = d_new if mask is None else scan_steps.select(mask, d_new, d_start)
    return d_carry, d_carry[: plan.call.outputs]

  def chunk(d_carry, xs):
    *_, d_x, _ = xs
    push = lambda f, *at: autodiff.pushforward(f, at, (d_weights, d_x))
    at, d_x_gates = _points(plan, saved, kernels, xs, push)
    x_gates, h_gates, start, reset, mask = at
    d_given = _by_tangents(plan, params, d_kernels, at)
    return loop(
        body,
        d_carry,
        (start, x_gates, h_gates, d_x_gates, d_given, reset, mask),
        at,
        reverse=reverse,
    )

  d_carry, d_restart = _instantiated((d_carry, d_restart), (carry, restart))
  return scan_steps.scan_chunks(
      chunk, d_carry, _steps(saved, d_x), plan.chunk, reverse
  )


def _by_tangents(
    plan: scan_steps.Plan, params, d_kernels, at: scan_steps.Linearization
) -> list[tuple[Any, ...]]:
  """Returns dR times its operand for a chunk, one tuple for each stage."""
  cell, none = plan.cell, (None,) * len(at.h_gates)
  staged = cell if isinstance(cell, cell_lib.TwoStageCell) else None
  if not d_kernels:
    return [none] if staged is None else [none[:-1], none[-1:]]
  multiplied = [at.start[0]]
  if staged is not None:
    first = at.h_gates[:-1]
    multiplied.append(staged.operand(params, at.x_gates, first, at.start))
  if plan.call.stop_recurrent_gradient:  # In second derivatives, too.
    multiplied = lax.stop_gradient(multiplied)
  return list(map(products.multiply, d_kernels, multiplied))


def _instantiated(tangents, primals):
  """Returns tangents with zeros in place of None."""
  return jax.tree.map(
      lambda x, d: jnp.zeros_like(x) if d is None else d, primals, tangents
  )
