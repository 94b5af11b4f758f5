"""Times layers on every path, after checking what they compute.

  python -m rnnzoo.benchmark
  python -m rnnzoo.benchmark --suite=linear
  python -m rnnzoo.benchmark --suite=dense
  python -m rnnzoo.benchmark --layers=GRU,LSTM --shapes=pixel_mnist,long
  python -m rnnzoo.benchmark --plot_from=benchmarks/cells_cpu.json

Each combination of layer, implementation, shape, dtype, direction and
projection is a row. A row is `ok`; or `cannot`, where the implementation says
so; or `failed`, where the result is not that of the 'scan' path in float64, and
then it is not timed and the exit code is 1. Results are printed as a table,
written as JSON, and plotted from the JSON.

The suite 'cells' has every layer, at shapes of tasks; the suite 'linear' those
that memory bandwidth bounds, at shapes of large models (`benchmark_linear`);
the suite 'dense' those with a product R h in every step (`benchmark_dense`).

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
from rnnzoo import benchmark_baselines
from rnnzoo import benchmark_cases
from rnnzoo import benchmark_dense
from rnnzoo import benchmark_linear
from rnnzoo import benchmark_report
from rnnzoo import benchmark_rotation
from rnnzoo import benchmark_steps
from rnnzoo import benchmark_timing
from rnnzoo import benchmark_watchdog
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
    dtypes: maps a shape's name to the dtypes measured if none are named.
    rows: measures (layers, implementations, shape's name, dtype, repeats,
      watchdog) and yields rows.
    copy_bandwidth: maps repeats to what a large copy does.
    implementations: names of what can run in it.
  """

  layers: Sequence[str]
  shapes: Mapping[str, benchmark_cases.Shape]
  default_shapes: Sequence[str]
  dtypes: Callable[[str], Sequence[str]]
  rows: Callable[..., Iterable[dict[str, Any]]]
  copy_bandwidth: Callable[[int], dict[str, Any]]
  implementations: Sequence[str] = selection.IMPLEMENTATIONS


def _cells_rows(layers, implementations, shape, dtype, repeats, watchdog):
  del watchdog
  implementations = implementations or selection.IMPLEMENTATIONS
  sizes = benchmark_cases.SHAPES[shape]
  cases = benchmark_cases.cells(layers, implementations, sizes, dtype)
  return measure(cases, repeats)


def _linear_rows(layers, implementations, shape, dtype, repeats, watchdog):
  del watchdog
  implementations = implementations or selection.IMPLEMENTATIONS
  cases = benchmark_linear.cases(layers, implementations, shape, dtype)
  return benchmark_rotation.measure(cases, repeats)


def _dense_rows(layers, implementations, shape, dtype, repeats, watchdog):
  problems = benchmark_dense.problems(layers, implementations, shape, dtype)
  return benchmark_steps.measure(problems, repeats, watchdog)


SUITES: Mapping[str, Suite] = {
    'cells': Suite(
        layers=tuple(rnnzoo.LAYERS),
        shapes=benchmark_cases.SHAPES,
        default_shapes=('row_mnist', 'pixel_mnist'),
        dtypes=lambda shape: ('float32',),
        rows=_cells_rows,
        copy_bandwidth=lambda n: benchmark_timing.copy_bandwidth(n),
    ),
    'linear': Suite(
        layers=benchmark_linear.LAYERS,
        shapes=benchmark_linear.SHAPES,
        default_shapes=tuple(benchmark_linear.SHAPES)[1:],
        dtypes=lambda shape: benchmark_cases.DTYPES,
        rows=_linear_rows,
        copy_bandwidth=benchmark_rotation.copy_bandwidth,
    ),
    'dense': Suite(
        layers=benchmark_dense.LAYERS,
        shapes=benchmark_dense.SHAPES,
        default_shapes=tuple(benchmark_dense.SHAPES)[1:],
        dtypes=benchmark_dense.dtypes,
        rows=_dense_rows,
        copy_bandwidth=lambda n: benchmark_timing.copy_bandwidth(n),
        implementations=benchmark_dense.IMPLEMENTATIONS,
    ),
}


def _check_rows(layers):
  problems = functools.partial(
      benchmark_dense.checks, layers, _IMPLEMENTATIONS.value, _DTYPES.value
  )
  return lambda repeats, watchdog: benchmark_steps.measure(
      problems(), repeats, watchdog
  )


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
flags.DEFINE_alias('cells', 'layers')
_IMPLEMENTATIONS = _names(
    'implementations',
    (*selection.IMPLEMENTATIONS, *benchmark_dense.IMPLEMENTATIONS),
    'Which paths over time; all if not given, or a default of the suite.',
)
_SHAPES = _names(
    'shapes',
    itertools.chain(*(suite.shapes for suite in SUITES.values())),
    'Which input shapes, by name; a default of the suite if not given.',
)
_DTYPES = _names(
    'dtypes',
    (*benchmark_cases.DTYPES, *benchmark_dense.DTYPES),
    'Which dtypes; a default of the suite if not given.',
)
_REPEATS = flags.DEFINE_integer(
    'repeats', 10, 'Samples of each time.', lower_bound=1
)
_CHECK_ONLY = flags.DEFINE_bool(
    'check_only', False, "Suite 'dense': check many odd sizes, time nothing."
)
_TIMEOUT = flags.DEFINE_float(
    'timeout',
    120,
    "Suite 'dense': seconds after which whatever has not ended is a failure.",
    lower_bound=0.1,
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
  for names, known in (
      (_LAYERS, suite.layers),
      (_SHAPES, suite.shapes),
      (_IMPLEMENTATIONS, suite.implementations),
  ):
    other = [repr(name) for name in names.value or () if name not in known]
    if other:
      _give_up(
          f'{other[0]} is of another suite than {_SUITE.value!r}, which has'
          f' {", ".join(known)}'
      )
  if _CHECK_ONLY.value and _SUITE.value != 'dense':
    _give_up("--check_only is for the suite 'dense'; the others always check")
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
  only_checks = _CHECK_ONLY.value and not _SHAPES.value
  shapes = () if only_checks else _SHAPES.value or suite.default_shapes
  repeats = 0 if _CHECK_ONLY.value else _REPEATS.value
  # Where the file went says nothing about the result.
  options = [a for a in sys.argv[1:] if not a.startswith('--output')]
  command = ['python', '-m', 'rnnzoo.benchmark', *options]
  result = {
      'suite': _SUITE.value,
      'command': shlex.join(command),
      **benchmark_timing.environment(),
      'copy': suite.copy_bandwidth(repeats) if repeats else None,
      'shapes': {k: dataclasses.asdict(suite.shapes[k]) for k in shapes},
      'rows': [],
  }
  if _SUITE.value == 'dense':
    result['published_ms'] = benchmark_baselines.PUBLISHED
  print(benchmark_report.header(result), flush=True)
  found: list[dict[str, Any]] = result['rows']

  def save_hanging(what: str, reason: str) -> None:
    result['hung'] = {'what': what, 'reason': reason}
    benchmark_report.write(result, _OUTPUT.value)

  watchdog = benchmark_watchdog.Watchdog(_TIMEOUT.value, save_hanging)
  parts = [
      (
          {'shape': name, 'dtype': dtype},
          f'{name} ({suite.shapes[name]}), {dtype}',
          functools.partial(
              suite.rows, layers, _IMPLEMENTATIONS.value, name, dtype
          ),
      )
      for name in shapes
      for dtype in _DTYPES.value or suite.dtypes(name)
  ]
  if only_checks:
    parts = [({'shape': 'checks'}, 'checks', _check_rows(layers))]
  reasons: dict[str, int] = {}
  for labels, title, measure_part in parts:
    print(f'compiling, checking and timing {title} ...', file=sys.stderr)
    rows = []
    for row in measure_part(repeats, watchdog):
      if 'gb_per_s' in row:
        row['copy_fraction'] = row['gb_per_s'] / result['copy']['gb_per_s']
      rows.append(row)
      found.append({**labels, **row})
    if rows:
      print(benchmark_report.table(title, rows, reasons), flush=True)
    # What a run that is cut off has measured so far is not lost.
    benchmark_report.write(result, _OUTPUT.value)
  if _SUITE.value == 'linear' and 'IRevRNN' in layers:
    result['memory'] = [
        row
        for name in shapes
        if name in benchmark_linear.DIAGONAL
        for row in benchmark_linear.memory(
            name,
            (_DTYPES.value or suite.dtypes(name))[0],
            _IMPLEMENTATIONS.value or suite.implementations,
        )
    ]
    print(benchmark_report.memory_table(result['memory']), flush=True)
    benchmark_report.write(result, _OUTPUT.value)
  print(_OUTPUT.value)
  if not repeats:
    return _code(result)
  try:
    print(benchmark_report.plot(_OUTPUT.value))
  except ModuleNotFoundError as error:
    print(f'no plot: {error}; --plot_from makes it later', file=sys.stderr)
  return _code(result)


def _code(result) -> int:
  bad = [row for row in result['rows'] if row['status'] == 'failed']
  if not bad:
    return 0
  print(f'FAILED: {len(bad)} of {len(result["rows"])} rows', file=sys.stderr)
  return 1


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
