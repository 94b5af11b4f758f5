"""The suites 'batches' and 'lengths': does `None` take the fastest path?

'batches' has LSTM and GRU from few rows to thousands, and FlashRNN's own
sweeps; 'lengths' has linear recurrences from one step to 65,536, with and
without copying their inputs from the host. Rows of the path that `None` takes
say how many times the time of the best path it is. `batches.txt` has the shapes
of 'batches': first a middle, a large and a small batch of every number of
features, so that a part of a run covers the range. cuDNN's line is the suite
'cudnn', by torch, with the file's shapes of one head in float16. 'workloads'
has published programs, beside flax and cuDNN: `workloads.txt` has their names,
layers, shapes and sources.
"""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import os
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

import rnnzoo
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import peers
from rnnzoo.benchmark import suites
from rnnzoo.benchmark import timing
from rnnzoo.engines import choice

# As a share of the best path's time.
_SLOWER = 1.05


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[dict[str, Any]]:
  """Yields the rows of `measurement.measure`, with the path of `None`.

  All rows have `path_of_none`. Rows of the path of `None` have `choice`, a
  text, and `of_best`: its time as a multiple of the best path's.
  """
  for case, rows in measurement.by_case(selected, timer, watchdog):
    path, _ = measurement.attempt(_path_of_none, case)
    for row in rows:
      row['path_of_none'] = path
    for direction in cases.DIRECTIONS:
      _compare([row for row in rows if row['direction'] == direction])
    yield from rows


def summary(rows: Sequence[dict[str, Any]]) -> str:
  """Returns how often a choice was not the best, and where; or ''."""
  taken = [row for row in rows if 'of_best' in row]
  if not taken:
    return ''
  over = [row for row in taken if row['of_best'] > _SLOWER]
  over.sort(key=lambda row: -row['of_best'])
  scan = [row for row in taken if row.get('of_scan', 0) > _SLOWER]
  text = ''
  for row in over:
    text += (
        f'SLOWER: {row["layer"]} {row["shape"]} {row["dtype"]},'
        f' {row["direction"]}: None takes {row["path_of_none"]!r},'
        f' {row["ms"]:.3f} ms, {row["of_best"]:.2f} times'
        f' {row["best_path"]!r}'
    )
    text += '; bound by dispatch\n' if timing.by_dispatch(row) else '\n'
  return (
      f'{text}None is slower than the best path by more than'
      f' {_SLOWER - 1:.0%} in {len(over)} of {len(taken)} programs, and slower'
      f" than 'scan' in {len(scan)}.\n"
  )


def _compare(rows: Sequence[dict[str, Any]]) -> None:
  timed = (row for row in rows if 'ms' in row)
  times = {row['program']: row['ms'] for row in timed}
  for row in rows:
    chosen = row['path_of_none']
    if row['program'] == chosen in times:
      row['best_path'] = min(times, key=lambda name: times[name])
      row['of_best'] = times[chosen] / times[row['best_path']]
      if 'scan' in times:
        row['of_scan'] = times[chosen] / times['scan']
      slower = row['of_best'] > _SLOWER
      row['choice'] = f'{row["of_best"]:.2f} SLOWER' if slower else 'best'


def _path_of_none(case: cases.Case) -> str:
  """Returns the path that `None` takes here.

  It is timed by its name, which makes an equal program.
  """
  shape, dtype = case.shape, jnp.dtype(case.dtype)
  size = shape.batch, shape.time, shape.in_features
  x = jax.ShapeDtypeStruct(size, dtype)

  def run(x):
    if case.layer == 'linear_scan':
      return rnnzoo.linear_scan(x, x)
    make: Any = rnnzoo.LAYERS[case.layer]
    sizes = shape.in_features, shape.features
    options: Any = {'dtype': dtype, **shape.options}
    return make(*sizes, rngs=nnx.Rngs(0), **options)(x)

  with choice.noted() as choices:
    jax.eval_shape(run, x)
  return choices[-1].path


# 5 samples of short calls, 3 of long ones: two thousand programs are many.
_TIMER = timing.Timer(
    max_sets=2,
    threads=os.cpu_count() or 1,
    pace=timing.Pace(sample=0.01, program=0.05, enough=0.3),
)
_LINES = pathlib.Path(__file__).with_name('batches.txt').read_text()
_BATCHES = dict(map(cases.parse_shape, _LINES.splitlines()))
_LENGTHS = {
    f'{batch}x{steps}': cases.Shape(batch, steps, 64, 64)
    for steps in (1024, 1, 16384, 16, 4096, 65536, 64, 256, 4)
    for batch in (1, 16)
}
_ONE_HEAD = {k: v for k, v in _BATCHES.items() if v.num_heads == 1}
_DEEP = suites.SUITES['stacks'].shapes
_GATED = peers.LAYERS[:2]
_STACKED = ('2 x LSTM', '4 x LSTM', '4 x GRU')


def _workloads() -> suites.Suite:
  """Returns the suite of published programs, which `workloads.txt` lists."""
  path = pathlib.Path(__file__).with_name('workloads.txt')
  small = 'small'
  shapes = {small: cases.Shape(4, 6, 5, 8)}
  layers: dict[str, list[str]] = {'GRU': [small], '2 x bi LSTM': [small]}
  for line in path.read_text().splitlines():
    name, layer, sizes, _ = (part.strip() for part in line.split('|'))
    _, shapes[name] = cases.parse_shape(sizes)
    layers.setdefault(layer, []).append(name)
  entries = [
      suites.Entry(names, [layer], 'with', (cases.BF16,))
      for layer, names in layers.items()
  ]
  return suites.Suite(
      shapes,
      entries,
      timing.Timer(pace=_TIMER.pace),
      [*shapes][1:],
      implementations=(peers.OURS, peers.SCAN, 'flax.nnx', 'cudnn'),
      measure=peers.measure,
      runs=lambda name, case: peers.PEERS[name].takes(case.layer),
  )


SUITES = {
    'cudnn': suites.Suite(
        {**_ONE_HEAD, **_DEEP},
        [
            suites.Entry([*_DEEP], _STACKED, 'with', (cases.F16,)),
            suites.Entry(None, _GATED, 'with', (cases.F16,)),
        ],
        timing.Timer(pace=_TIMER.pace),
        [*_ONE_HEAD],
        implementations=('cudnn',),
        measure=peers.measure,
    ),
    'batches': suites.Suite(
        _BATCHES,
        [suites.Entry(None, _GATED, 'with', (cases.BF16,))],
        _TIMER,
        [*_BATCHES],
        implementations=('pallas', 'scan'),
        drawn=True,
        measure=measure,
    ),
    'workloads': _workloads(),
    'lengths': suites.Suite(
        _LENGTHS,
        [
            suites.Entry(None, ['linear_scan'], 'without'),
            suites.Entry(None, ['MinGRU', 'MinLSTM'], 'with'),
        ],
        dataclasses.replace(_TIMER, max_sets=8, from_host=True),
        [*_LENGTHS],
        measure=measure,
    ),
}
