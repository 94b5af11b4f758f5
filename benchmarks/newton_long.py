"""Times all steps at once on long sequences, beside the sequential kernel.

  python benchmarks/newton_long.py --output=benchmarks/newton_long_h200.json
  python benchmarks/newton_long.py --grid --output=newton_grid.json

Cells without a projection, float32, heads as the cell's R has them, forward
and, with `--gradients`, forward and backward, with gradients of gates and of R.
A row of 'associative_scan' has the error against 'pallas', relative to the
largest output, and how the joints between parts of time went
(`engines.time.kernel_parts.Report`). `--together=4` also times so many calls
in one program, each on gates of its own: a program that waits for its loop has
the device wait for the next call too. `--iterations` also times the iteration
over single steps. `--grid` has GRUs over steps, batch and units, beside 'scan'
too, for the figure of benchmarks/newton_grid.py. The file is written after
every case, and keeps its `before`, times of an earlier commit.
"""

from collections.abc import Callable
import dataclasses
import datetime
import json
import pathlib
import statistics
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp

import rnnzoo
from rnnzoo.benchmark import program as program_lib
from rnnzoo.benchmark import timing
from rnnzoo.cells import elman
from rnnzoo.cells import slstm
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import selection
from rnnzoo.engines.time import kernel_parts
from rnnzoo.engines.time import plan as newton_plan

_OUTPUT = flags.DEFINE_string('output', None, 'The JSON file to write.')
_COMMIT = flags.DEFINE_string('commit', '', 'The commit that is measured.')
_ONLY = flags.DEFINE_multi_string(
    'only', None, 'Beginnings of the names of cases to measure.'
)
_QUICK = flags.DEFINE_bool('quick', False, 'Few steps and units, to try it.')
_ITERATIONS = flags.DEFINE_bool(
    'iterations', False, 'Whether to time the iteration over single steps too.'
)
_GRID = flags.DEFINE_bool(
    'grid', False, 'Whether to measure GRUs of many sizes instead.'
)
_GRADIENTS = flags.DEFINE_bool(
    'gradients', False, 'Whether to time forward and backward too.'
)
_TOGETHER = flags.DEFINE_integer(
    'together', 1, 'Calls that are timed in one program too.', lower_bound=1
)

# A sample has as many calls in flight as take this long, and at most CALLS.
SAMPLE_SECONDS, CALLS, SAMPLES = 0.1, 10, 7
# (batch, units) and steps of the grid.
GRID_SIZES = (1, 8), (16, 8), (1, 64), (16, 64)
GRID_STEPS = 1000, 10_000, 100_000
QUICK = {'time': 32, 'features': 8, 'heads': 8}


@dataclasses.dataclass(frozen=True)
class Case:
  """A cell and the sizes of its gates, [batch, time, gates, features].

  Attributes:
    name: of the case.
    cell: the equations, or None for `linear_scan`.
    sizes: batch, time, features and heads.
    arguments: returns parameters, gates and R from `sizes`.
  """

  name: str
  cell: Any
  sizes: dict[str, int]
  arguments: Callable[[dict[str, int]], tuple[Any, ...]]


def gru(sizes):
  """Returns arguments of a GRU; with heads of one unit, R is in [-1, 1]."""
  batch, steps, features, heads = sizes.values()
  keys = jax.random.split(jax.random.key(0), 2)
  size = features // heads
  kernel = jax.random.normal(keys[0], (3, heads, size, size)) / size**0.5
  if size == 1:
    kernel = jnp.clip(kernel, -1, 1)
  x = jax.random.normal(keys[1], (batch, steps, 3, features))
  return {'recurrent_bias': jnp.zeros(features)}, x, kernel


def indrnn(sizes, scale=1.0):
  """Returns arguments of an IndRNN; a small `scale` makes it forget little."""
  batch, steps, features, _ = sizes.values()
  keys = jax.random.split(jax.random.key(1), 3)
  x = scale * jax.random.normal(keys[1], (batch, steps, 1, features))
  return {}, x, jax.random.uniform(keys[2], (1, features, 1, 1))


def small_indrnn(sizes):
  """Returns the same with inputs of a hundredth."""
  return indrnn(sizes, 0.01)


def linear(sizes):
  """Returns a and b of a linear recurrence."""
  batch, steps, features, _ = sizes.values()
  keys = jax.random.split(jax.random.key(1), 3)
  shape = batch, steps, features
  return jax.random.uniform(keys[0], shape), jax.random.normal(keys[1], shape)


def many_heads(sizes):
  """Returns arguments of an sLSTM that forgets little."""
  batch, steps, features, heads = sizes.values()
  keys = jax.random.split(jax.random.key(1), 3)
  x = jax.random.normal(keys[1], (batch, steps, 4, features))
  kernel = 0.5 * jax.random.normal(keys[0], (4, heads, 1, 1))
  return {}, x.at[:, :, 1].add(3.0), kernel


def all_cases() -> list[Case]:
  """Returns the cases."""
  sizes = lambda *of: dict(
      zip(('batch', 'time', 'features', 'heads'), of, strict=True)
  )
  wide = sizes(1, 65536, 768, 768)
  tanh, relu = elman.ElmanCell('tanh'), elman.ElmanCell('relu')
  short = [
      Case('sLSTM', slstm.SLSTMCell(), sizes(b, 2048, 256, 256), many_heads)
      for b in (1, 8)
  ]
  return [
      Case('GRU', rnnzoo.GRUCell(), sizes(16, 100_000, 1, 1), gru),
      Case('GRU', rnnzoo.GRUCell(), sizes(16, 100_000, 8, 1), gru),
      Case('GRU', rnnzoo.GRUCell(), sizes(8, 4096, 256, 256), gru),
      Case('linear_scan', None, wide, linear),
      Case('IndRNN, tanh', tanh, wide, indrnn),
      Case('IndRNN, tanh, x / 100', tanh, wide, small_indrnn),
      Case('IndRNN, relu', relu, wide, indrnn),
      Case('IndRNN, relu, x / 100', relu, wide, small_indrnn),
      *short,
  ]


def grid() -> list[Case]:
  """Returns GRUs of one head over steps, batch and units."""
  return [
      Case('GRU', rnnzoo.GRUCell(), sizes, gru)
      for batch, features in GRID_SIZES
      for time in GRID_STEPS
      for sizes in [
          {'batch': batch, 'time': time, 'features': features, 'heads': 1}
      ]
  ]


def timed(function, *arguments) -> tuple[dict[str, Any], Any]:
  """Returns fields of a row, and what the function returns."""
  program = timing.build(function, *arguments)
  jax.block_until_ready(program.call(*arguments))
  start = time.perf_counter()
  out = jax.block_until_ready(program.call(*arguments))
  once = time.perf_counter() - start
  calls = max(1, min(CALLS, round(SAMPLE_SECONDS / once)))
  samples = []
  for _ in range(SAMPLES):
    start = time.perf_counter()
    for _ in range(calls):
      out = program.call(*arguments)
    jax.block_until_ready(out)
    samples.append((time.perf_counter() - start) / calls * 1e3)
  fields = {
      'status': 'ok',
      'median_ms': round(statistics.median(samples), 4),
      'least_ms': round(min(samples), 4),
      'compile_s': round(program.compile_s, 1),
      'temp_mib': round((program.memory['temp_bytes'] or 0) / 2**20, 1),
  }
  return fields, out


def zero_carry(cell, x) -> tuple[jax.Array, ...]:
  """Returns the carry before the first step."""
  zeros = jnp.zeros((x.shape[0], x.shape[-1]))
  return (zeros,) * len(cell.carry_names)


def joints(cell, params, x, kernel) -> dict[str, Any]:
  """Returns how the joints between parts of time went."""
  carry = zero_carry(cell, x)
  operands = call_lib.Operands(
      params=params,
      weights=(),
      x=jnp.swapaxes(x, 0, 1),
      recurrent_kernel=kernel,
      carry=carry,
      restart=carry,
      reset=None,
      mask=None,
  )
  plan = newton_plan.make_plan(
      cell,
      call_lib.Given(),
      operands,
      call_lib.Call(reverse=False),
      **dataclasses.asdict(selection.AssociativeScan()),
  )

  def otherwise(operands):
    # Only how it went is asked for: nothing else is to be compiled.
    shape = *operands.x.shape[:2], x.shape[-1]
    return operands.carry, (jnp.zeros(shape),) * len(cell.carry_names)

  report = jax.jit(
      lambda operands: kernel_parts.unroll(plan.steps, operands, otherwise)[2]
  )(operands)
  return {
      'parts': int(report.parts),
      'runs': int(report.runs),
      'correction': float(report.correction),
      'fell_back': bool(report.fell_back),
  }


def attempt(function, *arguments) -> tuple[dict[str, Any], Any]:
  """Returns what `timed` does, or why it cannot."""
  try:
    return timed(function, *arguments)
  except NotImplementedError as error:
    return {'status': 'cannot', 'reason': str(error)}, None
  except Exception as error:  # Out of memory, say: the others are measured.
    return {'status': 'failed', 'reason': f'{error!r}'[:300]}, None


def in_program(function, arguments) -> dict[str, Any]:
  """Returns the time of a call among `--together` in one program."""
  count = _TOGETHER.value
  if count == 1:
    return {}
  first, second, *rest = arguments
  seconds = [jnp.roll(second, i, axis=1) for i in range(count)]
  program = lambda seconds: [function(first, x, *rest) for x in seconds]
  fields, _ = attempt(program, seconds)
  if 'median_ms' not in fields:
    return {}
  ms = {name: fields[f'{name}_ms'] / count for name in ('median', 'least')}
  return {f'in_program_{name}_ms': round(each, 4) for name, each in ms.items()}


def measure(case: Case, iterations: bool):
  """Yields the rows of a case."""
  head = {'case': case.name, **case.sizes}
  arguments = case.arguments(case.sizes)
  if case.cell is None:
    fields, _ = attempt(rnnzoo.linear_scan, *arguments)
    fields |= in_program(rnnzoo.linear_scan, arguments)
    yield head | {'path': 'linear_scan'} | fields
    return
  paths: dict[str, Any] = {
      'pallas': 'pallas',
      'associative_scan': 'associative_scan',
  }
  if _GRID.value:
    paths['scan'] = 'scan'
  if iterations:
    # A window of its own asks for the iteration over single steps.
    window = rnnzoo.AssociativeScan(window=case.sizes['time'])
    paths['single steps'] = window
  wanted = wanted_d = None
  for name, path in paths.items():

    def run(params, x, kernel, path=path):
      carry = zero_carry(case.cell, x)
      return rnnzoo.unroll(
          case.cell, params, x, kernel, carry, implementation=path
      )[1]

    def gradient(params, x, kernel, run=run):
      loss = lambda x, kernel: jnp.sum(run(params, x, kernel) ** 2)
      return jax.grad(loss, (0, 1))(x, kernel)

    fields, out = attempt(run, *arguments)
    fields |= in_program(run, arguments)
    if name == 'pallas':
      wanted = out
    elif out is not None and wanted is not None:
      fields['error'] = _difference(out, wanted)
    if name == 'associative_scan':
      try:
        fields |= joints(case.cell, *arguments)
      except NotImplementedError as error:
        fields['joints'] = str(error)
    if _GRADIENTS.value:
      found, d = attempt(gradient, *arguments)
      if name == 'pallas':
        wanted_d = d
      elif d is not None and wanted_d is not None:
        found['error'] = max(map(_difference, d, wanted_d))
      fields['gradient'] = found
    yield head | {'path': name} | fields


def _difference(x, wanted) -> float:
  """Returns the largest, relative to the largest number that is wanted."""
  return float(jnp.max(jnp.abs(x - wanted)) / jnp.max(jnp.abs(wanted)))


def main(argv) -> None:
  """Measures the cases that are wanted."""
  program_lib.flags_alone(argv)
  program_lib.writable(_OUTPUT.value)
  path = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else None
  rows: list[dict[str, Any]] = []
  result: dict[str, Any] = {
      'device': jax.devices()[0].device_kind,
      'jax': jax.__version__,
      'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
      'commit': _COMMIT.value,
      'rows': rows,
  }
  if path and path.exists():
    old = json.loads(path.read_text(encoding='utf-8'))
    result |= {key: old[key] for key in ('before',) if key in old}
  for case in grid() if _GRID.value else all_cases():
    if _ONLY.value and not case.name.startswith(tuple(_ONLY.value)):
      continue
    if _QUICK.value:
      sizes = {k: min(n, QUICK.get(k, n)) for k, n in case.sizes.items()}
      case = dataclasses.replace(case, sizes=sizes)
    for row in measure(case, _ITERATIONS.value):
      rows.append(row)
      ms = f'{row["median_ms"]:9.3f}' if 'median_ms' in row else '        -'
      print(f'{row["case"]:22} {row["path"]:17} {ms} ms', row, flush=True)
    if path:
      text = json.dumps(result, indent=2) + '\n'
      path.write_text(text, encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
