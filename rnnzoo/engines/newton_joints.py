"""Path 2 on a GPU: Newton's method at the joints between parts of time.

Where few sequences leave a GPU idle, time is cut into parts, and a kernel runs
all of them side by side, the steps of each in turn. Unknown are only the
carries s_k that parts begin with. With F_k the run over part k, they solve

    s_{k+1} - F_k(s_k) = 0

(multiple shooting: Bellen and Zennaro, 1989, "Parallel algorithms for initial-
value problems for difference and differential equations"). An iteration runs
the kernel from a guess of s, and corrects s by d,

    d_{k+1} = a_k d_k + F_k(s_k) - s_{k+1},    a_k = dF_k / ds

with C numbers a feature instead of T. No derivative of a step is written to
memory: a diagonal kernel with one array multiplies them up in registers, or
composes its clipped affine maps, and then the first s is right up to rounding
(`joint_cells.py`). For other cells a_k is taken for 0: that ends soon where a
part forgets the carry before it.

The result is that of the loop over time, or it is not taken. Within a part the
steps run in turn, so errors arise at the joints only. Without derivatives they
are to agree in every bit; then the trajectory is the kernel's own. With them,
the last correction is to be rounding. Where it does not get there, the steps
are solved for as on any device (`newton_windows.py`), in the same program.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import devices
from rnnzoo import cell as cell_lib
from rnnzoo.engines import branches
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import joint_cells
from rnnzoo.engines import part_runs
from rnnzoo.engines import scan_steps

Array = jax.Array
Carry = cell_lib.Carry
Operands = call_lib.Operands

# Runs over all steps, before the joints are given up.
_MOST_RUNS = 4

# In roundings of the carry's scale: a correction of `_SMALL` is rounding and no
# more; one of `_LARGE` is where it falls no further, since errors of the steps
# of a long memory add up.
_SMALL, _LARGE = 16, 64


class Report(NamedTuple):
  """How a run came about.

  Attributes:
    parts: of time.
    runs: of the kernel over all steps, without the first, which has no outputs.
    correction: the last of the joints, in the scale of the carry.
    fell_back: whether the joints were given up.
  """

  parts: int
  runs: Array
  correction: Array
  fell_back: Array


def unroll(
    steps: scan_steps.Plan,
    operands: Operands,
    otherwise: Callable[[Operands], tuple[Carry, Carry]],
    rows: int = 1,
) -> tuple[Carry, Carry, Report]:
  """Runs a cell over time.

  Args:
    steps: static arguments of path 1.
    operands: time-major, with a carry.
    otherwise: returns the last carry and all from operands, where the joints
      are given up.
    rows: runs that share the memory.

  Returns:
    The carry after the last step, each [B, F], the carries after every step,
    each [T, B, F], and how they were found.

  Raises:
    NotImplementedError: there are no kernels for this, or parts of time would
      not make them faster.
  """
  swap = lambda tree: jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
  operands = devices.alike(operands)
  x, reset, mask = swap((operands.x, operands.reset, operands.mask))
  batch_major = operands._replace(x=x, reset=reset, mask=mask)
  problem = part_runs.Problem.of(steps, batch_major, rows)

  def in_windows():
    # XLA removes pairs of transposes, and keeps this one in its branch.
    x, reset, mask = swap((batch_major.x, batch_major.reset, batch_major.mask))
    _, carries = otherwise(operands._replace(x=x, reset=reset, mask=mask))
    return swap(carries)

  carries, report = _solve(problem, in_windows)
  last = tuple(c[:, 0 if steps.call.reverse else -1] for c in carries)
  return last, swap(carries), report


def _first(problem: part_runs.Problem) -> Carry:
  """Returns carries that parts begin with, by a run that only reads."""
  if problem.has_maps:
    return problem.by_maps()
  guess = problem.guess()
  ends, slope, _ = problem.from_starts(guess, problem.fewest_outputs)
  return _corrected(guess, ends, slope)[0]


def _corrected(
    starts: Carry, ends: Carry, slope: Array | None
) -> tuple[Carry, Carry]:
  """Returns the next carries that parts begin with, and their corrections."""
  gaps = tuple(e[:-1] - s[1:] for e, s in zip(ends, starts, strict=True))
  if slope is None:
    rest = tuple(e[:-1] for e in ends)
  else:
    # d of the first part is 0: its beginning is known.
    d = pallas_kernels.linear_scan(slope[None, :-1], gaps[0][None])[0]
    gaps, rest = (d,), (starts[0][1:] + d,)
  new = tuple(
      jnp.concatenate([s[:1], x]) for s, x in zip(starts, rest, strict=True)
  )
  return new, gaps


def _size(slope: Array | None, starts: Carry, corrections: Carry) -> Array:
  """Returns the largest correction, in the scale of its feature so far.

  A part remembers the scale before it as far as its slope says. Without slopes
  the scale is that of all features. The size is infinite or NaN if a correction
  is.
  """
  worst = []
  for s, d in zip(starts, corrections, strict=True):
    tiny = float(jnp.finfo(s.dtype).tiny)
    # The maximum of a CPU may pass over NaN.
    known = jnp.where(jnp.isfinite(d), jnp.abs(d), jnp.inf)
    if slope is None:
      scale = jnp.max(jnp.abs(s))
    else:
      scale = part_runs.small_recurrence(
          joint_cells.Largest(), (slope[:-1], jnp.abs(s[1:])), jnp.abs(s[0])
      )
    worst.append(jnp.max(known / jnp.maximum(scale, tiny)))
  return jnp.max(jnp.stack(worst))


class _State(NamedTuple):
  starts: Carry
  carries: Carry
  right: Array
  runs: Array
  correction: Array
  fell_back: Array


def _solve(problem: part_runs.Problem, otherwise) -> tuple[Carry, Report]:
  """Returns the carries of all steps, each [B, T, F], and how they came."""
  outputs = len(problem.cell.carry_names)
  like = problem.gates

  def run(starts, runs, earlier):
    ends, slope, carries = problem.from_starts(starts, outputs)
    new, corrections = _corrected(starts, ends, slope)
    size = _size(slope, new, corrections)
    eps = float(jnp.finfo(size.dtype).eps)
    if slope is None:  # Nothing says how an error goes on.
      right = size == 0
    else:
      right = size <= _SMALL * eps
      right |= (size <= _LARGE * eps) & (size > earlier / 2)
    fell_back = devices.like(jnp.bool(False), like)
    return _State(new, carries, right, runs, size, fell_back)

  def give_up(state):
    yes = devices.like(jnp.bool(True), like)
    return state._replace(carries=otherwise(), right=yes, fell_back=yes)

  def again(state):
    return lax.cond(
        state.runs < _MOST_RUNS,
        lambda state: run(state.starts, state.runs + 1, state.correction),
        give_up,
        state,
    )

  # A loop and not a branch: a branch would copy carries that are right already.
  state = lax.while_loop(
      lambda state: ~branches.for_all_mapped(state.right),
      again,
      run(_first(problem), jnp.int32(1), jnp.float32(jnp.inf)),
  )
  return state.carries, Report(
      problem.fold.count, state.runs, state.correction, state.fell_back
  )
