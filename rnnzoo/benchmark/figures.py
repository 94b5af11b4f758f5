"""Plots a benchmark's JSON file: panels of bars, one bar for each program."""

from collections.abc import Iterator, Sequence
import json
import pathlib
from typing import Any

from rnnzoo.benchmark import cases

# A row of the JSON file, with the `name` of its bar and the `group` of bars
# that it is in.
Row = dict[str, Any]

_NAMES = {'lax_scan': 'lax.scan', 'lax_scan_8': 'lax.scan, unroll=8'}


def plot(path: str) -> str:
  """Plots a JSON file of `report.write`; returns the PNG file beside it."""
  from matplotlib import figure as figures  # Slow to import.

  result = json.loads(pathlib.Path(path).read_text())
  if not result['rows']:
    raise ValueError(f'{path!r} has no rows')
  rows = [row for row in result['rows'] if 'ms' in row and 'part' not in row]
  panels = _by_path(rows, result.get('suite') == 'linear')
  if 'published_ms' in result:
    panels = _beside_published(rows, result['published_ms'])
  lines = [line for line in panels if line[1]]
  heights = [_inches(own) for _, own, _ in lines]
  figure = figures.Figure(figsize=(12, sum(heights) or 1), layout='constrained')
  figure.suptitle(
      f'{result["device"]["kind"]}, jax {result["versions"]["jax"]},'
      f' {result["date"][:10]}'
  )
  if lines:
    axes = figure.subplots(len(lines), 2, squeeze=False, height_ratios=heights)
    for pair, (title, own, scale) in zip(axes, lines, strict=True):
      for ax, direction in zip(pair, cases.DIRECTIONS, strict=True):
        ax.set_title(f'{title}, {direction}')
        _panel(ax, own, direction, scale)
      pair[1].legend(loc='center left', bbox_to_anchor=(1.02, 0.5), fontsize=8)
  target = pathlib.Path(path).with_suffix('.png')
  figure.savefig(target, dpi=120)
  return str(target)


def _distinct(rows: Sequence[Row], key: str) -> list[str]:
  return list(dict.fromkeys(row[key] for row in rows))


def _inches(rows: Sequence[Row]) -> float:
  """Returns the height of a panel in which no label covers the next one."""
  bars, groups = len(_distinct(rows, 'name')), len(_distinct(rows, 'group'))
  return 1.5 + max(0.55, 0.125 * bars) * groups


def _by_path(rows, shares) -> Iterator[tuple[str, list[Row], str]]:
  """Yields panels for each dtype: a bar for each path, by layer and shape.

  Bars are times, or `shares` of a copy's bandwidth, which layers with a
  projection do not have.
  """
  rows = [row for row in rows if 'copy_fraction' in row or not shares]
  for row in rows:
    row['name'] = f'{row["program"]}, {row["projection"]} projection'
    row['group'] = f'{row["layer"]}\n{row["shape"]}'
  for dtype in _distinct(rows, 'dtype'):
    own = [row for row in rows if row['dtype'] == dtype]
    yield dtype, own, 'share' if shares else 'linear'


def _beside_published(rows, published) -> Iterator[tuple[str, list[Row], str]]:
  """Yields panels of LSTMs on gates, and of every cell's kernel, by shape.

  A shape that was measured in several dtypes shows the first one.
  """
  rows = [row for row in rows if row['projection'] == 'without']
  first = {row['shape']: row['dtype'] for row in reversed(rows)}
  rows = [row for row in rows if row['dtype'] == first[row['shape']]]
  lstms, kernels = [], []
  # Shapes of the LSTM alone do not compare cells.
  several = {row['shape'] for row in rows if row['layer'] != 'LSTM'}
  for row in rows:
    way, row['group'] = row['program'], row['shape']
    if row['layer'] == 'LSTM':
      lstms.append({**row, 'name': _NAMES.get(way, f'rnnzoo, {way}')})
    if way == 'pallas' and row['shape'] in several:
      kernels.append({**row, 'name': row['layer']})
  lstms += [
      {'name': name, 'group': shape, 'direction': direction, 'ms': ms}
      for name, own in published.items()
      for shape, times in own.items()
      for direction, ms in zip(cases.DIRECTIONS, times, strict=True)
      if shape in first
  ]
  yield 'LSTM', lstms, 'log'
  yield "every cell's kernel", kernels, 'linear'


def _panel(ax, rows: Sequence[Row], direction: str, scale: str) -> None:
  """Draws bars in groups, the first group on top."""
  names, groups = _distinct(rows, 'name'), _distinct(rows, 'group')
  rows = [row for row in rows if row['direction'] == direction]
  times = [row['ms'] for row in rows]
  height = 0.8 / len(names)
  for k, name in enumerate(names):
    own = [row for row in rows if row['name'] == name]
    y = [groups.index(row['group']) + k * height for row in own]
    ms = [row['ms'] for row in own]
    lengths, spread = ms, None
    if scale == 'share':
      lengths = [100 * row['copy_fraction'] for row in own]
    elif all('low_ms' in row for row in own):
      low = [row['ms'] - row['low_ms'] for row in own]
      spread = [low, [row['high_ms'] - row['ms'] for row in own]]
    bars = ax.barh(y, lengths, height, xerr=spread, label=name)
    # Readable where a label lies on a line.
    behind = {'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.3}
    labels = [f'{t:.3g}' for t in ms]
    ax.bar_label(bars, labels, padding=2, fontsize=6, bbox=behind)
  ax.set_yticks([y + 0.4 - height / 2 for y in range(len(groups))], groups)
  ax.set_ylim(len(groups) - 0.1, -0.1 - height)
  if scale == 'share':
    ax.set_xlabel("% of a copy's bandwidth; labels are milliseconds")
    ax.set_xlim(0, 118)
    ax.axvline(100, color='gray', linewidth=0.8)
  else:
    ax.set_xlabel('milliseconds, median and quartiles')
    ax.set_xscale(scale)
    if times:
      # A seventh of the axis is free for the label of the longest bar.
      least, most = 0.7 * min(times), max(times)
      if scale == 'log':
        ax.set_xlim(least, most * (most / least) ** (1 / 6))
      else:
        ax.set_xlim(0, most * 7 / 6)
