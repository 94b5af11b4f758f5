"""Checks every result, then times those that are right.

If nothing is timed, or a timer has several threads, programs of several cases
are compiled side by side while the first ones are checked. If it has processes
as well, they trace and lower, and a round of cases is compiled before the first
is timed: then nothing disturbs times. Otherwise one program is compiled after
the other, so that the seconds it takes mean something.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import importlib
import itertools
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

import jax
from jax import export

from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import checks
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing

# Traces and lowers the programs of cases, here or in other processes.
#
# Tracing and lowering are Python, which one thread at a time can run, and take
# longer than XLA where kernels are lowered. A process hands on a program that
# is lowered; it is compiled here, where no two searches for the fastest product
# disturb each other.


# How many processes give way to threads that compile or time.
_NICE = 10

# Kernels are handed on as they are.
_CHECKS = [export.DisabledSafetyCheck.custom_call('mosaic_gpu_v2')]

# Facts of a case, for all of its rows.
Note = Callable[[cases.Case], dict[str, Any]]


def no_facts(case: cases.Case) -> dict[str, Any]:
  """A `Note` without any; other processes are sent its name."""
  del case
  return {}


class Way(NamedTuple):
  """A program of a case.

  Attributes:
    exact: whether it is the reference, in `Case.exact_dtype`.
  """

  implementation: str
  direction: str
  exact: bool = False


def function(problem: problems.Problem, way: Way) -> Callable[..., Any]:
  """Returns a function of the problem's arguments."""
  if not way.exact:
    return problem.function(way.implementation, way.direction)
  dtype = problem.case.exact_dtype
  run = problem.function(way.implementation, way.direction, dtype)
  widen = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
  return lambda *arguments: run(*widen(arguments))


def precision(way: Way) -> contextlib.AbstractContextManager[Any]:
  """Returns the context to trace and compile it in."""
  stack = contextlib.ExitStack()
  if way.exact:
    stack.enter_context(jax.enable_x64(True))
    stack.enter_context(jax.default_matmul_precision('highest'))
  return stack


def _read(arguments: tuple[Any, ...], way: Way) -> tuple[Any, ...]:
  """Returns those arguments that a program reads.

  One that is handed on keeps all its arguments; forward has no use of weights.
  """
  return arguments[:1] if way.direction == cases.DIRECTIONS[0] else arguments


class Lowered(NamedTuple):
  """A program of leaves to leaves: not every structure can be handed on.

  Attributes:
    text: of `jax.export`.
    results: anything with the structure of the results.
    seconds: that it took.
  """

  text: bytearray
  results: Any
  seconds: float


def _lower(problem: problems.Problem, way: Way) -> Lowered:
  """Traces and lowers a program of a problem."""
  start = time.perf_counter()
  results: list[Any] = []
  leaves, structure = jax.tree.flatten(_read(problem.arguments, way))

  def called(leaves):
    read = jax.tree.unflatten(structure, leaves)
    run = function(problem, way)
    found, structure_of_results = jax.tree.flatten(run(*(*read, None)[:2]))
    numbers = list(range(len(found)))
    results.append(jax.tree.unflatten(structure_of_results, numbers))
    return found

  with precision(way):
    program = export.export(jax.jit(called), disabled_checks=_CHECKS)
    text = program(leaves).serialize()
  return Lowered(text, results[-1], time.perf_counter() - start)


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A case whose programs are lowered.

  Attributes:
    programs: each, or why it cannot be. Those of baselines are left out:
      cuDNN's calls cannot be handed on.
    arguments: shapes and dtypes.
    facts: of a `Note`.
  """

  case: cases.Case
  programs: Mapping[Way, Lowered | Exception]
  arguments: Any
  facts: dict[str, Any]

  def lower(self, way: Way, quick: bool) -> Callable[[], timing.Program]:
    """Returns the program's compilation, as `timing.lower` does."""
    if way.implementation in baselines.NAMES:
      return Here(problems.abstract(self.case)).lower(way, quick)
    found = self.programs[way]
    if isinstance(found, Exception):
      raise found
    structure = jax.tree.structure(found.results)
    # It says where the functions are that a kernel of another process calls.
    with contextlib.suppress(ImportError):
      importlib.import_module('jax.experimental.mosaic.gpu')

    def run(*arguments):
      call = export.deserialize(found.text).call
      leaves = call(jax.tree.leaves(_read(arguments, way)))
      return jax.tree.unflatten(structure, leaves)

    def finish() -> timing.Program:
      with precision(way):
        program = timing.lower(run, *self.arguments, quick=quick)()
      seconds = program.compile_s + found.seconds
      return dataclasses.replace(program, compile_s=seconds)

    return finish


@dataclasses.dataclass(frozen=True)
class Here:
  """Like `Prepared`; traces and lowers in this thread, when it is asked to."""

  problem: problems.Problem

  def lower(self, way: Way, quick: bool) -> Callable[[], timing.Program]:
    """Returns the program's compilation, as `timing.lower` does."""
    with precision(way):
      run = function(self.problem, way)
      return timing.lower(run, *self.problem.arguments, quick=quick)


def prepare(case: cases.Case, ways: list[Way], note: Note) -> Prepared:
  """Traces and lowers programs of a case for the device that is here."""
  problem = problems.abstract(case)
  programs: dict[Way, Any] = {}
  for way in ways:
    if way.implementation in baselines.NAMES:
      continue
    try:
      programs[way] = _lower(problem, way)
    except NotImplementedError as error:
      programs[way] = NotImplementedError(str(error))
    except Exception as error:
      traceback.print_exception(error)
      # Not every exception can be sent.
      programs[way] = RuntimeError(f'{type(error).__name__}: {error}')
  return Prepared(case, programs, problem.arguments, note(case))


@contextlib.contextmanager
def compiling_processes(count: int) -> Iterator[futures.Executor]:
  """Gives processes that run `prepare`."""
  # A process that is forked would have JAX's locks, and not their threads.
  context = multiprocessing.get_context('spawn')
  config: Any = jax.config  # Its attributes have no types.
  platforms = (config.jax_platforms,)
  pool = futures.ProcessPoolExecutor(count, context, _start, platforms)
  try:
    yield pool
  finally:
    pool.shutdown(wait=False, cancel_futures=True)


def _start(platforms: str | None) -> None:
  """Begins a process, which sees the device and keeps none of its memory."""
  threading.Thread(target=_end_with_parent, daemon=True).start()
  os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'
  os.environ['XLA_PYTHON_CLIENT_ALLOCATOR'] = 'platform'
  os.nice(_NICE)
  jax.config.update('jax_platforms', platforms)
  # The same jax reads a program: it is to be the one that would run here.
  jax.config.update('jax_export_ignore_forward_compatibility', True)


def _end_with_parent() -> None:
  """Ends the process when its parent is no more, as after a watchdog."""
  parent = multiprocessing.parent_process()
  if parent is not None:
    parent.join()
    os._exit(1)


Row = dict[str, Any]

# Fields that say which row it is, with those that a table shows first.
LABELS = ('layer', 'program', 'projection', 'direction')
_SIZES = (field.name for field in dataclasses.fields(cases.Shape))
KEY = ('shape', *_SIZES, 'dtype', 'param_dtype', *LABELS)

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

  way: Way
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
    watchdog: timing.Watchdog,
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
    watchdog: timing.Watchdog,
    note: Note = no_facts,
) -> Iterator[list[Row]]:
  """Yields the rows of `measure` of a case, which have the facts of `note`."""
  threads = timer.threads if timer.repeats else os.cpu_count() or 1
  with futures.ThreadPoolExecutor(threads) as pool:
    session = _Session(timer, watchdog, note, pool, threads)
    if timer.processes:
      with compiling_processes(timer.processes) as processes:
        yield from session.in_rounds(selected, processes)
    else:
      yield from session.in_turn(selected)
    # Nobody wants the programs that are not compiled yet.
    pool.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class _Session:
  """The arguments of `by_case`, and threads that compile."""

  timer: timing.Timer
  watchdog: timing.Watchdog
  note: Note
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
        (case, processes.submit(prepare, case, _ways(case), note))
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
        needed = problems.operations(prepared.arguments, case.exact_dtype)
        for operation in needed - known:
          self.pool.submit(problems.compile_ahead, *operation)
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
      here = Here(problem)
      group = self._compile(case, here, self.note(case))
      group.problem = problem
    return group

  def _compile(self, case, prepared, facts: Row) -> _Group:
    """Begins to compile programs that are, or can be, lowered."""

    def begin(way: Way) -> _Run:
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
          if group.case.layer.endswith(problems.STEP):
            run.row |= kernels_of_loop(run.program)
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


def _timed(case: cases.Case) -> list[Way]:
  ways = itertools.product(case.implementations, case.directions)
  return [Way(*way) for way in ways]


def _runs(case: cases.Case) -> list[_Run]:
  """Returns the runs of a case before anything is known of them."""
  return [_Run(way, case.row(*way[:2])) for way in _timed(case)]


def _references(case: cases.Case) -> list[Way]:
  """Returns the reference; and the yardstick of errors, if there is one."""
  scan = 'scan', case.directions[-1]
  found = [Way(*scan, exact=True)]
  if case.drawn and not set(case.implementations) <= set(baselines.NAMES):
    found.append(Way(*scan))
  return found


def _ways(case: cases.Case) -> list[Way]:
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
          problem, run.row['program'], found, scan_errors
      )
      run.row |= fields
      if reasons:
        run.fail('; '.join(reasons))


def _time(problem, runs: Sequence[_Run], timer, watchdog) -> None:
  """Notes times of runs of a problem."""
  programs: Any = [
      (function(problem, run.way), run.program.call)  # type: ignore[union-attr]
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
