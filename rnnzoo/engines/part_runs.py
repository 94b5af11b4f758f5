"""Runs of a kernel over all parts of time, side by side.

Where few sequences leave a GPU idle, parts of time keep it busy. As many are
taken as its multiprocessors run at once, unless parts get too short to forget
the steps before them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import devices
from pallas_kernels import projection as kernel_projection
from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import joint_cells
from rnnzoo.engines import scan_steps
from rnnzoo.engines import selection
from rnnzoo.engines import time_folds

Array = jax.Array
Carry = cell_lib.Carry
Operands = call_lib.Operands

# Fewest steps of a part: it is to forget the steps before it.
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
    params: of the cell.
    gates: without the bias.
    bias: of the gates, or None.
    kernel: R.
    init: before the first step, each [B, F].
    restart: after a reset, each [B, F].
    reset: bool, or None.
    mask: bool, or None.
    diagonal: whether R is.
  """

  cell: cell_lib.Cell
  fold: time_folds.Fold
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
  def of(
      cls, steps: scan_steps.Plan, operands: Operands, rows: int = 1
  ) -> 'Problem':
    """Folds operands.

    Args:
      steps: static arguments of path 1.
      operands: batch-major, with a carry.
      rows: runs that share the memory.
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
    fold = time_folds.Fold(
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
    if rows * batch * time * cell.input_gates * features * 4 > _MOST_BYTES:
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
      The carries that parts end with, each [C, B F], and those of all steps,
      each [B, T, F].
    """
    fold, params = self.fold, self.params
    if cell is not self.cell:
      weights = self.kernel[:, :, 0, 0]
      params = {**params, joint_cells.WEIGHTS: weights}
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
    """Returns carries to begin parts with: those of a reset, but the first."""
    return tuple(
        jnp.concatenate([init.reshape(1, -1), self.fold.every(again)[1:]])
        for init, again in zip(self.init, self.restart, strict=True)
    )

  @property
  def fewest_outputs(self) -> int:
    """Number of arrays that a run has to write."""
    return 0 if self.diagonal else 1

  @property
  def has_maps(self) -> bool:
    """Whether a part is a clipped affine map."""
    if not self.has_slopes:
      return False
    weights = self.kernel[:, :, 0, 0]
    params = {**self.params, joint_cells.WEIGHTS: weights}
    return joint_cells.has_map(self.cell, params)

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

  Args:
    cell: the equations.
    gates: of every part, each [C - 1, B F].
    first: the carry before, [B F].

  Returns:
    The carry after every part, [C - 1, B F].
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
