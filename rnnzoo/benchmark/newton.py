"""The suite 'newton': where iterating over time in parallel pays.

Each row of 'associative_scan' has the iterations that it takes, the least that
would do, and an estimate of the largest Lyapunov exponent, which says whether
few can do at all. Its time stands beside the time of 'scan'.
"""

from collections.abc import Iterable, Iterator
import dataclasses
from typing import Any

from flax import nnx
import jax

import rnnzoo
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing

PATH = 'associative_scan'

# The layers that need an iteration; MinGRU and MinLSTM take one pass.
LAYERS = tuple(x for x in rnnzoo.LAYERS if x not in ('MinGRU', 'MinLSTM'))


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[dict[str, Any]]:
  """Yields the rows of `measurement.measure`.

  Rows of 'associative_scan' also have the fields of `rnnzoo.Verification`.
  """
  for case in selected:
    facts: Any = {}
    if PATH in case.implementations:
      with watchdog(f'verifying {case.layer}, {case.shape_name}'):
        found, failed = measurement.attempt(_verify, case)
        facts = found or failed
    for row in measurement.measure([case], timer, watchdog):
      if row['program'] == PATH and row['status'] == 'ok':
        row |= {k: v for k, v in facts.items() if k != 'error'}
      yield row


def _verify(case: cases.Case) -> dict[str, Any]:
  shape = case.shape
  make = problems.layer_class(case.layer)
  sizes = shape.in_features, shape.features
  layer = make(*sizes, rngs=nnx.Rngs(0), **shape.options)
  size = shape.batch, shape.time, shape.in_features
  x = jax.random.normal(jax.random.key(0), size, case.dtype)
  return dataclasses.asdict(rnnzoo.verify(layer, x))
