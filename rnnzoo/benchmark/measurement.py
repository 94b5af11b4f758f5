"""Checks every result, then times the right ones.

Threads compile the programs of a few cases side by side. Then these cases are
checked and timed, while nothing is compiled. A single thread takes one case at
a time, so that the seconds of its compilation mean something.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import sys
import traceback
from typing import Any

import jax

from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import checks
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing

Row = dict[str, Any]

# Fields that say which row it is. A table shows LABELS first.
LABELS = ('layer', 'program', 'projection', 'direction')
_SIZES = (field.name for field in dataclasses.fields(cases.Shape))
KEY = ('shape', *_SIZES, 'dtype', 'param_dtype', *LABELS)

# Cases that are compiled together, whose arrays are in memory at once.
_TOGETHER = 4

# Calls of a kernel that are in flight together, each of which is checked: CTAs
# that do not wait for each other as they should are right most of the time.
_CALLS = 3

# Implementations that are no kernels of ours.
_LOOPS = ('scan', *baselines.NAMES)


@dataclasses.dataclass(eq=False)
class _Run:
  """One program of a case, and its results so far.

  Attributes:
    exact: whether it is the reference, in `Case.exact_dtype`.
    compiling: its compilation; None if it cannot be traced.
    program: the program; None until it is compiled.
    right: whether its errors are within their limits.
  """

  row: Row
  exact: bool = False
  compiling: futures.Future[timing.Program] | None = None
  program: timing.Program | None = None
  right: bool = False

  def __str__(self):
    return ' '.join(str(self.row[label]) for label in LABELS)

  def function(self, problem: problems.Problem) -> Callable[..., Any]:
    """Returns a function of the problem's arguments."""
    way = self.row['program'], self.row['direction']
    if not self.exact:
      return problem.function(*way)
    dtype = problem.case.exact_dtype
    run = problem.function(*way, dtype)
    widen = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
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
  """Notes an error of a step, in each run without an earlier error."""
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
    problem: the problem; None if its arrays cannot be drawn.
    exact: the reference, where there is something to compare with it.
    scan: the yardstick of errors, where there is one.
  """

  case: cases.Case
  runs: list[_Run]
  problem: problems.Problem | None = None
  exact: _Run | None = None
  scan: _Run | None = None


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[Row]:
  """Checks every implementation of every case, then times those not wrong.

  Yields:
    One row for each case, implementation and direction, as soon as it is known.
    A row has its labels, `status` ('ok', 'cannot' or 'failed'), `reason`, and
    as far as it got `compile_s`, XLA's view of memory, the errors that
    `checks.judge` describes, `bytes_moved`, and the times that `timing.measure`
    describes. A row that `failed` only since its error exceeds the error of
    'scan' is still timed. `compile_s` means little where several were
    `compiled_together`.
  """
  for _, rows in by_case(selected, timer, watchdog):
    yield from rows


def by_case(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[tuple[cases.Case, list[Row]]]:
  """Yields each case with the rows of `measure`."""
  threads = timer.threads if timer.repeats else os.cpu_count() or 1
  with futures.ThreadPoolExecutor(threads) as pool:
    session = _Session(timer, watchdog, pool, threads)
    rest = iter(selected)
    together = 1 if threads == 1 else _TOGETHER
    while True:
      groups = [
          session.begin(case) for case in itertools.islice(rest, together)
      ]
      if not groups:
        return
      for group in groups:
        session.wait(group)
      while groups:  # The arrays of earlier cases are dropped.
        group = groups.pop(0)
        yield group.case, session.finish(group)


@dataclasses.dataclass(frozen=True)
class _Session:
  """The arguments of `by_case`, and threads that compile."""

  timer: timing.Timer
  watchdog: timing.Watchdog
  pool: futures.Executor
  threads: int

  def begin(self, case: cases.Case) -> _Group:
    """Traces a case's programs, and begins to compile them."""
    ways = itertools.product(case.implementations, case.directions)
    runs = {way: _Run(case.row(*way)) for way in ways}
    group = _Group(case, list(runs.values()))
    with _attempt(*group.runs):  # More than memory holds, say.
      group.problem = problems.build(case)
    if group.problem is None:
      return group
    for run in group.runs:
      self._compile(run, group.problem, not self.timer.repeats)
    if any(run.compiling for run in group.runs):
      last = 'scan', case.directions[-1]
      group.exact = _Run(case.row(*last), exact=True)
      self._compile(group.exact, group.problem, True)
      if case.drawn and not set(case.implementations) <= set(baselines.NAMES):
        group.scan = runs.get(last)
        if group.scan is None:
          group.scan = _Run(case.row(*last))
          self._compile(group.scan, group.problem, True)
    return group

  def _compile(self, run: _Run, problem: problems.Problem, quick: bool) -> None:
    """Traces a program here; a thread compiles it."""
    with contextlib.ExitStack() as stack:
      stack.enter_context(self.watchdog(f'tracing {run}'))
      stack.enter_context(_attempt(run))
      if run.exact:
        run.row['dtype'] = problem.case.exact_dtype
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.default_matmul_precision('highest'))
      traced = run.function(problem)
      lowered = timing.lower(
          traced, *problem.arguments, quick=quick, options=problem.options
      )
      run.compiling = self.pool.submit(lowered)

  def wait(self, group: _Group) -> None:
    """Waits until a case's programs are compiled."""
    for run in dict.fromkeys([*group.runs, group.exact, group.scan]):
      if run is None or run.compiling is None:
        continue
      with self.watchdog(f'compiling {run}'), _attempt(run):
        run.program = run.compiling.result()
        run.row |= {'compile_s': run.program.compile_s, **run.program.memory}
        run.row['compiled_together'] = self.threads
        if group.case.layer.endswith(problems.STEP):
          run.row |= kernels_of_loop(run.program)

  def finish(self, group: _Group) -> list[Row]:
    """Checks and times a case; returns its rows."""
    if group.exact is not None:
      with _attempt(*group.runs):  # Out of memory in float64, say.
        _check(group, self.watchdog)
        right = [run for run in group.runs if run.right]
        if self.timer.repeats and right:
          _time(group.problem, right, self.timer, self.watchdog)
    return [run.row for run in group.runs]


# Instructions of XLA that are no kernel.
_FREE = ('bitcast', 'constant', 'get-tuple-element', 'parameter', 'tuple')


def kernels_of_loop(program: timing.Program) -> Row:
  """Counts the kernels in the body of a program's first loop.

  Returns:
    `kernels`, how many there are, and `kinds`, how many of each kind: fusions,
    products, calls and copies.
  """
  compiled: Any = program.call
  text = compiled.as_text()
  found = re.search(r'while\(.*body=(%[\w.\-]+)', text)
  if found is None:
    return {'kernels': 0, 'kinds': {}}
  body = text.partition(f'\n{found[1]} (')[2].partition('\n}')[0]
  names = re.findall(r'= .*? ([a-z\-]+)\(', body)
  kinds = collections.Counter(name for name in names if name not in _FREE)
  return {'kernels': kinds.total(), 'kinds': dict(kinds)}


def _check(group: _Group, watchdog) -> None:
  """Compares results with the reference, and notes their errors."""
  problem: Any = group.problem
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
        calls = 1 if run.row['program'] in _LOOPS else _CALLS
        results = [run.call(problem.arguments) for _ in range(calls)]
        found = checks.errors(results, expected)
        del results
      fields, run.right, reasons = checks.judge(
          problem, run.row['program'], found, scan_errors
      )
      run.row |= fields
      if reasons:
        run.fail('; '.join(reasons))


def _time(problem, runs: Sequence[_Run], timer, watchdog) -> None:
  """Notes times of runs of a problem."""
  programs: Any = [
      (run.function(problem), run.program.call)  # type: ignore[union-attr]
      for run in runs
  ]
  begin = lambda index: watchdog.start(f'timing {runs[index]}')
  with watchdog('timing'), _attempt(*runs):
    measured = timing.measure(timer, problem.arguments, programs, begin)
    for run, fields in zip(runs, measured, strict=True):
      row, ms = run.row, fields['ms']
      row |= {**fields, 'us_per_step': 1e3 * ms / problem.case.shape.time}
      if problem.traffic:
        moved = problem.traffic[cases.DIRECTIONS.index(row['direction'])]
        row |= {'bytes_moved': moved, 'gb_per_s': moved / ms / 1e6}
      if timing.by_dispatch(row):
        print(f'bound by dispatch: {run}', file=sys.stderr, flush=True)
