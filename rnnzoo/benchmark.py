"""Times layers on every path, after checking what they compute.

  python -m rnnzoo.benchmark
  python -m rnnzoo.benchmark --suite=linear
  python -m rnnzoo.benchmark --layers=GRU,LSTM --shapes=pixel_mnist,long
  python -m rnnzoo.benchmark --plot_from=benchmarks/cells_cpu.json

Each combination of layer, implementation, shape, dtype, direction and
projection is a row. A row is `ok`; or `cannot`, where the implementation says
so; or `failed`, where the result is not that of the 'scan' path in float64, and
then it is not timed and the exit code is 1. Results are printed as a table,
written as JSON, and plotted from the JSON.

The suite 'cells' has every layer, at shapes of tasks; the suite 'linear' those
that memory bandwidth bounds, at shapes of large models (`benchmark_linear`).

With the projection, a row is a layer on x; without it, `rnnzoo.unroll` on given
input gates. Backward is the gradient by everything that is given: parameters,
recurrent kernel, and x or the input gates.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import itertools
import pathlib
import shlex
import sys
from typing import Any, NoReturn

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np

import rnnzoo
from rnnzoo import benchmark_cases
from rnnzoo import benchmark_linear
from rnnzoo import benchmark_report
from rnnzoo import benchmark_rotation
from rnnzoo import benchmark_timing
from rnnzoo import selection


def measure(
    cases: Iterable[benchmark_cases.Case], repeats: int
) -> list[dict[str, Any]]:
  """Checks every case, then times those that are right, interleaved.

  Args:
    cases: what to measure.
    repeats: number of samples of each.

  Returns:
    One row for each case: what it is, `status` and `reason`, and as far as it
    got `error`, `tolerance`, `compile_s`, XLA's view of memory, and times.
  """
  rows, right, calls = [], [], []
  for case in cases:
    row = {label: getattr(case, label) for label in benchmark_report.LABELS}
    row |= {'status': 'ok', 'reason': ''}
    rows.append(row)
    try:
      program = benchmark_timing.build(case.function, *case.arguments)
      got = jax.tree.map(np.asarray, program.call(*case.arguments))
      error = benchmark_cases.relative_error(got, case.expected())
    except NotImplementedError as exception:
      row |= {'status': 'cannot', 'reason': str(exception)}
      continue
    except jax.errors.JaxRuntimeError as exception:  # Out of memory, say.
      row |= {'status': 'failed', 'reason': str(exception)}
      continue
    row |= {
        'error': error,
        'tolerance': case.tolerance,
        'compile_s': program.compile_s,
        **program.memory,
        'bytes_moved': case.bytes_moved,
    }
    if error <= case.tolerance:
      right.append(row)
      calls.append(functools.partial(program.call, *case.arguments))
    else:  # NaN too.
      row |= {
          'status': 'failed',
          'reason': (
              f'relative error {error:.1e} from the float64 scan is above'
              f' {case.tolerance:.1e}'
          ),
      }
  times = benchmark_timing.interleave(calls, repeats)
  for row, measured in zip(right, times, strict=True):
    row |= dataclasses.asdict(measured)
    if row['bytes_moved'] is not None:
      row['gb_per_s'] = row['bytes_moved'] / measured.median_ms / 1e6
  return rows


@dataclasses.dataclass(frozen=True)
class Suite:
  """What can be asked of a suite, and how it answers.

  Attributes:
    layers: names of what it measures.
    shapes: by name.
    default_shapes: names of those measured if none are named.
    default_dtypes: likewise.
    rows: measures (layers, implementations, shape's name, dtype, repeats).
    copy_bandwidth: maps repeats to what a large copy does.
  """

  layers: Sequence[str]
  shapes: Mapping[str, benchmark_cases.Shape]
  default_shapes: Sequence[str]
  default_dtypes: Sequence[str]
  rows: Callable[..., list[dict[str, Any]]]
  copy_bandwidth: Callable[[int], dict[str, Any]]


def _cells_rows(layers, implementations, shape, dtype, repeats):
  sizes = benchmark_cases.SHAPES[shape]
  cases = benchmark_cases.cells(layers, implementations, sizes, dtype)
  return measure(cases, repeats)


def _linear_rows(layers, implementations, shape, dtype, repeats):
  cases = benchmark_linear.cases(layers, implementations, shape, dtype)
  return benchmark_rotation.measure(cases, repeats)


SUITES: Mapping[str, Suite] = {
    'cells': Suite(
        layers=tuple(rnnzoo.LAYERS),
        shapes=benchmark_cases.SHAPES,
        default_shapes=('row_mnist', 'pixel_mnist'),
        default_dtypes=('float32',),
        rows=_cells_rows,
        copy_bandwidth=lambda n: benchmark_timing.copy_bandwidth(n),
    ),
    'linear': Suite(
        layers=benchmark_linear.LAYERS,
        shapes=benchmark_linear.SHAPES,
        default_shapes=tuple(benchmark_linear.SHAPES)[1:],
        default_dtypes=benchmark_cases.DTYPES,
        rows=_linear_rows,
        copy_bandwidth=benchmark_rotation.copy_bandwidth,
    ),
}


def _names(flag: str, known: Iterable[str], text: str):
  """Defines a flag that lists some of the known names; None for a default."""
  known = tuple(dict.fromkeys(known))
  holder = flags.DEFINE_list(flag, None, text)

  def check(names):
    if names is None:
      return True
    given = next((repr(n) for n in names if n not in known), None)
    if given or not names:
      raise flags.ValidationError(
          f'{given or "nothing"} is given, and there are {", ".join(known)}'
      )
    return True

  flags.register_validator(flag, check)
  return holder


_SUITE = flags.DEFINE_enum('suite', 'cells', list(SUITES), 'What to time.')
_LAYERS = _names(
    'layers',
    itertools.chain(*(suite.layers for suite in SUITES.values())),
    'Which layers; all of the suite if not given.',
)
_IMPLEMENTATIONS = _names(
    'implementations',
    selection.IMPLEMENTATIONS,
    'Which paths over time; all if not given.',
)
_SHAPES = _names(
    'shapes',
    itertools.chain(*(suite.shapes for suite in SUITES.values())),
    'Which input shapes, by name; a default of the suite if not given.',
)
_DTYPES = _names(
    'dtypes',
    benchmark_cases.DTYPES,
    'Which dtypes; a default of the suite if not given.',
)
_REPEATS = flags.DEFINE_integer(
    'repeats', 10, 'Samples of each time.', lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
    'output',
    'runs/benchmark.json',
    'The JSON file to write; the plot goes beside it, as .png.',
)
_PLOT_FROM = flags.DEFINE_string(
    'plot_from', None, 'Only plot this JSON file of an earlier run.'
)


def _give_up(message: object) -> NoReturn:
  """Ends with one sentence: the caller's mistake needs no trace."""
  text = ' '.join(str(message).split())
  print(f'rnnzoo.benchmark: {text}', file=sys.stderr)
  sys.exit(2)


def parse_flags(argv: list[str]) -> list[str]:
  """Parses the command line, and gives up where it cannot be obeyed."""
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    _give_up(error)
  if rest[1:]:
    _give_up(f'unknown argument {rest[1]!r}; options are --name=value')
  for path in (_OUTPUT.value, _PLOT_FROM.value or 'x.json'):
    if pathlib.Path(path).suffix != '.json':
      _give_up(f'{path!r} must be the name of a .json file')
  if _PLOT_FROM.value and not pathlib.Path(_PLOT_FROM.value).is_file():
    _give_up(f'there is no file {_PLOT_FROM.value!r} to plot')
  suite = SUITES[_SUITE.value]
  for names, known in ((_LAYERS, suite.layers), (_SHAPES, suite.shapes)):
    other = [repr(name) for name in names.value or () if name not in known]
    if other:
      _give_up(
          f'{other[0]} is of another suite than {_SUITE.value!r}, which has'
          f' {", ".join(known)}'
      )
  if flags.FLAGS['verbosity'].using_default_value:
    flags.FLAGS['verbosity'].value = logging.WARNING
  return rest


def main(unused_argv: list[str]) -> int:
  """Runs a suite, or plots an earlier run; returns the exit code."""
  if _PLOT_FROM.value:
    try:
      print(benchmark_report.plot(_PLOT_FROM.value))
    except (AttributeError, KeyError, TypeError, ValueError):
      _give_up(f'{_PLOT_FROM.value!r} is not what a benchmark wrote')
    return 0
  try:
    pathlib.Path(_OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    _give_up(error)
  suite = SUITES[_SUITE.value]
  layers = _LAYERS.value or suite.layers
  implementations = _IMPLEMENTATIONS.value or selection.IMPLEMENTATIONS
  shapes = _SHAPES.value or suite.default_shapes
  dtypes = _DTYPES.value or suite.default_dtypes
  # Where the file went says nothing about the result.
  options = [a for a in sys.argv[1:] if not a.startswith('--output')]
  command = ['python', '-m', 'rnnzoo.benchmark', *options]
  result = {
      'suite': _SUITE.value,
      'command': shlex.join(command),
      **benchmark_timing.environment(),
      'copy': suite.copy_bandwidth(_REPEATS.value),
      'shapes': {k: dataclasses.asdict(suite.shapes[k]) for k in shapes},
      'rows': [],
  }
  print(benchmark_report.header(result), flush=True)
  reasons: dict[str, int] = {}
  for name, dtype in itertools.product(shapes, dtypes):
    title = f'{name} ({suite.shapes[name]}), {dtype}'
    print(f'compiling, checking and timing {title} ...', file=sys.stderr)
    rows = suite.rows(layers, implementations, name, dtype, _REPEATS.value)
    for row in rows:
      if 'gb_per_s' in row:
        row['copy_fraction'] = row['gb_per_s'] / result['copy']['gb_per_s']
    result['rows'] += [{'shape': name, 'dtype': dtype, **row} for row in rows]
    if rows:
      print(benchmark_report.table(title, rows, reasons), flush=True)
    # What a run that is cut off has measured so far is not lost.
    benchmark_report.write(result, _OUTPUT.value)
  if _SUITE.value == 'linear' and 'IRevRNN' in layers:
    result['memory'] = [
        row
        for name in shapes
        if name in benchmark_linear.DIAGONAL
        for row in benchmark_linear.memory(name, dtypes[0], implementations)
    ]
    print(benchmark_report.memory_table(result['memory']), flush=True)
    benchmark_report.write(result, _OUTPUT.value)
  print(_OUTPUT.value)
  try:
    print(benchmark_report.plot(_OUTPUT.value))
  except ModuleNotFoundError as error:
    print(f'no plot: {error}; --plot_from makes it later', file=sys.stderr)
  return int(any(row['status'] == 'failed' for row in result['rows']))


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
