"""Times `linear_scan` by GPU kernels with no, few and many resets.

python benchmarks/resets.py --output=benchmarks/resets_h100.json
"""

import datetime
import functools
import json
import pathlib

from absl import app
from absl import flags
import jax
import jax.numpy as jnp

import rnnzoo
from rnnzoo.benchmark import program
from rnnzoo.benchmark import timing

_OUTPUT = flags.DEFINE_string(
    'output', 'benchmarks/resets_h100.json', 'The JSON file.'
)
_REPEATS = flags.DEFINE_integer(
    'repeats', 7, 'Measurements of each program.', lower_bound=1
)
_PATH = flags.DEFINE_string('implementation', 'pallas', 'The path.')

_SHAPES = (1, 2**20, 1024), (16, 1024, 768)
_DTYPE = jnp.bfloat16
_RATES = {'none': None, '0.1 %': 1e-3, '3 %': 0.03, '30 %': 0.3}


def forward(a, b, reset):
  """Returns h."""
  return rnnzoo.linear_scan(a, b, reset=reset, implementation=_PATH.value)


def both(a, b, reset, d_h):
  """Returns the cotangents of a and b."""
  return jax.vjp(lambda a, b: forward(a, b, reset), a, b)[1](d_h)


def main(argv: list[str]) -> None:
  """Writes the JSON file, and prints a line for each row."""
  program.flags_alone(argv)
  program.writable(_OUTPUT.value)
  rows = []
  for shape in _SHAPES:
    keys = jax.random.split(jax.random.key(0), 4)
    normal = jax.jit(lambda key, s=shape: jax.random.normal(key, s, _DTYPE))
    gates, b, d_h = (normal(key) for key in keys[:3])
    a = jax.jit(jax.nn.sigmoid)(gates)
    calls = []
    for rate in _RATES.values():
      reset = None
      if rate is not None:
        reset = jax.random.uniform(keys[3], shape[:2]) < rate
      for function, more in ((forward, ()), (both, (d_h,))):
        calls.append(functools.partial(jax.jit(function), a, b, reset, *more))
        jax.block_until_ready(calls[-1]())
    found = timing.interleave(calls, _REPEATS.value)
    times = [time.median_ms for time in found]
    for i, name in enumerate(_RATES):
      rows.append(
          {'shape': shape, 'resets': name, 'ms': times[2 * i : 2 * i + 2]}
      )
      print(json.dumps(rows[-1]), flush=True)
  environment = timing.environment()
  result = {
      'device': environment['device']['kind'],
      'jax': jax.__version__,
      'date': datetime.date.today().isoformat(),
      'commit': environment['commit'],
      'dtype': jnp.dtype(_DTYPE).name,
      'rows': rows,
  }
  text = json.dumps(result, indent=2) + '\n'
  pathlib.Path(_OUTPUT.value).write_text(text, encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
