"""Compiles functions and times them.

Host clocks mislead in four ways. An accelerator runs while the host goes on, so
several calls are put in flight and waited for together: one call at a time adds
0.1 - 0.7 ms of dispatch. A machine's speed drifts, so calls that are compared
take turns: every repeat times each once. Arrays that fit a cache of 50 MB are
read faster than memory allows, so calls work on several sets of inputs, which
are larger in all than any cache. And a call of 20 µs is shorter than its own
dispatch, so one program may do all sets, one after the other.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

# A sample lasts about this long, in seconds, where MAX_CALLS calls can fill it.
SAMPLE_SECONDS = 0.02
MAX_CALLS = 20

# Sets of inputs are larger than this in all.
SET_BYTES = 300e6

# A call of more seconds is a loop of launches that no cache speeds up: it is
# timed by itself, a few times in about SLOW_BUDGET seconds.
SLOW_SECONDS = 0.1
SLOW_BUDGET = 5.0


@dataclasses.dataclass(frozen=True)
class Timer:
  """How programs are timed.

  Attributes:
    repeats: number of samples of each; 0 to time nothing.
    max_sets: largest number of sets of inputs.
    one_program: whether one program does all sets, for calls that may be
      shorter than their dispatch.
    compile_alone: whether programs are compiled one after the other, so that
      the time each takes means something.
  """

  repeats: int = 0
  max_sets: int = 8
  one_program: bool = False
  compile_alone: bool = True


@dataclasses.dataclass(frozen=True)
class Times:
  """Times of one call, in milliseconds.

  Attributes:
    median_ms: median over the samples.
    low_ms: their first quartile.
    high_ms: their third quartile.
    samples: how many samples were taken.
    calls: calls in one sample, of which it is the mean.
  """

  median_ms: float
  low_ms: float
  high_ms: float
  samples: int
  calls: int


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled function and what its compilation said.

  Attributes:
    call: the compiled function.
    compile_s: seconds taken by tracing, lowering and compiling.
    memory: bytes by use, as far as XLA tells: `temp_bytes`, `argument_bytes`,
      `output_bytes` and `peak_bytes`, which may each be None.
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

  Args:
    function: to be compiled.
    *arguments: have its arguments' shapes and dtypes.
    quick: whether to do without the search for the fastest matrix products, for
      programs that will not be timed.
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
    analysis = call.memory_analysis()
    names = {
        'temp_bytes': 'temp_size_in_bytes',
        'argument_bytes': 'argument_size_in_bytes',
        'output_bytes': 'output_size_in_bytes',
        'peak_bytes': 'peak_memory_in_bytes',
    }
    memory = {ours: getattr(analysis, its, None) for ours, its in names.items()}
    return Program(call, seconds, memory)

  return finish


def interleave(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    before: Callable[[int], None] = lambda index: None,
) -> list[Times]:
  """Times each call once per repeat, in turn.

  Args:
    calls: functions without arguments that return arrays to wait for.
    repeats: number of samples of each.
    before: called with the index of the call before each sample.

  Returns:
    One `Times` for each call.
  """
  counts = []
  for index, call in enumerate(calls):
    before(index)
    jax.block_until_ready(call())
    seconds = _seconds(call, 1)
    counts.append(max(1, min(MAX_CALLS, round(SAMPLE_SECONDS / seconds))))
  samples: list[list[float]] = [[] for _ in calls]
  for _ in range(repeats):
    for index, call in enumerate(calls):
      before(index)
      count, own = counts[index], samples[index]
      # The call before left its own data in the caches, and maybe threads that
      # still spin.
      jax.block_until_ready(call())
      own.append(1e3 * _seconds(call, count) / count)
  return [_summary(own, n) for own, n in zip(samples, counts, strict=True)]


def _seconds(call: Callable[[], Any], count: int) -> float:
  # On a CPU dispatch is cheap, and calls in flight may run side by side.
  in_turn = jax.default_backend() == 'cpu'
  start = time.perf_counter()
  for _ in range(count):
    out = call()
    if in_turn:
      jax.block_until_ready(out)
  jax.block_until_ready(out)
  return time.perf_counter() - start


def _summary(samples: Sequence[float], calls: int) -> Times:
  low = high = samples[0]
  if len(samples) > 1:
    low, _, high = statistics.quantiles(samples, n=4, method='inclusive')
  median = statistics.median(samples)
  return Times(median, low, high, len(samples), calls)


def measure(
    timer: Timer,
    arguments: tuple[Any, Any],
    functions: Sequence[Callable[..., Any]],
    programs: Sequence[Callable[..., Any]],
    before: Callable[[int], None] = lambda index: None,
) -> list[dict[str, Any]]:
  """Times programs that have the same arguments.

  Args:
    timer: how to time them.
    arguments: arrays by name, and weights.
    functions: of the arguments.
    programs: the same, compiled.
    before: called with the index of a program before each of its samples.

  Returns:
    Fields of a row for each program: those of `Times` for one set of inputs,
    `sets`, the number of sets, and on an accelerator `dispatch_ms`, the time
    that the host takes for a call. If that is what takes so long, a profile
    gives `device_ms` where one program does all sets.
  """
  on_cpu = jax.default_backend() == 'cpu'
  sets = input_sets(arguments, timer.max_sets)
  fields: list[dict[str, Any]] = [{} for _ in programs]
  together: list[int] = []
  calls: list[Callable[[], Any]] = []
  per_call = len(sets) if timer.one_program else 1
  for index, program in enumerate(programs):
    before(index)
    alone = functools.partial(program, *arguments)
    jax.block_until_ready(alone())
    seconds = _seconds(alone, 1)
    if seconds > SLOW_SECONDS and not on_cpu:
      count = max(2, min(timer.repeats, round(SLOW_BUDGET / seconds)))
      samples = []
      for _ in range(count):
        before(index)
        samples.append(1e3 * _seconds(alone, 1))
      fields[index] = {**dataclasses.asdict(_summary(samples, 1)), 'sets': 1}
      continue
    together.append(index)
    if timer.one_program:
      rotated = build(rotate(functions[index]), sets).call
      calls.append(functools.partial(rotated, sets))
    else:
      calls.append(_in_turn(program, sets))
  times = interleave(calls, timer.repeats, lambda i: before(together[i]))
  for index, call, each in zip(together, calls, times, strict=True):
    row = fields[index]
    row |= {**dataclasses.asdict(each), 'sets': len(sets)}
    for name in ('median_ms', 'low_ms', 'high_ms'):
      row[name] /= per_call
    if not on_cpu:
      before(index)
      row['dispatch_ms'] = _dispatch_ms(call) / per_call
      if row['dispatch_ms'] > 0.7 * row['median_ms'] and timer.one_program:
        row['device_ms'] = device_ms(call) / per_call
  return fields


def _dispatch_ms(call: Callable[[], Any]) -> float:
  """Returns the time that the host takes to put a call in flight."""
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


def input_sets(arguments: tuple[Any, Any], max_sets: int) -> list[Any]:
  """Returns distinct sets of arguments, more in all than a cache holds.

  Args:
    arguments: arrays by name, and weights. Sequences come some steps later in
      each other set; parameters stay.
    max_sets: the most sets.
  """
  count = 2  # On a CPU it takes no more, and nothing else is in flight.
  if jax.default_backend() != 'cpu':
    own = sum(x.nbytes for x in jax.tree.leaves(arguments[0]))
    count = max(2, int(-(-SET_BYTES // own)))
  count = min(max_sets, count)

  @functools.partial(jax.jit, static_argnums=1)
  def later(arguments, steps):
    arrays, weights = arguments
    roll = lambda x: jnp.roll(x, steps, axis=1 if x.ndim > 2 else 0)
    sequences = ('x', 'x_gates', 'a', 'b')
    inputs = {k: roll(v) for k, v in arrays.items() if k in sequences}
    return {**arrays, **inputs}, jax.tree.map(roll, weights)

  sets = [arguments, *(later(arguments, steps) for steps in range(1, count))]
  return jax.block_until_ready(sets)


def _in_turn(call: Callable[..., Any], sets: list[Any]) -> Callable[[], Any]:
  """Returns a function that calls with each set of arguments in turn."""
  turn: Iterator[Any] = itertools.cycle(sets)
  return lambda: call(*next(turn))


def rotate(function: Callable[..., Any]) -> Callable[[list[Any]], list[Any]]:
  """Returns a function of several sets of arguments, one after the other.

  Each set waits for the results of the one before, so that the compiler neither
  merges them nor runs them side by side.

  Args:
    function: of one set.
  """
  once = jax.jit(function)  # Traced once, however many sets there are.

  def rotated(sets):
    results: list[Any] = []
    for arguments in sets:
      if results:
        arguments, _ = jax.lax.optimization_barrier((arguments, results[-1]))
      results.append(once(*arguments))
    return results

  return rotated
