"""Compiles functions and times them.

Host clocks mislead in four ways. An accelerator runs while the host goes on, so
several calls are put in flight and waited for together: one call at a time adds
0.1 - 0.7 ms of dispatch. A machine's speed drifts, so calls that are compared
take turns: every repeat times each once. Arrays that fit a cache of 50 MB are
read faster than memory allows, so calls work on several sets of inputs, which
are larger in all than any cache. And a call of 20 µs is shorter than its own
dispatch, so one program may do all sets, one after the other.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import time
from typing import Any

import jax
import numpy as np

from rnnzoo.benchmark import arrays as arrays_lib

MAX_CALLS = 20

# Sets of inputs are larger than this in all.
SET_BYTES = 300e6

# Samples need no call before that fills the caches if their calls take so many
# seconds: a cache is filled in far less.
_LONG = 0.02


@dataclasses.dataclass(frozen=True)
class Pace:
  """How long programs are timed.

  Attributes:
    sample: a sample lasts about so many seconds, where MAX_CALLS calls can fill
      it.
    program: all samples of a program on an accelerator take about so many, but
      there are three at least.
    enough: a call of so many is sampled once.
  """

  sample: float = 0.02
  program: float = 5.0
  enough: float = math.inf


@dataclasses.dataclass(frozen=True)
class Timer:
  """How programs are timed.

  Attributes:
    repeats: number of samples of each; 0 to time nothing.
    max_sets: largest number of sets of inputs.
    one_program: whether one program does all sets, for calls that may be
      shorter than their dispatch.
    from_host: whether calls that copy sequences from the host are timed too.
    threads: that compile; if several, seconds of compilation mean little.
    processes: that trace and lower; 0 to do it here. With some, all of a round
      of cases is compiled before the first is timed.
    until: `time.monotonic()` at which no round is begun.
  """

  repeats: int = 0
  max_sets: int = 8
  one_program: bool = False
  from_host: bool = False
  threads: int = 1
  processes: int = 0
  until: float = math.inf
  pace: Pace = Pace()


@dataclasses.dataclass(frozen=True)
class Times:
  """Median and quartiles of samples, each of which is the mean of calls."""

  median_ms: float
  low_ms: float
  high_ms: float
  samples: int
  calls: int


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled function.

  Attributes:
    compile_s: seconds taken by tracing, lowering and compiling.
    memory: bytes by use, or None where XLA does not tell.
  """

  call: Callable[..., Any]
  compile_s: float
  memory: dict[str, int | None]


def build(function: Callable[..., Any], *arguments: Any) -> Program:
  """Compiles a function for the shapes and dtypes of its arguments."""
  return lower(function, *arguments)()


def lower(
    function: Callable[..., Any], *arguments: Any, quick: bool = False
) -> Callable[[], Program]:
  """Traces a function and returns its compilation, to be run in any thread.

  Programs that will not be timed are `quick`, without the search for the
  fastest matrix products.
  """
  start = time.perf_counter()
  lowered = jax.jit(function).lower(*arguments)
  traced = time.perf_counter() - start
  options: Any = {'xla_gpu_autotune_level': 0} if quick else None

  def finish() -> Program:
    start = time.perf_counter()
    call = lowered.compile(compiler_options=options)
    seconds = traced + time.perf_counter() - start
    # Not every backend analyses memory, nor every jax the peak.
    found = call.memory_analysis()
    memory = {
        'temp_bytes': getattr(found, 'temp_size_in_bytes', None),
        'argument_bytes': getattr(found, 'argument_size_in_bytes', None),
        'output_bytes': getattr(found, 'output_size_in_bytes', None),
        'peak_bytes': getattr(found, 'peak_memory_in_bytes', None),
    }
    return Program(call, seconds, memory)

  return finish


def interleave(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    before: Callable[[int], None] = lambda index: None,
    pace: Pace = Pace(),
) -> list[Times]:
  """Returns the times of each call, one sample per repeat, in turn.

  A call returns arrays to wait for. A slow one has fewer samples. `before` gets
  the index of a call before each of its samples.
  """
  on_cpu = jax.default_backend() == 'cpu'
  long = [False for _ in calls]

  def sample(index: int, count: int) -> float:
    before(index)
    # The call before left its own data in the caches, and maybe threads that
    # still spin.
    if not long[index]:
      jax.block_until_ready(calls[index]())
    return _seconds(calls[index], count)[1]

  samples: list[list[float]] = [[] for _ in calls]
  rounds, counts = [], []
  for index in range(len(calls)):
    seconds = sample(index, 1)
    count = max(1, min(MAX_CALLS, round(pace.sample / seconds)))
    few = repeats
    if not on_cpu:
      long[index] = seconds > _LONG
      few = min(repeats, max(3, round(pace.program / (count * seconds))))
      if seconds > pace.enough:
        samples[index].append(1e3 * seconds)
        few = 0
    counts.append(count)
    rounds.append(few)
  for turn in range(repeats):
    for index, count in enumerate(counts):
      if turn < rounds[index]:
        samples[index].append(1e3 * sample(index, count))
  times = []
  for own, count in zip(samples, counts, strict=True):
    low, median, high = np.quantile(own, (0.25, 0.5, 0.75)).tolist()
    times.append(Times(median, low, high, len(own), count))
  return times


def _seconds(call: Callable[[], Any], count: int) -> tuple[float, float]:
  """Returns seconds of a call until it is in flight, and until it is done."""
  # On a CPU dispatch is cheap, and calls in flight may run side by side.
  one_by_one = jax.default_backend() == 'cpu'
  start = time.perf_counter()
  for _ in range(count):
    out = call()
    if one_by_one:
      jax.block_until_ready(out)
  dispatched = time.perf_counter() - start
  jax.block_until_ready(out)
  return dispatched / count, (time.perf_counter() - start) / count


def measure(
    timer: Timer,
    arguments: tuple[Any, Any],
    programs: Sequence[tuple[Callable[..., Any], Callable[..., Any]]],
    before: Callable[[int], None],
) -> list[dict[str, Any]]:
  """Times programs on (arrays by name, weights).

  Each is a pair of a function and the same, compiled; `before` is as for
  `interleave`.

  Returns:
    Fields of a row for each: those of `Times` for one set of inputs, `sets`,
    their number, and on an accelerator `dispatch_ms`, the host's share of a
    call below 100 ms.
  """
  sets = input_sets(arguments, timer.max_sets)
  each_call = [(sets,)] if timer.one_program else sets
  per_call = len(sets) if timer.one_program else 1
  calls = []
  for index, (function, program) in enumerate(programs):
    before(index)
    if timer.one_program:
      program = build(functools.partial(in_turn, function), sets).call
    turns = itertools.cycle(each_call)
    calls.append(lambda call=program, turns=turns: call(*next(turns)))
  times = interleave(calls, timer.repeats, before, timer.pace)
  rows = [{**dataclasses.asdict(each), 'sets': len(sets)} for each in times]
  if timer.from_host:
    host = {k: np.asarray(v) for k, v in _sequences(arguments).items()}
    copied = [_from_host(call, arguments, host) for _, call in programs]
    times = interleave(copied, timer.repeats, before, timer.pace)
    for row, each in zip(rows, times, strict=True):
      row['with_copy_ms'] = each.median_ms
  for index, row in enumerate(rows):
    if jax.default_backend() != 'cpu' and times[index].median_ms < 100:
      before(index)
      few = min(5, times[index].calls)
      row['dispatch_ms'] = 1e3 * _seconds(calls[index], few)[0]
    for name in row.keys() & {'median_ms', 'low_ms', 'high_ms', 'dispatch_ms'}:
      row[name] /= per_call
  return rows


def by_dispatch(row: Mapping[str, Any]) -> bool:
  """Returns whether a row of `measure` says more of the host than of a path."""
  return row.get('dispatch_ms', 0) > 0.7 * row['median_ms']


def input_sets(arguments: tuple[Any, Any], max_sets: int) -> list[Any]:
  """Returns distinct sets of arguments, more in all than a cache holds.

  Sequences come some steps later in each other set; parameters stay.
  """
  count = 2  # On a CPU it takes no more, and nothing else is in flight.
  if jax.default_backend() != 'cpu':
    own = sum(x.nbytes for x in jax.tree.leaves(arguments[0]))
    count = max(2, math.ceil(SET_BYTES / own))
  count = min(max_sets, count)
  arrays, weights = arguments

  def later(steps: int):
    shifted = functools.partial(arrays_lib.later, steps=steps)
    inputs = {k: shifted(v) for k, v in _sequences(arguments).items()}
    return {**arrays, **inputs}, jax.tree.map(shifted, weights)

  return jax.block_until_ready([arguments, *map(later, range(1, count))])


def _sequences(arguments: tuple[Any, Any]) -> dict[str, jax.Array]:
  names = arrays_lib.SEQUENCES
  return {k: v for k, v in arguments[0].items() if k in names}


def _from_host(
    call: Callable[..., Any],
    arguments: tuple[Any, Any],
    host: dict[str, np.ndarray],
) -> Callable[[], Any]:
  """Returns a call that copies its sequences from the host."""
  arrays, weights = arguments
  return lambda: call({**arrays, **jax.device_put(host)}, weights)


def in_turn(function: Callable[..., Any], sets: Sequence[Any]) -> list[Any]:
  """Calls a function on several sets of arguments, one after the other.

  Each set waits for the results of the one before, so that the compiler neither
  merges them nor runs them side by side.
  """
  once = jax.jit(function)  # Traced once, however many sets there are.
  results = [once(*sets[0])]
  for arguments in sets[1:]:
    arguments, _ = jax.lax.optimization_barrier((arguments, results[-1]))
    results.append(once(*arguments))
  return results
