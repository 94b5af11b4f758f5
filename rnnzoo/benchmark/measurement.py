"""Checks every result, then times those that are right.

If nothing is timed, or a timer has several threads, programs of several cases
are compiled side by side while the first ones are checked. Otherwise one is
compiled after the other, so that the seconds it takes mean something.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import itertools
import os
import sys
import traceback
from typing import Any

import jax

from rnnzoo.benchmark import cases
from rnnzoo.benchmark import checks
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing
from rnnzoo.benchmark import watchdog as watchdog_lib

Row = dict[str, Any]

# Fields that say which row it is, with those that a table shows first.
LABELS = ('layer', 'implementation', 'projection', 'direction')
KEY = ('shape', 'dtype', *LABELS)

# Cases that are in memory at the same time if nothing is timed.
_TOGETHER = 4

# Calls that are in flight together, each of which is checked: CTAs that do not
# wait for each other as they should are right most of the time.
_CALLS = 3


@dataclasses.dataclass(eq=False)
class _Run:
  """One implementation of a problem in one direction, and its results so far.

  Attributes:
    function: None if it cannot be made.
    compiling: None if it cannot be traced.
    program: None until it is compiled.
    right: whether its errors are within their limits.
  """

  problem: problems.Problem
  row: Row
  function: Callable[..., Any] | None = None
  compiling: futures.Future[timing.Program] | None = None
  program: timing.Program | None = None
  right: bool = False

  def __str__(self):
    return ' '.join(str(self.row[label]) for label in LABELS)

  def call(self, arguments: Any) -> Any:
    """Returns its results."""
    if self.program is None:
      raise ValueError(self.row['reason'])
    return self.program.call(*arguments)

  def fail(self, reason: Exception | str) -> None:
    """Notes that it failed, or cannot be."""
    if isinstance(reason, NotImplementedError):
      self.row |= {'status': 'cannot', 'reason': str(reason)}
      return
    if isinstance(reason, Exception):
      traceback.print_exception(reason)
      reason = repr(reason)[:1000]
    self.row |= {'status': 'failed', 'reason': reason}
    print(f'FAILED: {self}: {reason}', file=sys.stderr, flush=True)


@contextlib.contextmanager
def _attempt(*runs: _Run) -> Iterator[None]:
  """Notes an error of a step of these runs, as the first of each."""
  try:
    yield
  except Exception as error:
    for run in runs:
      if run.row['status'] == 'ok':
        run.fail(error)


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: watchdog_lib.Watchdog,
) -> Iterator[Row]:
  """Checks every implementation of every case, then times those not wrong.

  Yields:
    One row for each case, implementation and direction, as soon as it is known.
    Beside the labels there are `status` ('ok', 'cannot' or 'failed'), `reason`,
    and as far as it got `compile_s`, XLA's view of memory, the errors that
    `checks.judge` describes, `bytes_moved`, and the times that `timing.measure`
    describes. A row that `failed` only since its error is larger than that of
    'scan' is timed all the same. `compile_s` means little where several were
    `compiled_together`.
  """
  workers = timer.threads if timer.repeats else os.cpu_count() or 1
  together = 1 if workers == 1 else _TOGETHER
  with futures.ThreadPoolExecutor(workers) as pool:
    traced = (_trace(case, pool, timer, watchdog) for case in selected)
    waiting = collections.deque(itertools.islice(traced, together))
    while waiting:
      yield from _finish(*waiting.popleft(), workers, timer, watchdog)
      waiting.extend(itertools.islice(traced, 1))


def _trace(case, pool, timer, watchdog) -> tuple[list[_Run], list[_Run]]:
  """Traces a case's runs; and 'scan' in float64 and the yardstick, if any."""
  problem = problems.build(case)

  def trace(implementation, direction, dtype=None, timed=False):
    row = case.row(implementation, direction)
    run = _Run(problem, row | {'dtype': dtype or case.dtype})
    with watchdog(f'tracing {run}'), _attempt(run):
      run.function = problem.function(implementation, direction, dtype)
      arguments = jax.tree.map(
          lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype),
          problem.arguments,
      )
      lowered = timing.lower(run.function, *arguments, quick=not timed)
      run.compiling = pool.submit(lowered)
    return run

  ways = list(itertools.product(case.implementations, cases.DIRECTIONS))
  runs = [trace(*way, timed=bool(timer.repeats)) for way in ways]
  references = []
  if any(run.compiling for run in runs):
    both = ('scan', cases.DIRECTIONS[1])
    with jax.enable_x64(True), jax.default_matmul_precision('highest'):
      references.append(trace(*both, dtype=case.exact_dtype))
    if case.drawn:
      scan = runs[ways.index(both)] if both in ways else trace(*both)
      references.append(scan)
  return runs, references


def _finish(runs, references, workers, timer, watchdog) -> Iterator[Row]:
  """Yields the rows of a problem's runs, which `_trace` traced."""
  for run in dict.fromkeys([*runs, *references]):
    if run.compiling is not None:
      with watchdog(f'compiling {run}'), _attempt(run):
        run.program = run.compiling.result()
        run.row |= {'compile_s': run.program.compile_s, **run.program.memory}
        run.row['compiled_together'] = workers
  if references:
    with _attempt(*runs):  # Out of memory in float64, say.
      _check(runs, *references, watchdog=watchdog)
  right = [run for run in runs if run.right]
  if timer.repeats and right:
    _time(right, timer, watchdog)
  yield from (run.row for run in runs)


def _check(runs, exact, scan=None, *, watchdog) -> None:
  """Compares results with the reference, and notes their errors."""
  problem = exact.problem
  with watchdog(f'{exact}, the reference'), jax.enable_x64(True):
    dtype = problem.case.exact_dtype
    wide = jax.tree.map(lambda x: x.astype(dtype), problem.arguments)
    expected = jax.block_until_ready(exact.call(wide))
    del wide
  scan_errors: checks.Errors = {}
  if scan is not None:
    with watchdog(str(scan)):
      scan_errors = checks.errors([scan.call(problem.arguments)], expected)
  for run in runs:
    if run.program is None:
      continue
    with watchdog(str(run)), _attempt(run):
      results = [run.call(problem.arguments) for _ in range(_CALLS)]
      found = checks.errors(results, expected)
      fields, run.right, reasons = checks.judge(
          problem, run.row['implementation'], found, scan_errors
      )
      run.row |= fields
      if reasons:
        run.fail('; '.join(reasons))


def _time(runs: Sequence[_Run], timer, watchdog) -> None:
  """Notes times of runs of a problem."""
  problem = runs[0].problem
  programs: Any = [(run.function, run.program.call) for run in runs]  # type: ignore[union-attr]
  begin = lambda index: watchdog.start(f'timing {runs[index]}')
  with watchdog('timing'), _attempt(*runs):
    measured = timing.measure(timer, problem.arguments, programs, begin)
    for run, fields in zip(runs, measured, strict=True):
      row, ms = run.row, fields['median_ms']
      row |= {**fields, 'us_per_step': 1e3 * ms / problem.case.shape.time}
      if problem.traffic:
        moved = problem.traffic[cases.DIRECTIONS.index(row['direction'])]
        row |= {'bytes_moved': moved, 'gb_per_s': moved / ms / 1e6}
      if row.get('dispatch_ms', 0) > 0.7 * ms:
        print(f'bound by dispatch: {run}', file=sys.stderr, flush=True)
