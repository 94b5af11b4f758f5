"""Compares the GPU kernels of this device with 'scan'.

`engines/first_use.py` runs it in a process of its own, on a GPU of a kind that
nobody has tried:

  python -m rnnzoo.inspect.card     # prints one line, to be reported
"""

import json
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import devices
import rnnzoo

# Largest ||kernel - scan|| / ||scan||, in bfloat16 and float32.
_ERROR = 0.03


class Case(NamedTuple):
  """A layer for a kind of kernels, at batch x time x features."""

  kind: str
  layer: str
  shape: tuple[int, int, int]
  dtype: str


# Each kind has one whose CTAs are alone; others may wait for each other.
CASES = (
    Case('linear', 'MinGRU', (2, 300, 130), 'float32'),
    Case('linear', 'MinGRU', (2, 4096, 64), 'bfloat16'),
    Case('diagonal', 'IndRNN', (3, 100, 130), 'float32'),
    Case('dense', 'LSTM', (3, 50, 64), 'bfloat16'),
    Case('dense', 'LSTM', (5, 50, 64), 'float32'),
    Case('dense', 'LSTM', (16, 50, 256), 'bfloat16'),
    Case('dense', 'LSTM', (16, 50, 1024), 'bfloat16'),
)


def compare(case: Case) -> str:
  """Returns how outputs or gradients differ; '' where they do not."""
  try:
    got = _run(case, 'pallas')
  except NotImplementedError:
    return ''  # Then another path runs.
  except (RuntimeError, TypeError, ValueError) as error:
    return f'{case}: {type(error).__name__}: {str(error)[:300]}'
  with jax.default_matmul_precision('highest'):
    want = _run(case, 'scan')
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    size = float(np.linalg.norm(b))
    difference = float(np.linalg.norm(a - b)) / max(size, 1e-3)
    if not difference < _ERROR:
      return f'{case}: relative error {difference:.1e}'
  return ''


def _run(case: Case, path: str) -> Any:
  """Returns a layer's outputs and gradients, by a path."""
  batch, time, features = case.shape
  # The derivative of a relu would jump.
  options: Any = {'activation': 'tanh'} if case.kind == 'diagonal' else {}
  options |= {'dtype': case.dtype, 'implementation': path}
  make: Any = rnnzoo.LAYERS[case.layer]
  layer = make(8, features, rngs=nnx.Rngs(0), **options)
  graphdef, state = nnx.split(layer)
  x = np.random.default_rng(0).standard_normal((batch, time, 8))

  def loss(state, x):
    y = nnx.merge(graphdef, state)(x).astype(jnp.float32)
    return jnp.sum(jnp.sin(y)), y

  run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
  return run(state, jnp.asarray(x, case.dtype))


def report() -> dict[str, Any]:
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
  print(json.dumps(report()))
