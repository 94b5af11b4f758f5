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

from collections.abc import Iterable
import dataclasses
import functools
import itertools
import pathlib
import shlex
import sys
from typing import Any, NoReturn

from absl import flags
from absl import logging

from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases as benchmark_cases
from rnnzoo.benchmark import dense as benchmark_dense
from rnnzoo.benchmark import linear as benchmark_linear
from rnnzoo.benchmark import problems as benchmark_problems
from rnnzoo.benchmark import report
from rnnzoo.benchmark import steps as benchmark_steps
from rnnzoo.benchmark import suites
from rnnzoo.benchmark import timing as benchmark_timing
from rnnzoo.benchmark import watchdog as benchmark_watchdog
from rnnzoo.engines import selection

SUITES = suites.SUITES


def _check_rows(table, layer):
  problems = functools.partial(
      benchmark_problems.checks,
      table,
      [layer],
      _IMPLEMENTATIONS.value,
      _DTYPES.value,
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
    'check_only',
    False,
    "Suites 'linear' and 'dense': check many odd sizes, time nothing.",
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
  if _CHECK_ONLY.value and not suite.checks():
    _give_up(
        "--check_only is for the suites 'linear' and 'dense'; 'cells' always"
        ' checks'
    )
  if _CHECK_ONLY.value and _SUITE.value == 'linear' and _SHAPES.value:
    _give_up("--check_only has shapes of its own in the suite 'linear'")
  if flags.FLAGS['verbosity'].using_default_value:
    flags.FLAGS['verbosity'].value = logging.WARNING
  return rest


def main(unused_argv: list[str]) -> int:
  """Runs a suite, or plots an earlier run; returns the exit code."""
  if _PLOT_FROM.value:
    try:
      print(report.plot(_PLOT_FROM.value))
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
    result['published_ms'] = baselines.PUBLISHED
  print(report.header(result), flush=True)
  found: list[dict[str, Any]] = result['rows']

  def save_hanging(what: str, reason: str) -> None:
    result['hung'] = {'what': what, 'reason': reason}
    report.write(result, _OUTPUT.value)

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
    parts = [
        (
            {'shape': 'checks'},
            f'checks of {layer}',
            _check_rows(suite.checks(), layer),
        )
        for layer in layers
    ]
  reasons: dict[str, int] = {}
  for labels, title, measure_part in parts:
    what = 'checking and timing' if repeats else 'checking'
    print(f'compiling, {what} {title} ...', file=sys.stderr)
    rows = []
    for row in measure_part(repeats, watchdog):
      if 'gb_per_s' in row:
        row['copy_fraction'] = row['gb_per_s'] / result['copy']['gb_per_s']
      rows.append(row)
      found.append({**labels, **row})
    if rows:
      print(report.table(title, rows, reasons), flush=True)
    # What a run that is cut off has measured so far is not lost.
    report.write(result, _OUTPUT.value)
  if _SUITE.value == 'linear' and 'IRevRNN' in layers and shapes:
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
    print(report.memory_table(result['memory']), flush=True)
    report.write(result, _OUTPUT.value)
  print(_OUTPUT.value)
  if not repeats:
    return _code(result)
  try:
    print(report.plot(_OUTPUT.value))
  except ModuleNotFoundError as error:
    print(f'no plot: {error}; --plot_from makes it later', file=sys.stderr)
  return _code(result)


def _code(result) -> int:
  bad = [row for row in result['rows'] if row['status'] == 'failed']
  if not bad:
    return 0
  print(f'FAILED: {len(bad)} of {len(result["rows"])} rows', file=sys.stderr)
  return 1
