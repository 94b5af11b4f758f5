"""Checks and times programs that are bound by the latency of their steps.

A result is compared with a float64 run of the 'scan' path on the same rounded
inputs, on the same device. What rounding may do to a thousand dependent steps
is not easily said in advance, so the yardstick is the error of the 'scan' path
in the dtype at hand: no other path may be much worse. Beside that there are
limits that hold for all.

Compiling takes longer than running here, so programs are compiled side by side;
only the kernels of the first problem are compiled one by one, so that the time
it takes means something.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
import itertools
import os
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases as benchmark_cases
from rnnzoo.benchmark import report
from rnnzoo.benchmark import rotation
from rnnzoo.benchmark import timing as benchmark_timing
from rnnzoo.benchmark import watchdog as benchmark_watchdog

Row = dict[str, Any]

# Largest error of a path, as a multiple of that of 'scan' in the same dtype.
RATIO = 1.25

# Errors below this many units of rounding are no worse than any other.
_NOTHING = 1 / 16

# Largest ||y - expected|| / ||expected|| of outputs and of gradients.
_LIMITS = (1e-2, 2e-2)

# Other people's loops add the recurrent kernel's gradient up in 16 bits.
_BASELINE_LIMITS = (2e-2, 0.2)

# Calls that are in flight together and checked each: blocks that do not wait
# for each other as they should are right most of the time.
_CALLS = 3

# Errors of so few elements are chance, and a sum of all steps may cancel.
_FEW, _OF_FEW = 16, 5


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
  """Something to compute in several ways.

  Attributes:
    layer: what it is.
    projection: 'with' the input projection or 'without'.
    dtype: of inputs and results.
    time: T.
    arguments: arrays, and weights of the results, from which gradients come.
    make: maps (implementation, dtype) to run(arrays) -> results.
    implementations: those to check and time.
  """

  layer: str
  projection: str
  dtype: str
  time: int
  arguments: tuple[Any, Any]
  make: Callable[[str, str], Callable[[Any], Any]]
  implementations: Sequence[str]

  def function(self, implementation: str, direction: str):
    """Returns a function of the arguments."""
    run = self.make(implementation, self.dtype)
    if direction == 'forward':
      return benchmark_cases.forward_only(run)
    return benchmark_cases.with_gradient(run)


@dataclasses.dataclass(eq=False)
class _Run:
  """A problem, computed in one way; `row` tells what is known of it.

  Attributes:
    problem: what is computed.
    implementation: how.
    direction: whether with the gradient.
    row: what is known of it.
    timed: whether it is compiled to be timed.
    lowered: while it is traced and not compiled.
    program: while it is compiled.
  """

  problem: Problem
  implementation: str
  direction: str
  row: Row
  timed: bool = False
  lowered: benchmark_timing.Lowered | None = None
  program: benchmark_timing.Program | None = None

  def __str__(self):
    return ' '.join(str(self.row[label]) for label in report.LABELS)

  def lower(self) -> None:
    """Traces it, or notes why that cannot be."""
    try:
      function = self.problem.function(self.implementation, self.direction)
      self.lowered = benchmark_timing.lower(function, *self.problem.arguments)
    except NotImplementedError as error:
      self.row |= {'status': 'cannot', 'reason': str(error)}
    except Exception as error:
      self.fail(error)

  def compile(self, together: int) -> None:
    """Compiles it, while `together` programs are compiled in all."""
    if self.lowered is None:
      return
    try:
      self.program = benchmark_timing.finish(self.lowered, not self.timed)
    except Exception as error:  # Of a kernel's compiler, say: the others are
      self.fail(error)  # still to be measured.
    else:
      self.row |= {
          'compile_s': self.program.compile_s,
          'compiled_together': together,
          **self.program.memory,
      }
    self.lowered = None

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


def _run(
    problem: Problem, implementation: str, direction: str, timed: bool = False
) -> _Run:
  row = {
      'layer': problem.layer,
      'implementation': implementation,
      'projection': problem.projection,
      'direction': direction,
      'status': 'ok',
      'reason': '',
  }
  return _Run(problem, implementation, direction, row, timed)


def measure(
    problems: Sequence[Problem],
    repeats: int,
    watchdog: benchmark_watchdog.Watchdog,
) -> Iterator[Row]:
  """Checks every run of every problem, then times those that are not wrong.

  Args:
    problems: what to compute; their arguments are in memory together.
    repeats: number of samples of each time; 0 only checks.
    watchdog: watches over every run.

  Yields:
    One row for each run, as `rnnzoo.benchmark.suites.measure` returns them,
    with `errors` and `scan_errors` of each array by its name, `ratio`, the
    largest of their quotients, and `sets`, the number of input sets that calls
    took in turn. A row that `failed` is timed all the same if only its ratio is
    wrong. `compile_s` means little where several were `compiled_together`.
  """
  groups = []
  for problem in problems:
    ways = itertools.product(
        problem.implementations, benchmark_cases.DIRECTIONS
    )
    groups.append([_run(problem, *way, bool(repeats)) for way in ways])
  alone: list[_Run] = []
  together: list[_Run] = []
  for run in itertools.chain(*groups):
    with watchdog(f'tracing {run}'):
      run.lower()
    measured = run.implementation == 'pallas' and run.problem is problems[0]
    (alone if measured and repeats else together).append(run)
  # No yardstick is needed where nothing can run.
  measures = {
      problem: _yardstick(problem, group, watchdog)
      for problem, group in zip(problems, groups, strict=True)
      if any(run.lowered for run in group)
  }
  for run in alone:
    with watchdog(f'compiling {run}'):
      run.compile(together=1)
  for scan, exact in measures.values():
    together += [run for run in (scan, exact) if run not in together]
  _compile(together, watchdog)
  for problem, group in zip(problems, groups, strict=True):
    if problem in measures:
      try:
        _check(group, *measures.pop(problem), watchdog)
      except Exception as error:  # Out of memory in float64, say.
        for run in group:
          if 'errors' not in run.row and run.row['status'] == 'ok':
            run.fail(error)
      right = [run for run in group if _worth_timing(run)]
      if repeats and right:
        with watchdog('timing'):
          _time(problem, right, repeats, watchdog)
    for run in group:
      run.program = None
      yield run.row


def _yardstick(problem, group, watchdog) -> tuple[_Run, _Run]:
  """Returns 'scan' with its gradient, in the problem's dtype and in float64."""
  both = benchmark_cases.DIRECTIONS[1]
  found = [
      run
      for run in group
      if (run.implementation, run.direction) == ('scan', both) and run.lowered
  ]
  scan = found[0] if found else _run(problem, 'scan', both)
  with jax.enable_x64(True):
    wide = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float64), problem.arguments
    )
    exact = _run(
        dataclasses.replace(problem, dtype='float64', arguments=wide),
        'scan',
        both,
    )
    with watchdog(f'tracing {exact} in float64'):
      exact.lower()
  if not found:
    scan.lower()
  return scan, exact


def _compile(runs: Sequence[_Run], watchdog) -> None:
  """Compiles side by side what has been traced."""
  runs = [run for run in runs if run.lowered]
  workers = max(1, min(len(runs), os.cpu_count() or 1))
  with futures.ThreadPoolExecutor(workers) as pool:
    pending = [pool.submit(run.compile, workers) for run in runs]
    for run, each in zip(runs, pending, strict=True):
      with watchdog(f'compiling {run}'):
        each.result()


def _check(group, scan: _Run, exact: _Run, watchdog) -> None:
  """Compares the results of a problem's runs, and notes what it finds."""
  problem = scan.problem
  with watchdog(f'{exact} in float64'), jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), problem.arguments)
    expected = jax.block_until_ready(exact.call(wide))
    del wide
  with watchdog(str(scan)):
    scan_errors = _errors(scan.call(), expected)
  for run in group:
    if run.program is None:
      continue
    with watchdog(str(run)):
      try:
        errors = _worst([run.call() for _ in range(_CALLS)], expected)
      except Exception as error:
        run.fail(error)
      else:
        _judge(run, errors, scan_errors)


def _errors(got, expected) -> dict[str, tuple[float, int]]:
  """Returns ||got - expected|| / ||expected|| and the size of each array."""
  found = {}
  with jax.enable_x64(True):
    for name, tree in got.items():
      leaves = jax.tree_util.tree_leaves_with_path(tree)
      others = jax.tree.leaves(expected[name])
      for (path, a), b in zip(leaves, others, strict=True):
        end = jax.tree_util.keystr(path, simple=True, separator='.')
        label = f'{name}.{end}' if end else name
        found[label] = float(_relative(a, b)), a.size
  return found


def _worst(results, expected) -> dict[str, tuple[float, int]]:
  """Returns the largest of `_errors` of several results, or NaN."""
  each = [_errors(got, expected) for got in results]
  return {
      name: (float(np.max([errors[name][0] for errors in each])), size)
      for name, (_, size) in each[0].items()
  }


@jax.jit
def _relative(a: jax.Array, b: jax.Array) -> jax.Array:
  norm = lambda x: jnp.sqrt(jnp.sum(x * x))
  size = norm(b)
  return norm(a.astype(b.dtype) - b) / jnp.where(size == 0, 1, size)


def _judge(run: _Run, errors, scan_errors) -> None:
  """Notes a run's errors, and whether they are too large."""
  dtype = run.problem.dtype
  nothing = _NOTHING * float(jnp.finfo(dtype).eps)
  baseline = run.implementation in baselines.NAMES
  output, gradient = _BASELINE_LIMITS if baseline else _LIMITS
  if dtype == 'float32':
    output = gradient = benchmark_cases.tolerance(dtype, run.problem.time)
  ratios, wrong = {}, []
  for name, (error, size) in errors.items():
    limit = gradient if name.startswith('gradient') else output
    limit *= _OF_FEW if size < _FEW else 1
    if not error <= limit:  # NaN too.
      wrong.append(f'the relative error of {name}, {error:.1e}, is above')
      wrong[-1] += f' {limit:.1e}'
    if size >= _FEW:
      ratios[name] = error / max(scan_errors[name][0], nothing)
  worst = max(ratios, key=lambda name: np.nan_to_num(ratios[name], nan=np.inf))
  run.row |= {
      'error': float(np.max([error for error, _ in errors.values()])),
      'errors': {name: error for name, (error, _) in errors.items()},
      'scan_errors': {
          name: error
          for name, (error, _) in scan_errors.items()
          if name in errors
      },
      'ratio': ratios[worst],
      'worst': worst,
  }
  if wrong:
    run.row['wrong'] = True
  # A layer's kernels keep its input gates in 16 bits, where 'scan' computes
  # them in float32: it is no yardstick for that.
  gates_rounded = (
      run.problem.projection == 'with' and jnp.dtype(dtype).itemsize == 2
  )
  if not (baseline or gates_rounded or ratios[worst] <= RATIO):
    wrong.append(
        f'the error of {worst}, {errors[worst][0]:.1e}, is'
        f" {ratios[worst]:.2f} times that of 'scan'"
    )
  if wrong:
    run.fail('; '.join(wrong))


def _worth_timing(run: _Run) -> bool:
  return 'errors' in run.row and not run.row.get('wrong')


def _time(problem: Problem, runs, repeats: int, watchdog) -> None:
  """Notes times of runs of a problem, interleaved."""
  try:
    sets = rotation.input_sets(problem.arguments, _later)

    def call_of(run):
      call = rotation.in_turn(run.program.call, sets)

      def told():
        watchdog.what = f'timing {run}'
        return call()

      return told

    calls = [call_of(run) for run in runs]
    times = benchmark_timing.interleave(calls, repeats)
  except Exception as error:
    for run in runs:
      run.fail(error)
    return
  for run, call, measured in zip(runs, calls, times, strict=True):
    row = run.row
    row |= dataclasses.asdict(measured)
    row['sets'] = len(sets)
    row['us_per_step'] = 1e3 * measured.median_ms / problem.time
    if jax.default_backend() != 'cpu':
      row['dispatch_ms'] = rotation.dispatch_ms(call)
      if row['dispatch_ms'] > 0.7 * row['median_ms']:
        print(f'bound by dispatch: {run}', file=sys.stderr, flush=True)


def _later(arguments, i: int):
  """Arguments whose inputs come i steps later; parameters stay."""
  arrays, weights = arguments
  roll = lambda x: jnp.roll(x, i, axis=1)
  inputs = {k: roll(v) for k, v in arrays.items() if k in ('x', 'x_gates')}
  return {**arrays, **inputs}, jax.tree.map(roll, weights)
