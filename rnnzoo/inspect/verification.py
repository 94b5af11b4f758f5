"""Whether Newton's method over time pays for a layer, and why or why not."""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import selection
from rnnzoo.engines.scan import loop as scan_loop
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import errors as newton_errors
from rnnzoo.engines.time import newton
from rnnzoo.engines.time import path as newton_path
from rnnzoo.engines.time import plan as newton_plan
from rnnzoo.layers import recurrent

Array = jax.Array
Carry = cell_lib.Carry

_DEFAULTS = selection.AssociativeScan()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
  """How `implementation='associative_scan'` fares, beside 'scan'.

  Attributes:
    least_iterations: K*, the least number of iterations whose trajectory
      equals 'scan', within 1e-4 of each feature's scale; None where 32 are too
      few.
    iterations: iterations that the path took, the most of any window.
    sensitivity: largest error that one rounding error in each step makes, in
      the carry's scale.
    fell_back: whether some steps ran one by one.
    in_turn: sequential steps, most run side by side with steps of other parts
      of time. 'scan' has as many as the sequence; with as many or more, the
      iteration gained nothing.
    error: largest difference between the path's carries and 'scan' carries, in
      each feature's scale: the largest number of the feature, and of the terms
      that it adds up.
    lyapunov: mean logarithm, over the steps, of the growth of a small change of
      the carry: an estimate of the largest Lyapunov exponent. Below 0 the
      recurrence forgets, and few iterations do; above 0 it is chaotic, and none
      will. A change that is forgotten whole, as by a relu that is 0 in all
      features, starts anew, and that step does not count; NaN if all are.
  """

  least_iterations: int | None
  iterations: int
  sensitivity: float
  fell_back: bool
  in_turn: int
  error: float
  lyapunov: float


def verify(
    layer: recurrent.RecurrentLayer,
    x: Array,
    *,
    implementation: selection.AssociativeScan = _DEFAULTS,
) -> Verification:
  """Runs a layer by Newton's method and step by step, and compares.

  A small residual is not yet the right trajectory: an iterate may be close to a
  solution of every step and far from the recurrence. So the trajectories
  themselves are compared here.

  >>> import jax, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.GRU(3, 8, rngs=nnx.Rngs(0))
  >>> x = jax.random.normal(jax.random.key(0), (2, 50, 3))
  >>> found = rnnzoo.verify(layer, x)
  >>> found.fell_back, found.lyapunov < 0
  (False, True)

  Args:
    layer: a layer whose cell is not linear in its carry; a linear cell takes
      one pass and has nothing to iterate.
    x: [..., time, in_features], with any batch axes or none.
    implementation: settings of the path.

  Raises:
    ValueError: the layer is none of one cell, its cell is linear, or x has
      another shape.
    NotImplementedError: the path cannot run this.
  """
  if not isinstance(layer, recurrent.RecurrentLayer):
    raise ValueError(
        'layer must be a layer of one cell, such as an rnnzoo.GRU, got'
        f' {settings.a(type(layer))}. For a stack, each of its layers would'
        ' work.'
    )
  if isinstance(layer.cell, cell_lib.LinearCell):
    raise ValueError(
        f'{type(layer).__name__} is linear in its carry: its associative scan'
        ' is one pass, and there is nothing to iterate. A layer whose gates see'
        ' the memory, such as an rnnzoo.GRU, would work.'
    )
  if not isinstance(implementation, selection.AssociativeScan):
    raise ValueError(
        'implementation must be an rnnzoo.AssociativeScan, got'
        f' {implementation!r}.'
    )
  checks.inputs(
      x, '[..., time, in_features]', layer.in_features, type(layer).__name__
  )
  if x.ndim < 2 or not x.size:
    raise ValueError(
        f'x must have at least one sequence and one step, got shape {x.shape}.'
    )
  operands = layer._operands(x)
  checks.known(operands, 'layer and x')
  operands = jax.tree.map(_on_one_device, operands)
  rows = lambda c: c.reshape(-1, c.shape[-1])
  operands = operands._replace(
      x=operands.x.reshape(x.shape[-2], -1, layer.in_features),
      carry=jax.tree.map(rows, operands.carry),
      restart=jax.tree.map(rows, operands.restart),
  )
  plan = newton_plan.make_plan(
      layer._cell(),
      call_lib.Dense(),
      operands,
      call_lib.Call(),
      implementation,
  )
  return _verify(plan, operands)


def _on_one_device(x: Array) -> Array:
  if len(x.devices()) == 1:
    return x
  return jax.device_put(jax.device_get(x), min(x.devices(), key=lambda d: d.id))


@promotion.of_ranks
def _verify(plan, operands) -> Verification:
  compiled = lambda function, plan: jax.jit(functools.partial(function, plan))
  run = compiled(newton_path.unroll_with_report, plan)
  _, wanted = compiled(scan_loop.carries, plan.steps)(operands)
  scales = compiled(_scales, plan)(operands, wanted)
  difference = functools.partial(jax.jit(_difference), wanted, scales)
  _, found, report = run(operands)
  least = None
  for count in range(newton.MOST_ITERATIONS + 1):
    _, found_so_far, bare = run(operands, jnp.int32(count))
    if difference(found_so_far) <= 1e-4:
      least = count
      break
    if bare.iterations < count:  # No further one would change the carries.
      break
  return Verification(
      least_iterations=least,
      iterations=int(report.iterations),
      sensitivity=float(report.sensitivity),
      fell_back=bool(report.fell_back),
      in_turn=int(report.in_turn),
      error=float(difference(found)),
      lyapunov=float(compiled(_lyapunov, plan.steps)(operands)),
  )


def _difference(wanted: Carry, scales: Carry, found: Carry) -> Array:
  """Returns the largest difference, each feature in its scale."""
  worst = []
  for a, b, scale in zip(found, wanted, scales, strict=True):
    tiny = float(jnp.finfo(b.dtype).tiny)
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    both = jnp.isfinite(a) & jnp.isfinite(b)  # A maximum may pass over NaN.
    difference = jnp.where(both, jnp.abs(a - b), jnp.inf)
    difference = jnp.where(same, 0, difference)
    error = jnp.max(difference, axis=0) / jnp.maximum(scale, tiny)
    worst.append(jnp.max(error))
  return jnp.max(jnp.stack(worst))


def _scales(plan, operands, wanted: Carry) -> Carry:
  """Returns the units of rounding errors, each [B, F]."""
  kernel, cell, sizes = operands.recurrent_kernel, plan.steps.cell, wanted
  if kernel is not None:
    before = scan_steps.shifted(operands.carry, wanted, False)
    x_gates = scan_steps.project(
        plan.steps.project, before, None, operands.weights, operands.x
    )
    kernels = scan_steps.pack(cell, kernel.astype(before[0].dtype))
    sizes = newton_errors.noise(cell, operands.params, kernels, x_gates, before)
  known = lambda x: jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
  return tuple(jnp.max(known(x), axis=0) for x in sizes)


def _lyapunov(plan: scan_steps.Plan, operands: call_lib.Operands) -> Array:
  """Returns the mean growth, as a logarithm, of a change of the carry."""
  carry = operands.carry
  kernel = operands.recurrent_kernel
  wide = None if kernel is None else kernel.astype(carry[0].dtype)
  kernels = scan_steps.pack(plan.cell, wide)
  tiny = float(jnp.finfo(carry[0].dtype).tiny)

  def norm(change):
    squares = [jnp.sum(d**2, axis=-1, keepdims=True) for d in change]
    return jnp.sqrt(functools.reduce(jnp.add, squares))

  def body(state, x):
    carry, change = state
    x_gates = scan_steps.project(plan.project, carry, None, operands.weights, x)

    def step(carry):
      return scan_steps.step(
          plan.cell, operands.params, kernels, x_gates, carry
      )[0]

    carry, change = jax.jvp(step, (carry,), (change,))
    size = norm(change)
    alive = size > tiny
    change = tuple(
        jnp.where(alive, d / jnp.maximum(size, tiny), new)
        for d, new in zip(change, first, strict=True)
    )
    growth = jnp.where(alive, jnp.log(jnp.maximum(size, tiny)), jnp.nan)
    return (carry, change), growth

  keys = jax.random.split(jax.random.key(0), len(carry))
  drawn = tuple(
      jax.random.normal(key, c.shape, c.dtype)
      for key, c in zip(keys, carry, strict=True)
  )
  first = tuple(d / norm(drawn) for d in drawn)
  _, growth = lax.scan(body, (carry, first), operands.x)
  # The first steps turn the change towards the direction that grows most.
  return jnp.nanmean(growth[len(growth) // 10 :])
