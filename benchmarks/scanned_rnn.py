"""Times ScannedRNN beside the class of that name that programs for agents copy.

  python benchmarks/scanned_rnn.py --output=benchmarks/scanned_rnn_h200.json

The copied class is flax's `nn.scan` over a GRUCell, with `where(reset)` before
the step. Batch 128, 128 steps, 256 features, 3 % of the steps reset; float32
arrays in both.
"""

import dataclasses
import datetime
import functools
import json
import pathlib

from absl import app
from absl import flags
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo.benchmark import program as program_lib
from rnnzoo.benchmark import timing

_OUTPUT = flags.DEFINE_string('output', None, 'The JSON file to write.')
_COMMIT = flags.DEFINE_string('commit', '', 'The commit that is measured.')

BATCH, TIME, FEATURES, RESETS = 128, 128, 256, 0.03


class FlaxScannedRNN(nn.Module):
  """flax's GRUCell over time, time-major, with resets."""

  @functools.partial(
      nn.scan,
      variable_broadcast='params',
      in_axes=0,
      out_axes=0,
      split_rngs={'params': False},
  )
  @nn.compact
  def __call__(self, carry, x):
    inputs, resets = x
    carry = jnp.where(resets[:, None], jnp.zeros_like(carry), carry)
    return nn.GRUCell(features=FEATURES)(carry, inputs)


def programs(x, resets, h):
  """Yields (name, function of parameters and x, parameters)."""
  module = FlaxScannedRNN()
  yield (
      'flax nn.scan(GRUCell), where(reset)',
      lambda params, x: module.apply(params, h, (x, resets))[1],
      module.init(jax.random.key(0), h, (x, resets)),
  )
  for dtype in ('float32', 'bfloat16'):
    make = functools.partial(rnnzoo.GRU, dtype=jnp.dtype(dtype))
    graphdef, params = nnx.split(make(FEATURES, FEATURES, rngs=nnx.Rngs(0)))
    yield (
        f'rnnzoo.GRU without resets, {dtype}',
        lambda p, x, g=graphdef: nnx.merge(g, p)(x, time_major=True),
        params,
    )
    scanned = rnnzoo.ScannedRNN(
        FEATURES, FEATURES, layer=make, rngs=nnx.Rngs(0)
    )
    graphdef, params = nnx.split(scanned)
    yield (
        f'rnnzoo.ScannedRNN, {dtype}',
        lambda p, x, g=graphdef: nnx.merge(g, p)(h, (x, resets))[1],
        params,
    )


def main(argv) -> None:
  """Times all programs, interleaved."""
  program_lib.flags_alone(argv)
  program_lib.writable(_OUTPUT.value)
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((TIME, BATCH, FEATURES)), jnp.float32)
  resets = jnp.asarray(rng.random((TIME, BATCH)) < RESETS)
  rows, calls = [], []
  for name, f, params in programs(x, resets, jnp.zeros((BATCH, FEATURES))):
    loss = lambda p, x, f=f: (f(p, x).astype(jnp.float32) ** 2).sum()
    directions = {
        'forward': f,
        'forward+backward': jax.grad(loss, (0, 1)),
    }
    for direction, function in directions.items():
      program = timing.build(function, params, x)
      calls.append(functools.partial(program.call, params, x))
      rows.append(
          {
              'program': name,
              'direction': direction,
              'compile_s': program.compile_s,
          }
      )
  for row, times in zip(rows, timing.interleave(calls, 15), strict=True):
    row |= dataclasses.asdict(times)
    print(
        f'{row["program"]:42} {row["direction"]:18} {times.median_ms:9.4f} ms'
    )
  if _OUTPUT.value:
    result = {
        'device': jax.devices()[0].device_kind,
        'jax': jax.__version__,
        'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
        'commit': _COMMIT.value,
        'rows': rows,
    }
    path = pathlib.Path(_OUTPUT.value)
    path.write_text(json.dumps(result, indent=2) + '\n', encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
