"""Affine maps of a carry, s' = A s + b, composed over time in parallel.

Affine maps compose,

    (A_2, b_2) o (A_1, b_1) = (A_2 A_1, A_2 b_1 + b_2)

so all T steps take O(log T) parallel rounds (Blelloch, 1990, "Prefix sums and
their applications"). Time is the leading axis, [T, B, ...].

`linear_scan` runs a linear cell, whose steps are such maps. Its h is a tuple of
one array or two, and A has a form of `pallas_kernels/linear_maps.py`; an A that
is free of time has one step, [1, ...]. A step with A = 0 forgets, and a reset
is such a step: neither a NaN nor an infinity before it reaches anything after
it. So A = 0 is a flag, and a composition has it only where one of its steps
has. A product that underflows forgets nothing: it becomes the smallest normal
number. Otherwise the result would depend on how time is cut. `step_scan` and
the GPU kernels (`pallas_kernels/mosaic/affine_maps.py`) treat all such numbers
alike. The adjoint is a recurrence of this kind, run backwards (Martin and
Cundy, 2018, "Parallelizing linear recurrent neural nets over sequence length",
section 2.2), so it is written once, whatever runs the recurrence:

    mu_t = A_t^T mu_{t+1} + A_t^T g_t,   lambda_t = g_t + mu_{t+1}
    db_t = lambda_t,   dA_t = lambda_t h_{t-1}^T,   dh_0 = mu_1

`solve` runs the steps of another cell, linearised around a guess. Their A is
sparse in one of two ways:

  Pointwise  a carry's S arrays mix, features do not: S x S numbers a feature
  Heads      the features of a head mix as well: one matrix a head
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
from pallas_kernels import linear_maps
from rnnzoo import cell as cell_lib
from rnnzoo.engines import autodiff
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import platforms
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import devices as time_devices

Array = jax.Array
Carry = cell_lib.Carry
Vector = linear_maps.Vector


def unroll(
    cell: cell_lib.LinearCell,
    project: call_lib.Projection,
    operands: call_lib.Operands,
    reverse: bool,
    solve: Callable[[Any, Vector, bool], Vector],
    over: time_devices.Names = (),
) -> Vector:
  """Returns a linear cell's carry after every step, each [T, B, F].

  Args:
    cell: the equations.
    project: the projection to the input gates.
    operands: time-major, with a carry and a restart that are arrays.
    reverse: as in `linear_scan`, like `solve` and `over`.
    solve: runs the maps.
    over: mesh axes of time.
  """
  a, b = coefficients(cell, project, operands)
  return linear_scan(solve, reverse, a, b, operands.carry, over)


def coefficients(
    cell: cell_lib.LinearCell,
    project: call_lib.Projection,
    operands: call_lib.Operands,
) -> tuple[Any, Vector]:
  """Returns A and b of all steps; arguments as in `unroll`.

  Returns:
    A in one of its forms, each [T, B, F], or [1, 1, F] where it is free of
    time; and b, each [T, B, F].
  """
  params, weights, x, _, carry, restart, reset, mask = operands
  x_gates = scan_steps.project(project, carry, mask, weights, x)
  shape, dtype = x_gates[0].shape, carry[0].dtype
  inputs = x_gates
  if cell.reads_starts:
    starts = jnp.zeros((), bool) if reset is None else reset
    starts = jnp.broadcast_to(starts, shape[:2])[..., None].astype(dtype)
    inputs = (*x_gates, starts)
  a, b = jax.tree.map(jnp.asarray, cell.coefficients(params, inputs))
  b = b if isinstance(b, tuple) else (b,)
  b = tuple(jnp.broadcast_to(x, shape).astype(dtype) for x in b)
  is_free = all(x.ndim < 2 for x in jax.tree.leaves(a))
  shape = (1, 1, shape[-1]) if is_free else shape
  a = jax.tree.map(lambda x: jnp.broadcast_to(x, shape).astype(dtype), a)
  if mask is not None:
    mask = mask[..., None]
    a = linear_maps.where(~mask, linear_maps.identity(a), a)
    b = linear_maps.where(~mask, 0, b)
  a, b = restarted(a, b, reset, restart)
  if jax.default_backend() != 'cpu' and len(x_gates) > 2:
    # XLA would compute gates again in each of the scan's fusions: minLSTM took
    # 15 to 30 % longer on an H200. MinGRU, of two gates, took 6 to 22 % longer
    # with the barrier, and on a CPU the gradients of both did.
    a, b = lax.optimization_barrier((a, b))
  return a, b


def linear_scan(
    solve,
    reverse: bool,
    a: Any,
    b: Vector,
    h0: Vector,
    over: time_devices.Names = (),
) -> Vector:
  """Returns h_t = A_t h_{t-1} + b_t for all t.

  Args:
    solve: `compose_scan` or `step_scan`.
    reverse: whether the recurrence runs from the last step to the first.
    a: A, each [T, ...], or [1, ...] if it is free of time.
    b: arrays [T, ...].
    h0: arrays [...], h before the first step.
    over: the mesh axes that time is over, inside `jax.shard_map`; T is then the
      number of this device's steps.
  """
  return _linear_scan((solve, reverse, over), (a, b, h0))


def _is_free(a: Any, b: Vector) -> bool:
  """Returns whether A is the same in all of several steps."""
  return jax.tree.leaves(a)[0].shape[0] != b[0].shape[0]


def step_scan(a: Any, b: Vector, reverse: bool) -> Vector:
  """h_t = A_t h_{t-1} + b_t step by step, from h = 0."""
  always = jax.tree.map(lambda x: x[0], a) if _is_free(a, b) else None

  def body(h, ab):
    a, b = ab
    h = affine(a if always is None else always, b, h)
    return h, h

  xs = (a if always is None else None), b
  zero = jax.tree.map(lambda x: jnp.zeros_like(x[0]), b)
  return lax.scan(body, zero, xs, reverse=reverse)[1]


def compose_scan(a: Any, b: Vector, reverse: bool) -> Vector:
  """h_t = A_t h_{t-1} + b_t for all t in parallel, from h = 0."""
  if _is_free(a, b) and on_cpu():
    return _in_equal_blocks(a, b, reverse)
  return _prefixes(compose_scan, a, b, reverse)[1]


def _in_equal_blocks(a: Any, b: Vector, reverse: bool) -> Vector:
  """`compose_scan` with an A that is free of time.

  All blocks of about sqrt(T) steps have the same products of A, so that these
  take no memory.
  """
  always = jax.tree.map(lambda x: x[0], a)
  split, join, length = _blocks_of(b[0].shape[0], reverse)
  blocks = jax.tree.map(split, b)
  zero = jax.tree.map(lambda x: jnp.zeros_like(x[0]), blocks)

  def within(state, b):
    power, h = state
    power = _product(always, power)
    h = affine(always, b, h)
    return (power, h), (power, h)

  ones = jax.tree.map(jnp.ones_like, always)
  one = jax.tree.leaves(ones)[0]
  start = linear_maps.identity(always, one, jnp.zeros_like(one)), zero
  (whole, totals), (powers, h) = lax.scan(within, start, blocks, length=length)

  def across(before, total):
    return affine(whole, total, before), before

  first = jax.tree.map(lambda x: x[0], zero)
  _, before = lax.scan(across, first, totals)
  powers = jax.tree.map(lambda x: x[:, None], powers)
  h = affine(powers, h, jax.tree.map(lambda x: x[None], before))
  return jax.tree.map(join, h)


def _prefixes(solve, a: Any, b: Vector, reverse: bool) -> tuple[Any, Vector]:
  """Returns the maps (A, b) from before the first step to each step."""
  if _is_free(a, b):
    a = jax.tree.map(lambda x: jnp.broadcast_to(x, b[0].shape), a)
  if solve is step_scan:
    step = lambda maps, ab: (compose(maps, ab),) * 2
    one, zero = jnp.ones_like(b[0][0]), jnp.zeros_like(b[0][0])
    start = linear_maps.identity(a, one, zero), (zero,) * len(b)
    return lax.scan(step, start, (a, b), reverse=reverse)[1]
  if export.is_symbolic_dim(b[0].shape[0]):
    raise NotImplementedError(
        "implementation='associative_scan' needs a number of steps that is"
        f' known, got {b[0].shape[0]}: its rounds depend on it. The batch may'
        " be symbolic. implementation='scan' works."
    )
  # Else XLA on CPUs composes a map anew in each later round that reads it.
  keep = lax.optimization_barrier if on_cpu() else tuple
  once = lambda *maps: keep(compose(*maps))
  return lax.associative_scan(once, (a, b), reverse=reverse)


def compose(first, second):
  """Returns the map (A, b) of two, of which `first` acts first."""
  (a1, b1), (a2, b2) = first, second
  # After many steps A may have overflowed where b is 0.
  return _product(a2, a1), linear_maps.add(
      linear_maps.times(a2, b1, _both_beside), b2
  )


def _product(a2: Any, a1: Any) -> Any:
  """Returns A_2 A_1, which is zero only where one of them is."""
  product = linear_maps.after(a2, a1, _both_beside)
  is_zero = linear_maps.is_zero
  is_lost = is_zero(product) & ~is_zero(a1) & ~is_zero(a2)

  def kept(x):
    tiny: Any = x.dtype.type(jnp.finfo(x.dtype).tiny)
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
      tiny = jnp.copysign(tiny, x)
    return jnp.where(is_lost, tiny, x)

  return jax.tree.map(kept, product)


def _both_beside(x: Array, y: Array) -> Array:
  return _beside(y, x) * _beside(x, y)


def _from_finite(factor: Array, x: Array) -> Array:
  """Returns factor * x, where a factor of 0 forgets an infinity or NaN."""
  return factor * _beside(factor, x)


def _beside(factor: Array, x: Array) -> Array:
  """Returns x for a product with a factor: 0 for 0 times an infinity or NaN.

  For all that is finite the product has its own derivatives, of every order.
  """
  return jnp.where((factor == 0) & ~jnp.isfinite(x), 0, x)


def restarted(
    a: Any, b: Vector, reset: Array | None, restart: Vector
) -> tuple[Any, Vector]:
  """Returns the coefficients of steps that restart where `reset` is true.

  Args:
    a: A, each [..., F].
    b: arrays [..., F].
    reset: bool [...], or None for no restarts.
    restart: replaces h, arrays that are broadcast against b.
  """
  if reset is None:
    return a, b
  reset = reset[..., None]
  again = affine(a, b, restart)
  return linear_maps.where(reset, 0, a), linear_maps.where(reset, again, b)


def affine(a: Any, b: Vector, h: Vector) -> Vector:
  """Returns A h + b of one step, where A = 0 forgets even an infinite h."""
  return linear_maps.add(linear_maps.times(a, h, _from_finite), b)


def _solve(static, a, b, h0):
  """Returns h, and the h before the first step: h0 where time is whole."""
  solve, reverse, over = static
  if not over:
    first = -1 if reverse else 0
    of_first = lambda tree: jax.tree.map(lambda x: x[first], tree)
    start = affine(of_first(a), of_first(b), h0)
    b = jax.tree.map(lambda x, y: x.at[first].set(y), b, start)
    return solve(a, b, reverse), h0
  # An A that is free of time is not told from one of a single step.
  a = jax.tree.map(lambda x: jnp.broadcast_to(x, b[0].shape), a)
  a, b = _prefixes(solve, a, b, reverse)
  last = jax.tree.map(lambda x: x[0 if reverse else -1], (a, b))
  before = time_devices.enter(compose, last, h0, reverse, over)
  return affine(a, b, before), before


def _forward(static, operands):
  a, b, h0 = operands
  h, before = _solve(static, a, b, h0)
  return h, (a, h, before)


def _tangent(static, residuals, tangents):
  """The tangent is this recurrence, with dA_t h_{t-1} + db_t for b_t."""
  solve, reverse, over = static
  a, h, before = residuals
  d_a, d_b, d_h0 = tangents
  zeros = functools.partial(
      jax.tree.map,
      lambda d, x: jnp.zeros_like(x) if d is None else d,
      is_leaf=lambda d: d is None,
  )
  forcing = zeros(d_b, h)
  if any(x is not None for x in jax.tree.leaves(d_a)):
    earlier = scan_steps.shifted(before, h, reverse)
    moved = linear_maps.times(zeros(d_a, a), earlier, _from_finite)
    forcing = linear_maps.add(forcing, moved)
  if over or any(x is not None for x in jax.tree.leaves(d_h0)):
    return _solve(static, a, forcing, zeros(d_h0, before))[0]
  return solve(a, forcing, reverse)


def _adjoint(static, residuals, g):
  solve, reverse, over = static
  a, h, before = residuals
  back = linear_maps.transposed(a)
  zero = jax.tree.map(jnp.zeros_like, before)
  forcing = affine(back, jax.tree.map(jnp.zeros_like, g), g)
  if over:
    backward = solve, not reverse, over
    mu, after = _solve(backward, back, forcing, zero)
  else:
    mu, after = solve(back, forcing, not reverse), zero
  first = jax.tree.map(lambda x: x[-1 if reverse else 0], mu)
  if over:
    is_first = time_devices.is_first(reverse, over)
    first = linear_maps.where(~is_first, 0, first)
  adjoint = linear_maps.add(g, scan_steps.shifted(after, mu, not reverse))
  d_a = linear_maps.outer(a, adjoint, scan_steps.shifted(before, h, reverse))
  return jax.tree.map(_summed, d_a, a), adjoint, first


def _summed(d: Array, like: Array) -> Array:
  """Returns a cotangent, summed over the axes that `like` has no steps of."""
  sizes = zip(d.shape, like.shape, strict=True)
  axes = [i for i, (m, n) in enumerate(sizes) if m != n == 1]
  return jnp.sum(d, axes, keepdims=True) if axes else d


_linear_scan = autodiff.differentiable(_forward, _tangent, _adjoint)


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
      solved = compose_scan(a, (b,), self.reverse)[0]
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
  has no use for more in parallel. Arguments are as in `over_time`.
  """
  time = jax.tree.leaves(elements)[0].shape[0]
  split, join, _ = _blocks_of(time, reverse)

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


def _blocks_of(time: int, reverse: bool) -> tuple[Any, Any, int]:
  """Returns functions that cut steps into blocks and undo it, and their length.

  The blocks are [length, blocks, ...], in the order of the recurrence, behind
  the last step zeros.
  """
  length = math.isqrt(max(time - 1, 0)) + 1
  count = -(-time // length)

  def split(x):
    x = jnp.flip(x, 0) if reverse else x
    widths = [(0, count * length - time)] + [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, widths).reshape(count, length, *x.shape[1:])
    return jnp.swapaxes(x, 0, 1)

  def join(x):
    x = jnp.swapaxes(x, 0, 1).reshape(count * length, *x.shape[2:])[:time]
    return jnp.flip(x, 0) if reverse else x

  return split, join, length


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
