"""Runs train.py many times in one go: imports once, and forks for each run.

  python -m tests.testing.forked_program < runs.json

reads a list of lists of arguments, and prints a list of [exit code, output,
errors]. No backend of JAX may be there before a fork, which is why this is a
process of its own.
"""

import contextlib
import json
import os
import runpy
import sys
import tempfile
import warnings

# The slowest import, once for all children.
from rnnzoo.training import command_line as unused_command_line  # noqa: F401


def run(arguments: list[str]) -> tuple[int, str, str]:
  """Returns the exit code, the output and the errors of a run."""
  with (
      tempfile.TemporaryFile('w+') as output,
      tempfile.TemporaryFile('w+') as errors,
  ):
    child = os.fork()
    if not child:
      os.dup2(output.fileno(), 1)
      os.dup2(errors.fileno(), 2)
      sys.argv = ['train.py', *arguments]
      code = 0
      try:
        runpy.run_path('train.py', run_name='__main__')
      except SystemExit as end:
        code = end.code or 0
      finally:
        with contextlib.suppress(Exception):
          sys.stdout.flush()
          sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    output.seek(0)
    errors.seek(0)
    return os.waitstatus_to_exitcode(status), output.read(), errors.read()


if __name__ == '__main__':
  # JAX says that it has threads; without a backend it has none.
  warnings.filterwarnings('ignore', message=r'os\.fork\(\) was called')
  json.dump([run(each) for each in json.load(sys.stdin)], sys.stdout)
