"""Path 2 for cells that are not linear: Newton's method, a window at a time.

Time is cut into windows, so that memory is bounded at any T; the carry passes
from one to the next, and within a window all steps are parallel (`newton.py`).
Forward, the steps equal `lax.scan`'s; if the iteration does not end in their
trajectory, they run one by one, and the report says so. If rounding errors
grow so much that no order of operations would repeat a trajectory, all steps
run with path 1.

No iteration is stored or differentiated. The tangent and the adjoint of the
steps are linear, so path 1's loops over them are solved this way too, by the
implicit function theorem: one affine scan with the derivatives, transposed in
the adjoint. A clipped gradient is not linear: its loop runs step by step.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import auto_axes
from pallas_kernels import devices
from rnnzoo import cell as cell_lib
from rnnzoo.engines import autodiff
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import platforms
from rnnzoo.engines.scan import derivatives as scan_derivatives
from rnnzoo.engines.scan import loop as scan_loop
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import errors as newton_errors
from rnnzoo.engines.time import guess as newton_guess
from rnnzoo.engines.time import jacobians
from rnnzoo.engines.time import kernel_parts
from rnnzoo.engines.time import maps as maps_lib
from rnnzoo.engines.time import newton
from rnnzoo.engines.time import parts as time_parts
from rnnzoo.engines.time import plan as newton_plan
from rnnzoo.engines.time import rows as newton_rows

Array = jax.Array
Carry = cell_lib.Carry
Operands = call_lib.Operands
Plan = newton_plan.Plan
Report = newton.Report

# A cell, its parameters and the packed recurrent kernels.
_Equations = tuple[cell_lib.Cell, cell_lib.Params, tuple[Array, ...]]


def unroll(plan: Plan, operands: Operands) -> tuple[Carry, Carry]:
  """Runs a cell over time: `scan_loop.unroll` by Newton's method."""
  if operands.x.shape[1] == 0:  # A batch of 0 has no largest error.
    return scan_loop.unroll(plan.steps, operands)
  return _unroll(plan, operands)


def unroll_with_report(
    plan: Plan, operands: Operands, iterations: Array | None = None
) -> tuple[Carry, Carry, Report]:
  """Returns the last carry, all carries, and how they were found.

  Args:
    plan: static arguments.
    operands: time-major arrays, as in `unroll`.
    iterations: most iterations of each window, whatever they give: nothing
      runs step by step. None for the trajectory.
  """
  # Rounded to TF32, as a GPU's products are by default, h would be a staircase
  # as well. So results there differ from path 1's by the rounding of TF32, also
  # where the steps run one by one.
  with jax.default_matmul_precision('highest'):
    return _unroll_with_report(plan, operands, iterations)


def _unroll_with_report(
    plan: Plan, operands: Operands, iterations: Array | None
) -> tuple[Carry, Carry, Report]:
  _, _, x, _, carry, restart, reset, mask = operands
  steps, dtype = plan.steps, carry[0].dtype
  equations = _equations(plan, operands)
  # If rounding errors grow to more of the carry's scale, another order of
  # operations gives another trajectory, and path 1's is the one to be returned.
  accepted = 1e-4 if dtype == jnp.float32 else 1e-10
  bound = accepted if iterations is None else jnp.inf

  def window(state, xs):
    problem = _problem(plan, operands, equations, state[0], xs)
    guess = newton_guess.first(problem, *equations, state[0], restart)
    return _solved(problem, guess, state, bound, iterations)

  zero = devices.like(jnp.zeros((), dtype), x)
  report = Report(
      iterations=jnp.zeros_like(zero, dtype=jnp.int32),
      residual=zero,
      sensitivity=zero,
      fell_back=jnp.zeros_like(zero, dtype=bool),
      in_turn=jnp.zeros_like(zero, dtype=jnp.int32),
  )

  def unless_hopeless(state, xs):
    """Once rounding errors have grown too much, windows need not be solved."""
    empty = tuple(jnp.zeros((xs[0].shape[0], *c.shape), c.dtype) for c in carry)
    empty = jax.tree.map(lambda a: devices.like(a, x), empty)
    return lax.cond(
        time_parts.for_all_mapped(state[2].sensitivity <= bound),
        window,
        lambda state, _: (state, empty),
        state,
        xs,
    )

  (final, _, report), carries = scan_steps.scan_chunks(
      unless_hopeless,
      (carry, jax.tree.map(jnp.zeros_like, carry), report),
      (x, reset, mask),
      steps.chunk,
      steps.call.reverse,
  )
  hopeful = time_parts.for_all_mapped(report.sensitivity <= bound)
  final, carries = lax.cond(
      hopeful,
      lambda: (final, carries),
      lambda: scan_loop.carries(steps, operands),
  )
  report = report._replace(
      fell_back=report.fell_back | ~hopeful,
      in_turn=report.in_turn + jnp.where(hopeful, 0, x.shape[0]),
  )
  return final, carries, report


def _equations(plan: Plan, operands: Operands) -> _Equations:
  """Returns the equations, with kernels in the dtype of the carry."""
  # Rounded to 16 bits, h would be a staircase, which has no derivative.
  kernel, dtype = operands.recurrent_kernel, operands.carry[0].dtype
  wide = None if kernel is None else kernel.astype(dtype)
  cell = plan.steps.cell
  return cell, operands.params, scan_steps.pack(cell, wide)


def _problem(
    plan: Plan, operands: Operands, equations: _Equations, init: Carry, xs
) -> newton.Problem:
  """Returns the steps of a window from its first carry, inputs and flags."""
  (cell, params, kernels), (x, reset, mask) = equations, xs
  project, weights = plan.steps.project, operands.weights
  x_gates = scan_steps.project(project, init, mask, weights, x)

  def body(carry, xs):
    x_gates, reset, mask = xs
    start = scan_steps.select(reset, operands.restart, carry)
    new, _ = scan_steps.step(*equations, x_gates, start)
    if mask is not None:
      new = scan_steps.select(mask, new, start)
    return new, new

  def noise(before, xs):
    x_gates, reset, _ = xs
    start = scan_steps.select(reset, operands.restart, before)
    return newton_errors.noise(*equations, x_gates, start)

  def maps(before):
    start = scan_steps.select(reset, operands.restart, before)
    h_gates = scan_steps.multiply(*equations, x_gates, start)
    given = *equations, x_gates, h_gates, start
    found = jacobians.of_steps(*given, exact=plan.exact)
    return jacobians.held(found, reset, mask)

  return newton.Problem(
      body=body,
      xs=(x_gates, reset, mask),
      maps=maps,
      exact=plan.exact,
      reverse=plan.steps.call.reverse,
      heads=_heads(kernels, init),
      begins=None if reset is None else reset[..., None],
      noise=noise if kernels and kernels[0].shape[1] > 1 else None,
      at_once=jacobians.steps_at_once(cell, params, x_gates, init),
  )


def _solved(problem: newton.Problem, guess, state, bound: float, iterations):
  """Solves a window, or else runs its steps; returns its state and carries."""
  (init, errors, report), (ends, guess_in_turn) = state, guess
  before, after_errors, found, is_trajectory = newton.solve(
      problem, init, errors, ends, most_sensitive=bound, iterations=iterations
  )
  if iterations is not None:
    is_trajectory = jnp.ones_like(is_trajectory)
  carries, errors, sensitivity = lax.cond(
      time_parts.for_all_mapped(is_trajectory),
      lambda: (problem.after(before)[1], after_errors, found.sensitivity),
      lambda: _in_turn(problem, init, errors),
  )
  report = Report(
      iterations=jnp.maximum(report.iterations, found.iterations),
      residual=jnp.maximum(report.residual, found.residual),
      sensitivity=jnp.maximum(report.sensitivity, sensitivity),
      fell_back=report.fell_back | found.fell_back,
      in_turn=report.in_turn
      + found.in_turn
      + guess_in_turn
      + jnp.where(is_trajectory, 0, len(carries[0])),
  )
  return (problem.last(carries), errors, report), carries


def _in_turn(problem: newton.Problem, init: Carry, errors: Carry):
  """Runs steps one by one, with the growth of rounding errors."""
  eps = newton_errors.rounding(init)

  def body(state, xs):
    carry, errors, scales, worst = state
    xs, begins = xs
    step = lambda carry: problem.body(carry, xs)[0]
    carry, errors = jax.jvp(step, (carry,), (errors,))
    scales = scales.after(carry, problem.heads, begins)
    errors = tuple(
        e + eps * s for e, s in zip(errors, scales.step, strict=True)
    )
    relative = newton_errors.largest(
        tuple(e[None] for e in errors), scales.so_far
    )
    # A carry that is not finite is path 1's own, and has no errors.
    relative = jnp.where(jnp.isfinite(relative), relative, 0)
    errors = tuple(jnp.where(jnp.isfinite(e), e, 0) for e in errors)
    return (carry, errors, scales, jnp.maximum(worst, relative)), carry

  scales = newton_errors.Scales.before(init, problem.heads)
  # Zero, varying over devices as the carry does.
  worst = jnp.sum(scales.own[0])
  (_, errors, _, worst), carries = lax.scan(
      body,
      (init, errors, scales, worst),
      (problem.xs, problem.begins),
      reverse=problem.reverse,
  )
  return carries, errors, worst


def _heads(kernels: tuple[Array, ...], carry: Carry) -> int:
  """Returns the number of heads; without R every feature is one."""
  return len(kernels[0]) if kernels else carry[0].shape[-1]


def _loop(plan: Plan, operands: Operands, transposed: bool) -> scan_steps.Loop:
  """Returns the loop over linear steps that runs all steps at once.

  Args:
    plan: static arguments.
    operands: operands of the unroll.
    transposed: whether the steps are the adjoint's.
  """
  stop = plan.steps.call.stop_recurrent_gradient
  equations = cell, params, kernels = _equations(plan, operands)

  def loop(body, init, xs, linearization, *, reverse):
    x_gates, h_gates, start, reset, mask = linearization
    maps = jacobians.of_steps(
        *equations, x_gates, h_gates, start, exact=True, stop=stop
    )
    maps = jacobians.held(maps, reset, mask)
    if transposed:
      maps = maps_lib.transpose(maps)
    problem = newton.Problem(
        body=body,
        xs=xs,
        maps=lambda _: maps,
        exact=True,
        reverse=reverse,
        heads=_heads(kernels, init),
        begins=None if reset is None else reset[..., None],
        at_once=jacobians.steps_at_once(cell, params, x_gates, start),
    )
    # With the digits of TF32 no residual is small enough; see above.
    with jax.default_matmul_precision('highest'):
      return newton.solve_linear(problem, init)

  if not plan.exact and not stop:
    # Their steps need the derivatives themselves, which do not fit.
    return scan_steps.in_turn
  return loop


def _tangent(plan: Plan, saved: scan_steps.Saved, tangents: Operands):
  plan = plan.again(saved.operands)
  loop = _loop(plan, saved.operands, transposed=False)
  return scan_derivatives.forward(plan.steps, saved, tangents, loop)


def _adjoint(plan: Plan, saved: scan_steps.Saved, cotangents):
  plan = plan.again(saved.operands)
  if plan.steps.call.recurrent_gradient_clip is not None:
    return scan_derivatives.backward(plan.steps, saved, cotangents)
  loop = _loop(plan, saved.operands, transposed=True)
  return scan_derivatives.backward(plan.steps, saved, cotangents, loop)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _carries(plan: Plan, operands: Operands) -> tuple[Carry, Carry]:
  """Returns the last carry and all, with derivatives of every order."""
  return newton_rows.together(_run, plan, operands)


def _run(plan: Plan, operands: Operands) -> tuple[Carry, Carry]:
  """Returns the last carry and all."""
  if operands.x.shape[1] == 0:  # No rows; see `unroll`.
    return scan_loop.carries(plan.steps, operands)
  windows = _Windows(plan)
  if not plan.joints:
    return windows(operands)
  functions = platforms.Functions(on_gpu=_Joints(windows), elsewhere=windows)
  return platforms.kernels_if_any(functions, operands)


@dataclasses.dataclass(frozen=True)
class _Windows:
  """Runs windows of time in turn."""

  plan: Plan

  def __call__(self, operands: Operands) -> tuple[Carry, Carry]:
    return unroll_with_report(self.plan, operands)[:2]


@dataclasses.dataclass(frozen=True)
class _Joints:
  """Runs parts of time side by side, by a GPU's kernels."""

  windows: _Windows

  def __call__(self, operands: Operands) -> tuple[Carry, Carry]:
    whole = auto_axes.WHOLE
    # Parts of time are next to the batch, where XLA could not split a kernel.
    run = auto_axes.over_batch(
        devices.current(),
        self._part,
        tuple(operands),
        (whole, whole, 1, whole, 0, 0, 1, 1),
        (0, 1),
    )
    return run(*operands)

  def _part(self, *operands: Any) -> tuple[Carry, Carry]:
    """Runs the part of the batch that one device has."""
    plan, given = self.windows.plan, Operands(*operands)
    return kernel_parts.unroll(plan.steps, given, self.windows)[:2]


@_carries.defjvp
def _carries_jvp(plan, primals, tangents):
  # An iteration has no derivative of its own. Its result's derivative is the
  # linear map of `_unroll`, one level of differentiation further out. Gradients
  # are not clipped there: the derivative of a clipped gradient is not clipped.
  call = dataclasses.replace(
      plan.steps.call,
      outputs=len(plan.steps.cell.carry_names),
      recurrent_gradient_clip=None,
  )
  steps = dataclasses.replace(plan.steps, call=call)
  every = dataclasses.replace(plan, steps=steps)
  return jax.jvp(functools.partial(_unroll, every), primals, tangents)


def _forward_with_residuals(plan: Plan, operands: Operands):
  carry, carries = _carries(plan, operands)
  saved = scan_steps.Saved(operands, carries, None)
  return (carry, carries[: plan.steps.call.outputs]), saved


_unroll = autodiff.differentiable(_forward_with_residuals, _tangent, _adjoint)
