"""Draws the figures of README.md and docs/.

  python -m benchmarks.figures
  python -m benchmarks.figures runs/lengths.json

Without arguments it draws the committed results. The figure of a file of the
suites 'batches' and 'lengths' goes beside it, as .png.

'batches' has microseconds a step over the batch, by layer and features. A panel
of 'lengths' has the steps of a layer at a batch; dotted lines copy their inputs
from the host. Crosses are times of the path that `None` takes where another one
is more than 5 % faster.
"""

from collections.abc import Callable, Iterator, Sequence
import json
import pathlib
import sys
from typing import Any

from matplotlib import figure as figures

from benchmarks import pivots

HERE = pathlib.Path(__file__).resolve().parent
COLORS = {'pallas': 'C0', 'scan': 'C1', 'associative_scan': 'C2', 'cudnn': 'C3'}

Row = dict[str, Any]


def source(result: Row) -> str:
  """Returns device, version and date of a result."""
  version = result['versions']['jax']
  return f'{result["device"]["kind"]}, jax {version}, {result["date"][:10]}'


def timed_rows(result: Row, direction: str) -> list[Row]:
  """Returns the rows of a direction that have times."""
  return [
      row
      for row in result['rows']
      if row['direction'] == direction and 'ms' in row
  ]


def lines(
    rows: Sequence[Row], size: str, steps: bool = False
) -> dict[tuple, dict[int, float]]:
  """Returns milliseconds by size, for each path, with and without a copy.

  Args:
    rows: the rows of a panel.
    size: the size that varies.
    steps: whether to return microseconds a step; of the longest sequences, if
      there are several.
  """
  found: dict[tuple, dict[int, float]] = {}
  for row in sorted(rows, key=lambda row: row['time']):
    for copies, key in enumerate(('ms', 'with_copy_ms')):
      if key in row:
        label = row['program'], row['dtype'], bool(copies)
        scale = 1e3 / row['time'] if steps else 1
        found.setdefault(label, {})[row[size]] = scale * row[key]
  return found


def draw(ax, found: dict[tuple, dict[int, float]], size: str) -> None:
  """Draws a line for each path."""
  for (path, dtype, copies), own in found.items():
    name = f'{path}, {dtype}{", with a copy" if copies else ""}'
    style = {'color': COLORS[path], 'ls': ':' if copies else '-', 'marker': '.'}
    x = sorted(own)
    ax.plot(x, [own[k] for k in x], label=name, **style)
  ax.set_xscale('log', base=2)
  ax.set_yscale('log')
  ax.set_xlabel(size)
  ax.grid(alpha=0.3)


def cross(ax, rows: Sequence[Row], size: str, steps: bool = False) -> None:
  """Marks times of choices that are not the best."""
  over = [row for row in rows if row.get('of_best', 1) > pivots.SLOWER]
  for own in lines(over, size, steps).values():
    ax.plot([*own], [*own.values()], 'kx')


def batches(result: Row) -> figures.Figure:
  """Returns the figure: a row a layer and direction, a column a head size."""
  groups: dict[tuple, dict[tuple, list[Row]]] = {}
  for direction in pivots.DIRECTIONS:
    for row in timed_rows(result, direction):
      own = groups.setdefault((row['layer'], direction), {})
      size = row['num_heads'], row['features']
      own.setdefault(size, []).append(row)
  columns = sorted({size for own in groups.values() for size in own})
  figure = figures.Figure(
      figsize=(2.4 * len(columns), 2.3 * len(groups)), layout='constrained'
  )
  axes = figure.subplots(len(groups), len(columns), squeeze=False, sharex='col')
  for line, ((layer, direction), own) in zip(
      axes, sorted(groups.items()), strict=True
  ):
    for ax, (heads, features) in zip(line, columns, strict=True):
      rows = own.get((heads, features), [])
      draw(ax, lines(rows, 'batch', steps=True), 'batch')
      cross(ax, rows, 'batch', steps=True)
      sizes = f'{heads} x {features // heads}' if heads > 1 else features
      ax.set_title(f'{layer} {sizes}\n{direction}', fontsize=8)
    line[0].set_ylabel('µs a step')
  axes[0, 0].legend(fontsize=6)
  return figure


def panels(result: Row) -> Iterator[tuple[str, dict[str, list[Row]]]]:
  """Yields a title and the rows of each direction, which differ in steps."""
  by_way = {way: timed_rows(result, way) for way in pivots.DIRECTIONS}
  fixed = lambda row: (row['layer'], row['batch'], row['features'])
  for key in sorted({fixed(row) for own in by_way.values() for row in own}):
    layer, batch, features = key
    rows = {
        way: [row for row in own if fixed(row) == key]
        for way, own in by_way.items()
    }
    yield f'{layer}, batch {batch}, {features} features', rows


def lengths(result: Row) -> figures.Figure:
  """Returns the figure; a row of it has times and speedups of a panel."""
  found = list(panels(result))
  figure = figures.Figure(figsize=(16, 2.5 * len(found)), layout='constrained')
  axes = figure.subplots(len(found), 4, squeeze=False)
  for four, (title, by_way) in zip(axes, found, strict=True):
    for way, (direction, rows) in enumerate(by_way.items()):
      own = lines(rows, 'time')
      # As many copies in both.
      scans = {key[2]: line for key, line in own.items() if key[0] == 'scan'}
      speedups = {
          key: {k: scans[key[2]][k] / v for k, v in line.items()}
          for key, line in own.items()
          if line.keys() <= scans.get(key[2], {}).keys()
      }
      draw(four[way], own, 'steps')
      cross(four[way], rows, 'time')
      draw(four[2 + way], speedups, 'steps')
      four[way].set_ylabel('milliseconds')
      four[2 + way].set_ylabel("times as fast as 'scan'")
      for ax in (four[way], four[2 + way]):
        ax.set_title(f'{title}, {direction}', fontsize=8)
    four[0].legend(fontsize=6)
  return figure


# (layer, implementation), its label, and how it is drawn.
MEASURED = (
    ('GRU', 'pallas', 'GRU, kernels', 'C0o-'),
    ('LSTM', 'pallas', 'LSTM, kernels', 'C1o-'),
    ('GRU', 'scan', "GRU, 'scan'", 'C0^:'),
    ('LSTM', 'scan', "LSTM, 'scan'", 'C1^:'),
    ('LSTM', 'lax_scan_8', 'LSTM, lax.scan unrolled by 8', 'C7v:'),
)
PUBLISHED = (
    ('FlashRNN fused, bfloat16', 'LSTM, FlashRNN (published)', 'C2s-'),
    (
        'cuDNN, float16, with projection',
        "LSTM, torch's cuDNN, float16, with W x (published)",
        'C3D-',
    ),
)


def curves(result: Row, way: int) -> dict[str, dict[int, float]]:
  """Returns milliseconds by head dim, by label.

  Args:
    result: the content of dense_h200.json.
    way: 0 for forward, 1 for forward and backward.
  """
  direction = pivots.DIRECTIONS[way]
  dims = {
      row['shape']: row['features'] // row['num_heads']
      for row in result['rows']
      if (row['batch'], row['time']) == (16, 1024)
  }
  found: dict[str, dict[int, float]] = {}
  for layer, implementation, label, _ in MEASURED:
    found[label] = {
        dims[row['shape']]: row['ms']
        for row in result['rows']
        if row['shape'] in dims
        and row['status'] == 'ok'
        and (row['layer'], row['program']) == (layer, implementation)
        and (row['dtype'], row['projection']) == ('bfloat16', 'without')
        and row['direction'] == direction
    }
  for program, label, _ in PUBLISHED:
    found[label] = {
        dims[shape]: times[way]
        for shape, times in result['published_ms'][program].items()
        if shape in dims
    }
  return found


def head_dim(result: Row) -> figures.Figure:
  """Returns the figure: forward on the left, with backward on the right."""
  figure = figures.Figure(figsize=(8.6, 4.8), layout='constrained')
  axes = figure.subplots(1, 2)
  styles = {label: style for *_, label, style in (*MEASURED, *PUBLISHED)}
  for way, ax in enumerate(axes):
    for label, points in curves(result, way).items():
      x = sorted(points)
      ax.plot(x, [points[d] for d in x], styles[label], label=label, ms=5)
    ax.set_title(('forward', 'forward and backward')[way])
    ax.set_xscale('log', base=2)
    ax.set_yscale('log')
    ticks = (16, 24, 64, 128, 256, 512, 1024)
    ax.set_xticks(ticks, [str(d) for d in ticks])
    ax.set_xlabel('head dim, units of one block of R')
    ax.set_ylabel('milliseconds')
    ax.grid(alpha=0.3)
  figure.legend(
      *axes[0].get_legend_handles_labels(),
      loc='outside lower center',
      ncols=2,
      fontsize=9.5,
  )
  figure.suptitle(
      f'1,024 steps, batch 16, bfloat16, gates given: {source(result)}\n'
      '768 units in heads; 512 and 1,024: one head',
      fontsize=10,
  )
  return figure


# A label, and the factors beside flax and beside cuDNN, where measured.
Factors = Sequence[tuple[str, float | None, float | None]]


def bars(factors: Factors, note: str) -> figures.Figure:
  """Returns the figure of the README: times as fast as two libraries.

  Args:
    factors: a line each, from the top.
    note: the device, and how the times were taken.
  """
  figure = figures.Figure(
      figsize=(8.6, 1.3 + 0.62 * len(factors)), layout='constrained'
  )
  ax = figure.subplots()
  names = ('flax (the faster of nnx and linen)', "torch's cuDNN")
  for k, (name, color) in enumerate(zip(names, ('C0', 'C7'), strict=True)):
    place = [
        (line + 0.38 * k - 0.19, row[1 + k])
        for line, row in enumerate(factors)
        if row[1 + k]
    ]
    own = ax.barh(*zip(*place, strict=True), 0.36, color=color, label=name)
    text = [f'{factor:.1f} x' for _, factor in place]
    ax.bar_label(own, text, padding=3, fontsize=10.5)
  ax.set_yticks(range(len(factors)), [row[0] for row in factors], fontsize=10.5)
  ax.invert_yaxis()
  ax.axvline(1, color='k', lw=0.8)
  ax.set_xlim(0, 1.1 * max(max(row[1] or 0, row[2] or 0) for row in factors))
  ax.set_xlabel(f'times as fast; {note}', fontsize=10)
  ax.spines[['top', 'right']].set_visible(False)
  ax.legend(fontsize=10.5, loc='lower right')
  return figure


def ahead(result: Row) -> figures.Figure:
  """Returns the figure of the README, from peers_h200.json and two others."""
  factors = []
  times = pivots.pivot(timed_rows(result, pivots.BOTH), ['layer', 'shape'])
  for item in times[:2]:
    own = {name: cell[pivots.BOTH]['ms'] for name, cell in item['own'].items()}
    flax = min(own['flax.nnx'], own['flax.linen'])
    label = f'{item["layer"]} of 256 units,\nbatch 16, 256 steps'
    line = (flax / own['rnnzoo'], own['torch'] / own['rnnzoo'])
    factors.append((label, *line))
  rollouts = pivots.load('benchmarks/scanned_rnn_h200.json')
  own = {
      row['program']: row['ms']
      for row in timed_rows(rollouts, pivots.BOTH)
      if (row['layer'], row['dtype']) == ('ScannedRNN', 'float32')
      and 'batch' in row
  }
  label = 'Rollouts with resets, GRU of\n256 units, batch 128, 128 steps'
  factors.append((label, own['flax'] / own['pallas'], None))
  wide = pivots.load('benchmarks/dense_h200.json')
  cudnn = wide['published_ms']['cuDNN, float16, with projection']['1x768'][1]
  (ms,) = (
      row['ms']
      for row in timed_rows(wide, pivots.BOTH)
      if (row['layer'], row['program']) == ('LSTM', 'pallas')
      and (row['shape'], row['projection']) == ('1x768', 'with')
      and row['dtype'] == 'bfloat16'
  )
  label = 'LSTM of 768 units, 16 bits,\nbatch 16, 1,024 steps'
  factors.append((label, None, cudnn / ms))
  device = result['device']['kind']
  return bars(factors, f'forward and backward, medians, {device}')


# How each path is drawn.
PATHS = {'scan': 'C7v:', 'pallas': 'C0s-', 'associative_scan': 'C1o-'}


def newton_grid(result: Row) -> figures.Figure:
  """Returns the figure: milliseconds over steps, for each batch and units."""
  items = pivots.pivot(
      [row for row in result['rows'] if row['status'] == 'ok'],
      ('batch', 'features'),
      ('program', 'time'),
  )
  figure = figures.Figure(figsize=(8.6, 3.4), layout='constrained')
  axes = figure.subplots(1, len(items), sharey=True, squeeze=False)[0]
  for item, ax in zip(items, axes, strict=True):
    for path, style in PATHS.items():
      own = item['own'][path]
      ms = [row['ms'] for row in own.values()]
      ax.plot(list(own), ms, style, label=f"'{path}'")
    ax.set_title(
        f'batch {item["batch"]},\n{item["features"]} units', fontsize=10
    )
    ax.set_xscale('log')
    ax.set_yscale('log')
    ax.set_xlabel('steps')
    ax.grid(alpha=0.3)
  axes[0].set_ylabel('milliseconds, forward')
  axes[0].legend(fontsize=8)
  figure.suptitle(
      f'GRU, float32, gates given: {source(result)}',
      fontsize=10,
  )
  return figure


SUITES: dict[str, Callable[[Row], figures.Figure]] = {
    'batches': batches,
    'lengths': lengths,
}

# Committed results, and how they are drawn; dots an inch.
COMMITTED = {
    'ahead_h200.png': ('peers_h200.json', ahead, 200),
    'head_dim_h200.png': ('dense_h200.json', head_dim, 160),
    'newton_grid_h200.png': ('newton_grid_h200.json', newton_grid, 160),
    'batches_h100.png': ('batches_h100.json', batches, 70),
    'lengths_h200.png': ('lengths_h200.json', lengths, 70),
}


def save(result: Row, draw_it, path: pathlib.Path, dots: int) -> None:
  """Writes the figure of a result."""
  figure = draw_it(result)
  if draw_it in SUITES.values():
    figure.suptitle(source(result))
  figure.savefig(path, dpi=dots)
  print(path)


def main(names: Sequence[str]) -> None:
  """Draws the committed results, or each file that is named."""
  if not names:
    for target, (name, draw_it, dots) in COMMITTED.items():
      result = pivots.load(f'benchmarks/{name}')
      save(result, draw_it, HERE / target, dots)
  for name in names:
    path = pathlib.Path(name)
    result = json.loads(path.read_text(encoding='utf-8'))
    if result['suite'] not in SUITES or not result['rows']:
      sys.exit(f'{name} has no rows of the suites {" and ".join(SUITES)}')
    save(result, SUITES[result['suite']], path.with_suffix('.png'), 70)


if __name__ == '__main__':
  main(sys.argv[1:])
