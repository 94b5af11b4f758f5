"""Checks every result, then times the right ones.

Threads compile the programs of a few cases side by side. Then these cases are
checked and timed, while nothing is compiled. A single thread takes one case at
a time, so that the seconds of its compilation mean something.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import checks
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing

Row = dict[str, Any]

# Fields of a row that a table shows first.
LABELS = ('layer', 'program', 'projection', 'direction')

# Cases that are compiled together, whose arrays are in memory at once.
_TOGETHER = 4

# Calls of a kernel that are in flight together, each of which is checked: CTAs
# that do not wait for each other as they should are right most of the time.
_CALLS = 3

# Implementations that are no kernels of ours.
_LOOPS = ('scan', *baselines.NAMES)


@dataclasses.dataclass(eq=False)
class _Run:
  """One program of a case, and its results so far."""

  row: Row
  exact: bool = False  # The reference, in `Case.exact_dtype`.
  compiling: futures.Future[timing.Program] | None = None
  program: timing.Program | None = None
  right: bool = False  # Errors are within their limits.

  def __str__(self):
    return ' '.join(str(self.row[label]) for label in LABELS)

  def function(self, problem: problems.Problem) -> Callable[..., Any]:
    """Returns a function of the problem's arguments."""
    way = self.row['program'], self.row['direction']
    if not self.exact:
      return problem.function(*way)
    dtype = problem.case.exact_dtype
    run = problem.function(*way, dtype)
    wide = lambda x: x.astype(jnp.promote_types(x.dtype, dtype))
    widen = functools.partial(jax.tree.map, wide)
    return lambda *arguments: run(*widen(arguments))

  def call(self, arguments: Any) -> Any:
    """Returns its results."""
    if self.program is None:
      raise ValueError(self.row['reason'])
    return self.program.call(*arguments)

  def fail(self, reason: Exception | str) -> None:
    """Notes that it failed, or cannot be."""
    self.row |= failure(reason)
    if self.row['status'] == 'failed':
      text = f'FAILED: {self}: {self.row["reason"]}'
      print(text, file=sys.stderr, flush=True)


def failure(reason: Exception | str) -> Row:
  """Returns the fields of a row that failed, or cannot be."""
  if isinstance(reason, NotImplementedError):
    return {'status': 'cannot', 'reason': str(reason)}
  text = reason if isinstance(reason, str) else repr(reason)[:1000]
  return {'status': 'failed', 'reason': text}


def judged(error: float, limit: float, name: str) -> Row:
  """Returns the fields of a row that has one error; `name` says of which."""
  fields: Row = {'error': error, 'tolerance': limit}
  if not error <= limit:  # NaN too.
    fields |= failure(f'{name} by {error:.1e}, more than {limit:.0e}')
  return fields


@contextlib.contextmanager
def attempt(*runs: _Run) -> Iterator[Row]:
  """Notes an error of a step, in each run without an earlier error.

  A step fails where memory does not hold a case's arrays, for instance.

  Yields:
    The fields of a failure, empty so far.
  """
  failed: Row = {}
  try:
    yield failed
  except Exception as error:
    if not isinstance(error, NotImplementedError):
      traceback.print_exception(error)
    failed |= failure(error)
    for run in runs:
      if run.row['status'] == 'ok':
        run.fail(error)


def side_by_side(
    function: Callable[..., None],
    case: cases.Case,
    rows: list[Row],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> list[Row]:
  """Returns rows of a case, to which a function of all arguments adds."""
  with watchdog(f'{case.label}, {rows[0]["direction"]}'), attempt() as failed:
    function(case, rows, timer, watchdog)
  return [row | failed for row in rows]


def take_turns(
    case: cases.Case,
    rows: Sequence[Row],
    calls: Sequence[Callable[[], Any]],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> None:
  """Times a call for each row, in turn, and adds the times to the rows."""
  begin = lambda index: watchdog.start(
      f'timing {case.layer}, {rows[index]["program"]}'
  )
  times = timing.interleave(calls, timer.repeats, begin, timer.pace)
  for row, each in zip(rows, times, strict=True):
    row |= {**each, 'us_per_step': 1e3 * each['ms'] / case.shape.time}


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
    add: Callable[..., None] = lambda case, rows, watchdog: None,
) -> Iterator[Row]:
  """Checks every implementation of every case, then times those not wrong.

  Args:
    selected: the cases.
    timer: how they are timed.
    watchdog: ends the process if a step does not end.
    add: adds the suite's own fields: (case, rows, watchdog) -> None.

  Yields:
    One row for each case, implementation and direction, as soon as it is known.
    A row has its labels, `status` ('ok', 'cannot' or 'failed'), `reason`, and
    as far as it got `compile_s`, XLA's view of memory, the errors that
    `checks.judge` describes, `bytes_moved`, and the times that `timing.measure`
    describes. A row that `failed` only since its error exceeds the error of
    'scan' is still timed. `compile_s` means little where several were
    `compiled_together`.
  """
  threads = timer.threads if timer.repeats else os.cpu_count() or 1
  rest = iter(selected)
  with futures.ThreadPoolExecutor(threads) as pool:
    while groups := [
        _Group(case, timer, watchdog, threads).begin(pool)
        for case in itertools.islice(rest, 1 if threads == 1 else _TOGETHER)
    ]:
      for group in groups:
        group.wait()
      while groups:  # The arrays of earlier cases are dropped.
        group = groups.pop(0)
        rows = group.finish()
        add(group.case, rows, watchdog)
        yield from rows


@dataclasses.dataclass(eq=False)
class _Group:
  """A case and its programs, to be checked and timed together."""

  case: cases.Case
  timer: timing.Timer
  watchdog: timing.Watchdog
  threads: int  # How many compile.
  problem: Any = None  # None if its arrays cannot be drawn.
  exact: _Run | None = None  # The reference.
  scan: _Run | None = None  # The yardstick of errors, where there is one.

  def begin(self, pool: futures.Executor) -> '_Group':
    """Traces a case's programs, and begins to compile them."""
    case = self.case
    ways = itertools.product(case.implementations, case.directions)
    runs = {way: _Run(case.row(*way)) for way in ways}
    self.runs = list(runs.values())
    with attempt(*self.runs):  # More than memory holds, say.
      self.problem = problems.build(case)
    if self.problem is None:
      return self
    for run in self.runs:
      self._begin(run, pool, not self.timer.repeats)
    if any(run.compiling for run in self.runs):
      last = 'scan', case.directions[-1]
      self.exact = _Run(case.row(*last), exact=True)
      self._begin(self.exact, pool)
      if case.drawn and not set(case.implementations) <= set(baselines.NAMES):
        self.scan = runs.get(last)
        if self.scan is None:
          self.scan = _Run(case.row(*last))
          self._begin(self.scan, pool)
    return self

  def _begin(self, run: _Run, pool, quick: bool = True) -> None:
    """Traces a program here; a thread compiles it."""
    problem = self.problem
    with contextlib.ExitStack() as stack:
      stack.enter_context(self.watchdog(f'tracing {run}'))
      stack.enter_context(attempt(run))
      if run.exact:
        run.row['dtype'] = self.case.exact_dtype
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.default_matmul_precision('highest'))
      traced = run.function(problem)
      lowered = timing.lower(
          traced, *problem.arguments, quick=quick, options=problem.options
      )
      run.compiling = pool.submit(lowered)

  def wait(self) -> None:
    """Waits until its programs are compiled."""
    for run in dict.fromkeys([*self.runs, self.exact, self.scan]):
      if run is None or run.compiling is None:
        continue
      with self.watchdog(f'compiling {run}'), attempt(run):
        run.program = run.compiling.result()
        run.row |= {'compile_s': run.program.compile_s, **run.program.memory}
        run.row['compiled_together'] = self.threads

  def finish(self) -> list[Row]:
    """Checks and times its programs; returns its rows."""
    if self.exact is not None:
      with attempt(*self.runs):  # Out of memory in float64, say.
        self._check(self.exact)
        right = [run for run in self.runs if run.right]
        if self.timer.repeats and right:
          self._time(right)
    return [run.row for run in self.runs]

  def _check(self, exact: _Run) -> None:
    """Compares results with the reference, and notes their errors."""
    arguments = self.problem.arguments
    with self.watchdog(f'{exact}, the reference'), jax.enable_x64(True):
      expected = jax.block_until_ready(exact.call(arguments))

    def errors(run: _Run, calls: int) -> checks.Errors:
      results = [run.call(arguments) for _ in range(calls)]
      return checks.errors(results, expected)

    scan_errors: checks.Errors = {}
    if self.scan is not None:
      with self.watchdog(str(self.scan)):
        scan_errors = errors(self.scan, 1)
    for run in self.runs:
      if run.program is None:
        continue
      with self.watchdog(str(run)), attempt(run):
        name = run.row['program']
        found = scan_errors
        if run is not self.scan:
          found = errors(run, 1 if name in _LOOPS else _CALLS)
        fields, run.right, reasons = checks.judge(
            self.problem, name, found, scan_errors
        )
        run.row |= fields
        if reasons:
          run.fail('; '.join(reasons))

  def _time(self, runs: Sequence[_Run]) -> None:
    """Notes times of runs."""
    programs: Any = [
        (run.function(self.problem), run.program.call)  # type: ignore[union-attr]
        for run in runs
    ]
    begin = lambda index: self.watchdog.start(f'timing {runs[index]}')
    arguments, traffic = self.problem.arguments, self.problem.traffic
    with self.watchdog('timing'), attempt(*runs):
      measured = timing.measure(self.timer, arguments, programs, begin)
      for run, fields in zip(runs, measured, strict=True):
        row, ms = run.row, fields['ms']
        row |= {**fields, 'us_per_step': 1e3 * ms / self.case.shape.time}
        if traffic:
          moved = traffic[cases.DIRECTIONS.index(row['direction'])]
          row |= {'bytes_moved': moved, 'gb_per_s': moved / ms / 1e6}
        if row.get('dispatch_ms', 0) > 0.7 * ms:
          print(f'bound by dispatch: {run}', file=sys.stderr, flush=True)
