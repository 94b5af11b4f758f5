"""The figure of the suite 'dense': times beside those of other programs."""

from collections.abc import Mapping
from typing import Any

DIRECTIONS = ('forward', 'forward+backward')

_NAMES = {'lax_scan': 'lax.scan', 'lax_scan_8': 'lax.scan, unroll=8'}


def latencies(result: Mapping[str, Any]):
  """A panel for each direction; a bar for each program, by shape.

  Above, LSTMs on given gates beside published times; below, every cell's
  kernel. They differ by factors of ten, so the axis is logarithmic.

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
  shapes = list(dict.fromkeys(row['shape'] for row in rows))
  lstm: dict[str, dict[str, Mapping[str, float]]] = {}
  cells: dict[str, dict[str, Mapping[str, float]]] = {}
  for row in rows:
    time = {row['direction']: row['median_ms']}
    if row['layer'] == 'LSTM':
      name = row['implementation']
      name = _NAMES.get(name, f'rnnzoo, {name}')
      _add(lstm, name, row['shape'], time)
    if row['implementation'] == 'pallas':
      _add(cells, row['layer'], row['shape'], time)
  for name, own in result['published_ms'].items():
    for shape, times in own.items():
      if shape in shapes:
        _add(lstm, name, shape, dict(zip(DIRECTIONS, times, strict=True)))
  panels = [('LSTM', lstm)] + ([('kernels', cells)] if cells else [])
  height = 1.5 + 0.9 * max(1, len(shapes)) * len(panels)
  figure = figures.Figure(figsize=(12, height), layout='constrained')
  axes = figure.subplots(len(panels), 2, squeeze=False)
  for (title, bars), line in zip(panels, axes, strict=True):
    for ax, direction in zip(line, DIRECTIONS, strict=True):
      _bars(ax, shapes, bars, direction)
      ax.set_title(f'{title}, {direction}')
    if bars:
      line[1].legend(loc='center left', bbox_to_anchor=(1.02, 0.5), fontsize=8)
  return figure


def _add(bars, name, shape, times) -> None:
  own = bars.setdefault(name, {})
  own[shape] = {**own.get(shape, {}), **times}


def _bars(ax, shapes, bars, direction) -> None:
  """Draws one panel: bars[name][shape][direction] in milliseconds."""
  height = 0.8 / max(len(bars), 1)
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
  ax.set_xscale('log')
  ax.set_xlabel('milliseconds')
  times = [
      ms
      for own in bars.values()
      for each in own.values()
      for ms in each.values()
  ]
  ax.set_xlim(0.7 * min(times, default=1), 1.6 * max(times, default=1))
  ax.set_yticks([y + 0.4 - height / 2 for y in range(len(shapes))], shapes)
  ax.set_ylim(len(shapes) - 0.1, -0.1 - height)  # The first shape on top.
