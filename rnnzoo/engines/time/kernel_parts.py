"""Path 2 on a GPU: Newton's method at the joints between parts of time.

If few sequences leave a GPU idle, time is cut into parts, and a kernel runs
all parts side by side, the steps of each in turn. Unknown are only the
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

The result is the loop's over time, or it is not taken. Within a part the
steps run in turn, so errors arise at the joints only. Without derivatives they
are to agree in every bit; then the trajectory is the kernel's own. With them,
the last correction is to be rounding. If it does not get there, the steps
are solved for as on any device (`path.py`), without leaving the program.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import devices
from pallas_kernels import projection as kernel_projection
from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import selection
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.engines.time import joint_cells
from rnnzoo.engines.time import parts as time_parts

Array = jax.Array
Carry = cell_lib.Carry
Operands = call_lib.Operands

# Fewest steps of a part: it is to forget the steps before it. Else there are as
# many parts as multiprocessors run at once.
_FEWEST_STEPS = 128

# Tiles of 128 lanes that keep a multiprocessor busy, where each is a CTA.
_TILES = 4

# Sequences of a CTA, and units of one that shares a head with others.
_COLUMNS, _UNITS = 8, 32

# Bytes of input gates: they exist for all steps at once.
_MOST_BYTES = 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """Operands of kernels that run all parts, folded.

  Attributes:
    cell: the equations.
    fold: how time is cut.
    params: parameters of the cell.
    gates: without the bias.
    bias: bias of the gates, or None.
    kernel: R.
    init: carry before the first step, each [B, F].
    restart: carry after a reset, each [B, F].
    reset: bool, or None.
    mask: bool, or None.
    diagonal: whether R is.
  """

  cell: cell_lib.Cell
  fold: time_parts.Fold
  params: dict[str, Array]
  gates: Array
  bias: Array | None
  kernel: Array
  init: Carry
  restart: Carry
  reset: Array | None
  mask: Array | None
  diagonal: bool

  @classmethod
  def of(cls, steps: scan_steps.Plan, operands: Operands) -> 'Problem':
    """Folds operands.

    Args:
      steps: static arguments of path 1.
      operands: batch-major, with a carry.
    """
    cell, kernel = steps.cell, operands.recurrent_kernel
    x, reset, mask = operands.x, operands.reset, operands.mask
    init = operands.carry
    selection.check_known(x.shape)
    if kernel is None or init[0].dtype != jnp.float32:
      raise NotImplementedError('Parts of time need R, and a float32 carry.')
    batch, time = x.shape[:2]
    heads, size = kernel.shape[1:3]
    features = heads * size
    diagonal = size == 1 and not isinstance(cell, cell_lib.TwoStageCell)
    flagged = reset is not None or mask is not None
    in_features = diagonal and features < 128 and not flagged
    cores = devices.current().cores
    if in_features:
      most = _TILES * cores * 128 // (batch * features)
    elif diagonal:
      most = _TILES * cores // (batch * -(-features // 128))
    else:
      most = _COLUMNS * cores // (batch * heads * -(-size // _UNITS))
    count = _count(time, min(most, time // _FEWEST_STEPS))
    fold = time_parts.Fold(
        batch=batch,
        time=time,
        features=features,
        count=count,
        reverse=steps.call.reverse,
        in_features=in_features,
    )
    if mask is not None:
      x = scan_steps.where(mask, x, 0)
    projection: Any = steps.project
    inputs = projection.for_kernels(operands.weights, x)
    gates = inputs.x
    if batch * time * cell.input_gates * features * 4 > _MOST_BYTES:
      raise NotImplementedError('Windows of time take less memory.')
    if inputs.input_kernel is not None:
      gates = kernel_projection.project(inputs.input_kernel, gates)
    if diagonal:
      kernel = fold.small(kernel[:, :, 0, 0])[..., None, None]
    small = lambda tree: jax.tree.map(fold.small, tree)
    flags = lambda x: None if x is None else fold.steps(x)
    return cls(
        cell=cell,
        fold=fold,
        params=small(dict(operands.params)),
        gates=fold.steps(gates),
        bias=small(inputs.bias),
        kernel=kernel,
        init=init,
        restart=operands.restart,
        reset=flags(reset),
        mask=flags(mask),
        diagonal=diagonal,
    )

  @property
  def has_slopes(self) -> bool:
    """Whether the derivative of a part is one number a feature."""
    return self.diagonal and len(self.cell.carry_names) == 1

  def run(
      self, cell: Any, starts: Carry, restart: Carry, outputs: int
  ) -> tuple[Carry, Carry]:
    """Runs all parts.

    Args:
      cell: the cell or one made of it.
      starts: the carries that parts begin with, each [C, B F].
      restart: the carry after a reset, each [C, B F].
      outputs: number of arrays of the carry to return for all steps.

    Returns:
      The carries that parts end with, each [C, B F], and the carries after all
      steps, each [B, T, F].
    """
    fold = self.fold
    params = self.params if cell is self.cell else self.with_weights()
    folded = lambda carry: tuple(map(fold.carry, carry))
    ends, carries = pallas_kernels.recurrence(
        cell,
        params,
        self.gates,
        self.kernel,
        folded(starts),
        bias=self.bias,
        restart=None if self.reset is None else folded(restart),
        reset=self.reset,
        mask=self.mask,
        call=call_lib.Call(
            reverse=fold.reverse, outputs=outputs, out_dtype=jnp.float32
        ),
    )
    return tuple(map(fold.rows, ends)), tuple(map(fold.unfolded, carries))

  def from_starts(
      self, starts: Carry, outputs: int
  ) -> tuple[Carry, Array | None, Carry]:
    """Runs all parts; returns their ends, slopes or None, and carries."""
    restart = tuple(map(self.fold.every, self.restart))
    if not self.has_slopes:
      ends, carries = self.run(self.cell, starts, restart, outputs)
      return ends, None, carries
    (s,), (again,) = starts, restart
    (end, slope), carries = self.run(
        joint_cells.Tangent(self.cell),
        (s, jnp.ones_like(s)),
        (again, jnp.zeros_like(s)),
        outputs,
    )
    return (end,), slope, carries

  def guess(self) -> Carry:
    """Returns carries to begin parts with: after a reset, but the first."""
    return tuple(
        jnp.concatenate([init.reshape(1, -1), self.fold.every(again)[1:]])
        for init, again in zip(self.init, self.restart, strict=True)
    )

  @property
  def has_maps(self) -> bool:
    """Whether a part is a clipped affine map."""
    if not self.has_slopes:
      return False
    return joint_cells.has_map(self.cell, self.with_weights())

  def with_weights(self) -> dict[str, Array]:
    """Returns the parameters, the diagonal of R included."""
    return {**self.params, joint_cells.WEIGHTS: self.kernel[:, :, 0, 0]}

  def by_maps(self) -> Carry:
    """Returns the carries that parts begin with, by the maps of parts."""
    again = self.fold.every(self.restart[0])
    like = jnp.zeros_like(again)
    free = like - jnp.inf, like + jnp.inf
    maps, _ = self.run(
        joint_cells.Clipped(self.cell),
        (like + 1, like, *free),
        (like, again, *free),
        0,
    )
    first = self.init[0].reshape(-1)
    rest = small_recurrence(
        joint_cells.Clip(), tuple(x[:-1] for x in maps), first
    )
    return (jnp.concatenate([first[None], rest]),)


def small_recurrence(cell: Any, gates: Carry, first: Array) -> Array:
  """Runs a cell of one array over parts, without R.

  Its gates are [C - 1, B F], the first carry [B F], and the result is the carry
  after every part, [C - 1, B F].
  """
  _, (carries,) = pallas_kernels.recurrence(
      cell,
      {},
      tuple(gate[None] for gate in gates),
      jnp.zeros((1, first.shape[0], 1, 1)),
      (first[None],),
      call=call_lib.Call(out_dtype=jnp.float32),
  )
  return carries[0]


def _count(time: int, most: int) -> int:
  """Returns the number of parts, which divides T if a good one does."""
  if most < 2:
    raise NotImplementedError('Parts of time would not be faster.')
  for count in range(most, max(most // 2, 1), -1):
    if time % count == 0:
      return count
  return most


# Runs over all steps, before the joints are given up.
_MOST_RUNS = 4

# In roundings of the carry's scale: a correction of `_SMALL` is rounding and no
# more; one of `_LARGE` is where it falls no further, since errors of the steps
# of a long memory add up.
_SMALL, _LARGE = 16, 64


class Report(NamedTuple):
  """How a run came about.

  Attributes:
    parts: number of parts of time.
    runs: kernel runs over all steps, without the first, which has no outputs.
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
) -> tuple[Carry, Carry, Report]:
  """Returns the last carry, all, [T, B, F], and how they were found.

  Args:
    steps: static arguments of path 1.
    operands: time-major, with a carry.
    otherwise: returns the last carry and all from operands, where the joints
      are given up.

  Raises:
    NotImplementedError: there are no kernels for this, or parts of time would
      not make them faster.
  """
  swap = lambda tree: jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
  operands = devices.alike(operands)
  batch_major = operands.swapped()
  problem = Problem.of(steps, batch_major)

  def in_windows():
    # XLA removes pairs of transposes, and keeps this one in its branch.
    _, carries = otherwise(batch_major.swapped())
    return swap(carries)

  carries, report = _solve(problem, in_windows)
  last = tuple(c[:, 0 if steps.call.reverse else -1] for c in carries)
  return last, swap(carries), report


def _first(problem: Problem) -> Carry:
  """Returns carries that parts begin with, by a run that only reads."""
  if problem.has_maps:
    return problem.by_maps()
  guess = problem.guess()
  fewest_outputs = 0 if problem.diagonal else 1
  ends, slope, _ = problem.from_starts(guess, fewest_outputs)
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
  all features share one scale. The size is infinite or NaN if a correction is.
  """
  worst = []
  for s, d in zip(starts, corrections, strict=True):
    tiny = float(jnp.finfo(s.dtype).tiny)
    # The maximum of a CPU may pass over NaN.
    known = jnp.where(jnp.isfinite(d), jnp.abs(d), jnp.inf)
    if slope is None:
      scale = jnp.max(jnp.abs(s))
    else:
      scale = small_recurrence(
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


def _solve(problem: Problem, otherwise) -> tuple[Carry, Report]:
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
      lambda state: ~time_parts.for_all_mapped(state.right),
      again,
      run(_first(problem), jnp.int32(1), jnp.float32(jnp.inf)),
  )
  return state.carries, Report(
      problem.fold.count, state.runs, state.correction, state.fell_back
  )
