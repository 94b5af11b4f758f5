"""Checks and times programs that are bound by memory bandwidth.

Two things would flatter a kernel or hide it. Arrays that fit a cache of 50 MB
are read faster than memory allows, and a call that takes 20 µs is shorter than
its own dispatch. So a program here applies the operation to several distinct
sets of inputs, larger in all than any cache, and its time is divided by their
number. Each set waits for the results of the one before, so that the compiler
neither merges them nor runs them side by side.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import itertools
import pathlib
import sys
import tempfile
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.benchmark import cases as benchmark_cases
from rnnzoo.benchmark import report
from rnnzoo.benchmark import timing as benchmark_timing

Case = benchmark_cases.Case

# The sets of inputs are larger than this in all.
SET_BYTES = 300e6
MAX_SETS = 8

# A call of more seconds is a loop of launches that no cache speeds up: it is
# timed by itself, a few times in about SLOW_BUDGET seconds.
SLOW_SECONDS = 0.1
SLOW_BUDGET = 5.0


def measure(
    groups: Iterable[Sequence[Case]], repeats: int
) -> list[dict[str, Any]]:
  """Checks every case, then times those that are right.

  Args:
    groups: cases, in groups that share their arguments.
    repeats: number of samples of each.

  Returns:
    One row for each case, as `rnnzoo.benchmark.suites.measure` returns them,
    with `sets`, the number of input sets that a call took in turn, and
    `difference`, the relative difference of all elements from those of the
    first implementation that was right. Times are those of one set. Where the
    host's `dispatch_ms` is what takes so long, there is `device_ms` too.
  """
  rows = []
  for group in groups:
    right: list[tuple[dict[str, Any], Case, benchmark_timing.Program]] = []
    first: dict[str, Any] = {}
    for case in group:
      row = {label: getattr(case, label) for label in report.LABELS}
      row |= {'status': 'ok', 'reason': ''}
      rows.append(row)
      try:
        program = _check(case, row, first)
      except NotImplementedError as exception:
        row |= {'status': 'cannot', 'reason': str(exception)}
      except Exception as exception:  # Of a kernel's compiler, say: the others
        traceback.print_exc()  # are still to be measured.
        row |= {'status': 'failed', 'reason': f'{exception!r}'[:1000]}
      else:
        if row['status'] == 'ok':
          right.append((row, case, program))
    first.clear()  # Memory.
    try:
      _time(right, repeats)
    except Exception as exception:
      traceback.print_exc()
      for row, *_ in right:
        if 'median_ms' not in row:
          row |= {'status': 'failed', 'reason': f'{exception!r}'[:1000]}
    for row in rows[-len(group) :] if group else ():
      if row['status'] == 'failed':
        what = ' '.join(str(row[label]) for label in report.LABELS)
        print(f'FAILED: {what}: {row["reason"]}', file=sys.stderr, flush=True)
  return rows


def _check(case: Case, row, first) -> benchmark_timing.Program:
  """Compiles a case and compares its results; notes what it finds in `row`."""
  program = benchmark_timing.build(case.function, *case.arguments)
  result = jax.block_until_ready(program.call(*case.arguments))
  got = jax.tree.map(np.asarray, case.part(result))
  error = benchmark_cases.relative_error(got, case.expected())
  row |= {
      'error': error,
      'tolerance': case.tolerance,
      'compile_s': program.compile_s,
      **program.memory,
      'bytes_moved': case.bytes_moved,
  }
  difference = 0.0
  if case.direction in first:
    difference = _difference(result, first[case.direction])
    row['difference'] = difference
  if not error <= case.tolerance:  # NaN too.
    row |= {
        'status': 'failed',
        'reason': (
            f'relative error {error:.1e} from the float64 scan is above'
            f' {case.tolerance:.1e}'
        ),
    }
  elif not difference <= 2 * case.tolerance:
    row |= {
        'status': 'failed',
        'reason': (
            f'relative difference {difference:.1e} from another implementation'
            f' is above {2 * case.tolerance:.1e}, over all elements'
        ),
    }
  else:
    first.setdefault(case.direction, result)
  return program


def _difference(got, expected) -> float:
  """The largest ||got - expected|| / ||expected||, of all elements."""

  @jax.jit
  def norms(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm((a - b).ravel()), jnp.linalg.norm(b.ravel())

  leaves = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
  pairs = [norms(a, b) for a, b in leaves]
  return float(np.max([float(d) / (float(n) or 1.0) for d, n in pairs]))


def _time(right, repeats: int) -> None:
  """Notes times in rows of (row, case, program), which share arguments."""
  fast, calls = [], []
  sets: list[Any] = []
  for row, case, program in right:
    start = time.perf_counter()
    jax.block_until_ready(program.call(*case.arguments))
    seconds = time.perf_counter() - start
    if seconds > SLOW_SECONDS and jax.default_backend() != 'cpu':
      call = functools.partial(program.call, *case.arguments)
      count = max(2, min(repeats, round(SLOW_BUDGET / seconds)))
      _note(row, benchmark_timing.one_by_one(call, count), 1)
      continue
    sets = sets or input_sets(case.arguments)
    rotated = benchmark_timing.build(rotate(case.function), sets)
    fast.append(row)
    calls.append(functools.partial(rotated.call, sets))
  times = benchmark_timing.interleave(calls, repeats)
  for row, measured in zip(fast, times, strict=True):
    _note(row, measured, len(sets))
  for row, call in zip(fast, calls, strict=True):
    if jax.default_backend() != 'cpu':
      row['dispatch_ms'] = dispatch_ms(call) / len(sets)
      if row['dispatch_ms'] > 0.7 * row['median_ms']:
        row['device_ms'] = device_ms(call) / len(sets)
        print(f'bound by dispatch: {row}', file=sys.stderr, flush=True)


def _note(row, times: benchmark_timing.Times, sets: int) -> None:
  row |= dataclasses.asdict(times)
  for name in ('median_ms', 'low_ms', 'high_ms'):
    row[name] /= sets
  row['sets'] = sets
  if row['bytes_moved'] is not None:
    row['gb_per_s'] = row['bytes_moved'] / row['median_ms'] / 1e6


def dispatch_ms(call: Callable[[], Any]) -> float:
  """Returns what the host takes to put a call in flight."""
  count = 5
  start = time.perf_counter()
  for _ in range(count):
    out = call()
  seconds = time.perf_counter() - start
  jax.block_until_ready(out)
  return 1e3 * seconds / count


def device_ms(call: Callable[[], Any]) -> float:
  """Returns how long a GPU works on a call, by a profile, without gaps."""
  with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory):
      jax.block_until_ready(call())
    (path,) = pathlib.Path(directory).rglob('*.xplane.pb')
    profile = jax.profiler.ProfileData.from_file(str(path))
  nanoseconds = sum(
      event.duration_ns
      for plane in profile.planes
      if plane.name.startswith('/device:GPU')
      for line in plane.lines
      if line.name.startswith('Stream')
      for event in line.events
  )
  return nanoseconds / 1e6


def input_sets(
    arguments: Any, change: Callable[[Any, int], Any] | None = None
) -> list[Any]:
  """Returns distinct sets like `arguments`, more in all than a cache holds.

  Args:
    arguments: a tree of arrays.
    change: maps it and the number of a set to that set; if None, every array's
      last axis is rolled.
  """
  change = _rolled if change is None else change
  count = 2  # On a CPU it takes no more, and nothing else is in flight.
  if jax.default_backend() != 'cpu':
    own = sum(x.nbytes for x in jax.tree.leaves(arguments[0]))
    count = max(2, min(MAX_SETS, int(-(-SET_BYTES // own))))

  other = jax.jit(change, static_argnums=1)
  sets = [arguments, *(other(arguments, i) for i in range(1, count))]
  return jax.block_until_ready(sets)


def _rolled(tree: Any, i: int) -> Any:
  return jax.tree.map(lambda x: jnp.roll(x, i, axis=-1), tree)


def in_turn(call: Callable[..., Any], sets: list[Any]) -> Callable[[], Any]:
  """Returns a function that calls with each set of arguments in turn.

  For calls that are longer than their dispatch; others want `rotate`.

  Args:
    call: a compiled function.
    sets: as `input_sets` returns them.
  """
  turn = itertools.cycle(sets)
  return lambda: call(*next(turn))


def rotate(function: Callable[..., Any]) -> Callable[[list[Any]], list[Any]]:
  """Returns a function of several sets of arguments, one after the other."""
  once = jax.jit(function)  # Traced once, however many sets there are.

  def rotated(sets):
    results: list[Any] = []
    for arguments in sets:
      if results:
        arguments, _ = jax.lax.optimization_barrier((arguments, results[-1]))
      results.append(once(*arguments))
    return results

  return rotated


def copy_bandwidth(repeats: int) -> dict[str, Any]:
  """Measures what a copy of 1 GiB reads and writes a second, in two ways.

  Returns:
    `gb_per_s`, the larger one; `jax_gb_per_s`, of a copy or an increment by
    XLA; `torch_gb_per_s`, of torch's copy_, which is cudaMemcpy, or None where
    torch cannot; `array_bytes`.
  """
  ours = benchmark_timing.copy_bandwidth(repeats)
  theirs = _torch_gb_per_s(repeats)
  return {
      **ours,
      'gb_per_s': max(ours['gb_per_s'], theirs or 0.0),
      'jax_gb_per_s': ours['gb_per_s'],
      'torch_gb_per_s': theirs,
  }


def _torch_gb_per_s(repeats: int) -> float | None:
  if jax.default_backend() != 'gpu':
    return None
  try:
    import torch  # Slow to import, and often not there.

    x = torch.ones(2**28, device='cuda')
    y = torch.empty_like(x)
    samples = []
    for _ in range(repeats + 1):
      start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
      start.record()
      for _ in range(10):
        y.copy_(x)
      end.record()
      torch.cuda.synchronize()
      samples.append(start.elapsed_time(end) / 10)
    size = x.numel() * x.element_size()
    del x, y
    torch.cuda.empty_cache()
    return 2 * size / float(np.median(samples[1:])) / 1e6
  except (ImportError, OSError, AssertionError, RuntimeError) as error:
    print(f'no copy by torch: {error}', file=sys.stderr)
    return None
