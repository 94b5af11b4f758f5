"""The machine that a benchmark runs on: its description, and its bandwidth."""

import datetime
from importlib import metadata
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

import jax
import jax.numpy as jnp

from rnnzoo.benchmark import timing

_PACKAGES = ('jax', 'jaxlib', 'flax')


def environment() -> dict[str, Any]:
  """Returns the facts that a result depends on besides its own settings."""
  device = jax.devices()[0]
  kind = device.device_kind if device.platform != 'cpu' else _processor()
  affinity = getattr(os, 'sched_getaffinity', None)  # Linux only.
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
      'versions': {
          **{name: metadata.version(name) for name in _PACKAGES},
          'python': platform.python_version(),
          # Which CUDA jax has been installed for.
          **{
              found.name: found.version
              for found in metadata.distributions()
              if found.name in ('jax-cuda12-plugin', 'jax-cuda13-plugin')
          },
      },
      'xla_flags': os.environ.get('XLA_FLAGS', ''),
      'commit': commit(),
  }


def _processor() -> str:
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    text = ''
  found = re.search('model name\\s*: (.*)', text)
  return found[1] if found else platform.processor() or platform.machine()


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

  Returns:
    `gb_per_s`, the largest one; `jax_gb_per_s`, of a copy or of x + 1 in place
    by XLA (on a CPU a large new array costs page faults that take longer than
    the copy); `torch_gb_per_s`, theirs, of torch's copy_, which is cudaMemcpy,
    or None; `array_bytes`, the size of the array.
  """
  size = 2**24 if jax.default_backend() == 'cpu' else 2**28
  x = jnp.ones((size,), jnp.float32)
  copy = timing.build(jnp.copy, x).call
  increment = jax.jit(lambda x: x + 1, donate_argnums=0)
  current = jnp.copy(x)

  def in_place():
    nonlocal current
    current = increment(current)
    return current

  times = timing.interleave([lambda: copy(x), in_place], repeats)
  ours = 2 * x.nbytes / min(t.median_ms for t in times) / 1e6
  return {
      'gb_per_s': max(ours, theirs or 0.0),
      'array_bytes': x.nbytes,
      'jax_gb_per_s': ours,
      'torch_gb_per_s': theirs,
  }
