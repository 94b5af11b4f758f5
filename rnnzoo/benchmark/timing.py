"""Compiles and times functions, and says on what machine.

Host clocks mislead in two ways. An accelerator runs while the host goes on, so
several calls are put in flight and waited for together: one call at a time adds
0.1 - 0.7 ms of dispatch. And a machine's speed drifts, so what is compared is
interleaved: every repeat times each function once.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import datetime
import os
import pathlib
import platform
import statistics
import subprocess
import time
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib

# A sample lasts about this long, in seconds, where MAX_CALLS calls can fill it.
SAMPLE_SECONDS = 0.02
MAX_CALLS = 20


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
  memory: Mapping[str, int | None]


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A function that is traced and lowered, but not yet compiled.

  Attributes:
    stage: what jax knows of it.
    seconds: taken so far.
  """

  stage: jax.stages.Lowered
  seconds: float


def lower(function: Callable[..., Any], *arguments: Any) -> Lowered:
  """Traces a function for the shapes and dtypes of its arguments."""
  start = time.perf_counter()
  stage = jax.jit(function).lower(*arguments)
  return Lowered(stage, time.perf_counter() - start)


def build(function: Callable[..., Any], *arguments: Any) -> Program:
  """Compiles a function for the shapes and dtypes of its arguments."""
  return finish(lower(function, *arguments))


def finish(lowered: Lowered, quick: bool = False) -> Program:
  """Compiles what is lowered; this much can be done in several threads.

  Args:
    lowered: what to compile.
    quick: whether to do without the search for the fastest matrix products, for
      programs that will not be timed.
  """
  start = time.perf_counter()
  options: Any = {'xla_gpu_autotune_level': 0} if quick else None
  call = lowered.stage.compile(compiler_options=options)
  seconds = lowered.seconds + time.perf_counter() - start
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


def interleave(calls: Sequence[Callable[[], Any]], repeats: int) -> list[Times]:
  """Times each call once per repeat, in turn.

  Args:
    calls: functions without arguments that return arrays to wait for.
    repeats: number of samples of each.

  Returns:
    One `Times` for each call.
  """
  counts = []
  for call in calls:
    jax.block_until_ready(call())
    seconds = _seconds(call, 1)
    counts.append(max(1, min(MAX_CALLS, round(SAMPLE_SECONDS / seconds))))
  samples: list[list[float]] = [[] for _ in calls]
  for _ in range(repeats):
    for call, count, own in zip(calls, counts, samples, strict=True):
      # The call before left its own data in the caches, and maybe threads that
      # still spin.
      jax.block_until_ready(call())
      own.append(1e3 * _seconds(call, count) / count)
  return [_summary(own, n) for own, n in zip(samples, counts, strict=True)]


def one_by_one(call: Callable[[], Any], repeats: int) -> Times:
  """Times a call that is warm, and so long that it needs no others in flight.

  Args:
    call: a function without arguments that returns arrays to wait for.
    repeats: number of samples.
  """
  return _summary([1e3 * _seconds(call, 1) for _ in range(repeats)], 1)


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


def copy_bandwidth(repeats: int) -> dict[str, float]:
  """Measures what a large copy reads and writes per second.

  Returns:
    `gb_per_s`, the better of a copy and of x + 1 in place, and `array_bytes`,
    the size of the array. In place, because on a CPU a large new array costs
    page faults that take longer than the copy.
  """
  size = 2**24 if jax.default_backend() == 'cpu' else 2**28
  x = jnp.ones((size,), jnp.float32)
  copy = build(jnp.copy, x).call
  increment = jax.jit(lambda x: x + 1, donate_argnums=0)
  current = jnp.copy(x)

  def in_place():
    nonlocal current
    current = increment(current)
    return current

  times = interleave([lambda: copy(x), in_place], repeats)
  best = min(t.median_ms for t in times)
  return {'gb_per_s': 2 * x.nbytes / best / 1e6, 'array_bytes': x.nbytes}


def environment() -> dict[str, Any]:
  """Returns what a result depends on besides its own settings."""
  device = jax.devices()[0]
  return {
      'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
      'device': {
          'platform': device.platform,
          'kind': _processor()
          if device.platform == 'cpu'
          else (device.device_kind),
          'count': jax.device_count(),
      },
      'host_cores': len(os.sched_getaffinity(0))
      if hasattr(os, 'sched_getaffinity')
      else os.cpu_count(),
      # Well above zero before the run, and the machine was shared.
      'load_average': os.getloadavg()[0],
      'versions': {
          'jax': jax.__version__,
          'jaxlib': jaxlib.__version__,
          'flax': flax.__version__,
          'python': platform.python_version(),
      },
      'xla_flags': os.environ.get('XLA_FLAGS', ''),
      'commit': _commit(),
  }


def _processor() -> str:
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    return platform.processor() or platform.machine()
  models = [
      x.split(':')[1].strip() for x in lines if x.startswith('model name')
  ]
  return models[0] if models else platform.machine()


def _commit() -> str | None:
  """Returns the commit of a checkout, with -dirty where it was changed."""
  here = pathlib.Path(__file__)

  def git(*arguments):
    return subprocess.run(
        ['git', *arguments],
        cwd=here.parent,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()

  try:
    # An installed copy may lie inside another repository, which ignores it.
    git('ls-files', '--error-unmatch', here.name)
    return git('describe', '--always', '--dirty', '--abbrev=40', '--exclude=*')
  except (OSError, subprocess.CalledProcessError):
    return None
