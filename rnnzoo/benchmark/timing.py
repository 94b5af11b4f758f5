"""Compiles functions and times them.

Host clocks mislead in four ways. An accelerator runs while the host goes on, so
several calls are put in flight and waited for together: one call at a time adds
0.1 - 0.7 ms of dispatch. A machine's speed drifts, so calls that are compared
take turns. Arrays that fit a cache of 50 MB are read faster than memory allows,
so calls work on several sets of inputs. And a call of 20 µs is shorter than its
own dispatch, so one program may do all sets, one after another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import datetime
import faulthandler
import functools
from importlib import metadata
import itertools
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.benchmark import problems

MAX_CALLS = 20

# Sets of inputs are larger than this in all.
SET_BYTES = 300e6

# Samples need no call before that fills the caches if their calls take so many
# seconds: a cache is filled in far less.
_LONG = 0.02


@dataclasses.dataclass(frozen=True)
class Pace:
  """How many seconds programs are timed.

  Attributes:
    sample: length of a sample, where MAX_CALLS calls can fill it.
    program: length of all samples of a program on an accelerator, but there are
      three at least.
    enough: length of a call that is sampled once.
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
    threads: compiling threads; if several, compilation times mean little.
    pace: length of samples.
  """

  repeats: int = 0
  max_sets: int = 8
  one_program: bool = False
  from_host: bool = False
  threads: int = 1
  pace: Pace = Pace()


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled function.

  Attributes:
    compile_s: seconds taken by tracing, lowering and compiling.
    memory: MiB by use (`mib`: temporary), or None where XLA does not tell.
  """

  call: Callable[..., Any]
  compile_s: float
  memory: dict[str, float | None]


def build(function: Callable[..., Any], *arguments: Any) -> Program:
  """Compiles a function for the shapes and dtypes of its arguments."""
  return lower(function, *arguments)()


def lower(
    function: Callable[..., Any],
    *arguments: Any,
    quick: bool = False,
    options: dict[str, Any] | None = None,
) -> Callable[[], Program]:
  """Traces a function and returns its compilation, to be run in any thread.

  Programs that will not be timed are `quick`, without the search for the
  fastest matrix products. All others have the `options` of XLA.
  """
  start = time.perf_counter()
  lowered = jax.jit(function).lower(*arguments)
  traced = time.perf_counter() - start
  if quick:
    options = {'xla_gpu_autotune_level': 0}

  def finish() -> Program:
    start = time.perf_counter()
    call = lowered.compile(compiler_options=options)
    seconds = traced + time.perf_counter() - start
    found = call.memory_analysis()
    # Not every backend analyses memory, nor every jax the peak.
    sizes = {key: getattr(found, name, None) for key, name in _MEMORY.items()}
    memory = {k: None if n is None else n / 2**20 for k, n in sizes.items()}
    return Program(call, seconds, memory)

  return finish


_MEMORY = {
    'mib': 'temp_size_in_bytes',
    'argument_mib': 'argument_size_in_bytes',
    'output_mib': 'output_size_in_bytes',
    'peak_mib': 'peak_memory_in_bytes',
}


def interleave(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    before: Callable[[int], None] = lambda index: None,
    pace: Pace = Pace(),
) -> list[dict[str, Any]]:
  """Times calls, one sample per repeat, in turn.

  A call returns arrays to wait for. A slow one has fewer samples. `before` gets
  the index of a call before each of its samples.

  Returns:
    Fields of a row for each call: median and quartiles of the samples in
    milliseconds, the number of samples, and of the calls that each averages.
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
  plans = []
  for index, own in enumerate(samples):
    seconds, few = sample(index, 1), repeats
    count = max(1, min(MAX_CALLS, round(pace.sample / seconds)))
    if not on_cpu:
      long[index] = seconds > _LONG
      few = min(repeats, max(3, round(pace.program / (count * seconds))))
      if seconds > pace.enough:
        own.append(1e3 * seconds)
        few = 0
    plans.append((count, few))
  for turn in range(repeats):
    for index, (count, few) in enumerate(plans):
      if turn < few:
        samples[index].append(1e3 * sample(index, count))
  times = []
  for own, (count, _) in zip(samples, plans, strict=True):
    low, median, high = np.quantile(own, (0.25, 0.5, 0.75)).tolist()
    ms = {'ms': median, 'low_ms': low, 'high_ms': high}
    times.append({**ms, 'samples': len(own), 'calls': count})
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

  Each is a pair of a function and its compiled form; `interleave` describes
  `before`.

  Returns:
    Fields of a row for each: those of `interleave` for one set of inputs,
    `sets` (their number), and on an accelerator `dispatch_ms`, the host's share
    of a call below 100 ms.
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
  rows = [{**each, 'sets': len(sets)} for each in times]
  if timer.from_host:
    arrays, weights = arguments
    host = {k: np.asarray(v) for k, v in _sequences(arrays).items()}
    copied = [
        lambda call=call: call(arrays | jax.device_put(host), weights)
        for _, call in programs
    ]
    with_copy = interleave(copied, timer.repeats, before, timer.pace)
    for row, each in zip(rows, with_copy, strict=True):
      row['with_copy_ms'] = each['ms']
  for index, row in enumerate(rows):
    if jax.default_backend() != 'cpu' and row['ms'] < 100:
      before(index)
      few = min(5, row['calls'])
      row['dispatch_ms'] = 1e3 * _seconds(calls[index], few)[0]
    for name in row.keys() & {'ms', 'low_ms', 'high_ms', 'dispatch_ms'}:
      row[name] /= per_call
  return rows


def input_sets(arguments: tuple[Any, Any], max_sets: int) -> list[Any]:
  """Returns distinct sets of arguments, more in all than a cache holds.

  Sequences come some steps later in each other set; parameters stay.
  """
  count = 2  # On a CPU it takes no more, and nothing else is in flight.
  if jax.default_backend() != 'cpu':
    own = sum(x.nbytes for x in jax.tree.leaves(arguments[0]))
    count = max(2, math.ceil(SET_BYTES / own))
  arrays, weights = arguments
  sets = [arguments]
  for steps in range(1, min(max_sets, count)):
    shifted = functools.partial(problems.later, steps=steps)
    inputs = {k: shifted(v) for k, v in _sequences(arrays).items()}
    sets.append((arrays | inputs, jax.tree.map(shifted, weights)))
  return jax.block_until_ready(sets)


def _sequences(arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
  return {k: v for k, v in arrays.items() if k in problems.SEQUENCES}


def in_turn(function: Callable[..., Any], sets: Sequence[Any]) -> list[Any]:
  """Calls a function on several sets of arguments, one after another.

  Each set waits for the results of the one before, so that the compiler neither
  merges them nor runs them side by side.
  """
  once = jax.jit(function)  # Traced once, however many sets there are.
  results = [once(*sets[0])]
  for arguments in sets[1:]:
    arguments, _ = jax.lax.optimization_barrier((arguments, results[-1]))
    results.append(once(*arguments))
  return results


def environment() -> dict[str, Any]:
  """Returns the facts that a result depends on besides its own settings."""
  device = jax.devices()[0]
  kind = device.device_kind
  if device.platform == 'cpu':
    file = pathlib.Path('/proc/cpuinfo')  # Linux only.
    text = file.read_text() if file.exists() else ''
    found = re.search('model name\\s*: (.*)', text)
    kind = found[1] if found else platform.machine()
  affinity = getattr(os, 'sched_getaffinity', None)  # Linux only.
  packages = ('jax', 'jaxlib', 'flax')
  plugins = ('jax-cuda12-plugin', 'jax-cuda13-plugin')  # The CUDA of jax.
  known = {each.name: each.version for each in metadata.distributions()}
  versions = {k: known[k] for k in (*packages, *plugins) if k in known}
  return {
      'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
      'device': {
          'platform': device.platform,
          'kind': kind,
          'count': jax.device_count(),
      },
      'host_cores': len(affinity(0)) if affinity else os.cpu_count(),
      # Well above zero before the run, and the machine was shared.
      'load_average': os.getloadavg()[0],
      'versions': versions | {'python': platform.python_version()},
      'xla_flags': os.environ.get('XLA_FLAGS', ''),
      'commit': commit(),
  }


def commit() -> str | None:
  """Returns the commit of a checkout, with -dirty where it was changed."""
  here = pathlib.Path(__file__)
  options: Any = {'cwd': here.parent, 'text': True, 'capture_output': True}
  git = lambda *words: subprocess.run(['git', *words], check=True, **options)
  try:
    # An installed copy may lie inside another repository, which ignores it.
    git('ls-files', '--error-unmatch', here.name)
    names = '--always', '--dirty', '--abbrev=40', '--exclude=*'
    return git('describe', *names).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return None


def copy_bandwidth(repeats: int, theirs: float | None) -> dict[str, Any]:
  """Measures the bytes that a large copy reads and writes per second.

  Args:
    repeats: samples of each copy.
    theirs: gigabytes a second of torch's copy_, which is cudaMemcpy; or None.

  Returns:
    `gb_per_s`, the largest one; `jax_gb_per_s`, of a copy or of x + 1 in place
    by XLA (on a CPU a large new array costs page faults that take longer than
    the copy); `torch_gb_per_s`; and `array_bytes`, the size of the array.
  """
  size = 2**24 if jax.default_backend() == 'cpu' else 2**28
  x = jnp.ones((size,), jnp.float32)
  copy = build(jnp.copy, x).call
  increment = jax.jit(lambda x: x + 1, donate_argnums=0)
  current = [jnp.copy(x)]

  def in_place():
    current.append(increment(current.pop()))
    return current[0]

  times = interleave([lambda: copy(x), in_place], repeats)
  ours = 2 * x.nbytes / min(t['ms'] for t in times) / 1e6
  return {
      'gb_per_s': max(ours, theirs or 0.0),
      'array_bytes': x.nbytes,
      'jax_gb_per_s': ours,
      'torch_gb_per_s': theirs,
  }


# The exit code of a program that hangs.
EXIT_CODE = 3

# A thread needs the interpreter's lock. If the work that hangs holds it, the
# process ends after so many seconds more, with a trace instead of a message.
GRACE_S = 15


class Watchdog:
  """Ends the process if a piece of work does not end.

  A kernel whose blocks wait for each other may wait for ever, and nothing in
  the process can stop it, so a thread watches the clock.
  """

  def __init__(self, seconds: float):
    """Creates it; each piece of work may take so many seconds."""
    self.seconds = seconds
    self._timer = threading.Timer(seconds, self._end)

  @contextlib.contextmanager
  def __call__(self, work: str) -> Iterator[None]:
    """Ends the process with `EXIT_CODE` if the block does not end in time."""
    self.start(work)
    try:
      yield
    finally:
      self.stop()

  def start(self, work: str) -> None:
    """Watches `work` from now on, instead of any before."""
    self.stop()
    if sys.__stderr__ is not None:
      limit = self.seconds + GRACE_S
      faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
    self._timer = threading.Timer(self.seconds, self._end, (work,))
    self._timer.daemon = True
    self._timer.start()

  def stop(self) -> None:
    """Watches nothing."""
    self._timer.cancel()
    faulthandler.cancel_dump_traceback_later()

  def _end(self, work: str) -> None:
    print(
        f'rnnzoo.benchmark: {work}: did not end within {self.seconds:g} s;'
        ' giving up. --timeout allows more, and --shape and --layers take less'
        ' work.',
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_CODE)
