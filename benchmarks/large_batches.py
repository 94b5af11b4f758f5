"""Times layers of large batches, and of heads with thousands of units.

  python benchmarks/large_batches.py

A layer with its projection, from zero carries, forward and with the gradients
by x and all parameters, in bfloat16; time-major and batch-major by the path
that `None` takes, and time-major by 'scan', with which results are compared.
The table has cuDNN's times from benchmarks/cudnn_h200.json.
"""

from concurrent import futures
import json
import shlex
import sys
import time
from typing import Any

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp

import rnnzoo
from rnnzoo.benchmark import cases as cases_lib
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import program as program_lib
from rnnzoo.benchmark import report
from rnnzoo.benchmark import timing
from rnnzoo.engines import choice

_REPEATS = flags.DEFINE_integer(
    'repeats', 7, 'Measurements of each program.', lower_bound=1
)
_THREADS = flags.DEFINE_integer(
    'threads', 1, 'Programs compiled at once.', lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
    'output', 'benchmarks/large_batches_h200.json', 'The JSON file.'
)
_CASES = flags.DEFINE_multi_string(
    'case', None, 'layer,batch,time,features; repeatable. All by default.'
)

# Layer, batch, time, features.
CASES = (
    ('LSTM', 2048, 64, 768),
    ('GRU', 2048, 64, 768),
    ('LSTM', 4096, 64, 512),
    ('GRU', 4096, 64, 512),
    ('LSTM', 1024, 64, 512),
    ('LSTM', 4096, 64, 256),
    ('LSTM', 1024, 64, 128),
    ('LSTM', 16384, 16, 128),
    ('LSTM', 128, 1024, 768),
    ('GRU', 128, 1024, 768),
    ('LSTM', 256, 1024, 768),
    ('GRU', 256, 1024, 768),
    ('LSTM', 32, 1024, 1536),
    ('LSTM', 16, 1024, 2048),
    ('GRU', 16, 1024, 2048),
)

# Way: implementation, and whether time comes first.
WAYS = {
    'time-major': (None, True),
    'batch-major': (None, False),
    'scan': ('scan', True),
}
NAMES = ('layer', 'batch', 'time', 'features')
DIRECTIONS = cases_lib.DIRECTIONS


def parse(text: str) -> tuple[str, int, int, int]:
  """Returns a case of --case.

  Raises:
    ValueError: it is none.
  """
  layer, _, sizes = text.partition(',')
  if layer not in rnnzoo.LAYERS or sizes.count(',') != 2:
    raise ValueError(
        f'--case={text}: layer,batch,time,features would work, as in'
        ' LSTM,2048,64,768'
    )
  _, shape = cases_lib.parse_shape(f'{sizes},{sizes.split(",")[-1]}')
  return layer, shape.batch, shape.time, shape.features


def program(case: Any, direction: str, way: str) -> Any:
  """Returns a function of state, x and y's cotangents, and the state.

  Its x and y are batch-major or time-major, as the way says.
  """
  layer, _, _, features = case
  implementation, time_major = WAYS[way]
  make: Any = rnnzoo.LAYERS[layer]
  graphdef, state = nnx.split(
      make(
          features,
          features,
          dtype=jnp.bfloat16,
          implementation=implementation,
          rngs=nnx.Rngs(0),
      )
  )

  def forward(state, x, weights):
    del weights
    return {'y': nnx.merge(graphdef, state)(x, time_major=time_major)}

  def both(state, x, weights):
    run = lambda state, x: forward(state, x, weights)
    y, pull = jax.vjp(run, state, x)
    return y | dict(zip(('state', 'x'), pull({'y': weights}), strict=True))

  return both if direction == DIRECTIONS[1] else forward, state


def size(case: Any, way: str) -> tuple[int, ...]:
  """Returns the shape of x and y."""
  _, batch, steps, features = case
  lead = (steps, batch) if WAYS[way][1] else (batch, steps)
  return *lead, features


def build(case: Any, direction: str, way: str) -> tuple[Any, dict[str, Any]]:
  """Returns a compiled program of x and cotangents, and what is known of it."""
  function, state = program(case, direction, way)
  x = jax.ShapeDtypeStruct(size(case, way), jnp.bfloat16)
  start = time.perf_counter()
  with choice.noted() as choices:
    lowered = jax.jit(function).lower(state, x, x)
  compiled = lowered.compile()
  memory: Any = compiled.memory_analysis()

  def call(x, weights):
    return compiled(state, x, weights)

  return call, {
      'path': choices[-1].path,
      'compile_s': round(time.perf_counter() - start, 2),
      'temp_mb': round(memory.temp_size_in_bytes / 1e6),
  }


def distance(found: Any, other: Any, way: str) -> float:
  """Returns the largest relative distance of an array to that of 'scan'.

  Args:
    found: results of a way.
    other: results of 'scan', time-major.
    way: that of `found`.
  """
  if not WAYS[way][1]:
    turned = {k: v.swapaxes(0, 1) for k, v in found.items() if k != 'state'}
    found = found | turned
  pairs = zip(*map(jax.tree.leaves, (found, other)), strict=True)
  wide = lambda a: a.astype(jnp.float32)
  return max(float(problems.relative_error(wide(a), wide(b))) for a, b in pairs)


def measure(case: Any, direction: str, built: Any) -> dict[str, Any]:
  """Returns a row: the times of all ways, taken in turns."""
  x, weights = (
      jax.random.normal(jax.random.key(i), size(case, 'scan'), jnp.bfloat16)
      for i in (1, 2)
  )
  row: dict[str, Any] = dict(zip(NAMES, case, strict=True))
  row['direction'] = direction
  calls, other = [], built[direction, 'scan'].result()[0](x, weights)
  for way in WAYS:
    call, facts = built[direction, way].result()
    own: Any = (x, weights)
    if not WAYS[way][1]:
      own = tuple(a.swapaxes(0, 1) for a in own)
    if way != 'scan':
      facts['difference'] = distance(call(*own), other, way)
    row[way] = facts
    calls.append(lambda call=call, own=own: call(*own))
  del other
  for way, timed in zip(
      WAYS, timing.interleave(calls, _REPEATS.value), strict=True
  ):
    row[way] = {'ms': round(timed.median_ms, 4)} | row[way]
  return row


def main(argv: list[str]) -> int:
  """Writes the JSON file, prints a line for each row; returns the exit code."""
  program_lib.flags_alone(argv)
  program_lib.writable(_OUTPUT.value)
  try:
    cases = [parse(text) for text in _CASES.value or ()] or CASES
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  if cases is not CASES and flags.FLAGS['output'].using_default_value:
    raise app.UsageError(
        f'--case would leave {_OUTPUT.value} without all others: name another'
        ' --output.'
    )
  options = [a for a in sys.argv[1:] if not a.startswith('--output')]
  result: dict[str, Any] = {
      'command': shlex.join(
          ['python', 'benchmarks/large_batches.py', *options]
      ),
      **timing.environment(),
      'threads': _THREADS.value,
      'rows': [],
  }
  with futures.ThreadPoolExecutor(_THREADS.value) as pool:
    begun = {
        case: {
            (direction, way): pool.submit(build, case, direction, way)
            for direction in DIRECTIONS
            for way in WAYS
        }
        for case in cases
    }
    # Nothing is timed while something is compiled.
    futures.wait([each for own in begun.values() for each in own.values()])
  code = 0
  for case, built in begun.items():
    for direction in DIRECTIONS:
      row, failed = measurement.attempt(measure, case, direction, built)
      if failed:
        row = dict(zip(NAMES, case, strict=True), direction=direction) | failed
        code = 1
      result['rows'].append(row)
      print(json.dumps(row), flush=True)
      report.write(result, _OUTPUT.value)
  return code


if __name__ == '__main__':
  app.run(main)
