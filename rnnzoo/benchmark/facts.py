"""Fields that suites add to the rows of a case: memory, iterations, `None`.

'memory': `mib` is XLA's own count of temporary memory for the compiled
gradient; x, y and the parameters are not among it. `kept_mib` is the size of
the arrays that `jax.vjp` holds besides x, y and the parameters.

'newton' asks where iterating over time in parallel pays. Each row of
'associative_scan' has the iterations that it takes, the least that would do,
and an estimate of the largest Lyapunov exponent, which says whether few can do
at all. Its time stands beside the time of 'scan'.

'batches' and 'lengths' ask whether `None` takes the fastest path. Rows of the
path that it takes say how many times the time of the best path it is.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import rnnzoo
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing
from rnnzoo.engines import choice

Rows = Sequence[dict[str, Any]]

NEWTON = 'associative_scan'


def memory(case: cases.Case, rows: Rows, watchdog: timing.Watchdog) -> None:
  """Adds `kept_mib`: MiB that `jax.vjp` holds between the passes of a layer."""
  for row in rows:
    if row['status'] == 'ok':
      with watchdog(f'{case.label}, {row["program"]}'):
        problem = problems.build(case)
        arrays, _ = problem.arguments
        y, pull = jax.vjp(problem.make(row['program'], case.dtype), arrays)
        own = {id(a) for a in jax.tree.leaves((arrays, y))}
        kept = {id(a): a.nbytes for a in jax.tree.leaves(pull)}
        mib = sum(size for a, size in kept.items() if a not in own) / 2**20
        row['kept_mib'] = mib


def newton(case: cases.Case, rows: Rows, watchdog: timing.Watchdog) -> None:
  """Adds the fields of `rnnzoo.Verification` to rows of 'associative_scan'."""
  right = [r for r in rows if r['program'] == NEWTON and r['status'] == 'ok']
  if right:
    label = f'verifying {case.layer}, {case.shape_name}'
    with watchdog(label), measurement.attempt() as found:
      found |= _verify(case)
    for row in right:
      row |= found


def _verify(case: cases.Case) -> dict[str, Any]:
  x = jax.random.normal(jax.random.key(0), case.shape.x, case.dtype)
  found = dataclasses.asdict(rnnzoo.verify(problems.new_layer(case), x))
  del found['error']
  return found


def path_of_none(case: cases.Case, rows: Rows, unused_watchdog: Any) -> None:
  """Adds `path_of_none`, and to the rows of that path how it compares.

  These have `of_best`: its time as a multiple of the best path's.
  """
  path = None
  with measurement.attempt():
    path = _path_of_none(case)
  for row in rows:
    row['path_of_none'] = path
  for direction in cases.DIRECTIONS:
    compare([row for row in rows if row['direction'] == direction])


def _path_of_none(case: cases.Case) -> str:
  """Returns the path that `None` takes; its name makes an equal program."""
  dtype = jnp.dtype(case.dtype)
  run: Any = lambda x: rnnzoo.linear_scan(x, x)
  if case.layer != 'linear_scan':
    run = lambda x: problems.new_layer(case, dtype=dtype)(x)
  with choice.noted() as choices:
    jax.eval_shape(run, jax.ShapeDtypeStruct(case.shape.x, dtype))
  return choices[-1].path


def compare(rows: Rows) -> None:
  """Compares the path of `None` with the others, in one direction."""
  times = {row['program']: row['ms'] for row in rows if 'ms' in row}
  for row in rows:
    chosen = row['path_of_none']
    if row['program'] == chosen in times:
      row['of_best'] = times[chosen] / min(times.values())
