"""Runs of one config or several, with many values of fields, and a table."""

import argparse
from collections.abc import Sequence
from concurrent import futures
import itertools
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from typing import NamedTuple

from rnnzoo.command import comparison
from rnnzoo.tasks.text import files as text_files
from rnnzoo.training import command_line
from rnnzoo.training import files

# The processes of runs.
_RUNNING: set[subprocess.Popen] = set()


class Case(NamedTuple):
  """Flags that are taken with each combination of the grids."""

  flags: list[str]  # The flags of the run.
  # A name or file; None for the one of the command line.
  config: str | None = None


def main(words: Sequence[str]) -> list[str]:
  """Trains all combinations and compares them.

  The words are those after `sweep`.

  Returns:
    Names of runs that failed.
  """
  parsed, rest = _parse(words)
  runs = combinations(parsed.grid, read_cases(parsed.cases))
  for config in {case.config or parsed.config: None for case in runs.values()}:
    command_line.check_config(config)
  directory = files.make_directory(parsed.workdir, '--workdir')
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with futures.ThreadPoolExecutor(parsed.parallel) as pool:
    started = {
        name: pool.submit(
            _run,
            case.config or parsed.config,
            directory / name,
            [*rest, *case.flags],
            parsed.parallel,
        )
        for name, case in runs.items()
    }
    try:
      codes = {name: future.result() for name, future in started.items()}
    except KeyboardInterrupt:
      # Waiting runs must not begin. Ctrl-C ends running ones by itself.
      pool.shutdown(wait=False, cancel_futures=True)
      for process in list(_RUNNING):
        process.terminate()
      command = shlex.join(['rnnzoo', 'sweep', *words])
      os.write(2, f'\nrnnzoo: interrupted; to go on: {command}\n'.encode())
      os._exit(128 + signal.SIGINT)
  # With 3 a run has ended, and has a report, though a loss was not finite.
  failed = [name for name, code in codes.items() if code not in (0, 3)]
  done = [str(directory / name) for name in runs if name not in failed]
  for name in failed:
    print(f'rnnzoo: {name} failed; see {directory / name}.log', file=sys.stderr)
  if done:
    print(comparison.compare(done, str(directory)))
  return failed


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
  """Returns the sweep's own words, and the flags of each run."""
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
      help='a file with one run a line: its name, a config if it is not that of'
      ' the command line, then its flags; all of them are run with each'
      ' combination of the grids',
  )
  parser.add_argument(
      '--parallel', type=int, default=1, help='how many runs at a time'
  )
  parsed, rest = parser.parse_known_args(words)
  if parsed.parallel < 1:
    raise ValueError(f'--parallel must be at least 1; got {parsed.parallel}')
  return parsed, rest


def read_cases(path: str | None) -> dict[str, Case]:
  """Returns each case by its name.

  A line is a case; without a file there is one, which has no flags. Empty lines
  and comments that begin with # are passed over.
  """
  if path is None:
    return {'': Case([])}
  cases: dict[str, Case] = {}
  lines = text_files.read(path, '--cases').splitlines()
  for number, line in enumerate(lines, 1):
    try:
      words = shlex.split(line, comments=True)
      if not words:
        continue
      name, *flags = words
      if any(flag.lstrip('-').startswith('workdir') for flag in flags):
        raise ValueError(
            'a case cannot have a --workdir; the sweep gives each run its own'
        )
      if not re.fullmatch(r'\w[\w.+-]*', name) or name in cases:
        raise ValueError(
            'a case begins with a name of its own, of letters, digits and'
            f' ._+-; got {name!r}'
        )
    except ValueError as error:
      raise ValueError(f'{path}, line {number}: {error}') from error
    config = None
    if flags and not flags[0].startswith('-'):
      config, *flags = flags
    cases[name] = Case(flags, config)
  if not cases:
    raise ValueError(f'{path} has no cases')
  return cases


def combinations(
    grids: Sequence[str], cases: dict[str, Case]
) -> dict[str, Case]:
  """Returns each run by its name.

  A grid is 'field=value,value'; cases are taken with all values.
  """
  axes: dict[str, list[str]] = {}
  for grid in grids:
    field, separator, values = grid.lstrip('-').partition('=')
    choices = _split(values)
    if not separator or not all(choices) or not field.startswith('config.'):
      raise ValueError(
          '--grid must be a field and its values, as'
          f' config.model.features=64,128; got {grid!r}'
      )
    if field in axes:
      raise ValueError(f'--grid has the field {field} twice')
    axes[field] = choices
  if not axes and '' in cases:
    raise ValueError(
        'a sweep needs something to vary, as'
        ' --grid=config.model.features=64,128'
    )
  runs: dict[str, Case] = {}
  for own, case in cases.items():
    for choice in itertools.product(*axes.values()):
      flags = [f'{field}={v}' for field, v in zip(axes, choice, strict=True)]
      # A field's last part is in a name; a value may have dots too.
      parts = [re.sub(r'^[^=]*\.', '', flag) for flag in flags]
      name = ','.join([own, *parts] if own else parts)
      name = re.sub(r'[^\w.,=+-]', '_', name)
      if name in runs:
        raise ValueError(
            f'two runs of the sweep would have the name {name!r}: they differ'
            ' only by characters that a name cannot have'
        )
      chosen = [f'--{flag}' for flag in flags]
      runs[name] = case._replace(flags=[*case.flags, *chosen])
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
    config: str,
    workdir: pathlib.Path,
    flags: Sequence[str],
    parallel: int,
) -> int:
  """Trains one run in a process of its own; returns its exit code."""
  environment = dict(os.environ)
  if parallel > 1:
    # Each takes the memory that it needs, not most of the device's.
    environment.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  command = [sys.executable, '-m', 'rnnzoo', 'train', config]
  with (
      open(f'{workdir}.log', 'w', encoding='utf-8') as log,
      subprocess.Popen(
          [*command, f'--workdir={workdir}', *flags],
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT,
          env=environment,
      ) as process,
  ):
    _RUNNING.add(process)
    code = process.wait()
    _RUNNING.discard(process)
  last = pathlib.Path(f'{workdir}.log').read_text(encoding='utf-8').splitlines()
  print(f'{workdir.name}: {last[-1] if last else "no output"}', flush=True)
  return code
