"""Times a linear recurrence with time over all GPUs, beside one.

  python benchmarks/linear_over_time.py

Forward and with the backward pass, with gates that forget and some that hardly
do, with and without resets; each result is compared with that of one GPU.
"""

from concurrent import futures
import json
import pathlib

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo.benchmark import program as program_lib
from rnnzoo.benchmark import timing

_STEPS = flags.DEFINE_integer('steps', 2**20, 'T.', lower_bound=1)
_FEATURES = flags.DEFINE_integer('features', 1024, 'F.', lower_bound=1)
_REPEATS = flags.DEFINE_integer(
    'repeats', 7, 'Measurements of each program.', lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
    'output', 'benchmarks/linear_over_time_2_h100.json', 'The JSON file.'
)

_DTYPE = jnp.bfloat16
# Name, gates, and whether one step in a thousand is a reset.
_CASES = (
    ('gates', 'gates', False),
    ('resets', 'gates', True),
    ('slow gates', 'slow', False),
    ('slow gates, resets', 'slow', True),
)
_DIRECTIONS = {'forward': False, 'forward+backward': True}


def forward(a, b, reset):
  """Returns h."""
  return rnnzoo.linear_scan(a, b, reset=reset)


def both(a, b, reset, d_h):
  """Returns the cotangents of a and b."""
  return jax.vjp(lambda a, b: forward(a, b, reset), a, b)[1](d_h)


def draw() -> dict[str, jax.Array]:
  """Returns random operands, on the first device."""
  shape = 1, _STEPS.value, _FEATURES.value
  normal = jax.jit(lambda key: jax.random.normal(key, shape, _DTYPE))
  x, y, b, d_h = (normal(jax.random.key(i)) for i in range(4))
  # Nothing is forgotten soon: all steps are read twice.
  slow = jax.jit(lambda x: jnp.where(x > 0, 1 - 2.0**-8, 1).astype(_DTYPE))
  flags_of = np.random.default_rng(0).random(shape[:2]) < 1e-3
  return {
      'gates': jax.jit(jax.nn.sigmoid)(x),
      'slow': slow(y),
      'b': b,
      'd_h': d_h,
      'reset': jax.device_put(flags_of, jax.devices()[0]),
  }


@jax.jit
def difference(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns the norm of a difference beside that of y."""
  x, y = x.astype(jnp.float32), y.astype(jnp.float32)
  return jnp.sqrt(jnp.sum((x - y) ** 2) / jnp.sum(y**2))


def main(argv: list[str]) -> None:
  """Writes the JSON file, and prints a line for each row."""
  program_lib.flags_alone(argv)
  program_lib.writable(_OUTPUT.value)
  count = jax.device_count()
  alone_on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  mesh = jax.make_mesh((count,), ('time',))
  over = jax.NamedSharding(mesh, jax.P(None, 'time'))
  places = {1: draw()}
  places[count] = {k: jax.device_put(x, over) for k, x in places[1].items()}

  def operands(case, with_backward, devices):
    _, gates, has_reset = case
    arrays = places[devices]
    reset = arrays['reset'] if has_reset else None
    given = (arrays['d_h'],) if with_backward else ()
    return arrays[gates], arrays['b'], reset, *given

  def build(case, with_backward, devices):
    arguments = operands(case, with_backward, devices)
    function = both if with_backward else forward
    program = jax.jit(function).lower(*arguments).compile()
    return lambda: program(*arguments), program.memory_analysis()

  keys = [(c, w, n) for c in _CASES for w in (False, True) for n in (1, count)]
  with futures.ThreadPoolExecutor(8) as pool:
    programs = pool.map(lambda key: build(*key), keys)
    built = dict(zip(keys, programs, strict=True))

  rows = []
  for case in _CASES:
    for direction, with_backward in _DIRECTIONS.items():
      ways = [built[case, with_backward, n] for n in (1, count)]
      calls = [call for call, _ in ways]
      alone, many = (jax.tree.leaves(call()) for call in calls)
      row = {
          'case': case[0],
          'direction': direction,
          'differences': [
              float(difference(jax.device_put(x, alone_on), y))
              for x, y in zip(many, alone, strict=True)
          ],
      }
      del alone, many
      found = timing.interleave(calls, _REPEATS.value)
      for n, time, (_, memory) in zip((1, count), found, ways, strict=True):
        size = sum(
            getattr(memory, f'{kind}_size_in_bytes')
            for kind in ('argument', 'output', 'temp')
        )
        row |= {f'ms_{n}': time.median_ms, f'gb_{n}': round(size / 1e9, 2)}
      row['times'] = row['ms_1'] / row[f'ms_{count}']
      rows.append(row)
      print(json.dumps(row), flush=True)
  result = {
      'command': 'python benchmarks/linear_over_time.py',
      **timing.environment(),
      'shape': [1, _STEPS.value, _FEATURES.value],
      'dtype': jnp.dtype(_DTYPE).name,
      'rows': rows,
  }
  text = json.dumps(result, indent=2) + '\n'
  pathlib.Path(_OUTPUT.value).write_text(text, encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
