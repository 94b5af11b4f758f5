"""Path 2: time in parallel, by an associative scan.

A linear cell's step is an affine map h -> a h + b, and affine maps compose:

    (a_2, b_2) o (a_1, b_1) = (a_2 a_1, a_2 b_1 + b_2)

so all T steps take O(log T) parallel rounds (Blelloch, 1990, "Prefix sums and
their applications"). A composition that forgets (a_2 = 0) takes b_2 alone: the
product would turn an infinity before a reset into NaN.

The adjoint of the recurrence is a recurrence of the same kind, run the other
way (Martin and Cundy, 2018, "Parallelizing linear recurrent neural nets over
sequence length", section 2.2):

    lambda_t = g_t + a_{t+1} lambda_{t+1}
    db_t = lambda_t,   da_t = lambda_t h_{t-1},   dh_0 = a_1 lambda_1

so the derivative below is written once, whatever runs the recurrence.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import scan_steps

Array = jax.Array


def unroll(
    cell: cell_lib.LinearCell,
    project: call_lib.Projection,
    operands: call_lib.Operands,
    reverse: bool,
) -> Array:
  """Runs a linear cell over time, all steps in parallel.

  Args:
    cell: the equations.
    project: the projection to the input gates.
    operands: time-major, with a carry and a restart of one array each.
    reverse: whether time runs from the last step to the first.

  Returns:
    h after every step, [T, B, F].
  """
  params, weights, x, _, carry, restart, reset, mask = operands
  x_gates = scan_steps.project(project, carry, mask, weights, x)
  a, b = cell.coefficients(params, x_gates)
  dtype = carry[0].dtype
  a, b = (jnp.broadcast_to(x, x_gates[0].shape).astype(dtype) for x in (a, b))
  if mask is not None:
    a = jnp.where(mask[..., None], a, 1)
    b = jnp.where(mask[..., None], b, 0)
  if reset is not None:
    b = b + jnp.where(reset[..., None], a * restart[0], 0)
    a = jnp.where(reset[..., None], 0, a)
  if jax.default_backend() != 'cpu' and len(x_gates) > 2:
    # XLA would compute gates again in each of the scan's fusions: minLSTM took
    # 15 to 30 % longer on an H200. MinGRU, of two gates, took 6 to 22 % longer
    # with the barrier, and on a CPU the gradients of both did.
    a, b = lax.optimization_barrier((a, b))
  return linear_scan(compose_scan, reverse, a, b, carry[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear_scan(solve, reverse: bool, a: Array, b: Array, h0: Array) -> Array:
  """Returns h_t = a_t h_{t-1} + b_t for all t.

  Args:
    solve: `compose_scan` or `step_scan`.
    reverse: whether the recurrence runs from the last step to the first.
    a: [T, ...].
    b: [T, ...], like a.
    h0: [...], h before the first step.

  Returns:
    h, [T, ...].
  """
  return solve(a, _fold(a, b, h0, reverse), reverse)


def step_scan(a: Array, b: Array, reverse: bool) -> Array:
  """h_t = a_t h_{t-1} + b_t step by step, from h = 0."""

  def body(h, ab):
    a, b = ab
    h = _affine(a, b, h)
    return h, h

  return lax.scan(body, jnp.zeros_like(b[0]), (a, b), reverse=reverse)[1]


def compose_scan(a: Array, b: Array, reverse: bool) -> Array:
  """h_t = a_t h_{t-1} + b_t for all t in parallel, from h = 0."""

  def compose(first, second):
    a1, b1 = first
    a2, b2 = second
    return a2 * a1, _affine(a2, b2, b1)

  return lax.associative_scan(compose, (a, b), reverse=reverse)[1]


def _affine(a: Array, b: Array, h: Array) -> Array:
  """Returns a h + b, where a = 0 forgets even an infinite h."""
  return jnp.where(a == 0, b, a * h + b)


def _fold(a, b, h0, reverse):
  """Adds the contribution of the initial h to the first step."""
  first = -1 if reverse else 0
  return b.at[first].set(_affine(a[first], b[first], h0))


def _linear_scan_fwd(solve, reverse, a, b, h0):
  h = linear_scan(solve, reverse, a, b, h0)
  return h, (a, h, h0)


def _linear_scan_bwd(solve, reverse, residuals, g):
  a, h, h0 = residuals
  zero = jnp.zeros_like(a[:1])
  if reverse:
    after = jnp.concatenate([zero, a[:-1]])
    before = jnp.concatenate([h[1:], h0[None]])
  else:
    after = jnp.concatenate([a[1:], zero])
    before = jnp.concatenate([h0[None], h[:-1]])
  adjoint = solve(after, g, not reverse)
  first = -1 if reverse else 0
  return adjoint * before, adjoint, a[first] * adjoint[first]


linear_scan.defvjp(_linear_scan_fwd, _linear_scan_bwd)
