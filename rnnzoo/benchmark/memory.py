"""The suite 'memory': arrays that a gradient keeps, by path and setting.

`mib` is XLA's own count of temporary memory for the compiled gradient; x, y and
the parameters are not among it. `kept_mib` is the size of the arrays that
`jax.vjp` holds besides x, y and the parameters.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from rnnzoo.benchmark import cases
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[dict[str, Any]]:
  """Yields the rows of `measurement.measure`, with `kept_mib`."""
  for case in selected:
    for row in measurement.measure([case], timer, watchdog):
      if row['status'] == 'ok':
        with watchdog(f'{case.label}, {row["program"]}'):
          row['kept_mib'] = kept_mib(case, row['program'])
      yield row


def kept_mib(case: cases.Case, implementation: str) -> float:
  """Returns MiB that `jax.vjp` holds between the passes of a layer on x."""
  problem = problems.build(case)
  arrays, _ = problem.arguments
  y, pull = jax.vjp(problem.make(implementation, case.dtype), arrays)
  own = {id(a) for a in jax.tree.leaves((arrays, y))}
  kept = {id(a): a.nbytes for a in jax.tree.leaves(pull) if id(a) not in own}
  return sum(kept.values()) / 2**20
