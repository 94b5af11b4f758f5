"""Checks every result, then times those that are right.

If nothing is timed, or a timer has several threads, programs of several cases
are compiled side by side while the first ones are checked. If it has processes
as well, they trace and lower, and a round of cases is compiled before the first
is timed: then nothing disturbs times. Otherwise one program is compiled after
the other, so that the seconds it takes mean something.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import itertools
import os
import sys
import time
import traceback
from typing import Any

import jax

from rnnzoo.benchmark import arrays
from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import checks
from rnnzoo.benchmark import preparation
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing
from rnnzoo.benchmark import watchdog as watchdog_lib

Row = dict[str, Any]

# Fields that say which row it is, with those that a table shows first.
LABELS = ('layer', 'implementation', 'projection', 'direction')
KEY = ('shape', 'dtype', *LABELS)

# Cases that are in memory at the same time if they are compiled ahead.
_TOGETHER = 4

# Cases that are compiled before the first is timed. With more, less time is
# spent on waiting for the last program, and more is lost if a run is ended.
_ROUND = 24

# Calls of a kernel that are in flight together, each of which is checked: CTAs
# that do not wait for each other as they should are right most of the time.
_CALLS = 3

# Implementations that are no kernels of ours.
_LOOPS = ('scan', *baselines.NAMES)


@dataclasses.dataclass(eq=False)
class _Run:
  """One program of a case, and its results so far.

  Attributes:
    compiling: None if it cannot be traced.
    program: None until it is compiled.
    right: whether its errors are within their limits.
  """

  way: preparation.Way
  row: Row
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


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Row]:
  """Returns a function's result and {}, or None and the fields of a failure.

  It fails where memory does not hold a case's arrays, for instance.
  """
  try:
    return function(*arguments), {}
  except Exception as error:
    _print(error)
    return None, failure(error)


def _print(error: Exception) -> None:
  if not isinstance(error, NotImplementedError):
    traceback.print_exception(error)


@contextlib.contextmanager
def _attempt(*runs: _Run) -> Iterator[None]:
  """Notes an error of a step of these runs, as the first of each."""
  try:
    yield
  except Exception as error:
    _print(error)
    for run in runs:
      if run.row['status'] == 'ok':
        run.fail(error)


@dataclasses.dataclass(eq=False)
class _Group:
  """A case and its programs, to be checked and timed together.

  Attributes:
    exact: the reference, where there is something to compare with it.
    scan: the yardstick of errors, where there is one.
    problem: None until its arrays are drawn.
  """

  case: cases.Case
  runs: list[_Run]
  exact: _Run | None = None
  scan: _Run | None = None
  problem: problems.Problem | None = None


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
  for rows in by_case(selected, timer, watchdog):
    yield from rows


def by_case(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: watchdog_lib.Watchdog,
    note: preparation.Note = preparation.no_facts,
) -> Iterator[list[Row]]:
  """Yields the rows of `measure` of a case, which have the facts of `note`."""
  threads = timer.threads if timer.repeats else os.cpu_count() or 1
  with futures.ThreadPoolExecutor(threads) as pool:
    session = _Session(timer, watchdog, note, pool, threads)
    if timer.processes:
      with preparation.processes(timer.processes) as processes:
        yield from session.in_rounds(selected, processes)
    else:
      yield from session.in_turn(selected)
    # Nobody wants the programs that are not compiled yet.
    pool.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class _Session:
  """The arguments of `by_case`, and threads that compile."""

  timer: timing.Timer
  watchdog: watchdog_lib.Watchdog
  note: preparation.Note
  pool: futures.Executor
  threads: int

  def in_turn(self, selected: Iterable[cases.Case]) -> Iterator[list[Row]]:
    """Traces cases here, and compiles some ahead if there are threads."""
    together = 1 if self.threads == 1 else _TOGETHER
    begun = (self._trace(case) for case in selected)
    waiting = collections.deque(itertools.islice(begun, together))
    while waiting:
      yield self._finish(waiting.popleft())
      waiting.extend(itertools.islice(begun, 1))

  def in_rounds(
      self, selected: Iterable[cases.Case], processes: futures.Executor
  ) -> Iterator[list[Row]]:
    """Compiles a round of cases, then times it while nothing is compiled.

    Meanwhile processes trace the next one, with a low priority.
    """
    traced = (
        (case, processes.submit(preparation.prepare, case, _ways(case), note))
        for note in [self.note]
        for case in selected
    )
    known: set[tuple[Any, ...]] = set()
    # A short one first: the sooner there are rows.
    first = min(_ROUND, self.timer.processes)
    ahead = list(itertools.islice(traced, first))
    while ahead and time.monotonic() < self.timer.until:
      following = list(itertools.islice(traced, _ROUND))
      start, groups = time.monotonic(), []
      for case, future in ahead:
        group = _Group(case, _runs(case))
        groups.append(group)
        text = f'tracing {case.label}, {case.title}'
        with self.watchdog(text), _attempt(*group.runs):
          prepared = future.result()
          groups[-1] = self._compile(case, prepared, prepared.facts)
        if groups[-1] is group:
          continue
        needed = arrays.operations(prepared.arguments, case.exact_dtype)
        for operation in needed - known:
          self.pool.submit(arrays.compile_ahead, *operation)
        known |= needed
      for group in groups:
        self._wait(group)
      seconds = time.monotonic() - start
      text = f'{len(groups)} cases are compiled, after {seconds:.0f} s'
      print(text, file=sys.stderr, flush=True)
      while groups:  # The programs of those before are dropped.
        yield self._finish(groups.pop(0))
      ahead = following

  def _trace(self, case: cases.Case) -> _Group:
    """Traces a case's programs, and begins to compile them."""
    group = _Group(case, _runs(case))
    with _attempt(*group.runs):  # More than memory holds, say.
      problem = problems.build(case)
      here = preparation.Here(problem)
      group = self._compile(case, here, self.note(case))
      group.problem = problem
    return group

  def _compile(self, case, prepared, facts: Row) -> _Group:
    """Begins to compile programs that are, or can be, lowered."""

    def begin(way: preparation.Way) -> _Run:
      row = case.row(way.implementation, way.direction) | facts
      run = _Run(way, row | ({'dtype': case.exact_dtype} if way.exact else {}))
      with self.watchdog(f'tracing {run}'), _attempt(run):
        quick = way.exact or not (self.timer.repeats and way in timed)
        run.compiling = self.pool.submit(prepared.lower(way, quick))
      return run

    timed = _timed(case)
    runs = {way: begin(way) for way in timed}
    group = _Group(case, list(runs.values()))
    if any(run.compiling for run in runs.values()):
      group.exact, *rest = (
          runs.get(way) or begin(way) for way in _references(case)
      )
      group.scan = next(iter(rest), None)
    return group

  def _wait(self, group: _Group) -> None:
    """Waits until a case's programs are compiled."""
    for run in dict.fromkeys([*group.runs, group.exact, group.scan]):
      if run is not None and run.program is None and run.compiling is not None:
        with self.watchdog(f'compiling {run}'), _attempt(run):
          run.program = run.compiling.result()
          run.row |= {'compile_s': run.program.compile_s, **run.program.memory}
          run.row['compiled_together'] = self.threads
        run.compiling = None

  def _finish(self, group: _Group) -> list[Row]:
    """Returns the rows of a case."""
    self._wait(group)
    if group.exact is not None:
      with _attempt(*group.runs):  # Out of memory in float64, say.
        problem = group.problem or problems.build(group.case)
        _check(problem, group, self.watchdog)
        right = [run for run in group.runs if run.right]
        if self.timer.repeats and right:
          _time(problem, right, self.timer, self.watchdog)
    return [run.row for run in group.runs]


def _timed(case: cases.Case) -> list[preparation.Way]:
  ways = itertools.product(case.implementations, cases.DIRECTIONS)
  return [preparation.Way(*way) for way in ways]


def _runs(case: cases.Case) -> list[_Run]:
  """Returns the runs of a case before anything is known of them."""
  return [_Run(way, case.row(*way[:2])) for way in _timed(case)]


def _references(case: cases.Case) -> list[preparation.Way]:
  """Returns the reference; and the yardstick of errors, if there is one."""
  scan = 'scan', cases.DIRECTIONS[1]
  found = [preparation.Way(*scan, exact=True)]
  if case.drawn and not set(case.implementations) <= set(baselines.NAMES):
    found.append(preparation.Way(*scan))
  return found


def _ways(case: cases.Case) -> list[preparation.Way]:
  return list(dict.fromkeys([*_timed(case), *_references(case)]))


def _check(problem, group: _Group, watchdog) -> None:
  """Compares results with the reference, and notes their errors."""
  exact: Any = group.exact
  with watchdog(f'{exact}, the reference'), jax.enable_x64(True):
    expected = jax.block_until_ready(exact.call(problem.arguments))
  scan_errors: checks.Errors = {}
  if group.scan is not None:
    with watchdog(str(group.scan)):
      results = [group.scan.call(problem.arguments)]
      scan_errors = checks.errors(results, expected)
      del results
  for run in group.runs:
    if run.program is None:
      continue
    with watchdog(str(run)), _attempt(run):
      if run is group.scan:
        found = scan_errors
      else:
        calls = 1 if run.way.implementation in _LOOPS else _CALLS
        results = [run.call(problem.arguments) for _ in range(calls)]
        found = checks.errors(results, expected)
        del results
      fields, run.right, reasons = checks.judge(
          problem, run.row['implementation'], found, scan_errors
      )
      run.row |= fields
      if reasons:
        run.fail('; '.join(reasons))


def _time(problem, runs: Sequence[_Run], timer, watchdog) -> None:
  """Notes times of runs of a problem."""
  programs: Any = [
      (preparation.function(problem, run.way), run.program.call)  # type: ignore[union-attr]
      for run in runs
  ]
  begin = lambda index: watchdog.start(f'timing {runs[index]}')
  with watchdog('timing'), _attempt(*runs):
    measured = timing.measure(timer, problem.arguments, programs, begin)
    for run, fields in zip(runs, measured, strict=True):
      row, ms = run.row, fields['median_ms']
      row |= {**fields, 'us_per_step': 1e3 * ms / problem.case.shape.time}
      if problem.traffic:
        moved = problem.traffic[cases.DIRECTIONS.index(row['direction'])]
        row |= {'bytes_moved': moved, 'gb_per_s': moved / ms / 1e6}
      if timing.by_dispatch(row):
        print(f'bound by dispatch: {run}', file=sys.stderr, flush=True)
