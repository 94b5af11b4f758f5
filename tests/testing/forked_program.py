"""Runs Python code many times in one go: imports once, and forks for each run.

  python -m tests.testing.forked_program < groups.json

reads a list of groups of `Run`s; those of a group run at the same time. It
prints the same list with [exit code, output, errors] in place of each run. No
backend of JAX may be there before a fork, which is why this is a process of its
own. `run` starts it.
"""

from collections.abc import Mapping, Sequence
import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[2]

# What takes long to import: once for all children.
_IMPORTS = (
    'rnnzoo.training.command_line',
    'sklearn.metrics',
    'matplotlib.figure',
)

TRAIN = "import runpy; runpy.run_path('train.py', run_name='__main__')"


class Run(NamedTuple):
  """A program's run.

  Attributes:
    arguments: of its command line.
    code: what it executes.
    environment: variables that are set.
  """

  arguments: Sequence[str]
  code: str = TRAIN
  environment: Mapping[str, str] = {}


class End(NamedTuple):
  """How a run ended: its exit code, or minus a signal, and what it printed."""

  code: int
  output: str
  errors: str


def run(*groups: Sequence[Run]) -> list[list[End]]:
  """Returns the ends of groups of runs, one group after another."""
  path = f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}'
  process = subprocess.run(
      [sys.executable, '-m', 'tests.testing.forked_program'],
      input=json.dumps(groups),
      cwd=ROOT,
      env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path},
      stdout=subprocess.PIPE,
      text=True,
      check=True,
  )
  return [[End(*end) for end in ends] for ends in json.loads(process.stdout)]


def _execute(arguments, code, environment) -> None:
  """Ends this process, a child, as a program that executes the code."""
  sys.argv = ['train.py', *arguments]
  os.environ.update(environment)
  status = 1
  try:
    exec(compile(code, '<code>', 'exec'), {'__name__': '__main__'})
    status = 0
  except SystemExit as end:
    status = end.code or 0
  except BaseException:
    sys.excepthook(*sys.exc_info())
  finally:
    with contextlib.suppress(Exception):
      sys.stdout.flush()
      sys.stderr.flush()
    os._exit(status)


def _run_group(runs) -> list[tuple[int, str, str]]:
  with contextlib.ExitStack() as stack:
    started = []
    for each in runs:
      files = [
          stack.enter_context(tempfile.TemporaryFile('w+')) for _ in range(2)
      ]
      child = os.fork()
      if not child:
        for number, file in enumerate(files, 1):
          os.dup2(file.fileno(), number)
        _execute(*each)
      started.append((child, files))
    ends = []
    for child, files in started:
      _, status = os.waitpid(child, 0)
      for file in files:
        file.seek(0)
      texts = [file.read() for file in files]
      ends.append((os.waitstatus_to_exitcode(status), *texts))
    return ends


if __name__ == '__main__':
  for name in _IMPORTS:
    importlib.import_module(name)
  # Python and JAX say that it has threads; without a backend, none matters.
  warnings.simplefilter('ignore')
  json.dump([_run_group(runs) for runs in json.load(sys.stdin)], sys.stdout)
