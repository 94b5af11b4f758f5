"""Affine maps of a carry, s' = A s + b, composed over time in parallel.

Path 2 needs one for each step: the step itself, linearised around a guess. A
is sparse in one of two ways:

  Pointwise  a carry's S arrays mix, features do not: S x S numbers a feature
  Heads      the features of a head mix as well: one matrix a head

Time is the leading axis, [T, B, ...].
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import export
from jax import lax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import devices
from rnnzoo import cell as cell_lib
from rnnzoo.engines import autodiff
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import platforms
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import devices as time_devices

# Path 2: time in parallel, by an associative scan.
#
# A linear cell's step is an affine map h -> a h + b, and affine maps compose:
#
#     (a_2, b_2) o (a_1, b_1) = (a_2 a_1, a_2 b_1 + b_2)
#
# so all T steps take O(log T) parallel rounds (Blelloch, 1990, "Prefix sums and
# their applications").
#
# A step with a = 0 forgets, and a reset is such a step: neither a NaN nor an
# infinity before it reaches anything after it. So a = 0 is a flag, and a
# composition has it only where one of its steps has. A product that underflows
# forgets nothing: it becomes the smallest normal number. Otherwise the result
# would depend on how time is cut. `step_scan` and the GPU kernels
# (`pallas_kernels/mosaic/affine_maps.py`) treat all such numbers alike.
#
# The adjoint of the recurrence is a recurrence of this kind, run backwards
# (Martin and Cundy, 2018, "Parallelizing linear recurrent neural nets over
# sequence length", section 2.2):
#
#     mu_t = a_t mu_{t+1} + a_t g_t,   lambda_t = g_t + mu_{t+1}
#     db_t = lambda_t,   da_t = lambda_t h_{t-1},   dh_0 = mu_1
#
# so the derivative below is written once, whatever runs the recurrence. If
# time is over devices, `devices.py` says which h a device begins with.


Array = jax.Array


def unroll(
    cell: cell_lib.LinearCell,
    project: call_lib.Projection,
    operands: call_lib.Operands,
    reverse: bool,
    solve=None,
    over: time_devices.Names = (),
) -> Array:
  """Runs a linear cell over time.

  Args:
    cell: the equations.
    project: the projection to the input gates.
    operands: time-major, with a carry and a restart of one array each.
    reverse: whether time runs from the last step to the first.
    solve: runs the maps, as in `linear_scan`; None for all steps in parallel.
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
  """Returns a and b of all steps, each [T, B, F]; arguments as in `unroll`."""
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
    over: time_devices.Names = (),
) -> Array:
  """Returns h_t = a_t h_{t-1} + b_t for all t.

  Args:
    solve: `compose_scan` or `step_scan`.
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
  return _prefixes(compose_scan, a, b, reverse)[1]


def _prefixes(solve, a: Array, b: Array, reverse: bool) -> tuple[Array, Array]:
  """Returns the maps (a, b) from before the first step to each step."""
  if solve is step_scan:
    step = lambda maps, ab: (compose(maps, ab),) * 2
    identity = jnp.ones_like(a[0]), jnp.zeros_like(b[0])
    return lax.scan(step, identity, (a, b), reverse=reverse)[1]
  if export.is_symbolic_dim(a.shape[0]):
    name, other = 'associative_scan', 'scan'
    raise NotImplementedError(
        f'implementation={name!r} needs a number of steps that is known, got'
        f' {a.shape[0]}: its rounds depend on it. The batch may be symbolic.'
        f' implementation={other!r} works.'
    )
  return lax.associative_scan(compose, (a, b), reverse=reverse)


def compose(first, second):
  """Returns the map (a, b) of two, of which `first` acts first."""
  a1, b1 = first
  a2, b2 = second
  product = _beside(a1, a2) * _beside(a2, a1)
  is_lost = (product == 0) & (a1 != 0) & (a2 != 0)
  tiny = jnp.copysign(jnp.finfo(product.dtype).tiny, product)
  return (
      jnp.where(is_lost, tiny, product),
      # After many steps a2 may have overflowed where b1 is 0.
      _beside(b1, a2) * _beside(a2, b1) + b2,
  )


def _beside(factor: Array, x: Array) -> Array:
  """Returns x for a product with a factor: 0 for 0 times an infinity or NaN.

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
  if not over:
    return solve(a, _fold(a, b, h0, reverse), reverse), h0
  a, b = _prefixes(solve, a, b, reverse)
  last = 0 if reverse else -1
  before = time_devices.enter(compose, (a[last], b[last]), h0, reverse, over)
  return affine(a, b, before), before


def _forward(static, operands):
  a, b, h0 = operands
  h, before = _solve(static, a, b, h0)
  return h, (a, h, before)


def _tangent(static, residuals, tangents):
  """The tangent is this recurrence, with da_t h_{t-1} + db_t for b_t."""
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
    first = jnp.where(time_devices.is_first(reverse, over), first, 0)
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


_linear_scan = autodiff.differentiable(_forward, _tangent, _adjoint)


Carry = cell_lib.Carry


class Pointwise(NamedTuple):
  """A for every step, without mixing features.

  Attributes:
    entries: [to][from], each [T, B, F].
  """

  entries: tuple[tuple[Array, ...], ...]


class Heads(NamedTuple):
  """A for every step, one matrix for each head.

  Attributes:
    matrix: [T, B, N, S D, S D], indexed [..., to, from]; row s D + d stands for
      feature d of the head in the carry's array s.
  """

  matrix: Array


Maps = Pointwise | Heads


def transpose(maps: Maps) -> Maps:
  """Returns the maps with Aᵀ for A."""
  if isinstance(maps, Heads):
    return Heads(jnp.swapaxes(maps.matrix, -1, -2))
  return Pointwise(tuple(zip(*maps.entries, strict=True)))


def apply(maps: Maps, carry: Carry) -> Carry:
  """Returns A s for every step; the arrays of `carry` are [T, B, F]."""
  if isinstance(maps, Heads):
    column = _columns([carry], maps.matrix)
    return _carries(maps.matrix @ column, carry)[0]
  return tuple(_dot(row, carry) for row in maps.entries)


def solve(maps: Maps, given: Sequence[Carry], reverse: bool) -> list[Carry]:
  """Returns s_t = A_t s_{t-1} + b_t for all t in parallel, from s = 0.

  Args:
    maps: A of every step.
    given: several b to solve for, each S arrays [T, B, F].
    reverse: whether time runs from the last step to the first.
  """
  if isinstance(maps, Heads):
    elements = maps.matrix, _columns(given, maps.matrix)
    solved = over_time(_compose_matrices, elements, reverse=reverse)[1]
    return _carries(solved, given[0])
  if len(maps.entries) == 1:
    scalars = platforms.Functions(_Kernel(reverse), _Compose(reverse))
    operands = maps.entries[0][0], [b for (b,) in given]
    return [(s,) for s in platforms.kernels_if_any(scalars, operands)]
  entries = jnp.stack([jnp.stack(row, axis=1) for row in maps.entries], axis=1)
  columns = jnp.stack([jnp.stack(b, axis=1) for b in given], axis=2)
  solved = over_time(_compose_entries, (entries, columns), reverse=reverse)[1]
  return [
      tuple(solved[:, i, k] for i in range(len(maps.entries)))
      for k in range(len(given))
  ]


@dataclasses.dataclass(frozen=True)
class _Kernel:
  """`solve` for a carry of one array, by the kernel of `linear_scan`."""

  reverse: bool

  def __call__(self, operands: tuple[Array, list[Array]]) -> list[Array]:
    a, given = operands
    run = functools.partial(
        pallas_kernels.linear_scan, reverse=self.reverse, time_major=True
    )
    return [run(a, b) for b in given]


@dataclasses.dataclass(frozen=True)
class _Compose:
  """The scan of scalar maps without kernels."""

  reverse: bool

  def __call__(self, operands: tuple[Array, list[Array]]) -> list[Array]:
    a, given = operands
    a, b = a[:, None], jnp.stack(given, axis=1)
    if on_cpu():
      solved = over_time(_compose_scalars, (a, b), reverse=self.reverse)[1]
    else:
      solved = compose_scan(a, b, self.reverse)
    return [solved[:, i] for i in range(len(given))]


def over_time(compose: Callable[[Any, Any], Any], elements, *, reverse: bool):
  """Returns the compositions of all steps up to each one.

  Args:
    compose: function for `lax.associative_scan`; it broadcasts leading axes.
    elements: arrays [T, ...].
    reverse: whether time runs from the last step to the first.
  """
  # Compositions vary over the devices of a `jax.shard_map` if any element does.
  elements = devices.alike(elements)
  run = _in_blocks if on_cpu() else lax.associative_scan
  return run(compose, elements, reverse=reverse)


def on_cpu() -> bool:
  """Returns whether blocks of time are better than a tree of compositions."""
  return jax.default_backend() == 'cpu'


def _in_blocks(compose, elements, *, reverse: bool):
  """`lax.associative_scan` in two rounds of about sqrt(T) steps each.

  The first works on all blocks of time at once, the second on their totals.
  That is half the work, and a small part of the program to be compiled. A CPU
  has no use for more in parallel.

  Args:
    compose: function for `lax.associative_scan`; it broadcasts leading axes.
    elements: arrays [T, ...].
    reverse: whether time runs from the last step to the first.
  """
  time = jax.tree.leaves(elements)[0].shape[0]
  length = math.isqrt(time - 1) + 1
  count = -(-time // length)

  def split(x):
    x = jnp.flip(x, 0) if reverse else x
    widths = [(0, count * length - time)] + [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, widths).reshape(count, length, *x.shape[1:])
    return jnp.swapaxes(x, 0, 1)

  def join(x):
    x = jnp.swapaxes(x, 0, 1).reshape(count * length, *x.shape[2:])[:time]
    return jnp.flip(x, 0) if reverse else x

  def prefixes(elements):
    first, rest = (
        jax.tree.map(lambda x, at=at: x[at], elements)
        for at in (0, slice(1, None))
    )

    def body(total, element):
      total = compose(total, element)
      return total, total

    _, others = lax.scan(body, first, rest)
    return jax.tree.map(
        lambda x, y: jnp.concatenate([x[None], y]), first, others
    )

  within = prefixes(jax.tree.map(split, elements))
  totals = prefixes(jax.tree.map(lambda x: x[-1], within))
  later = compose(
      jax.tree.map(lambda x: x[:-1], totals),
      jax.tree.map(lambda x: x[:, 1:], within),
  )
  return jax.tree.map(
      lambda x, y: join(jnp.concatenate([x[:, :1], y], axis=1)), within, later
  )


def _compose_entries(first, second):
  """Composes [..., S, S, B, F] and [..., S, n, B, F]."""
  (a1, b1), (a2, b2) = first, second
  a2 = a2[..., None, :, :]
  through = lambda x: jnp.sum(a2 * x[..., None, :, :, :, :], axis=-4)
  return through(a1), through(b1) + b2


def _compose_scalars(first, second):
  (a1, b1), (a2, b2) = first, second
  return a2 * a1, a2 * b1 + b2


def _compose_matrices(first, second):
  (a1, b1), (a2, b2) = first, second
  return a2 @ a1, a2 @ b1 + b2


def _dot(row: Sequence[Array], column: Sequence[Array]) -> Array:
  total = row[0] * column[0]
  for a, b in zip(row[1:], column[1:], strict=True):
    total += a * b
  return total


def _columns(given: Sequence[Carry], matrix: Array) -> Array:
  """Returns [T, B, N, S D, len(given)]."""
  heads, size = matrix.shape[-3:-1]
  column = lambda carry: jnp.concatenate(
      [x.reshape(*x.shape[:-1], heads, size // len(carry)) for x in carry],
      axis=-1,
  )
  return jnp.stack(list(map(column, given)), axis=-1)


def _carries(columns: Array, like: Carry) -> list[Carry]:
  """The inverse of `_columns`."""
  count, shape = len(like), like[0].shape
  found = []
  for i in range(columns.shape[-1]):
    parts = jnp.split(columns[..., i], count, axis=-1)
    found.append(tuple(part.reshape(shape) for part in parts))
  return found
