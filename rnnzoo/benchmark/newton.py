"""The suite 'newton': where iterating over time in parallel pays.

Each row of 'associative_scan' has the iterations that it takes, the least that
would do, and an estimate of the largest Lyapunov exponent, which says whether
few can do at all. Its time stands beside that of 'scan'.
"""

from collections.abc import Iterable, Iterator
import dataclasses
from typing import Any

from flax import nnx
import jax

import rnnzoo
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import timing

PATH = 'associative_scan'

# The layers that need an iteration.
LAYERS = tuple(
    name
    for name in rnnzoo.LAYERS
    if name not in ('MinGRU', 'MinLSTM')  # These take one pass.
)

# Larger differences from 'scan' are failures: as `rnnzoo.verify` has it.
_LARGEST_ERROR = 1e-4


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[dict[str, Any]]:
  """Verifies every case, then checks and times it as other suites do.

  Yields:
    The rows of `measurement.measure`; those of 'associative_scan' also have
    what `rnnzoo.Verification` describes.
  """
  for case in selected:
    found: Any = {}
    failed: dict[str, Any] = {}
    if PATH in case.implementations:
      with watchdog(f'verifying {case.layer}, {case.shape_name}'):
        found, failed = measurement.attempt(_verify, case)
    if not timer.repeats:
      if found or failed:
        yield _row(case, found, failed)
      continue
    for row in measurement.measure([case], timer, watchdog):
      if row['program'] == PATH:
        facts = {k: v for k, v in (found or {}).items() if k != 'error'}
        row |= facts if row['status'] != 'ok' else facts | failed
      yield row


def _verify(case: cases.Case) -> dict[str, Any]:
  shape = case.shape
  make: Any = rnnzoo.LAYERS[case.layer]
  sizes = shape.in_features, shape.features
  layer = make(*sizes, rngs=nnx.Rngs(0), **shape.options)
  size = shape.batch, shape.time, shape.in_features
  x = jax.random.normal(jax.random.key(0), size, case.dtype)
  return dataclasses.asdict(rnnzoo.verify(layer, x))


def _row(case: cases.Case, found: Any, failed: dict[str, Any]) -> Any:
  row = case.row(PATH, 'forward')
  if failed:
    return row | failed
  if not found['error'] <= _LARGEST_ERROR:
    row |= measurement.failure(f'{found["error"]:.1e} from scan')
  return row | found
