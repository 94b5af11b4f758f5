"""Kernels on a GPU of a kind that nobody has run them on.

Where `None` chooses the path, and the device is such a GPU, a process of its
own compares the kernels with 'scan' before any of them runs here
(`inspect/card.py`): a kernel that hangs or crashes there costs its time limit.
The answer is kept on disk, by device and jax's version.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax

from pallas_kernels import devices
from rnnzoo.engines import selection

# Seconds for all comparisons.
_LIMIT = 600


def doubt(kind: str) -> str:
  """Returns why `None` passes over the kernels here, or ''.

  Args:
    kind: 'linear', 'diagonal' or 'dense'.
  """
  device = devices.untried()
  if not device:
    return ''
  found = _answers(device).get(kind, 'they were not compared')
  if not found:
    return ''
  reason = (
      f'on {device} the GPU kernels for {kind} recurrences failed a comparison'
      f" with 'scan', so another path runs: {found}. Please report what"
      ' python -m rnnzoo.inspect.card prints.'
  )
  selection.warn_once(reason)
  return reason


@functools.cache
def _answers(device: str) -> dict[str, str]:
  """Returns for each kind what was wrong, or '', from disk if it is there."""
  cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  path = pathlib.Path(cache) / 'rnnzoo' / 'gpu_kernels.json'
  key = f'{device}, jax {jax.__version__}'
  try:
    kept = dict(json.loads(path.read_text('utf-8')))
  except (OSError, ValueError, TypeError):
    kept = {}
  if key in kept:
    return kept[key]
  selection.warn_once(
      f'nobody has run the GPU kernels on {device} yet, so a process compares'
      f" them with 'scan' once; the answer goes to {path}."
  )
  found = _ask()
  if 'process' in found:
    return dict.fromkeys(('linear', 'diagonal', 'dense'), found['process'])
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f'.{os.getpid()}')
    part.write_text(json.dumps({**kept, key: found}, indent=1), 'utf-8')
    part.replace(path)
  except OSError:
    pass  # The next process compares again.
  return found


def _ask() -> dict[str, str]:
  """Runs the program that compares; returns its answers, or why it has none."""
  # The device's memory is this process's already, but for a quarter.
  environment = {
      **os.environ,
      'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
      'PYTHONPATH': os.pathsep.join(filter(None, sys.path)),
  }
  command = [sys.executable, '-m', 'rnnzoo.inspect.card']
  try:
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    return json.loads(done.stdout.splitlines()[-1])['wrong']
  except subprocess.TimeoutExpired:
    return {'process': f'no answer within {_LIMIT} seconds'}
  except (OSError, ValueError, IndexError, KeyError, TypeError):
    return {'process': 'the process that compares ended without an answer'}
