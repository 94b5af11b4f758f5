"""Plots the suites 'batches' and 'lengths': time, and speedup over 'scan'.

  python benchmarks/sweeps.py runs/lengths.json

A panel has the shapes of a layer that differ in one size. The figure goes
beside the file, as .png; 'lengths' also has dotted lines for calls that copy
their inputs from the host. Crosses are times of the path that `None` takes
where another one is more than 5 % faster.
"""

from collections.abc import Iterator
import json
import pathlib
import sys
from typing import Any

from matplotlib import figure as figures

DIRECTIONS = ('forward', 'forward+backward')
COLORS = {'pallas': 'C0', 'scan': 'C1', 'associative_scan': 'C2', 'cudnn': 'C3'}
SIZES = {'batch': 'B', 'time': 'T', 'features': 'D', 'num_heads': 'heads'}

# Fewer points make no line.
LEAST = 4

# As a multiple of the best path's time.
SLOWER = 1.05

Row = dict[str, Any]


def panels(result: Row) -> Iterator[tuple[str, str, list[Row]]]:
  """Yields a title, the size that varies, and rows with all sizes."""
  rows = [
      row | result['shapes'][row['shape']]
      for row in result['rows']
      if 'median_ms' in row
  ]
  for size in ('batch', 'time'):
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
      fixed = {k: row[k] for k in SIZES if k != size}
      groups.setdefault((row['layer'], *fixed.items()), []).append(row)
    by_sizes = lambda item: (item[0][0], *(v for _, v in item[0][1:]))
    for (layer, *fixed), own in sorted(groups.items(), key=by_sizes):
      if len({row[size] for row in own}) >= LEAST:
        facts = ', '.join(f'{SIZES[k]} {v}' for k, v in fixed)
        yield f'{layer}, {facts}', size, own


def lines(rows: list[Row], size: str) -> dict[tuple, dict[int, float]]:
  """Returns milliseconds by size, for each path, with and without a copy."""
  found: dict[tuple, dict[int, float]] = {}
  for row in rows:
    for copies, key in enumerate(('median_ms', 'with_copy_ms')):
      if key in row:
        label = row['implementation'], row['dtype'], bool(copies)
        found.setdefault(label, {})[row[size]] = row[key]
  return found


def draw(ax, axis_of_speedup, rows: list[Row], size: str) -> None:
  """Draws times, and speedups over 'scan' with as many copies."""
  found = lines(rows, size)
  scans = {label[2]: own for label, own in found.items() if label[0] == 'scan'}
  for (path, dtype, copies), own in found.items():
    name = f'{path}, {dtype}{", with a copy" if copies else ""}'
    style = {'color': COLORS[path], 'ls': ':' if copies else '-', 'marker': '.'}
    x = sorted(own)
    ax.plot(x, [own[k] for k in x], label=name, **style)
    scan = scans.get(copies, {})
    x = [k for k in x if k in scan]
    speedups = [scan[k] / own[k] for k in x]
    axis_of_speedup.plot(x, speedups, label=name, **style)
  over = [row for row in rows if row.get('of_best', 1) > SLOWER]
  if over:
    places = [row[size] for row in over], [row['median_ms'] for row in over]
    ax.plot(*places, 'kx', label='None is slower than the best')
  for each in (ax, axis_of_speedup):
    each.set_xscale('log', base=2)
    each.set_yscale('log')
    each.set_xlabel(SIZES[size])
    each.grid(alpha=0.3)
  ax.set_ylabel('milliseconds')
  axis_of_speedup.set_ylabel("times as fast as 'scan'")


def plot(result: Row) -> figures.Figure:
  """Returns the figure; a row of it has times and speedups of a panel."""
  found = list(panels(result))
  height = 3 * max(1, len(found))
  figure = figures.Figure(figsize=(18, height), layout='constrained')
  figure.suptitle(
      f'{result["device"]["kind"]}, jax {result["versions"]["jax"]},'
      f' {result["date"][:10]}'
  )
  if not found:
    return figure
  axes = figure.subplots(len(found), 4, squeeze=False)
  for four, (title, size, rows) in zip(axes, found, strict=True):
    for way, direction in enumerate(DIRECTIONS):
      own = [row for row in rows if row['direction'] == direction]
      pair = four[way], four[2 + way]
      draw(*pair, own, size)
      for ax in pair:
        ax.set_title(f'{title}, {direction}', fontsize=8)
    four[0].legend(fontsize=6)
  return figure


def main() -> None:
  """Plots each file."""
  if not sys.argv[1:]:
    sys.exit('sweeps.py: name a result, as in sweeps.py runs/benchmark.json')
  for name in sys.argv[1:]:
    path = pathlib.Path(name)
    try:
      figure = plot(json.loads(path.read_text(encoding='utf-8')))
    except OSError as error:
      sys.exit(f'sweeps.py: {error}')
    except (AttributeError, KeyError, TypeError, ValueError):
      sys.exit(f"sweeps.py: {name!r} is not a benchmark's result")
    figure.savefig(path.with_suffix('.png'), dpi=80)
    print(path.with_suffix('.png'))


if __name__ == '__main__':
  main()
