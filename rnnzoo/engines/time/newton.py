"""Newton's method over time: like `lax.scan`, for all steps at once.

A trajectory s_1 .. s_T of s_t = f_t(s_{t-1}) is the root of the T equations
f_t(s_{t-1}) - s_t = 0. One Newton iteration is linear in its correction d,

    d_t = A_t d_{t-1} + f_t(s_{t-1}) - s_t,    A_t = df_t / ds at s_{t-1}

and this recurrence takes one associative scan (Lim et al., 2024, "Parallelizing
non-linear sequential models over the sequence length").

Far from the trajectory, a linearisation may lead further away, and then only
the first steps that are not exact yet become so. So each iteration also runs
the steps: parts of time side by side, from the carries that the scan gave
(`parts.py`). Within a part the steps then follow from each other, and
equations are open only at the joints between parts. An iteration makes at least
one more part exact. Later iterations run the parts 2, 4 or 8 times, each time
from the ends of the run before, and make as many parts exact. So the iteration
ends; it pays where it ends soon.

The result is the loop's over time, or it is not taken:

* A small residual is not a small error, since errors grow where the recurrence
  expands. So each iteration also solves for the growth of rounding errors: e_t
  = A_t e_{t-1} + noise_t, with noise of the size of one rounding and random
  signs. A residual leaves an error of at most residual / rounding times e.
* Iterates that are not finite never stay: the step's own value takes their
  place. A step that is not finite itself ends the iteration.
* If the residual is not down to rounding when the iteration ends, the steps run
  one by one, without leaving the compiled program.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import errors as newton_errors
from rnnzoo.engines.time import maps as maps_lib
from rnnzoo.engines.time import parts as time_parts

Array = jax.Array
Carry = cell_lib.Carry

# In roundings of the carry's scale: a residual of `_SMALL` is rounding and no
# more; one of `_LARGE` is where it falls no further and does no harm.
_SMALL, _LARGE = 4, 64

# Most affine scans of a window; if they do not suffice, its steps run in turn.
MOST_ITERATIONS = 32

# Starting here, each iteration runs the parts twice as often as the one before
# it, up to `_MOST_RUNS`.
_LATE, _MOST_RUNS = 1, 8

# Rounding errors grow as on the trajectory where the residual was no larger
# than this.
_NEAR = 1e-2


class Report(NamedTuple):
  """How a run came about.

  Attributes:
    iterations: affine scans, the most of any window.
    residual: largest |f(s_{t-1}) - s_t| of the last iteration, in the
      scale of the carry.
    sensitivity: largest error in the trajectory, in the carry's scale, that one
      rounding error in each step makes.
    fell_back: whether some steps ran one by one.
    in_turn: sequential steps in all windows together, most run side by side
      with steps of other parts of time. `lax.scan` has T.
  """

  iterations: Array
  residual: Array
  sensitivity: Array
  fell_back: Array
  in_turn: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """T steps to be solved for, [T, ...].

  Attributes:
    body: (carry, x) -> (carry, y), one step, as in `lax.scan`.
    xs: the steps' own arrays.
    maps: carries before the steps -> A of every step; exact, or near.
    exact: whether these are the derivatives.
    reverse: whether time runs from the last step to the first.
    heads: N, blocks of the carry that do not see each other.
    begins: bool [T, B, 1], the steps that do not depend on the carry before, or
      None.
    noise: (carries before steps, the steps' xs) -> their rounding errors, from
      `newton_errors.noise`; None where features do not see each other.
    at_once: number of steps that `after` takes at once, which bounds its
      memory; None for all.
  """

  body: Callable[[Carry, Any], tuple[Carry, Any]]
  xs: Any
  maps: Callable[[Carry], maps_lib.Maps]
  exact: bool
  reverse: bool
  heads: int
  begins: Array | None
  noise: Callable[[Carry, Any], Carry] | None = None
  at_once: int | None = None

  def scales(self, of: Callable[..., Carry], s: Carry) -> Carry:
    """Returns scales of the carries after the steps, of `newton_errors`."""
    return of(s, heads=self.heads, begins=self.begins, reverse=self.reverse)

  def before(self, init: Carry, s: Carry) -> Carry:
    """Returns the carries before the steps."""
    return scan_steps.shifted(init, s, self.reverse)

  def zeros(self, init: Carry) -> Carry:
    """Returns carries of zeros for every step."""
    time = jax.tree.leaves(self.xs)[0].shape[0]
    return tuple(
        jnp.broadcast_to(jnp.zeros_like(x), (time, *x.shape)) for x in init
    )

  def after(self, before: Carry) -> tuple[Carry, Any]:
    """Returns the carries after the steps, and their results."""
    run = lambda state, steps: (state, jax.vmap(self.body)(*steps))
    steps = before, self.xs
    if self.at_once is None:
      return run((), steps)[1]
    return scan_steps.scan_chunks(run, (), steps, self.at_once, False)[1]

  def parts(self, init: Carry) -> time_parts.Parts:
    """Returns parts of time, to be run side by side."""
    return time_parts.Parts(self.body, init, self.xs, self.reverse)

  def last(self, s: Carry) -> Carry:
    """Returns the carry after the last step."""
    return tuple(x[0] if self.reverse else x[-1] for x in s)


class _State(NamedTuple):
  ends: Carry
  new: Carry
  errors: Carry
  iterations: Array
  runs: Array
  residual: Array
  earlier: Array
  sensitivity: Array


def solve(
    problem: Problem,
    init: Carry,
    init_errors: Carry,
    guess: Carry,
    *,
    most_sensitive: float,
    iterations: int | Array | None = None,
) -> tuple[Carry, Any, Report, Array]:
  """Iterates until the residual is rounding, or there is no hope for it.

  Args:
    problem: the steps.
    init: the carry before the first step.
    init_errors: growth of rounding errors up to there.
    guess: the carries that parts of time end with, to begin with.
    most_sensitive: the largest growth of rounding errors that is accepted.
    iterations: most affine scans; None for `MOST_ITERATIONS`.

  Returns:
    The carries before the steps; the growth of rounding errors after the last;
    how it went; and whether the carries are the trajectory.
  """
  eps = newton_errors.rounding(init)
  parts = problem.parts(init)
  most = MOST_ITERATIONS if iterations is None else iterations

  def right(state):
    error = state.residual / eps * state.sensitivity
    small = state.residual <= _SMALL * eps
    small |= (state.residual <= _LARGE * eps) & (error <= most_sensitive)
    return small & jnp.isfinite(state.residual)

  def unfinished(state):
    falls = state.residual <= state.earlier / 2
    more = (state.residual > _SMALL * eps) & (falls | ~right(state))
    # The growth of rounding errors is that near the trajectory.
    more |= state.earlier > _NEAR
    more &= state.iterations < most
    return more & jnp.isfinite(state.residual)

  new = parts.carries(guess)
  residual = _residual_of_joints(problem, parts, new, guess)
  start = _State(
      ends=guess,
      new=new,
      errors=jax.tree.map(jnp.zeros_like, new),
      # They vary over the devices that the residual varies over.
      iterations=jnp.full_like(residual, 0, dtype=jnp.int32),
      runs=jnp.full_like(residual, 1, dtype=jnp.int32),
      residual=residual,
      earlier=jnp.full_like(residual, jnp.inf),
      sensitivity=jnp.zeros_like(residual),
  )
  state = lax.while_loop(
      lambda state: ~time_parts.for_all_mapped(~unfinished(state)),
      lambda state: _iterate(problem, parts, init, init_errors, state),
      start,
  )
  final = right(state)
  errors = problem.last(state.errors)
  report = Report(
      iterations=state.iterations,
      residual=state.residual,
      sensitivity=state.sensitivity,
      fell_back=~final,
      in_turn=state.runs * parts.length,
  )
  return problem.before(init, state.new), errors, report, final


def _iterate(
    problem: Problem, parts: time_parts.Parts, init, init_errors, state: _State
) -> _State:
  """Takes one affine scan, and runs parts of time from its carries."""
  s = parts.with_ends(state.new, state.ends)
  before = problem.before(init, s)
  maps = problem.maps(before)
  gaps = tuple(map(jnp.subtract, state.new, s))
  terms = _error_terms(problem, maps, state, init, init_errors, before)
  correction, errors = maps_lib.solve(maps, [gaps, terms], problem.reverse)
  # Not s + d: where d is the open equation's alone, the sum is new itself.
  s = tuple(
      new + jnp.where(jnp.isfinite(d), d - gap, 0)
      for new, d, gap in zip(state.new, correction, gaps, strict=True)
  )
  # After as many runs as there are parts, all parts are exact.
  runs = jnp.minimum(
      jnp.minimum(2 ** jnp.clip(state.iterations - _LATE, 0, 30), _MOST_RUNS),
      jnp.maximum(parts.count - state.runs, 1),
  )
  ends = parts.run_often(parts.ends(s), runs - 1)
  new = parts.carries(ends)
  if not problem.exact:
    errors = tuple(map(jnp.add, state.errors, errors))
  errors = tuple(jnp.where(jnp.isfinite(e), e, jnp.inf) for e in errors)
  so_far = problem.scales(newton_errors.scales_so_far, new)
  sensitivity = newton_errors.largest(errors, so_far)
  return _State(
      ends=ends,
      new=new,
      # An infinite error would stay one in the next iteration.
      errors=tuple(jnp.where(jnp.isfinite(e), e, 0) for e in errors),
      iterations=state.iterations + 1,
      runs=state.runs + runs,
      residual=_residual_of_joints(problem, parts, new, ends),
      earlier=state.residual,
      sensitivity=sensitivity,
  )


def solve_linear(problem: Problem, init: Carry) -> tuple[Carry, Any]:
  """Returns the results of `lax.scan(body, init, xs)`, for a linear body.

  One iteration is all it takes, and has derivatives of its own. If rounding
  or a number that is not finite keeps it from the result, the loop runs.

  Args:
    problem: problem with exact maps.
    init: the carry before the first step.
  """
  zero = problem.zeros(init)
  new, _ = problem.after(problem.before(init, zero))
  (s,) = maps_lib.solve(problem.maps(zero), [new], problem.reverse)
  new, ys = problem.after(problem.before(init, s))
  difference = tuple(map(jnp.subtract, new, s))
  scale = problem.scales(newton_errors.scales_together, new)
  residual = newton_errors.largest(difference, scale)
  return lax.cond(
      time_parts.for_all_mapped(
          residual <= _LARGE * newton_errors.rounding(init)
      ),
      lambda: (problem.last(new), ys),
      lambda: lax.scan(problem.body, init, problem.xs, reverse=problem.reverse),
  )


def _error_terms(problem, maps, state, init, init_errors, before) -> Carry:
  """Returns the rounding errors of a step, with random signs."""
  scale = problem.scales(newton_errors.scales, state.new)
  eps = newton_errors.rounding(init)
  noise = tuple(
      eps * x * newton_errors.signs(new.shape, i).astype(new.dtype)
      for i, (x, new) in enumerate(zip(scale, state.new, strict=True))
  )
  if problem.exact:
    first = -1 if problem.reverse else 0
    one = slice(-1, None) if problem.reverse else slice(0, 1)
    at_first = jax.tree.map(lambda a: a[one], maps)
    moved = maps_lib.apply(at_first, tuple(e[None] for e in init_errors))
    return tuple(
        n.at[first].add(m[0]) for n, m in zip(noise, moved, strict=True)
    )
  # The maps are only near: errors are iterated like the trajectory itself.
  errors = problem.before(init_errors, state.errors)
  _, moved = jax.jvp(lambda s: problem.after(s)[0], (before,), (errors,))
  return tuple(
      n + m - e for n, m, e in zip(noise, moved, state.errors, strict=True)
  )


def _residual_of_joints(
    problem: Problem, parts: time_parts.Parts, new: Carry, ends: Carry
) -> Array:
  """Returns the residual; NaN where a carry is not finite.

  Steps within parts follow from each other, so joints alone have any.
  """
  finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in new])
  unknown = jnp.where(jnp.all(finite), 0, jnp.nan).astype(new[0].dtype)
  if parts.count == 1:
    return unknown
  last = parts.length - 1
  found, xs, begins = parts.at(last, (new, problem.xs, problem.begins))
  before = parts.at(last - 1, new)
  noise = None if problem.noise is None else problem.noise(before, xs)
  scale = newton_errors.scales_of_steps(
      found, before, begins, problem.heads, noise
  )
  # The last part ends at no joint.
  difference = tuple((x - e)[:-1] for x, e in zip(found, ends, strict=True))
  scale = tuple(x[:-1] for x in scale)
  return newton_errors.largest(difference, scale) + unknown
