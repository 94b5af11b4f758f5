"""The figure of the suite 'dense': times beside those of other programs."""

from collections.abc import Mapping
from typing import Any

DIRECTIONS = ('forward', 'forward+backward')

_NAMES = {'lax_scan': 'lax.scan', 'lax_scan_8': 'lax.scan, unroll=8'}


def latencies(result: Mapping[str, Any]):
  """A panel for each direction; a bar for each program, by shape.

  Above, LSTMs on given gates beside published times; below, every cell's
  kernel.

  Args:
    result: the content of a JSON file.

  Returns:
    A matplotlib figure.
  """
  from matplotlib import figure as figures  # Slow to import.

  rows = [
      row
      for row in result['rows']
      if row['projection'] == 'without' and 'median_ms' in row
  ]
  first = {row['shape']: row['dtype'] for row in reversed(rows)}
  rows = [row for row in rows if row['dtype'] == first[row['shape']]]
  lstm: dict[str, dict[str, Mapping[str, float]]] = {}
  cells: dict[str, dict[str, Mapping[str, float]]] = {}
  for row in rows:
    time = {row['direction']: row['median_ms']}
    name = row['implementation']
    if row['layer'] == 'LSTM':
      _add(lstm, _NAMES.get(name, f'rnnzoo, {name}'), row['shape'], time)
    # Other batches have the LSTM only.
    if name == 'pallas' and '_batch' not in row['shape']:
      _add(cells, row['layer'], row['shape'], time)
  shapes = {row['shape'] for row in rows}
  for name, own in result['published_ms'].items():
    for shape, times in own.items():
      if shape in shapes:
        _add(lstm, name, shape, dict(zip(DIRECTIONS, times, strict=True)))
  panels = [('LSTM', lstm, 'log'), ("every cell's kernel", cells, 'linear')]
  panels = [panel for panel in panels if panel[1]] or panels[:1]
  heights = [1.5 + 0.55 * len(_shapes(bars)) for _, bars, _ in panels]
  figure = figures.Figure(figsize=(12, sum(heights)), layout='constrained')
  axes = figure.subplots(len(panels), 2, squeeze=False, height_ratios=heights)
  for (title, bars, scale), line in zip(panels, axes, strict=True):
    for ax, direction in zip(line, DIRECTIONS, strict=True):
      _bars(ax, bars, direction, scale)
      ax.set_title(f'{title}, {direction}')
    if bars:
      line[1].legend(loc='center left', bbox_to_anchor=(1.02, 0.5), fontsize=8)
  return figure


def _shapes(bars) -> list[str]:
  """Returns the shapes that there are bars for."""
  return list(dict.fromkeys(shape for own in bars.values() for shape in own))


def _add(bars, name, shape, times) -> None:
  own = bars.setdefault(name, {})
  own[shape] = {**own.get(shape, {}), **times}


def _bars(ax, bars, direction, scale) -> None:
  """Draws one panel: bars[name][shape][direction] in milliseconds."""
  shapes = _shapes(bars)
  height = 0.8 / max(len(bars), 1)
  times = [
      each[direction]
      for own in bars.values()
      for each in own.values()
      if direction in each
  ]
  for k, (name, own) in enumerate(bars.items()):
    found = [
        (shapes.index(shape) + k * height, times[direction])
        for shape, times in own.items()
        if direction in times
    ]
    drawn = ax.barh(
        [y for y, _ in found], [ms for _, ms in found], height, label=name
    )
    ax.bar_label(drawn, [f'{ms:.3g}' for _, ms in found], padding=2, fontsize=6)
  ax.set_xlabel('milliseconds')
  if times:
    ax.set_xscale(scale)
    low = 0.7 * min(times) if scale == 'log' else 0
    ax.set_xlim(low, 1.2 * max(times))
  ax.set_yticks([y + 0.4 - height / 2 for y in range(len(shapes))], shapes)
  ax.set_ylim(len(shapes) - 0.1, -0.1 - height)  # The first shape on top.
