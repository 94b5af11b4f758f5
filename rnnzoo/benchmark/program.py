"""Times layers on every path, after checking their results.

  python -m rnnzoo.benchmark
  python -m rnnzoo.benchmark --layers=GRU,LSTM --shapes=pixel_mnist,long
  python -m rnnzoo.benchmark --suite=dense --shape=16,1024,64,768,12
  python -m rnnzoo.benchmark --suite=dense --check_only

Each combination of layer, implementation, shape, dtype, direction and
projection is a row. A row is `ok`; or `cannot`, if the implementation says so;
or `failed`, if its result is not the result of 'scan' in float64, and the exit
code is 1. Rows are printed and written as JSON as soon as they are known.

With the projection, a row is a layer on x; without it, a cell on given input
gates. Backward is the gradient by everything that is given: parameters,
recurrent kernel, and x or the input gates.
"""

import dataclasses
import operator
import os
import pathlib
import shlex
import sys
from typing import Any, NoReturn

from absl import flags
from absl import logging
import jax

from rnnzoo.benchmark import cases as cases_lib
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
  selected = _select()
  if _SUITE.value in ('peers', 'cudnn'):  # Torch needs memory too.
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  repeats = 0 if _CHECK_ONLY.value else _REPEATS.value
  result, output = _new_result(repeats), pathlib.Path(_OUTPUT.value)
  try:
    output.parent.mkdir(parents=True, exist_ok=True)
    report.write(result, str(output))
  except OSError as error:
    _give_up(f'--output={output}: {error}')
  print(report.header(result), flush=True)
  _measure(selected, result, repeats)
  print(output)
  bad = [row for row in result['rows'] if row['status'] == 'failed']
  if bad:
    print(f'FAILED: {len(bad)} of {len(result["rows"])} rows', file=sys.stderr)
  return int(bool(bad))


def _measure(selected, result, repeats: int) -> None:
  """Measures cases; adds their rows to the result, and writes it."""
  suite = SUITES[_SUITE.value]
  threads = _COMPILE_THREADS.value
  if not threads:  # A CPU is busy enough.
    threads = 1 if jax.default_backend() == 'cpu' else suite.timer.threads
  timer = dataclasses.replace(suite.timer, repeats=repeats, threads=threads)
  table = report.Table(case.label for case in selected)
  part = operator.itemgetter('shape', 'dtype', 'param_dtype')
  titles = {part(case.row('', '')): case.title for case in selected}
  for row in suite.measure(selected, timer, timing.Watchdog(_TIMEOUT.value)):
    if 'gb_per_s' in row:
      row['copy_fraction'] = row['gb_per_s'] / result['copy']['gb_per_s']
    result['rows'].append(row)
    table.row(titles[part(row)], row)
    # A run that is cut off has lost nothing.
    report.write(result, _OUTPUT.value)


def _new_result(repeats: int) -> dict[str, Any]:
  """Returns a result without rows."""
  # The name of the output says nothing about the result.
  options = [a for a in sys.argv[1:] if not a.startswith('--output')]
  copy, torch_copy = timing.copy_bandwidth, peers_torch.copy_gb_per_s
  return {
      'suite': _SUITE.value,
      'command': shlex.join(['python', '-m', 'rnnzoo.benchmark', *options]),
      **timing.environment(),
      'copy': copy(repeats, torch_copy(repeats)) if repeats else None,
      'rows': [],
  }
