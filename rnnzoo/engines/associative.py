"""Path 2: time in parallel, by an associative scan.

A linear cell's step is an affine map h -> a h + b, and affine maps compose:

    (a_2, b_2) o (a_1, b_1) = (a_2 a_1, a_2 b_1 + b_2)

so all T steps take O(log T) parallel rounds (Blelloch, 1990, "Prefix sums and
their applications").

A step with a = 0 forgets, and a reset is such a step: neither a NaN nor an
infinity before it reaches anything after it. So a = 0 is a flag, and a
composition has it only where one of its steps has. A product that underflows
forgets nothing: it becomes the smallest normal number. Otherwise the result
would depend on how time is cut. `step_scan` and the GPU kernels
(`pallas_kernels/mosaic/affine_maps.py`) say the same about the same numbers.

The adjoint of the recurrence is a recurrence of the same kind, run the other
way (Martin and Cundy, 2018, "Parallelizing linear recurrent neural nets over
sequence length", section 2.2):

    mu_t = a_t mu_{t+1} + a_t g_t,   lambda_t = g_t + mu_{t+1}
    db_t = lambda_t,   da_t = lambda_t h_{t-1},   dh_0 = mu_1

so the derivative below is written once, whatever runs the recurrence. Where
time is over devices, `time_parts.py` says which h a device begins with.
"""

import jax
from jax import export
from jax import lax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import derivatives
from rnnzoo.engines import scan_steps
from rnnzoo.engines import time_parts

Array = jax.Array


def unroll(
    cell: cell_lib.LinearCell,
    project: call_lib.Projection,
    operands: call_lib.Operands,
    reverse: bool,
    solve=None,
    over: time_parts.Names = (),
) -> Array:
  """Runs a linear cell over time.

  Args:
    cell: the equations.
    project: the projection to the input gates.
    operands: time-major, with a carry and a restart of one array each.
    reverse: whether time runs from the last step to the first.
    solve: as for `linear_scan`; None for all steps in parallel.
    over: the mesh axes that time is over, inside `jax.shard_map`.

  Returns:
    h after every step, [T, B, F].
  """
  a, b = coefficients(cell, project, operands)
  return linear_scan(
      solve or compose_scan, reverse, a, b, operands.carry[0], over
  )


def coefficients(
    cell: cell_lib.LinearCell,
    project: call_lib.Projection,
    operands: call_lib.Operands,
) -> tuple[Array, Array]:
  """Returns a and b of all steps, each [T, B, F]; arguments as for `unroll`."""
  params, weights, x, _, carry, restart, reset, mask = operands
  x_gates = scan_steps.project(project, carry, mask, weights, x)
  a, b = cell.coefficients(params, x_gates)
  dtype = carry[0].dtype
  a, b = (jnp.broadcast_to(x, x_gates[0].shape).astype(dtype) for x in (a, b))
  if mask is not None:
    a = jnp.where(mask[..., None], a, 1)
    b = jnp.where(mask[..., None], b, 0)
  a, b = restarted(a, b, reset, restart[0])
  if jax.default_backend() != 'cpu' and len(x_gates) > 2:
    # XLA would compute gates again in each of the scan's fusions: minLSTM took
    # 15 to 30 % longer on an H200. MinGRU, of two gates, took 6 to 22 % longer
    # with the barrier, and on a CPU the gradients of both did.
    a, b = lax.optimization_barrier((a, b))
  return a, b


def linear_scan(
    solve,
    reverse: bool,
    a: Array,
    b: Array,
    h0: Array,
    over: time_parts.Names = (),
) -> Array:
  """Returns h_t = a_t h_{t-1} + b_t for all t.

  Args:
    solve: `compose_scan`, `step_scan`, or a hashable function like them.
    reverse: whether the recurrence runs from the last step to the first.
    a: [T, ...].
    b: [T, ...], like a.
    h0: [...], h before the first step.
    over: the mesh axes that time is over, inside `jax.shard_map`; T is then the
      number of this device's steps.

  Returns:
    h, [T, ...].
  """
  return _linear_scan((solve, reverse, over), (a, b, h0))


def step_scan(a: Array, b: Array, reverse: bool) -> Array:
  """h_t = a_t h_{t-1} + b_t step by step, from h = 0."""

  def body(h, ab):
    a, b = ab
    h = affine(a, b, h)
    return h, h

  return lax.scan(body, jnp.zeros_like(b[0]), (a, b), reverse=reverse)[1]


def compose_scan(a: Array, b: Array, reverse: bool) -> Array:
  """h_t = a_t h_{t-1} + b_t for all t in parallel, from h = 0."""
  if export.is_symbolic_dim(a.shape[0]):
    name, other = 'associative_scan', 'scan'
    raise NotImplementedError(
        f'implementation={name!r} needs a number of steps that is known, got'
        f' {a.shape[0]}: its rounds depend on it. The batch may be symbolic.'
        f' implementation={other!r} works.'
    )
  return lax.associative_scan(compose, (a, b), reverse=reverse)[1]


def compose(first, second):
  """Returns the map (a, b) of two, of which `first` acts first."""
  a1, b1 = first
  a2, b2 = second
  product = _beside(a1, a2) * _beside(a2, a1)
  is_lost = (product == 0) & (a1 != 0) & (a2 != 0)
  tiny = jnp.copysign(jnp.finfo(product.dtype).tiny, product)
  return (
      jnp.where(is_lost, tiny, product),
      # Of many steps: a2 may have overflowed where b1 is 0.
      _beside(b1, a2) * _beside(a2, b1) + b2,
  )


def _beside(factor: Array, x: Array) -> Array:
  """Returns x for a product with a factor: 0 for 0 times what is not finite.

  For all that is finite the product has its own derivatives, of every order.
  """
  return jnp.where((factor == 0) & ~jnp.isfinite(x), 0, x)


def restarted(
    a: Array, b: Array, reset: Array | None, restart: Array
) -> tuple[Array, Array]:
  """Returns the coefficients of steps that restart where `reset` is true.

  Args:
    a: [..., F].
    b: [..., F].
    reset: bool [...], or None for no restarts.
    restart: replaces h, broadcast against a.
  """
  if reset is None:
    return a, b
  reset = reset[..., None]
  return jnp.where(reset, 0, a), jnp.where(reset, affine(a, b, restart), b)


def affine(a: Array, b: Array, h: Array) -> Array:
  """Returns a h + b of one step, where a = 0 forgets even an infinite h."""
  return a * _beside(a, h) + b


def _fold(a, b, h0, reverse):
  """Adds the contribution of the initial h to the first step."""
  first = -1 if reverse else 0
  return b.at[first].set(affine(a[first], b[first], h0))


def _solve(static, a, b, h0):
  """Returns h, and the h before the first step: h0 where time is whole."""
  solve, reverse, over = static

  def run(before):
    h = solve(a, _fold(a, b, before, reverse), reverse)
    return h, h[0 if reverse else -1]

  if not over:
    return run(h0)[0], h0
  read = lambda start, stop: (a[start:stop], b[start:stop])
  return time_parts.run(compose, read, run, h0, a.shape[0], reverse, over)


def _forward(static, operands):
  a, b, h0 = operands
  h, before = _solve(static, a, b, h0)
  return h, (a, h, before)


def _tangent(static, residuals, tangents):
  """The tangent is the same recurrence, with da_t h_{t-1} + db_t for b_t."""
  solve, reverse, over = static
  a, h, before = residuals
  d_a, d_b, d_h0 = tangents
  forcing = jnp.zeros_like(h) if d_b is None else d_b
  if d_a is not None:
    forcing += d_a * (_before(h, before) if reverse else _after(before, h))
  if d_h0 is not None or over:
    d_h0 = jnp.zeros_like(before) if d_h0 is None else d_h0
    return _solve(static, a, forcing, d_h0)[0]
  return solve(a, forcing, reverse)


def _adjoint(static, residuals, g):
  solve, reverse, over = static
  a, h, before = residuals
  forcing = a * _beside(a, g)
  zero = jnp.zeros_like(before)
  if over:
    backward = solve, not reverse, over
    mu, after = _solve(backward, a, forcing, zero)
  else:
    mu, after = solve(a, forcing, not reverse), zero
  first = mu[-1] if reverse else mu[0]
  if over:
    first = jnp.where(time_parts.is_first(reverse, over), first, 0)
  if reverse:
    adjoint = g + _after(after, mu)
    return adjoint * _before(h, before), adjoint, first
  adjoint = g + _before(mu, after)
  return adjoint * _after(before, h), adjoint, first


def _after(first: Array, x: Array) -> Array:
  """Moves x by one step to later times, behind `first`."""
  return jnp.concatenate([first[None], x[:-1]])


def _before(x: Array, last: Array) -> Array:
  """Moves x by one step to earlier times, before `last`."""
  return jnp.concatenate([x[1:], last[None]])


_linear_scan = derivatives.differentiable(_forward, _tangent, _adjoint)
