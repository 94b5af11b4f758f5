"""How Newton's method over time is run: which derivatives, which windows."""

import dataclasses

from jax import export

from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import selection
from rnnzoo.engines.scan import steps as scan_steps

# Bytes of the derivatives of a window, and of the arrays that compose them.
BYTES = 2**28
_COPIES = 4

# Sequences that a symbolic batch is taken for.
_SYMBOLIC_BATCH = 64

# With matrices for fewer steps at once, there is not enough in parallel.
_FEWEST_STEPS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Static (hashable) arguments of a run.

  Attributes:
    steps: plan of path 1, whose chunks are the windows.
    exact: whether derivatives are exact; a diagonal quasi-Newton's otherwise.
    settings: the settings that were asked for.
  """

  steps: scan_steps.Plan
  exact: bool
  settings: selection.AssociativeScan

  @property
  def joints(self) -> bool:
    """Whether a GPU may solve for the joints of parts of time instead."""
    # Settings of derivatives and windows ask for those.
    return self.settings.jacobian is None and self.settings.window is None

  def again(self, operands: call_lib.Operands) -> 'Plan':
    """Returns the plan for other operands, with these settings."""
    steps = self.steps
    return make_plan(
        steps.cell, steps.project, operands, steps.call, self.settings
    )


def make_plan(
    cell: cell_lib.Cell,
    project: call_lib.Projection,
    operands: call_lib.Operands,
    call: call_lib.Call,
    settings: selection.AssociativeScan,
) -> Plan:
  """Chooses derivatives and the length of windows by the memory they need.

  Args:
    cell: the equations.
    project: makes the input gates, as in `scan_steps.Plan`.
    operands: time-major arrays, with a carry.
    call: static options.
    settings: says which derivatives, and how many steps in parallel.

  Raises:
    NotImplementedError: the number of steps is not known, or the derivatives of
      a few steps do not fit.
  """
  time, batch = operands.x.shape[0], operands.x.shape[1]
  if export.is_symbolic_dim(time):
    raise NotImplementedError(
        "implementation='associative_scan' needs a number of steps that is"
        f' known, got {time}: its rounds depend on it. The batch may be'
        " symbolic. implementation='scan' works."
    )
  if export.is_symbolic_dim(batch):
    batch = _SYMBOLIC_BATCH
  count, features = len(cell.carry_names), operands.carry[0].shape[-1]
  itemsize = operands.carry[0].dtype.itemsize
  kernel = operands.recurrent_kernel
  size = 1 if kernel is None else kernel.shape[-1]
  numbers = _COPIES * itemsize * max(batch, 1) * features * count**2
  jacobian, window = settings.jacobian, settings.window
  least = min(time, window or _FEWEST_STEPS)
  fits = numbers * size * least <= BYTES
  if jacobian == 'exact' and not fits:
    raise NotImplementedError(
        f"jacobian='exact' needs {numbers * size * least / 2**20:,.0f} MiB for"
        f' {least} steps of {batch} sequences with {features} features, above'
        f" the bound of {BYTES // 2**20} MiB. jacobian='diagonal' needs"
        f' {numbers * least / 2**20:,.1f} MiB for them, and None takes it.'
    )
  exact = size == 1 or (fits and jacobian != 'diagonal')
  if not exact:
    size = 1
  longest = max(1, min(time, BYTES // (numbers * size)))
  chunk = min(time, window or longest)
  return Plan(
      steps=scan_steps.Plan(
          cell=cell,
          project=project,
          call=dataclasses.replace(call, time_major=True, out_dtype=None),
          chunk=chunk,
          adjoint_chunk=chunk,
          save_gates=False,
      ),
      exact=exact,
      settings=settings,
  )
