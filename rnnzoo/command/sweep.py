"""One config with many values of its fields: a run for each, and a table."""

import argparse
from collections.abc import Sequence
from concurrent import futures
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys

from rnnzoo.command import comparison
from rnnzoo.training import configs
from rnnzoo.training import files


def main(words: Sequence[str]) -> list[str]:
  """Trains all combinations and compares them; returns names of failed runs.

  Args:
    words: of the command line.

  Raises:
    ValueError: a grid or a file of cases cannot be read.
    OSError: a file cannot be read or written.
    RunFileError: a finished run's files are damaged.
  """
  parser = argparse.ArgumentParser(
      'rnnzoo sweep',
      description='Trains a config with all combinations of values of its'
      ' fields, and compares the runs. Other flags go to each run. What is'
      ' finished is not run again.',
  )
  parser.add_argument('config', help='name or file')
  parser.add_argument('--workdir', required=True, help='directory of the runs')
  parser.add_argument(
      '--grid',
      action='append',
      default=[],
      help='a field and its values, as'
      ' config.optimizer.learning_rate=1e-3,3e-4; may be repeated',
  )
  parser.add_argument(
      '--cases',
      help='a file with one run a line: its name, then its flags; all of them'
      ' are run with each combination of the grids',
  )
  parser.add_argument(
      '--parallel', type=int, default=1, help='how many runs at a time'
  )
  parsed, rest = parser.parse_known_args(words)
  if parsed.parallel < 1:
    raise ValueError(f'--parallel must be at least 1; got {parsed.parallel}')
  runs = combinations(parsed.grid, read_cases(parsed.cases))
  configs.check(parsed.config)
  directory = files.make_directory(parsed.workdir, '--workdir')
  with futures.ThreadPoolExecutor(parsed.parallel) as pool:
    started = {
        name: pool.submit(
            _run,
            parsed.config,
            directory / name,
            [*rest, *flags],
            parsed.parallel,
        )
        for name, flags in runs.items()
    }
    try:
      codes = {name: future.result() for name, future in started.items()}
    except KeyboardInterrupt:
      # The runs have it too, and end; those that wait must not begin.
      pool.shutdown(wait=False, cancel_futures=True)
      command = shlex.join(['rnnzoo', 'sweep', *words])
      os.write(2, f'\nrnnzoo: interrupted; to go on: {command}\n'.encode())
      os._exit(130)
  # With 3 a run has ended, and has a report, though a loss was not finite.
  failed = [name for name, code in codes.items() if code not in (0, 3)]
  done = [str(directory / name) for name in runs if name not in failed]
  if done:
    print(comparison.compare(done, str(directory)))
  for name in failed:
    print(f'rnnzoo: {name} failed; see {directory / name}.log', file=sys.stderr)
  return failed


def read_cases(path: str | None) -> dict[str, list[str]]:
  """Returns the flags of each case by its name.

  Args:
    path: of a file with a line a case; None for one case without flags. Empty
      lines and those that begin with # are passed over.

  Raises:
    ValueError: a line cannot be read, or a name occurs twice.
    OSError: the file cannot be read.
  """
  if path is None:
    return {'': []}
  cases: dict[str, list[str]] = {}
  try:
    # Without the mark that some editors begin a file with.
    lines = pathlib.Path(path).read_text(encoding='utf-8-sig').splitlines()
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is not UTF-8: {error}') from error
  for number, line in enumerate(lines, 1):
    try:
      words = shlex.split(line, comments=True)
    except ValueError as error:
      raise ValueError(f'{path}, line {number}: {error}') from error
    if not words:
      continue
    name, *flags = words
    if any(flag.lstrip('-').startswith('workdir') for flag in flags):
      raise ValueError(
          f'{path}, line {number}: a case cannot have a --workdir; the sweep'
          ' gives each run its own'
      )
    if not re.fullmatch(r'\w[\w.+-]*', name) or name in cases:
      raise ValueError(
          f'{path}, line {number}: a case begins with a name of its own, of'
          f' letters, digits and ._+-; got {name!r}'
      )
    cases[name] = flags
  if not cases:
    raise ValueError(f'{path} has no cases')
  return cases


def combinations(
    grids: Sequence[str], cases: dict[str, list[str]]
) -> dict[str, list[str]]:
  """Returns the flags of each run by its name.

  Args:
    grids: 'field=value,value' each.
    cases: flags by name, each of them taken with all values.

  Raises:
    ValueError: a grid cannot be read, or there is nothing to vary.
  """
  axes: list[list[tuple[str, str]]] = []
  for grid in grids:
    field, separator, values = grid.lstrip('-').partition('=')
    choices = _split(values)
    if not separator or not all(choices) or not field.startswith('config.'):
      raise ValueError(
          '--grid must be a field and its values, as'
          f' config.model.features=64,128; got {grid!r}'
      )
    if len(set(choices)) < len(choices):
      raise ValueError(f'--grid has a value twice: {grid!r}')
    if field in (known for (known, _), *_ in axes):
      raise ValueError(f'--grid has the field {field} twice')
    axes.append([(field, value) for value in choices])
  if not axes and '' in cases:
    raise ValueError(
        'a sweep needs something to vary, as'
        ' --grid=config.model.features=64,128'
    )
  runs: dict[str, list[str]] = {}
  for case, flags in cases.items():
    for choice in itertools.product(*axes):
      parts = [f'{field.split(".")[-1]}={value}' for field, value in choice]
      name = re.sub(
          r'[^\w.,=+-]', '_', ','.join([case, *parts] if case else parts)
      )
      if name in runs:
        raise ValueError(
            f'two runs of the sweep would have the name {name!r}: they differ'
            ' only by characters that a name cannot have'
        )
      runs[name] = [*flags, *(f'--{field}={value}' for field, value in choice)]
  return runs


def _split(values: str) -> list[str]:
  """Returns parts between commas, but for those within brackets of a tuple."""
  parts, depth = [''], 0
  for letter in values:
    depth += (letter in '([') - (letter in ')]')
    if letter == ',' and depth < 1:
      parts.append('')
    else:
      parts[-1] += letter
  return parts


def _run(
    config: str, workdir: pathlib.Path, flags: Sequence[str], parallel: int
) -> int:
  """Trains one run in a process of its own; returns its exit code."""
  environment = dict(os.environ)
  if parallel > 1:
    # Each takes the memory that it needs, not most of the device's.
    environment.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  command = [sys.executable, '-m', 'rnnzoo', 'train', config]
  with open(f'{workdir}.log', 'w', encoding='utf-8') as log:
    code = subprocess.call(
        [*command, f'--workdir={workdir}', *flags],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
    )
  last = pathlib.Path(f'{workdir}.log').read_text(encoding='utf-8').splitlines()
  print(f'{workdir.name}: {last[-1] if last else "no output"}', flush=True)
  return code
