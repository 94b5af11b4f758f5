"""Times layers on every path, after checking their results.

  python -m rnnzoo.benchmark
  python -m rnnzoo.benchmark --layers=GRU,LSTM --shapes=pixel_mnist,long
  python -m rnnzoo.benchmark --suite=dense --shape=16,1024,64,768,12
  python -m rnnzoo.benchmark --suite=dense --check_only
  python -m rnnzoo.benchmark --suite=batches --time_limit=450 --resume

Each combination of layer, implementation, shape, dtype, direction and
projection is a row. A row is `ok`; or `cannot`, if the implementation says so;
or `failed`, if its result is not the result of 'scan' in float64, and the exit
code is 1. Rows are printed and written as JSON as soon as they are known.

With the projection, a row is a layer on x; without it, a cell on given input
gates. Backward is the gradient by everything that is given: parameters,
recurrent kernel, and x or the input gates.
"""

import dataclasses
import itertools
import json
import operator
import os
import pathlib
import shlex
import sys
import tempfile
import time
from typing import Any, NoReturn

from absl import flags
from absl import logging
import jax

from rnnzoo.benchmark import cases as cases_lib
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import peers_torch
from rnnzoo.benchmark import report
from rnnzoo.benchmark import suites
from rnnzoo.benchmark import timing

SUITES = dict(suites.SUITES)

_SUITE = flags.DEFINE_enum('suite', 'cells', list(SUITES), 'The suite to run.')
_LAYERS = flags.DEFINE_list('layers', None, 'Layers; all by default.')
_IMPLEMENTATIONS = flags.DEFINE_list(
    'implementations', None, "Paths over time; the suite's choice if not given."
)
_SHAPES = flags.DEFINE_list('shapes', None, 'Shapes by name; some by default.')
_SHAPE = flags.DEFINE_multi_string(
    'shape', [], 'batch,time,in_features,features[,heads]; repeatable.'
)
_DTYPES = flags.DEFINE_list('dtypes', None, "Dtypes; the suite's by default.")
_REPEATS = flags.DEFINE_integer(
    'repeats', 10, 'Samples of each time.', lower_bound=1
)
_CHECK_ONLY = flags.DEFINE_bool(
    'check_only',
    False,
    'Time nothing. Without shapes, the suites linear and dense check many odd'
    ' sizes.',
)
_TIMEOUT = flags.DEFINE_float(
    'timeout',
    120,
    'Seconds after which a step that has not ended is a failure, which ends the'
    ' program.',
    lower_bound=0.1,
)
_RESUME = flags.DEFINE_bool(
    'resume', False, 'Keep rows that the file has of this commit and machine.'
)
_TIME_LIMIT = flags.DEFINE_float(
    'time_limit',
    float('inf'),
    'Seconds after which no case is begun; --resume goes on.',
    lower_bound=0,
)
_COMPILE_THREADS = flags.DEFINE_integer(
    'compile_threads', None, 'Threads that compile.', lower_bound=1
)
_OUTPUT = flags.DEFINE_string('output', 'runs/benchmark.json', 'The JSON file.')


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
  if pathlib.Path(_OUTPUT.value).suffix != '.json':
    _give_up(f'{_OUTPUT.value!r} must be the name of a .json file')
  suite = SUITES[_SUITE.value]
  for names, known in (
      (_LAYERS, suite.layers),
      (_SHAPES, suite.shapes),
      (_IMPLEMENTATIONS, suite.implementations),
      (_DTYPES, suites.DTYPES),
  ):
    unknown = [name for name in names.value or () if name not in known]
    if unknown or names.value == []:
      _give_up(
          f'--{names.name}: {repr(unknown[0]) if unknown else "nothing"} is'
          f' given, and the suite {_SUITE.value!r} has {", ".join(known)}'
      )
  if flags.FLAGS['verbosity'].using_default_value:
    flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
  return rest


def _select() -> list[cases_lib.Case]:
  """Returns the cases that the flags ask for."""
  suite = SUITES[_SUITE.value]
  layers = _LAYERS.value or suite.layers
  try:
    own = dict(map(cases_lib.parse_shape, _SHAPE.value))
  except ValueError as error:
    _give_up(error)
  if _CHECK_ONLY.value and suite.checks and not (_SHAPES.value or own):
    found = suite.checked(layers, _IMPLEMENTATIONS.value, _DTYPES.value)
  else:
    names = _SHAPES.value or (() if own else suite.default_shapes)
    shapes = {**{name: suite.shapes[name] for name in names}, **own}
    found = suite.timed(shapes, layers, _IMPLEMENTATIONS.value, _DTYPES.value)
  selected = list(found)
  if not selected:
    _give_up(
        f'the suite {_SUITE.value!r} measures none of these layers at these'
        ' shapes, dtypes and implementations'
    )
  return selected


def main(unused_argv: list[str]) -> int:
  """Runs a suite; returns the exit code."""
  until = time.monotonic() + _TIME_LIMIT.value
  selected = _select()
  output = pathlib.Path(_OUTPUT.value)
  try:
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.exists():
      output.open('a', encoding='utf-8').close()
    tempfile.TemporaryFile(dir=output.parent).close()
  except OSError as error:
    _give_up(f'--output={output}: {error}')
  if _SUITE.value in ('peers', 'cudnn'):  # Torch needs memory too.
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  repeats = 0 if _CHECK_ONLY.value else _REPEATS.value
  result = _new_result(repeats)
  if _RESUME.value and output.exists():
    selected = _resume(result, selected, repeats)
  print(report.header(result), flush=True)
  _measure(selected, result, repeats, until)
  if result['rows']:
    print(output)
  bad = [row for row in result['rows'] if row['status'] == 'failed']
  if bad:
    print(f'FAILED: {len(bad)} of {len(result["rows"])} rows', file=sys.stderr)
  return int(bool(bad))


def _measure(selected, result, repeats: int, until: float) -> None:
  """Measures cases while there is time; adds their rows, and writes them.

  Rows of an earlier run in `result` stay until there is a new one.
  """
  suite, output = SUITES[_SUITE.value], _OUTPUT.value
  threads = _COMPILE_THREADS.value
  if not threads:  # A CPU is busy enough.
    threads = 1 if jax.default_backend() == 'cpu' else suite.timer.threads
  timer = dataclasses.replace(suite.timer, repeats=repeats, threads=threads)
  watchdog = timing.Watchdog(_TIMEOUT.value)
  table = report.Table(case.label for case in selected)
  titles = {_part(case.row('', '')): case.title for case in selected}
  rows = {_key(row): row for row in result['rows']}
  new = set()
  cases = itertools.takewhile(lambda _: time.monotonic() < until, selected)
  for row in suite.measure(cases, timer, watchdog):
    if 'gb_per_s' in row:
      row['copy_fraction'] = row['gb_per_s'] / result['copy']['gb_per_s']
    new.add(_key(row))
    rows[_key(row)] = row
    result['rows'] = list(rows.values())
    table.row(titles[_part(row)], row)
    # A run that is cut off has lost nothing.
    report.write(result, output)
  if not pathlib.Path(output).exists():
    report.write(result, output)
  if left := sum(not _keys(case) <= new for case in selected):
    print(
        f'--time_limit={_TIME_LIMIT.value:g}: {left} of {len(selected)} cases'
        ' were not begun; --resume goes on with them',
        file=sys.stderr,
    )


# The fields that tell a row from all others of its suite, and a part of a table
# from others.
_key = operator.itemgetter(*measurement.KEY)
_part = operator.itemgetter('shape', 'dtype', 'param_dtype')


def _keys(case: cases_lib.Case) -> set[tuple[Any, ...]]:
  """Returns the keys of a case's rows."""
  pairs = itertools.product(case.implementations, case.directions)
  return {_key(case.row(*pair)) for pair in pairs}


def _new_result(repeats: int) -> dict[str, Any]:
  """Returns a result without rows."""
  copy, torch_copy = timing.copy_bandwidth, peers_torch.copy_gb_per_s
  # The name of the output says nothing about the result.
  options = [a for a in sys.argv[1:] if not a.startswith('--output')]
  return {
      'suite': _SUITE.value,
      'command': shlex.join(['python', '-m', 'rnnzoo.benchmark', *options]),
      **timing.environment(),
      'copy': copy(repeats, torch_copy(repeats)) if repeats else None,
      'rows': [],
  }


def _resume(result, selected, repeats: int) -> list[cases_lib.Case]:
  """Adds the rows of an earlier run, and returns the cases still to be run."""
  path = _OUTPUT.value
  try:
    earlier = json.loads(pathlib.Path(path).read_text())
    report.header(earlier)  # It reads all that a later one needs.
    found = {_key(row): row for row in earlier['rows']}
    differences = [
        f'{fact} {earlier[fact]!r} (here {result[fact]!r})'
        for fact in ('suite', 'device', 'versions', 'commit')
        if earlier[fact] != result[fact]
    ]
  except (AttributeError, KeyError, TypeError, ValueError):
    _give_up(f"--resume: {path!r} is not a benchmark's result")
  if differences:
    _give_up(f'--resume: {path!r} is of {", ".join(differences)}')
  done = {
      name
      for name, row in found.items()
      if row['status'] == 'cannot'
      or (row['status'] == 'ok' and (not repeats or 'ms' in row))
  }
  result['copy'] = earlier['copy'] or result['copy']
  # Programs that are compared are timed together.
  rest = [case for case in selected if not _keys(case) <= done]
  result['rows'] = list(found.values())
  again = sum(name in found for case in rest for name in _keys(case))
  kept = f'{len(found) - again} rows of {path} are kept'
  print(f'{kept}, {again} measured again', file=sys.stderr)
  return rest
