"""Draws the figures of README.md and docs/.

  python -m benchmarks.figures
  python -m benchmarks.figures runs/lengths.json
  python -m benchmarks.figures runs/cpu.json runs/gpu.json

Without arguments it draws the committed results. The figure of a file of the
suite 'lengths' goes beside it, as .png. Files of several devices also get one
together, devices.png beside the last: the fastest path of each, and how many
times as fast as the first device it is.

A panel of 'lengths' has the steps of a layer at a batch; dotted lines copy
inputs from the host. Crosses are times of the path that `None` takes where
another one is more than 5 % faster.
"""

from collections.abc import Iterator, Sequence
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
  """Returns the rows of a direction that are right and have times."""
  return [
      row
      for row in result['rows']
      if row['direction'] == direction and row['status'] == 'ok' and 'ms' in row
  ]


def lines(rows: Sequence[Row]) -> dict[tuple, dict[int, float]]:
  """Returns milliseconds by steps, for each path, with and without a copy."""
  found: dict[tuple, dict[int, float]] = {}
  for row in sorted(rows, key=lambda row: row['time']):
    for copies, key in enumerate(('ms', 'with_copy_ms')):
      if key in row:
        label = row['program'], row['dtype'], bool(copies)
        found.setdefault(label, {})[row['time']] = row[key]
  return found


def logarithmic(ax, label: str, **options: Any) -> None:
  """Sets logarithmic axes; options are of the one below."""
  ax.set_xscale('log', **options)
  ax.set_yscale('log')
  ax.set_xlabel(label)
  ax.grid(alpha=0.3)


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


def over_steps(titles: Sequence[str], beside: str, draw) -> figures.Figure:
  """Returns a figure with a line of four panels for each title.

  Args:
    titles: of the lines.
    beside: whose time the speedups are beside.
    draw: draws times and speedups: (title, direction, two panels) -> None.
  """
  figure = figures.Figure(figsize=(16, 2.5 * len(titles)), layout='constrained')
  axes = figure.subplots(len(titles), 4, squeeze=False)
  for four, title in zip(axes, titles, strict=True):
    for way, direction in enumerate(pivots.DIRECTIONS):
      pair = four[way], four[2 + way]
      draw(title, direction, pair)
      labels = 'milliseconds', f'times as fast as {beside}'
      for ax, label in zip(pair, labels, strict=True):
        ax.set_ylabel(label)
        ax.set_title(f'{title}, {direction}', fontsize=8)
        logarithmic(ax, 'steps', base=2)
    four[0].legend(fontsize=6)
  return figure


def lengths(result: Row) -> figures.Figure:
  """Returns the figure; a row of it has times and speedups of a panel."""
  found = dict(panels(result))

  def draw(title, direction, pair):
    rows = found[title][direction]
    own = lines(rows)
    for (path, dtype, copies), line in own.items():
      name = f'{path}, {dtype}{", with a copy" if copies else ""}'
      style = {'color': COLORS[path], 'ls': ':' if copies else '-'}
      style |= {'marker': '.', 'label': name}
      pair[0].plot([*line], [*line.values()], **style)
      scan = own.get(('scan', dtype, copies), {})  # As many copies in both.
      if line.keys() <= scan.keys():
        speedups = [scan[steps] / ms for steps, ms in line.items()]
        pair[1].plot([*line], speedups, **style)
    over = [row for row in rows if row.get('of_best', 1) > 1.05]
    for line in lines(over).values():
      pair[0].plot([*line], [*line.values()], 'kx')

  figure = over_steps([*found], "'scan'", draw)
  figure.suptitle(source(result))
  return figure


def devices(results: Sequence[Row]) -> figures.Figure:
  """Returns the figure of the suite 'lengths' on several devices."""
  found = [dict(panels(result)) for result in results]

  def draw(title, direction, pair):
    first: dict[int, float] = {}
    for result, own in zip(results, found, strict=True):
      best: dict[int, float] = {}
      for row in sorted(own[title][direction], key=lambda row: row['time']):
        steps = row['time']
        best[steps] = min(row['ms'], best.get(steps, row['ms']))
      first = first or best
      speedups = {k: first[k] / v for k, v in best.items() if k in first}
      pair[0].plot([*best], [*best.values()], '.-', label=source(result))
      pair[1].plot([*speedups], [*speedups.values()], '.-')

  titles = [title for title in found[0] if all(title in f for f in found)]
  return over_steps(titles, 'the first', draw)


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
        for shape, times in pivots.load(pivots.PUBLISHED)[program].items()
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
    logarithmic(ax, 'head dim, units of one block of R', base=2)
    ticks = (16, 24, 64, 128, 256, 512, 1024)
    ax.set_xticks(ticks, [str(d) for d in ticks])
    ax.set_ylabel('milliseconds')
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


def ahead(result: Row) -> figures.Figure:
  """Returns the figure of the README: times as fast as two libraries."""
  items = pivots.pivot(timed_rows(result, pivots.BOTH), ['layer', 'shape'])
  figure = figures.Figure(
      figsize=(8.6, 1 + 0.36 * len(items)), layout='constrained'
  )
  ax = figure.subplots()
  for k, (program, label, color) in enumerate(
      (
          ('flax.nnx', 'flax, bfloat16', 'C0'),
          ('cudnn', "torch's cuDNN, float16", 'C7'),
      )
  ):
    found = [item['own'].get(program) for item in items]
    times = [ways[pivots.BOTH]['ahead'] if ways else 0 for ways in found]
    places = [line + 0.38 * k - 0.19 for line in range(len(items))]
    own = ax.barh(places, times, 0.36, color=color, label=label)
    labels = [f'{t:.1f} x' if t else 'wrong results' for t in times]
    ax.bar_label(own, labels, padding=5, fontsize=9.5)
  names = [f'{item["shape"]}: {item["layer"]}' for item in items]
  ax.set_yticks(range(len(items)), names, fontsize=10)
  ax.set_ylim(len(items) - 0.5, -0.5)
  ax.axvline(1, color='k', lw=0.8, zorder=0)
  ax.margins(x=0.1)
  ax.set_xlabel(
      f'times as fast, forward and backward; {source(result)}', fontsize=10
  )
  ax.spines[['top', 'right']].set_visible(False)
  ax.legend(fontsize=10.5, loc='center right')
  return figure


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
    logarithmic(ax, 'steps')
  axes[0].set_ylabel('milliseconds, forward')
  axes[0].legend(fontsize=8)
  figure.suptitle(f'GRU, float32, gates given: {source(result)}', fontsize=10)
  return figure


# Committed results, and how they are drawn; dots an inch.
COMMITTED = {
    'ahead_h200.png': ('workloads_h200.json', ahead, 160),
    'head_dim_h200.png': ('dense_h200.json', head_dim, 160),
    'newton_grid_h200.png': ('newton_grid_h200.json', newton_grid, 160),
    'lengths_h200.png': ('lengths_h200.json', lengths, 70),
}


def save(figure: figures.Figure, path: pathlib.Path, dots: int = 70) -> None:
  """Writes a figure, and says where."""
  figure.savefig(path, dpi=dots)
  print(path)


def main(names: Sequence[str]) -> None:
  """Draws the committed results, or each file that is named."""
  if not names:
    for target, (name, draw_it, dots) in COMMITTED.items():
      save(draw_it(pivots.load(f'benchmarks/{name}')), HERE / target, dots)
  read, path = [], HERE
  for name in names:
    path = pathlib.Path(name)
    result = json.loads(path.read_text(encoding='utf-8'))
    if result['suite'] != 'lengths' or not result['rows']:
      sys.exit(f"{name} has no rows of the suite 'lengths'")
    save(lengths(result), path.with_suffix('.png'))
    read.append(result)
  if len({result['device']['kind'] for result in read}) > 1:
    save(devices(read), path.with_name('devices.png'))


if __name__ == '__main__':
  main(sys.argv[1:])
