"""What a benchmark says: a table to read, JSON to keep, a plot of the JSON."""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

from rnnzoo.benchmark import dense_figure

Row = Mapping[str, Any]

# Last columns of a table: title, key, format, factor.
_COLUMNS = (
    ('GB/s', 'gb_per_s', '.1f', 1.0),
    ('% of copy', 'copy_fraction', '.0f', 100.0),
)
_DENSE_COLUMNS = (
    ("x scan's error", 'ratio', '.2f', 1.0),
    ('us a step', 'us_per_step', '.2f', 1.0),
)

LABELS = ('layer', 'implementation', 'projection', 'direction')


def header(result: Mapping[str, Any]) -> str:
  """Returns what a reader has to know about all the numbers."""
  device, copy = result['device'], result['copy'] or {}
  also = ', '.join(
      f'{name.removesuffix("_gb_per_s")} {value:.1f}'
      for name, value in copy.items()
      if name.endswith('_gb_per_s') and value is not None
  )
  also = also and f' ({also})'
  versions = ', '.join(f'{k} {v}' for k, v in result['versions'].items())
  return (
      f'{result["date"]}, commit {result["commit"] or "unknown"}\n'
      f'{device["count"]} x {device["kind"]} ({device["platform"]}),'
      f' {result["host_cores"]} host cores, load'
      f' {result["load_average"]:.1f}; {versions}'
      + (
          f'\ncopy of {copy["array_bytes"] / 2**20:.0f} MiB:'
          f' {copy["gb_per_s"]:.1f} GB/s{also}'
          if copy
          else ''
      )
  )


def table(
    title: str, rows: Sequence[Row], reasons: dict[str, int] | None = None
) -> str:
  """Returns rows as aligned text; reasons stand below, numbered.

  Args:
    title: stands above.
    rows: as `rnnzoo.benchmark.suites.measure` returns them.
    reasons: those already told by earlier tables, with their numbers; new ones
      are added.
  """
  reasons = {} if reasons is None else reasons
  told = len(reasons)
  dense = any('ratio' in row for row in rows)
  columns = _DENSE_COLUMNS if dense else _COLUMNS
  lines = [
      [
          *LABELS,
          'ms',
          'quartiles',
          'error',
          'compile s',
          'temp MiB',
          *(name for name, *_ in columns),
      ]
  ]
  for row in _merged(rows):
    cells = [row[label] for label in LABELS]
    if 'median_ms' in row:
      cells += [
          f'{row["median_ms"]:.3f}',
          f'{row["low_ms"]:.3f} - {row["high_ms"]:.3f}',
      ]
    else:
      cells += [row['status'], '']
    if row['status'] != 'ok':
      number = reasons.setdefault(row['reason'], len(reasons) + 1)
      mark = '' if row['status'] in cells else f'{row["status"]} '
      cells[-1] = f'{mark}[{number}]'
    cells += [
        _number(row.get('error'), '.1e'),
        _number(row.get('compile_s'), '.2f'),
        _number(row.get('temp_bytes'), '.1f', 2**-20),
        *(_number(row.get(key), form, by) for _, key, form, by in columns),
    ]
    lines.append(cells)
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  text = ['', title]
  for cells in lines:
    padded = [
        cell.ljust(width) if i < len(LABELS) else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    text.append('  '.join(padded).rstrip())
  new = list(reasons)[told:]
  text += [
      f'[{number}] {reason}' for number, reason in enumerate(new, told + 1)
  ]
  return '\n'.join(text)


def _merged(rows: Sequence[Row]) -> list[Row]:
  """Groups rows by path; one row is enough for a path that can do nothing."""
  groups: dict[tuple[str, str], list[Row]] = {}
  for row in rows:
    key = row['layer'], row['implementation']
    groups.setdefault(key, []).append(row)
  merged: list[Row] = []
  for group in groups.values():
    reasons = {row['reason'] for row in group if row['status'] == 'cannot'}
    same = all(row['status'] == 'cannot' for row in group) and len(reasons) == 1
    if same:
      merged.append({**group[0], 'projection': 'any', 'direction': 'any'})
    else:
      merged += group
  return merged


def _number(value: float | None, form: str, scale: float = 1) -> str:
  return '' if value is None else format(scale * value, form)


def memory_table(rows: Sequence[Row]) -> str:
  """Returns what `benchmark_linear.memory` found, one line a program."""
  lines = ['', 'temporary memory of a gradient']
  for row in rows:
    found = f'{row["status"]}: {row["reason"]}'
    if row['status'] == 'ok':
      found = f'{_number(row["temp_bytes"], ".1f", 2**-20)} MiB'
    lines.append(
        f'{row["layer"]}  R = {row["inner_steps"]}  {row["shape"]} '
        f' {row["dtype"]}  {row["implementation"]}  {found}'
    )
  return '\n'.join(lines)


def write(result: Mapping[str, Any], path: str) -> None:
  """Writes a result as JSON, one row a line."""
  rest = {key: value for key, value in result.items() if key != 'rows'}
  # Lines of rows make a readable difference between two committed results.
  head = json.dumps(rest, indent=2).removesuffix('\n}')
  rows = ',\n'.join('    ' + json.dumps(row) for row in result['rows'])
  file = pathlib.Path(path)
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(f'{head},\n  "rows": [\n{rows}\n  ]\n}}\n')


def plot(path: str) -> str:
  """Plots a JSON file that `write` made.

  Args:
    path: the JSON file.

  Returns:
    The path of the PNG file beside it.
  """
  result = json.loads(pathlib.Path(path).read_text())
  draw = {
      'linear': _bandwidths,
      'dense': dense_figure.latencies,
  }.get(result.get('suite'), _times)
  figure = draw(result)
  figure.suptitle(
      f'{result["device"]["kind"]}, jax {result["versions"]["jax"]},'
      f' {result["date"][:10]}'
  )
  target = pathlib.Path(path).with_suffix('.png')
  figure.savefig(target, dpi=120)
  return str(target)


def _times(result: Mapping[str, Any]):
  """A panel for each input and direction, a bar for each path: its time."""
  from matplotlib import figure as figures  # Slow to import.

  rows = [row for row in result['rows'] if row['status'] == 'ok']
  inputs = list(dict.fromkeys((r['shape'], r['dtype']) for r in result['rows']))
  directions = list(dict.fromkeys(row['direction'] for row in result['rows']))
  layers = list(dict.fromkeys(row['layer'] for row in result['rows']))
  variants = list(
      dict.fromkeys((r['implementation'], r['projection']) for r in rows)
  )
  figure = figures.Figure(
      figsize=(
          1.5 + 5 * len(directions),
          1 + (1 + 0.4 * len(layers)) * len(inputs),
      ),
      layout='constrained',
  )
  axes = figure.subplots(len(inputs), len(directions), squeeze=False)
  height = 0.8 / max(len(variants), 1)
  for i, (shape, dtype) in enumerate(inputs):
    for j, direction in enumerate(directions):
      ax = axes[i, j]
      for k, (implementation, projection) in enumerate(variants):
        own = [
            row
            for row in rows
            if (row['shape'], row['dtype']) == (shape, dtype)
            and row['direction'] == direction
            and row['implementation'] == implementation
            and row['projection'] == projection
        ]
        medians = [row['median_ms'] for row in own]
        ax.barh(
            [layers.index(row['layer']) + k * height for row in own],
            medians,
            height,
            xerr=[
                [row['median_ms'] - row['low_ms'] for row in own],
                [row['high_ms'] - row['median_ms'] for row in own],
            ],
            label=f'{implementation}, {projection} projection',
        )
      ax.set_title(f'{shape}, {dtype}, {direction}')
      ax.set_xlabel('milliseconds, median and quartiles')
      ax.set_yticks([y + 0.4 - height / 2 for y in range(len(layers))], layers)
      ax.set_ylim(len(layers) - 0.1, -0.1 - height)  # The first layer on top.
      ax.set_xlim(left=0)
  handles, labels = axes[0, 0].get_legend_handles_labels()
  if handles:
    figure.legend(handles, labels, loc='outside lower center', ncols=2)
  return figure


def _bandwidths(result: Mapping[str, Any]):
  """A panel for each dtype and direction, bars as a share of a copy's speed.

  Rows of layers have no such share; they are in the JSON and in the table.
  """
  from matplotlib import figure as figures  # Slow to import.

  rows = [row for row in result['rows'] if 'copy_fraction' in row]
  problems = list(dict.fromkeys((r['layer'], r['shape']) for r in rows))
  dtypes = list(dict.fromkeys(row['dtype'] for row in rows)) or ['']
  directions = list(dict.fromkeys(row['direction'] for row in rows)) or ['']
  paths = list(dict.fromkeys(row['implementation'] for row in rows))
  height = 0.8 / max(len(paths), 1)
  figure = figures.Figure(
      figsize=(
          2 + 5 * len(directions),
          1 + (0.8 + 0.7 * len(problems)) * len(dtypes),
      ),
      layout='constrained',
  )
  axes = figure.subplots(len(dtypes), len(directions), squeeze=False)
  for i, dtype in enumerate(dtypes):
    for j, direction in enumerate(directions):
      ax = axes[i, j]
      for k, path in enumerate(paths):
        own = [
            row
            for row in rows
            if (row['dtype'], row['direction'], row['implementation'])
            == (dtype, direction, path)
        ]
        bars = ax.barh(
            [
                problems.index((row['layer'], row['shape'])) + k * height
                for row in own
            ],
            [100 * row['copy_fraction'] for row in own],
            height,
            label=path,
        )
        labels = [f'{row["median_ms"]:.3g} ms' for row in own]
        ax.bar_label(bars, labels, padding=2, fontsize=7)
      ax.set_title(f'{dtype}, {direction}')
      ax.set_xlabel("% of a copy's bandwidth")
      ax.set_yticks(
          [y + 0.4 - height / 2 for y in range(len(problems))],
          [f'{layer}\n{shape}' for layer, shape in problems],
      )
      ax.set_ylim(len(problems) - 0.1, -0.1 - height)
      ax.set_xlim(0, 118)
      ax.axvline(100, color='gray', linewidth=0.8)
  handles, labels = axes[0, 0].get_legend_handles_labels()
  if handles:
    figure.legend(handles, labels, loc='outside lower center', ncols=3)
  return figure
