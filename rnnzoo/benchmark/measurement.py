"""Checks every result, then times those that are right.

Compiling takes longer than running here. So programs of several cases are
compiled side by side while the first ones are checked, unless the time that a
compilation takes is to mean something. Nothing is compiled while a program is
timed.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
import dataclasses
import itertools
import os
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from rnnzoo.benchmark import cases
from rnnzoo.benchmark import checks
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing
from rnnzoo.benchmark import watchdog as watchdog_lib

Row = dict[str, Any]

# Fields that say which row it is, with those that a table shows first.
LABELS = ('layer', 'implementation', 'projection', 'direction')
KEY = ('shape', 'dtype', *LABELS)

# Cases that are in memory at the same time.
_TOGETHER = 4

# Calls that are in flight together, each of which is checked: CTAs that do not
# wait for each other as they should are right most of the time.
_CALLS = 3


@dataclasses.dataclass(eq=False)
class _Run:
  """One implementation of a problem in one direction.

  Attributes:
    problem: the problem.
    implementation: by which path.
    direction: whether with the gradient.
    row: its results so far.
    dtype: instead of the case's.
    right: whether its errors are within their limits.
    compilation: between tracing and compiling.
    program: once it is compiled.
    pending: a compilation in another thread.
  """

  problem: problems.Problem
  implementation: str
  direction: str
  row: Row
  dtype: str | None = None
  right: bool = False
  compilation: Any = None
  program: timing.Program | None = None
  pending: futures.Future[None] | None = None

  def __str__(self):
    text = ' '.join(str(self.row[label]) for label in LABELS)
    return f'{text} in {self.dtype}' if self.dtype else text

  def trace(self, timed: bool) -> None:
    """Traces it, or notes why that cannot be."""
    arguments = self.problem.arguments
    try:
      function = self.problem.function(
          self.implementation, self.direction, self.dtype
      )
      if self.dtype is not None:
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, self.dtype), arguments
        )
      self.compilation = timing.lower(function, *arguments, quick=not timed)
    except NotImplementedError as error:
      self.row |= {'status': 'cannot', 'reason': str(error)}
    except Exception as error:
      self.fail(error)

  def compile(self, together: int) -> None:
    """Compiles it, while up to `together` programs are compiled."""
    try:
      self.program = self.compilation()
    except Exception as error:  # Of a kernel's compiler, say: the others are
      self.fail(error)  # still to be measured.
    else:
      self.row |= {
          'compile_s': self.program.compile_s,
          'compiled_together': together,
          **self.program.memory,
      }
    self.compilation = None

  def call(self, arguments: Any = None) -> Any:
    """Returns its results, for the problem's arguments or others."""
    if self.program is None:
      raise ValueError(self.row['reason'])
    return self.program.call(*(arguments or self.problem.arguments))

  def fail(self, reason: Exception | str) -> None:
    """Notes that it failed."""
    if isinstance(reason, Exception):
      traceback.print_exception(reason)
      reason = f'{reason!r}'[:1000]
    self.row |= {'status': 'failed', 'reason': reason}
    print(f'FAILED: {self}: {reason}', file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
  """The runs of a problem, and those that they are compared with.

  Attributes:
    runs: those with rows.
    exact: 'scan' in float64; None if no run can be compiled.
    scan: 'scan' in the case's dtype, if it is a yardstick.
  """

  runs: Sequence[_Run]
  exact: _Run | None = None
  scan: _Run | None = None

  def all_runs(self) -> list[_Run]:
    """Returns each once."""
    found = [*self.runs, self.exact, self.scan]
    return list(dict.fromkeys(run for run in found if run is not None))


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: watchdog_lib.Watchdog,
) -> Iterator[Row]:
  """Checks every implementation of every case, then times those not wrong.

  Args:
    selected: the cases.
    timer: how to time.
    watchdog: watches over every step.

  Yields:
    One row for each case, implementation and direction, as soon as it is known.
    Beside the labels there are `status` ('ok', 'cannot' or 'failed'), `reason`,
    and as far as it got `compile_s`, XLA's view of memory, the errors that
    `checks.judge` describes, `bytes_moved`, and the times that `timing.measure`
    describes. A row that `failed` only since its error is larger than that of
    'scan' is timed all the same. `compile_s` means little where several were
    `compiled_together`.
  """
  pending: collections.deque[_Group] = collections.deque()
  one_by_one = timer.repeats and timer.compile_alone
  with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    for index, case in enumerate(selected):
      group = _trace(case, timer, watchdog)
      pending.append(group)
      # The time that a kernel takes to compile is known of the first case.
      kernels_alone = bool(timer.repeats) and index == 0
      _compile(group, pool, one_by_one, kernels_alone, watchdog)
      if one_by_one or len(pending) == _TOGETHER:
        # Nothing is compiled while others are timed.
        ready = len(pending) if timer.repeats else 1
        yield from _finish(pending, ready, timer, watchdog)
    yield from _finish(pending, len(pending), timer, watchdog)


def _trace(case, timer, watchdog) -> _Group:
  """Traces all runs of a case."""
  timed = bool(timer.repeats)
  problem = problems.build(case)

  def run(implementation, direction, dtype=None, timed=False):
    row = {
        'shape': case.shape_name,
        'dtype': case.dtype,
        'layer': case.label,
        'implementation': implementation,
        'projection': case.projection,
        'direction': direction,
        'status': 'ok',
        'reason': '',
    }
    made = _Run(problem, implementation, direction, row, dtype)
    with watchdog(f'tracing {made}'):
      made.trace(timed)
    return made

  ways = itertools.product(case.implementations, cases.DIRECTIONS)
  runs = [run(*way, timed=timed) for way in ways]
  if not any(each.compilation for each in runs):
    return _Group(runs)
  both = cases.DIRECTIONS[1]
  with jax.enable_x64(True):
    exact = run('scan', both, 'float64')
  if not case.drawn:
    return _Group(runs, exact)
  found = [r for r in runs if (r.implementation, r.direction) == ('scan', both)]
  return _Group(runs, exact, found[0] if found else run('scan', both))


def _compile(group, pool, one_by_one, kernels_alone, watchdog) -> None:
  """Compiles the runs of a group, or starts to."""
  rest = []
  for run in group.all_runs():
    if run.compilation is None:
      continue
    if one_by_one or (kernels_alone and run.implementation == 'pallas'):
      with watchdog(f'compiling {run}'):
        run.compile(together=1)
    else:
      rest.append(run)
  for run in rest:
    run.pending = pool.submit(run.compile, len(rest))


def _finish(pending, count, timer, watchdog) -> Iterator[Row]:
  """Checks and times the first groups of those that wait."""
  groups = [pending.popleft() for _ in range(count)]
  for group in groups:
    for run in group.all_runs():
      if run.pending is not None:
        with watchdog(f'compiling {run}'):
          run.pending.result()
  for group in groups:
    try:
      _check(group, watchdog)
    except Exception as error:  # Out of memory in float64, say.
      for run in group.runs:
        if not run.right and run.row['status'] == 'ok':
          run.fail(error)
    right = [run for run in group.runs if run.right]
    if timer.repeats and right:
      _time(right, timer, watchdog)
    for run in group.all_runs():
      run.program = None
    yield from (run.row for run in group.runs)


def _check(group: _Group, watchdog) -> None:
  """Compares the results of runs with the reference, and notes their errors."""
  exact, scan = group.exact, group.scan
  if exact is None:
    return
  problem, dtype = exact.problem, exact.problem.case.dtype
  with watchdog(str(exact)), jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), problem.arguments)
    expected = jax.block_until_ready(exact.call(wide))
    del wide
  scan_errors: checks.Errors = {}
  if scan is not None:
    with watchdog(str(scan)):
      scan_errors = checks.errors([scan.call()], expected)
  for run in group.runs:
    if run.program is None:
      continue
    with watchdog(str(run)):
      try:
        found = checks.errors([run.call() for _ in range(_CALLS)], expected)
      except Exception as error:
        run.fail(error)
        continue
    limit = checks.limits(problem, run.implementation)
    fields, wrong, worse = checks.judge(found, scan_errors, limit, dtype)
    run.row |= fields
    run.right = not wrong
    if wrong or worse:
      run.fail('; '.join(wrong + worse))


def _time(runs: Sequence[_Run], timer, watchdog) -> None:
  """Notes times of runs of a problem."""
  problem = runs[0].problem
  try:
    with watchdog('timing'):
      measured = timing.measure(
          timer,
          problem.arguments,
          [problem.function(r.implementation, r.direction) for r in runs],
          [run.program.call for run in runs if run.program],
          lambda index: watchdog.start(f'timing {runs[index]}'),
      )
  except Exception as error:
    for run in runs:
      run.fail(error)
    return
  for run, fields in zip(runs, measured, strict=True):
    row = run.row
    row |= fields
    row['us_per_step'] = 1e3 * row['median_ms'] / problem.case.shape.time
    traffic = problem.traffic.get(run.direction)
    if traffic is not None:
      row['bytes_moved'] = traffic
      row['gb_per_s'] = traffic / row['median_ms'] / 1e6
    if row.get('dispatch_ms', 0) > 0.7 * row['median_ms']:
      print(f'bound by dispatch: {run}', file=sys.stderr, flush=True)
