"""Times the compilation of gradients on a CPU, beside flax.nnx.RNN.

  python benchmarks/compile_time.py --output=benchmarks/compile_time.json

The gradient of sum(y * w) by the parameters and x in float32, traced and
compiled in a process of its own; programs take turns. `cpu_s` is the time of
all threads, which other programs disturb least.
"""

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo.benchmark import command_line
from rnnzoo.benchmark import report
from rnnzoo.benchmark import timing

BATCH, TIME, FEATURES = 16, 200, 64
FLAX = ('LSTMCell', 'OptimizedLSTMCell', 'GRUCell', 'SimpleCell')

_OUTPUT = flags.DEFINE_string('output', None, 'The JSON file to write.')
_REPEATS = flags.DEFINE_integer(
    'repeats', 5, 'Processes for each program.', lower_bound=1
)
_ONE = flags.DEFINE_string('one', None, 'Compile this program; print JSON.')


def make(program: str) -> nnx.Module:
  """Returns a layer of ours, or flax's RNN with a cell, as 'flax LSTMCell'."""
  rngs = nnx.Rngs(0)
  if program.startswith('flax '):
    cell = getattr(nnx, program.removeprefix('flax '))
    return nnx.RNN(cell(FEATURES, FEATURES, rngs=rngs))
  return rnnzoo.LAYERS[program](
      FEATURES, FEATURES, implementation='scan', rngs=rngs
  )


def measure(program: str) -> dict[str, Any]:
  """Compiles one program's gradient, here; returns the fields of its row."""
  jax.jit(lambda x: x + 1)(1.0).block_until_ready()  # Starts the backend.
  graphdef, parameters, rest = nnx.split(make(program), nnx.Param, ...)
  draw = np.random.default_rng(0).standard_normal
  x = jnp.asarray(draw((BATCH, TIME, FEATURES)), jnp.float32)

  def loss(parameters, x, rest, w):
    y = nnx.merge(graphdef, parameters, rest, copy=True)(x)
    return jnp.sum(y * w)

  gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))
  start, cpu_start = time.perf_counter(), time.process_time()
  compiled = gradient.lower(parameters, x, rest, x).compile()
  wall, cpu = time.perf_counter() - start, time.process_time() - cpu_start
  text = compiled.as_text()
  return {
      'mib': compiled.memory_analysis().temp_size_in_bytes / 2**20,
      'compile_s': wall,
      'cpu_s': cpu,
      'status': 'ok',
      'fusions': len(re.findall(r' fusion\(', text)),
      'loops': len(re.findall(r' while\(', text)),
  }


def main(argv) -> None:
  """Measures all programs, in turns."""
  command_line.flags_alone(argv)
  command_line.writable(_OUTPUT.value)
  if _ONE.value:
    print(json.dumps(measure(_ONE.value)))
    return
  programs = [*sorted(rnnzoo.LAYERS), *(f'flax {cell}' for cell in FLAX)]
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  runs: dict[str, list[dict[str, Any]]] = {p: [] for p in programs}
  for _ in range(_REPEATS.value):
    for program in programs:
      command = [sys.executable, __file__, f'--one={program}']
      done = subprocess.run(
          command, env=environment, capture_output=True, text=True, check=True
      )
      runs[program].append(json.loads(done.stdout.splitlines()[-1]))
  sizes = {'batch': BATCH, 'time': TIME}
  sizes |= {'in_features': FEATURES, 'features': FEATURES}
  rows = []
  for program, results in runs.items():
    least = lambda key, own=results: min(result[key] for result in own)
    best = {key: least(key) for key in ('compile_s', 'cpu_s')}
    rows.append(sizes | {'program': program} | results[0] | best)
    print(rows[-1], flush=True)
  if _OUTPUT.value:
    result = {
        'command': 'python benchmarks/compile_time.py',
        **timing.environment(),
        'repeats': _REPEATS.value,
        'rows': rows,
    }
    report.write(result, _OUTPUT.value)


if __name__ == '__main__':
  app.run(main)
