"""The guess that Newton's method begins with: closer means fewer iterations.

Any cell can begin at f(s_0, x_t), one step from the initial carry. A cell may
know better and say so in `Cell.guess`, by recurrences of the form

    s_t = clip(a_t s_{t-1} + b_t, low_t, high_t)

These are closed under composition: a clipped affine map of a clipped range is
again one. So all steps are parallel, exactly and with no iteration. Among them
are linear recurrences, max(s + b, c), and relu(u s + x), which is all of an
IndRNN.

Then parts of time run side by side, step by step within a part, each from the
guess at its beginning. A recurrence that forgets makes the end of a
part nearly right, wherever the part began. So the parts run again from the ends
that were found, until these change little: some hundred steps in turn for any
T, which spare trained weights most of their iterations.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import errors as newton_errors
from rnnzoo.engines.time import jacobians
from rnnzoo.engines.time import joint_cells
from rnnzoo.engines.time import maps as maps_lib
from rnnzoo.engines.time import newton
from rnnzoo.engines.time import parts as time_parts

Array = jax.Array
Carry = cell_lib.Carry
Gates = cell_lib.Gates

# Up to so many steps, gates are frozen at a guess once; beyond it, three times.
_FEW_STEPS = 64

# How often parts of time run at most.
_MOST_RUNS = 8

# A change of the ends of parts, in the carry's scale, from which the iteration
# gets to rounding in two or three rounds.
_SMALL_CHANGE = 1e-3


def first(
    problem: newton.Problem,
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    kernels: tuple[Array, ...],
    init: Carry,
    restart: Carry,
) -> tuple[Carry, Array | int]:
  """Returns the first guess of the carries that parts of time end with.

  With it comes the number of steps that ran in turn to find it.

  Args:
    problem: the steps, whose `xs` are the input gates, resets and masks.
    cell: the equations.
    params: the cell's own parameters.
    kernels: packed recurrent kernels, as in `jacobians.of_steps`.
    init: the carry before the first step.
    restart: the carry after a reset.
  """
  x_gates, reset, mask = problem.xs
  diagonal = None
  if kernels and kernels[0].shape[1] == 1:
    diagonal = jnp.concatenate(list(map(jacobians.diagonal, kernels)))
  solve = _Solve(problem, init, restart)

  def improved(carries):
    before = problem.before(init, carries)
    start = scan_steps.select(reset, restart, before)
    h_gates = scan_steps.multiply(cell, params, kernels, x_gates, start)
    found = cell.guess(params, x_gates, h_gates, start, diagonal, solve)
    if found is None:
      return None
    if mask is None:
      return found
    # Some of it may be made of arrays that are held, and is not itself held.
    hold = lambda i: solve(lambda carry: carry[i], 0, found[i])[1]
    return tuple(map(hold, range(len(found))))

  zero = problem.zeros(init)
  time = zero[0].shape[0]
  parts = problem.parts(init)

  def guess(carries):
    ends = parts.ends(carries)
    if time <= _FEW_STEPS:
      return ends, 0
    return _by_parts(problem, parts, ends)

  if jax.eval_shape(improved, zero) is None:
    new, _ = problem.after(
        tuple(
            jnp.broadcast_to(c, z.shape)
            for c, z in zip(init, zero, strict=True)
        )
    )
    return guess(new)
  if diagonal is not None and cell.has_exact_guess:
    return parts.ends(improved(zero)), 0
  rounds = 2 if time <= _FEW_STEPS else 4
  found = lax.fori_loop(0, rounds, lambda _, carries: improved(carries), zero)
  return guess(found)


def _by_parts(
    problem: newton.Problem, parts: time_parts.Parts, guess: Carry
) -> tuple[Carry, Array]:
  """Improves a guess: runs parts of time side by side, a few times.

  Args:
    problem: the steps.
    parts: the parts of time.
    guess: the carries that parts end with, each [count, B, F].

  Returns:
    As `guess`, which stays where the runs give numbers that are not finite; and
    the number of steps in turn.
  """

  def run(ends):
    new = parts.run(ends)
    difference = tuple(map(jnp.subtract, new, ends))
    scale = newton_errors.scales(
        new, heads=problem.heads, begins=None, reverse=False
    )
    return new, newton_errors.largest(difference, scale)

  def unfinished(state):
    _, change, earlier, runs = state
    more = (change > _SMALL_CHANGE) & (change < earlier)
    return ~time_parts.for_all_mapped(~(more & (runs < _MOST_RUNS - 1)))

  def again(state):
    ends, earlier, _, runs = state
    return *run(ends), earlier, runs + 1

  ends, change = run(guess)
  earlier = jnp.full_like(change, jnp.inf)
  runs = jnp.ones_like(change, jnp.int32)
  ends, _, _, runs = lax.while_loop(
      unfinished, again, (ends, change, earlier, runs)
  )
  ends = tuple(
      jnp.where(jnp.isfinite(new), new, old)
      for new, old in zip(ends, guess, strict=True)
  )
  return ends, runs * parts.length


class _Solve:
  """Solves clipped affine recurrences of one array of the carry."""

  def __init__(self, problem: newton.Problem, init: Carry, restart: Carry):
    self._problem, self._init, self._restart = problem, init, restart

  def __call__(
      self,
      start: Callable[[Carry], Array],
      a: Any,
      b: Array,
      low: Any = -jnp.inf,
      high: Any = jnp.inf,
  ) -> tuple[Array, Array]:
    """Returns s before the steps and after them, each [T, B, F].

    Args:
      start: maps a carry to the s that it begins with.
      a: broadcast against b.
      b: [T, B, F].
      low: lower bounds, [T, B, F].
      high: upper bounds, [T, B, F].
    """
    _, reset, mask = self._problem.xs
    reverse = self._problem.reverse
    init, restart = start(self._init), start(self._restart)
    a, low, high = (
        jnp.broadcast_to(jnp.asarray(x, b.dtype), b.shape)
        for x in (a, low, high)
    )
    maps: tuple[Any, ...] = a, b, low, high
    if mask is not None:
      still = 1, 0, -jnp.inf, jnp.inf
      maps = tuple(
          scan_steps.where(mask, x, y) for x, y in zip(maps, still, strict=True)
      )
    if reset is not None:
      at_once = (0, joint_cells.apply(maps, restart), -jnp.inf, jnp.inf)
      maps = tuple(
          scan_steps.where(~reset, x, y)
          for x, y in zip(maps, at_once, strict=True)
      )
    first = -1 if reverse else 0
    begun = joint_cells.apply(tuple(x[first] for x in maps), init)
    a, b, low, high = maps
    maps = a.at[first].set(0), b.at[first].set(begun), low, high
    # The first step forgets the carry before it, so that s is b, clipped.
    _, b, low, high = maps_lib.over_time(
        joint_cells.compose, maps, reverse=reverse
    )
    after = jnp.clip(b, low, high)
    (before,) = self._problem.before((init,), (after,))
    if reset is not None:
      before = scan_steps.where(~reset, before, restart)
    return before, after
