"""The suite 'time_devices': a linear recurrence with time over all devices.

Each result is compared with that of one device, whose time takes turns with it.
`mib` is the memory of one device: arguments, results and temporary arrays.
"""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import checks
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing

# Name: whether gates forget next to nothing, and whether one step in a thousand
# resets.
LAYERS = {
    'linear_scan': (False, False),
    'linear_scan_resets': (False, True),
    'linear_scan_slow': (True, False),
    'linear_scan_slow_resets': (True, True),
}

WAYS = ('one device', 'time over devices')

Arrays = dict[str, jax.Array | None]


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[dict[str, Any]]:
  """Compares all devices with one, then times both.

  Yields:
    One row for each case, way and direction, with the labels of
    `measurement.measure`. `error` is the largest relative difference of a
    result; `times` is how often faster than one device.
  """
  for case in selected:
    for direction in case.directions:
      rows = [case.row(way, direction) for way in case.implementations]
      with watchdog(f'{case.label}, {direction}'):
        _, failed = measurement.attempt(_measure, case, rows, timer)
      yield from (row | failed for row in rows)


def draw(case: cases.Case) -> Arrays:
  """Returns random operands of a case on the first device."""
  shape = case.shape
  size = shape.batch, shape.time, shape.features
  slow, resets = LAYERS[case.layer]
  a = problems.normal(0, size, case.dtype)
  if slow:  # Nothing is forgotten soon: all steps are read twice.
    a = jnp.where(a > 0, 1 - 2.0**-8, 1).astype(case.dtype)
  else:
    a = jax.nn.sigmoid(a)
  reset = np.random.default_rng(0).random(size[:2]) < 1e-3
  return {
      'a': a,
      'b': problems.normal(1, size, case.dtype),
      'reset': jnp.asarray(reset) if resets else None,
      'd_h': problems.normal(2, size, case.dtype),
  }


def _function(direction: str) -> Callable[[Arrays], Any]:
  def run(arrays):
    forward = functools.partial(rnnzoo.linear_scan, reset=arrays['reset'])
    given = arrays['a'], arrays['b']
    if direction == cases.DIRECTIONS[0]:
      return forward(*given)
    return jax.vjp(forward, *given)[1](arrays['d_h'])

  return run


def _measure(case, rows, timer: timing.Timer) -> None:
  """Adds errors, memory and times to the rows of a case and direction."""
  arrays = draw(case)
  count = jax.device_count()
  mesh = jax.make_mesh((count,), ('time',))
  over = jax.NamedSharding(mesh, jax.P(None, 'time'))
  calls, found = [], []
  for row in rows:
    alone = row['program'] == WAYS[0]
    own = arrays if alone else jax.device_put(arrays, over)
    program = timing.build(_function(row['direction']), own)
    calls.append(lambda program=program, own=own: program.call(own))
    found.append(jax.tree.leaves(jax.device_put(calls[-1](), jax.devices()[0])))
    kinds = ('mib', 'argument_mib', 'output_mib')
    row['mib'] = sum(program.memory[kind] or 0 for kind in kinds)
    row |= {'compile_s': program.compile_s, 'devices': 1 if alone else count}
  limit = checks.rounding(case.dtype, case.shape.time)
  for row, got in zip(rows[1:], found[1:], strict=True):
    wide = lambda x: x.astype(jnp.float32)
    errors = [
        float(problems.relative_error(wide(x), wide(y)))
        for x, y in zip(got, found[0], strict=True)
    ]
    row['error'] = max(errors)
    if not row['error'] <= limit:
      reason = f'a result differs by {row["error"]:.1e} from one device'
      row |= {'status': 'failed', 'reason': reason}
  del found
  if timer.repeats:
    times = timing.interleave(calls, timer.repeats, pace=timer.pace)
    for row, own in zip(rows, times, strict=True):
      row |= dataclasses.asdict(own)
      row['times'] = times[0].ms / own.ms
