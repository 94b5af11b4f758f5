"""Memory and time of a gradient by what is kept between forward and backward.

  python benchmarks/memory.py --output=benchmarks/memory_cpu.json
  python benchmarks/memory.py --part=kernels --output=benchmarks/memory_gpu.json

A layer with its projection, batch-major; temporary memory is XLA's own count
for the compiled gradient. `--part=inner_steps` measures the iRevRNN over its
inner steps alone, `--part=stacks` the three cases that its authors publish.
`--part=kernels` measures the GPU kernels, by `rnnzoo.Pallas(keep=)`, and needs
a GPU that has them. `kept_bytes` are those of the arrays that `jax.vjp` holds
besides x, y and the parameters.
"""

import dataclasses
import datetime
import functools
import json
import os
import pathlib
import sys
from typing import Any

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import devices
import rnnzoo
from rnnzoo.benchmark import program as program_lib
from rnnzoo.benchmark import timing

_OUTPUT = flags.DEFINE_string('output', None, 'The JSON file to write.')
_COMMIT = flags.DEFINE_string('commit', '', 'The commit that is measured.')

_PARTS = flags.DEFINE_multi_enum(
    'part',
    ['settings', 'inner_steps', 'stacks'],
    ['settings', 'inner_steps', 'stacks', 'kernels'],
    'Parts to measure; the file keeps what it has of the others.',
)

BATCH, TIME, IN_FEATURES, FEATURES = 16, 4000, 64, 128
SETTINGS = {
    "'scan'": 'scan',
    "Scan(keep='gates')": rnnzoo.Scan(keep='gates'),
    "Scan(keep='carries')": rnnzoo.Scan(keep='carries'),
    "Scan(keep='carries', chunk=16)": rnnzoo.Scan(keep='carries', chunk=16),
    "Scan(keep='carries', chunk=4000)": rnnzoo.Scan(keep='carries', chunk=4000),
}

# Batch, time, features in and out, and the numbers of inner steps.
INNER_SIZES = 32, 200, 128, 128
INNER_STEPS = 1, 2, 4, 8, 16

# The cases of irevrnn's public code: features, layers, time, batch. There each
# sample has 10 features, and R is not said: 3 here.
STACKS = ((64, 2, 100, 32), (128, 3, 200, 64), (256, 4, 500, 128))
STACK_IN_FEATURES = 10

# Batch, time, features in and out, and heads; 256 rows of 768 units run in
# tiles. Then dtype and number of layers.
ONE, SEVERAL = (('float32', 1), ('bfloat16', 1)), (('bfloat16', 4),)
KERNELS = tuple(
    (layer, *sizes, *way)
    for layer, *sizes, ways in (
        ('LSTM', 16, 1024, 768, 1, ONE + SEVERAL),
        ('GRU', 16, 1024, 768, 12, ONE + SEVERAL),
        ('IndRNN', 16, 4096, 512, None, ONE + SEVERAL),
        ('LSTM', 256, 256, 768, 1, SEVERAL),
    )
    for way in ways
)


def settings():
  """Yields a row, a layer and x for each setting of 'scan'."""
  x = jax.random.normal(jax.random.key(0), (BATCH, TIME, IN_FEATURES))
  for name in ('LSTM', 'GRU'):
    for setting, path in SETTINGS.items():
      layer = rnnzoo.LAYERS[name](
          IN_FEATURES, FEATURES, implementation=path, rngs=nnx.Rngs(0)
      )
      yield {'layer': name, 'setting': setting}, layer, x


def inner_steps():
  """Yields a row, an IRevRNN and x for each number of its inner steps."""
  batch, time, in_features, features = INNER_SIZES
  x = jax.random.normal(jax.random.key(0), (batch, time, in_features))
  for path in ('scan', 'associative_scan'):
    for count in INNER_STEPS:
      layer = rnnzoo.IRevRNN(
          in_features,
          features,
          inner_steps=count,
          implementation=path,
          rngs=nnx.Rngs(0),
      )
      yield {'path': path, 'inner_steps': count}, layer, x


def stacks():
  """Yields a row, a stack of IRevRNN and x for each public case."""
  for features, layers, time, batch in STACKS:
    x = jax.random.normal(jax.random.key(0), (batch, time, STACK_IN_FEATURES))
    stack = rnnzoo.Stack(
        rnnzoo.IRevRNN,
        STACK_IN_FEATURES,
        features,
        num_layers=layers,
        implementation='scan',
        rngs=nnx.Rngs(0),
    )
    sizes = {'features': features, 'layers': layers}
    yield sizes | {'time': time, 'batch': batch}, stack, x


def kernels(name, batch, time, features, heads, dtype, layers):
  """Yields a row, a stack of layers and x for both settings of kernels."""
  x = jax.random.normal(jax.random.key(0), (batch, time, features), dtype)
  options: dict[str, Any] = {} if heads is None else {'num_heads': heads}
  for keep in ('gates', 'carries'):
    stack = rnnzoo.Stack(
        rnnzoo.LAYERS[name],
        features,
        features,
        num_layers=layers,
        dtype=jnp.dtype(dtype),
        implementation=rnnzoo.Pallas(keep=keep),
        rngs=nnx.Rngs(0),
        **options,
    )
    row = {'layer': name, 'batch': batch, 'time': time, 'features': features}
    row |= {'heads': heads, 'dtype': dtype, 'layers': layers, 'keep': keep}
    yield row | {'kept_bytes': kept_bytes(stack, x)}, stack, x


def kept_bytes(layer, x: jax.Array) -> int:
  """Returns the bytes that a layer's `jax.vjp` holds, but for the caller's.

  The caller has x, y and the parameters.

  Args:
    layer: the layer.
    x: its input.
  """
  graphdef, state = nnx.split(layer)
  run = lambda state, x: nnx.merge(graphdef, state)(x)
  y, pull = jax.vjp(run, state, x)
  own = {id(a) for a in jax.tree.leaves((state, x, y))}
  kept = {id(a): a.nbytes for a in jax.tree.leaves(pull) if id(a) not in own}
  return sum(kept.values())


def measure(cases) -> list[dict[str, Any]]:
  """Returns rows with memory and times of gradients, interleaved."""
  rows, calls = [], []
  for row, layer, x in cases:
    graphdef, state = nnx.split(layer)
    loss = lambda state, x, g=graphdef: (nnx.merge(g, state)(x) ** 2).sum()
    program = timing.build(jax.grad(loss, (0, 1)), state, x)
    calls.append(functools.partial(program.call, state, x))
    temp_bytes = program.memory['temp_bytes']
    rows.append(
        row | {'temp_bytes': temp_bytes, 'compile_s': program.compile_s}
    )
  for row, times in zip(rows, timing.interleave(calls, 7), strict=True):
    row |= dataclasses.asdict(times)
    print(
        f'{row["temp_bytes"] / 2**20:8.1f} MiB {times.median_ms:8.1f} ms',
        row,
        flush=True,
    )
  return rows


def main(argv) -> None:
  """Measures the parts that are wanted."""
  program_lib.flags_alone(argv)
  program_lib.writable(_OUTPUT.value)
  if 'kernels' in _PARTS.value:
    try:
      devices.current()
    except NotImplementedError as error:
      sys.exit(f'--part=kernels measures GPU kernels. {error}')
  result: dict[str, Any] = {}
  path = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else None
  if path and path.exists():
    result = json.loads(path.read_text(encoding='utf-8'))
  machine = {
      'device': jax.devices()[0].device_kind,
      'cores': os.cpu_count(),
      'jax': jax.__version__,
      'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
      'commit': _COMMIT.value,
  }
  sizes = {
      'settings': [BATCH, TIME, IN_FEATURES, FEATURES],
      'inner_steps': INNER_SIZES,
      'stacks': STACK_IN_FEATURES,
      'kernels': KERNELS,
  }
  # Programs of a group are timed in turn; the file is written after each.
  groups = {
      'settings': [settings],
      'inner_steps': [inner_steps],
      'stacks': [stacks],
      'kernels': [functools.partial(kernels, *case) for case in KERNELS],
  }
  for part in _PARTS.value:
    rows: list[dict[str, Any]] = []
    for cases in groups[part]:
      rows += measure(cases())
      result[part] = machine | {'sizes': sizes[part], 'rows': rows}
      if path:
        text = json.dumps(result, indent=2) + '\n'
        path.write_text(text, encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
