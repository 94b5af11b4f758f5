"""Memory and time of a gradient by what is kept between forward and backward.

  python benchmarks/memory.py --output=benchmarks/memory_cpu.json

A layer with its projection, batch-major; temporary memory is XLA's own count
for the compiled gradient.
"""

import dataclasses
import datetime
import functools
import json
import os
import pathlib

from absl import app
from absl import flags
from flax import nnx
import jax

import rnnzoo
from rnnzoo.benchmark import timing

_OUTPUT = flags.DEFINE_string('output', None, 'The JSON file to write.')
_COMMIT = flags.DEFINE_string('commit', '', 'The commit that is measured.')

BATCH, TIME, IN_FEATURES, FEATURES = 16, 4000, 64, 128
SETTINGS = {
    "'scan'": 'scan',
    "Scan(keep='gates')": rnnzoo.Scan(keep='gates'),
    "Scan(keep='carries')": rnnzoo.Scan(keep='carries'),
    "Scan(keep='carries', chunk=16)": rnnzoo.Scan(keep='carries', chunk=16),
    "Scan(keep='carries', chunk=4000)": rnnzoo.Scan(keep='carries', chunk=4000),
}


def main(argv) -> None:
  """Times all settings, interleaved."""
  del argv
  x = jax.random.normal(jax.random.key(0), (BATCH, TIME, IN_FEATURES))
  rows, calls = [], []
  for name in ('LSTM', 'GRU'):
    for setting, path in SETTINGS.items():
      layer = rnnzoo.LAYERS[name](
          IN_FEATURES, FEATURES, implementation=path, rngs=nnx.Rngs(0)
      )
      graphdef, state = nnx.split(layer)
      loss = lambda state, x, g=graphdef: (nnx.merge(g, state)(x) ** 2).sum()
      program = timing.build(jax.grad(loss, (0, 1)), state, x)
      calls.append(functools.partial(program.call, state, x))
      rows.append(
          {
              'layer': name,
              'setting': setting,
              'temp_bytes': program.memory['temp_bytes'],
              'compile_s': program.compile_s,
          }
      )
  for row, times in zip(rows, timing.interleave(calls, 7), strict=True):
    row |= dataclasses.asdict(times)
    print(
        f'{row["layer"]:6} {row["setting"]:34}'
        f' {row["temp_bytes"] / 2**20:8.1f} MiB {times.median_ms:8.1f} ms'
    )
  if _OUTPUT.value:
    result = {
        'device': jax.devices()[0].device_kind,
        'cores': os.cpu_count(),
        'sizes': [BATCH, TIME, IN_FEATURES, FEATURES],
        'jax': jax.__version__,
        'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
        'commit': _COMMIT.value,
        'rows': rows,
    }
    path = pathlib.Path(_OUTPUT.value)
    path.write_text(json.dumps(result, indent=2) + '\n', encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
