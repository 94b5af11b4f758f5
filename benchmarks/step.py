"""Times single steps in a loop, as decoding and acting take them, beside flax.

  python benchmarks/step.py --output=benchmarks/step_h200.json

A stack of two layers of 512 features; y of a step is x of the next one, 256
times in a `lax.while_loop`. Kernels are the fusions, products, calls and copies
that the loop's body has in XLA's program. flax's cells are nnx.GRUCell and
nnx.OptimizedLSTMCell, with carries of the computing dtype.
"""

import collections
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import re
from typing import Any

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp

import rnnzoo
from rnnzoo.benchmark import program as program_lib
from rnnzoo.benchmark import timing

_OUTPUT = flags.DEFINE_string('output', None, 'The JSON file to write.')
_COMMIT = flags.DEFINE_string('commit', '', 'The commit that is measured.')

STEPS, FEATURES, LAYERS, BATCHES = 256, 512, 2, (1, 1024)
DTYPES = ('float32', 'bfloat16')
FLAX = {'LSTM': nnx.OptimizedLSTMCell, 'GRU': nnx.GRUCell}

# Instructions that are no kernel.
_FREE = ('bitcast', 'constant', 'get-tuple-element', 'parameter', 'tuple')


class Cells(nnx.Module):
  """flax's cells, one above the other."""

  def __init__(self, name: str, dtype):
    make = FLAX[name]
    self.dtype = dtype
    self.cells = nnx.List(
        make(FEATURES, FEATURES, dtype=dtype, rngs=nnx.Rngs(0))
        for _ in range(LAYERS)
    )

  def initial_carry(self, batch_shape: tuple[int, ...]) -> Any:
    """Returns zeros."""
    shape = *batch_shape, FEATURES
    carries = [c.initialize_carry(shape, nnx.Rngs(0)) for c in self.cells]
    return jax.tree.map(lambda c: c.astype(self.dtype), tuple(carries))

  def step(self, carry, x):
    """Takes one step."""
    carries = []
    for cell, own in zip(self.cells, carry, strict=True):
      new, x = cell(own, x)
      carries.append(new)
    return tuple(carries), x


def models(name: str, dtype: str):
  """Yields the programs' names and their models."""
  stack = functools.partial(rnnzoo.Stack, num_layers=LAYERS)
  yield (
      f'rnnzoo.{name}',
      stack(
          rnnzoo.LAYERS[name],
          FEATURES,
          FEATURES,
          dtype=jnp.dtype(dtype),
          rngs=nnx.Rngs(0),
      ),
  )
  yield f'flax nnx.{FLAX[name].__name__}', Cells(name, jnp.dtype(dtype))


def loop(graphdef, state, carry, x):
  """Takes all steps; returns the last carry and y."""

  def body(past):
    count, carry, x = past
    return count + 1, *nnx.merge(graphdef, state, copy=True).step(carry, x)

  start = jnp.zeros((), jnp.int32), carry, x
  return jax.lax.while_loop(lambda past: past[0] < STEPS, body, start)[1:]


def kernels(text: str) -> dict[str, int]:
  """Returns how often each kind of kernel is in the body of the first loop."""
  found = re.search(r'while\(.*body=(%[\w.\-]+)', text)
  if found is None:
    return {}
  _, _, rest = text.partition(f'\n{found[1]} (')
  body = rest.partition('\n}')[0]
  kinds = re.findall(r'= .*? ([a-z\-]+)\(', body)
  return dict(collections.Counter(k for k in kinds if k not in _FREE))


def measure(name: str, dtype: str, batch: int) -> list[dict[str, Any]]:
  """Returns the rows of one case, timed in turn."""
  rows, calls = [], []
  x = jax.random.normal(jax.random.key(0), (batch, FEATURES), dtype)
  for program, model in models(name, dtype):
    graphdef, state = nnx.split(model)
    arguments = state, model.initial_carry((batch,)), x
    compiled = timing.build(functools.partial(loop, graphdef), *arguments)
    counts = kernels(compiled.call.as_text())  # type: ignore[attr-defined]
    rows.append(
        {
            'program': program,
            'dtype': dtype,
            'batch': batch,
            'kernels': sum(counts.values()),
            'kinds': counts,
            'compile_s': compiled.compile_s,
        }
    )
    calls.append(functools.partial(compiled.call, *arguments))
  repeats = 15 if jax.default_backend() != 'cpu' else 5
  for row, times in zip(rows, timing.interleave(calls, repeats), strict=True):
    row |= dataclasses.asdict(times)
    row['us_per_step'] = 1e3 * times.median_ms / STEPS
  return rows


def main(argv) -> None:
  """Times all cases."""
  program_lib.flags_alone(argv)
  program_lib.writable(_OUTPUT.value)
  affinity = getattr(os, 'sched_getaffinity', None)  # Linux only.
  result: dict[str, Any] = {
      'device': jax.devices()[0].device_kind,
      'cores': len(affinity(0)) if affinity else os.cpu_count(),
      'jax': jax.__version__,
      'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
      'commit': _COMMIT.value,
      'sizes': {'steps': STEPS, 'features': FEATURES, 'layers': LAYERS},
      'rows': [],
  }
  for batch in BATCHES:
    for dtype in DTYPES:
      for name in FLAX:
        for row in measure(name, dtype, batch):
          result['rows'].append(row)
          print(
              f'{row["program"]:27} {dtype:9} batch {batch:5}'
              f' {row["us_per_step"]:10.2f} us a step, {row["kernels"]:3}'
              ' kernels',
              flush=True,
          )
        if _OUTPUT.value:
          text = json.dumps(result, indent=2) + '\n'
          pathlib.Path(_OUTPUT.value).write_text(text, encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
