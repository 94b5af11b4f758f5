"""Plots a benchmark's JSON file: panels of bars, one bar for each program."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import json
import pathlib
from typing import Any

from rnnzoo.benchmark import cases

Row = Mapping[str, Any]
Bars = Mapping[str, Mapping[str, Row]]  # Rows by label of the bar, by group.

_NAMES = {'lax_scan': 'lax.scan', 'lax_scan_8': 'lax.scan, unroll=8'}


def plot(path: str) -> str:
  """Plots a JSON file that `report.write` made.

  Args:
    path: the JSON file.

  Returns:
    The path of the PNG file beside it.
  """
  result = json.loads(pathlib.Path(path).read_text())
  draw: Callable[..., Any] = _times
  draw = {'linear': _bandwidths, 'dense': _latencies}.get(
      result.get('suite'), draw
  )
  figure = draw(result)
  figure.suptitle(
      f'{result["device"]["kind"]}, jax {result["versions"]["jax"]},'
      f' {result["date"][:10]}'
  )
  target = pathlib.Path(path).with_suffix('.png')
  figure.savefig(target, dpi=120)
  return str(target)


def _figure(width: float, heights: Sequence[float], columns: int):
  """Returns a figure and its axes, a line of panels for each height."""
  from matplotlib import figure as figures  # Slow to import.

  figure = figures.Figure(figsize=(width, sum(heights)), layout='constrained')
  axes = figure.subplots(
      len(heights), columns, squeeze=False, height_ratios=heights
  )
  return figure, axes


def _legend(figure, ax, columns: int) -> None:
  handles, labels = ax.get_legend_handles_labels()
  if handles:
    figure.legend(handles, labels, loc='outside lower center', ncols=columns)


def _distinct(values: Iterable[Any]) -> list[Any]:
  return list(dict.fromkeys(values))


def _panel(
    ax,
    groups: Sequence[str],
    bars: Bars,
    title: str,
    *,
    value: Callable[[Row], float] = lambda row: row['median_ms'],
    spread: bool = False,
    label: Callable[[Row], str] | None = None,
) -> None:
  """Draws a group of bars for each of `groups`, the first one on top.

  Args:
    ax: the panel.
    groups: names beside the groups.
    bars: rows by label and group.
    title: stands above.
    value: length of a row's bar.
    spread: whether to show quartiles.
    label: text at a row's bar, or None.
  """
  height = 0.8 / max(len(bars), 1)
  for k, (name, own) in enumerate(bars.items()):
    rows = list(own.values())
    low = [row['median_ms'] - row['low_ms'] for row in rows if spread]
    high = [row['high_ms'] - row['median_ms'] for row in rows if spread]
    drawn = ax.barh(
        [groups.index(group) + k * height for group in own],
        [value(row) for row in rows],
        height,
        xerr=[low, high] if spread else None,
        label=name,
    )
    if label is not None:
      ax.bar_label(drawn, list(map(label, rows)), padding=2, fontsize=6)
  ax.set_title(title)
  ax.set_yticks([y + 0.4 - height / 2 for y in range(len(groups))], groups)
  ax.set_ylim(len(groups) - 0.1, -0.1 - height)


def _times(result: Mapping[str, Any]):
  """A panel for each input and direction, a bar for each path: its time."""
  rows = [row for row in result['rows'] if row['status'] == 'ok']
  inputs = _distinct((row['shape'], row['dtype']) for row in result['rows'])
  directions = _distinct(row['direction'] for row in result['rows'])
  layers = _distinct(row['layer'] for row in result['rows'])
  variant = lambda row: (row['implementation'], row['projection'])
  variants = _distinct(map(variant, rows))
  heights = [1 + 0.4 * len(layers) + 1 / len(inputs)] * len(inputs)
  figure, axes = _figure(1.5 + 5 * len(directions), heights, len(directions))
  for line, (shape, dtype) in zip(axes, inputs, strict=True):
    for ax, direction in zip(line, directions, strict=True):
      panel = (shape, dtype, direction)
      bars = {
          f'{implementation}, {projection} projection': {
              row['layer']: row
              for row in rows
              if (row['shape'], row['dtype'], row['direction']) == panel
              and variant(row) == (implementation, projection)
          }
          for implementation, projection in variants
      }
      _panel(ax, layers, bars, ', '.join(panel), spread=True)
      ax.set_xlabel('milliseconds, median and quartiles')
      ax.set_xlim(left=0)
  _legend(figure, axes[0, 0], 2)
  return figure


def _bandwidths(result: Mapping[str, Any]):
  """A panel for each dtype and direction, bars as a share of a copy's speed.

  Rows of layers have no such share; they are in the JSON and in the table.

  Args:
    result: the content of a JSON file.
  """
  rows = [row for row in result['rows'] if 'copy_fraction' in row]
  group = lambda row: f'{row["layer"]}\n{row["shape"]}'
  groups = _distinct(map(group, rows))
  dtypes = _distinct(row['dtype'] for row in rows) or ['']
  directions = _distinct(row['direction'] for row in rows) or ['']
  paths = _distinct(row['implementation'] for row in rows)
  heights = [0.8 + 0.7 * len(groups) + 1 / len(dtypes)] * len(dtypes)
  figure, axes = _figure(2 + 5 * len(directions), heights, len(directions))
  for line, dtype in zip(axes, dtypes, strict=True):
    for ax, direction in zip(line, directions, strict=True):
      bars = {
          path: {
              group(row): row
              for row in rows
              if (row['dtype'], row['direction'], row['implementation'])
              == (dtype, direction, path)
          }
          for path in paths
      }
      _panel(
          ax,
          groups,
          bars,
          f'{dtype}, {direction}',
          value=lambda row: 100 * row['copy_fraction'],
          label=lambda row: f'{row["median_ms"]:.3g} ms',
      )
      ax.set_xlabel("% of a copy's bandwidth")
      ax.set_xlim(0, 118)
      ax.axvline(100, color='gray', linewidth=0.8)
  _legend(figure, axes[0, 0], 3)
  return figure


def _latencies(result: Mapping[str, Any]):
  """A panel for each direction; a bar for each program, by shape.

  Above are LSTMs on given gates beside published times, below is every cell's
  kernel. A shape that was measured in several dtypes shows the first one.

  Args:
    result: the content of a JSON file.
  """
  rows = [
      row
      for row in result['rows']
      if row['projection'] == 'without' and 'median_ms' in row
  ]
  first = {row['shape']: row['dtype'] for row in reversed(rows)}
  rows = [row for row in rows if row['dtype'] == first[row['shape']]]
  shapes = _distinct(row['shape'] for row in rows)
  lstm = [
      {**row, 'name': _NAMES.get(way, f'rnnzoo, {way}')}
      for row in rows
      for way in [row['implementation']]
      if row['layer'] == 'LSTM'
  ]
  lstm += [
      {'name': name, 'shape': shape, 'direction': direction, 'median_ms': ms}
      for name, own in result['published_ms'].items()
      for shape, times in own.items()
      for direction, ms in zip(cases.DIRECTIONS, times, strict=True)
      if shape in shapes
  ]
  # Shapes of the LSTM alone say nothing about other cells.
  several = {row['shape'] for row in rows if row['layer'] != 'LSTM'}
  kernels = [
      {**row, 'name': row['layer']}
      for row in rows
      if row['implementation'] == 'pallas' and row['shape'] in several
  ]
  panels = [('LSTM', lstm, 'log'), ("every cell's kernel", kernels, 'linear')]
  panels = [panel for panel in panels if panel[1]] or panels[:1]
  groups = [
      [shape for shape in shapes if any(row['shape'] == shape for row in own)]
      for _, own, _ in panels
  ]
  heights = [1.5 + 0.55 * len(each) for each in groups]
  figure, axes = _figure(12, heights, len(cases.DIRECTIONS))
  for line, names, (title, own, scale) in zip(
      axes, groups, panels, strict=True
  ):
    for ax, direction in zip(line, cases.DIRECTIONS, strict=True):
      shown = [row for row in own if row['direction'] == direction]
      bars: dict[str, dict[str, Row]] = {row['name']: {} for row in own}
      for row in shown:
        bars[row['name']][row['shape']] = row
      label = lambda row: f'{row["median_ms"]:.3g}'
      _panel(ax, names, bars, f'{title}, {direction}', label=label)
      ax.set_xlabel('milliseconds')
      if shown:
        times = [row['median_ms'] for row in shown]
        ax.set_xscale(scale)
        ax.set_xlim(0.7 * min(times) if scale == 'log' else 0, 1.2 * max(times))
    if own:
      line[1].legend(loc='center left', bbox_to_anchor=(1.02, 0.5), fontsize=8)
  return figure
