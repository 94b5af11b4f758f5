"""Kernels on a GPU of a kind that nobody has run them on.

Where `None` chooses the path, and the device is such a GPU, a process of its
own compares the kernels with `lax.scan` before any of them runs here: a kernel
that hangs or crashes there costs its time limit. The answer is kept on disk, by
device and jax's version.

  python -m rnnzoo.engines.first_use     # prints one line, to be reported
"""

from collections.abc import Callable
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import api
from pallas_kernels import devices
from rnnzoo.engines import selection

# Seconds for all comparisons.
_LIMIT = 600

# Largest ||kernel - scan|| / ||scan||, in bfloat16 and float32.
_ERROR = 0.03


@dataclasses.dataclass(frozen=True)
class _Leaky:
  """h' = a h + (1 - a) x, with a the sigmoid of a gate."""

  input_gates, recurrent_gates, carry_names = 2, 0, ('h',)

  def coefficients(self, params, x):
    del params
    a = jax.nn.sigmoid(x[0])
    return a, (1 - a) * x[1]

  def update(self, params, x, h_gates, carry):
    a, b = self.coefficients(params, x)
    return (a * carry[0] + b,)


@dataclasses.dataclass(frozen=True)
class _Gated:
  """c' = f c + i g, h' = o tanh(c')."""

  input_gates, recurrent_gates, carry_names = 4, 4, ('h', 'c')

  def update(self, params, x, h_gates, carry):
    del params
    i, f, g, o = map(jnp.add, x, h_gates)
    c = jax.nn.sigmoid(f) * carry[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


@dataclasses.dataclass(frozen=True)
class Case:
  """A recurrence to compare.

  Attributes:
    kind: 'linear', 'diagonal' or 'dense'.
    shape: (batch, time, features).
    dtype: dtype of the inputs.
  """

  kind: str
  shape: tuple[int, int, int]
  dtype: str


# Each kind has one whose CTAs are alone; others may wait for each other.
CASES = (
    Case('linear', (2, 300, 130), 'float32'),
    Case('linear', (2, 4096, 64), 'bfloat16'),
    Case('diagonal', (3, 100, 130), 'float32'),
    Case('dense', (3, 50, 64), 'bfloat16'),
    Case('dense', (5, 50, 64), 'float32'),
    Case('dense', (16, 50, 256), 'bfloat16'),
    Case('dense', (16, 50, 1024), 'bfloat16'),
)


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
      f' with lax.scan, so another path runs: {found}. Please report what'
      ' python -m rnnzoo.engines.first_use prints.'
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
    kept = json.loads(path.read_text('utf-8'))
    return kept[key]
  except (OSError, ValueError, KeyError, TypeError):
    pass
  selection.warn_once(
      f'nobody has run the GPU kernels on {device} yet, so a process compares'
      f' them with lax.scan once; the answer goes to {path}.'
  )
  found = _ask()
  if 'process' in found:
    return dict.fromkeys(('linear', 'diagonal', 'dense'), found['process'])
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      kept = json.loads(path.read_text('utf-8'))
    except (OSError, ValueError):
      kept = {}
    part = path.with_suffix(f'.{os.getpid()}')
    part.write_text(json.dumps({**kept, key: found}, indent=1), 'utf-8')
    part.replace(path)
  except OSError:
    pass  # The next process compares again.
  return found


def _ask() -> dict[str, str]:
  """Runs this program; returns its answers, or why it has none."""
  # The device's memory is this process's already, but for a quarter.
  environment = {
      **os.environ,
      'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
      'PYTHONPATH': os.pathsep.join(filter(None, sys.path)),
  }
  command = [sys.executable, '-m', 'rnnzoo.engines.first_use']
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


def compare(case: Case) -> str:
  """Returns how the kernels differ from `lax.scan`; '' where they do not."""
  run, operands = _problem(case)

  def both(function: Callable[..., Any]):
    def loss(*given):
      h = function(*given)
      return jnp.sum(jnp.sin(h.astype(jnp.float32))), h

    every = tuple(range(len(operands)))
    return jax.jit(jax.value_and_grad(loss, every, has_aux=True))(*operands)

  try:
    got = both(run)
  except NotImplementedError:
    return ''  # Then another path runs.
  except (RuntimeError, TypeError, ValueError) as error:
    return f'{case}: {type(error).__name__}: {str(error)[:300]}'
  with jax.default_matmul_precision('highest'):
    want = both(functools.partial(_scan, case.kind))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    size = float(np.linalg.norm(b))
    difference = float(np.linalg.norm(a - b)) / max(size, 1e-3)
    if not difference < _ERROR:
      return f'{case}: relative error {difference:.1e}'
  return ''


def _problem(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Returns the kernels as a function, and its operands."""
  batch, time, features = case.shape
  cell: Any = _Leaky() if case.kind == 'linear' else _Gated()
  draw = np.random.default_rng(0).standard_normal
  x = draw((batch, time, cell.input_gates, features))
  operands = [jnp.asarray(x, case.dtype)]
  if case.kind != 'linear':
    size = 1 if case.kind == 'diagonal' else features
    kernel = draw((4, features // size, size, size)) / size**0.5
    operands.append(jnp.asarray(kernel, case.dtype))
  zeros = (jnp.zeros((batch, features)),) * len(cell.carry_names)

  def run(x, kernel=None):
    _, (h,) = api.recurrence(cell, {}, x, kernel, zeros)
    return h

  return run, tuple(operands)


def _scan(kind: str, x, kernel=None):
  """The recurrence by `lax.scan`, in float32."""
  cell: Any = _Leaky() if kind == 'linear' else _Gated()
  shape = x.shape[0], x.shape[-1]

  def step(carry, gates):
    h_gates: Any = ()
    if kernel is not None:
      by_head = carry[0].reshape(shape[0], *kernel.shape[1:3])
      wide = kernel.astype(jnp.float32)
      h_gates = jnp.einsum('bnd,gnde->gbne', by_head, wide)
      h_gates = tuple(h_gates.reshape(-1, *shape))
    gates = tuple(jnp.moveaxis(gates.astype(jnp.float32), 1, 0))
    new = cell.update({}, gates, h_gates, carry)
    return new, new[0]

  zeros = (jnp.zeros(shape),) * len(cell.carry_names)
  _, h = lax.scan(step, zeros, jnp.moveaxis(x, 1, 0))
  return jnp.moveaxis(h, 0, 1)


def _report() -> dict[str, Any]:
  """Compares all cases; returns what is to be reported."""
  wrong: dict[str, str] = {case.kind: '' for case in CASES}
  for case in CASES:
    wrong[case.kind] = wrong[case.kind] or compare(case)
  device = devices.default_device()
  return {
      'device': device.device_kind,
      'capability': str(getattr(device, 'compute_capability', '')),
      'jax': jax.__version__,
      'wrong': wrong,
  }


if __name__ == '__main__':
  print(json.dumps(_report()))
