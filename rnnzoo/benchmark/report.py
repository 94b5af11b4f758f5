"""Results as a table to read while they come, and as JSON to keep."""

from collections.abc import Iterable, Mapping, Sequence
import json
import os
import pathlib
from typing import Any

from rnnzoo.benchmark import measurement

Row = Mapping[str, Any]

# Columns of numbers: title, key, format, factor, width.
_COLUMNS = (
    ('error', 'error', '.1e', 1.0, 7),
    ("x scan's", 'ratio', '.2f', 1.0, 8),
    ('compile s', 'compile_s', '.2f', 1.0, 9),
    ('temp MiB', 'mib', '.1f', 1.0, 8),
    ('us a step', 'us_per_step', '.2f', 1.0, 9),
    ('GB/s', 'gb_per_s', '.1f', 1.0, 6),
    ('% of copy', 'copy_fraction', '.0f', 100.0, 9),
    ('x best', 'of_best', '.2f', 1.0, 6),
    ('weak scaling', 'weak_scaling', '.3f', 1.0, 12),
)
_WIDTHS = (16, 10, 16, 9, 19, *(width for *_, width in _COLUMNS))


def header(result: Mapping[str, Any]) -> str:
  """Returns the facts that all numbers depend on."""
  device, copy = result['device'], result['copy']
  versions = ', '.join(f'{k} {v}' for k, v in result['versions'].items())
  text = (
      f'{result["date"]}, commit {result["commit"] or "unknown"}\n'
      f'{device["count"]} x {device["kind"]} ({device["platform"]}),'
      f' {result["host_cores"]} host cores, load'
      f' {result["load_average"]:.1f}; {versions}'
  )
  if copy:
    size = copy['array_bytes'] / 2**20
    text += f'\ncopy of {size:.0f} MiB: {copy["gb_per_s"]:.1f} GB/s'
  return text


class Table:
  """Prints rows as they come, aligned.

  A reason stands below the first row that has it; later ones name its number.
  """

  def __init__(self, layers: Iterable[str]):
    """Creates a table for rows of the given layers."""
    self._widths = (max(map(len, ['layer', *layers])), *_WIDTHS)
    self._title = ''
    self._reasons: dict[str, int] = {}

  def row(self, title: str, row: Row) -> None:
    """Prints a row of `measurement.measure`, in the part with this title."""
    if title != self._title:
      self._title = title
      names = ('ms', 'quartiles', *(name for name, *_ in _COLUMNS))
      print(f'\n{title}')
      self._line([*measurement.LABELS, *names])
    cells = [row[label] for label in measurement.LABELS]
    median, spread = row['status'], ''
    if 'ms' in row:
      median = f'{row["ms"]:.3f}'
      spread = f'{row["low_ms"]:.3f} - {row["high_ms"]:.3f}'
    known = len(self._reasons)
    if row['status'] != 'ok':
      number = self._reasons.setdefault(row['reason'], known + 1)
      spread = f'failed [{number}]' if spread else f'[{number}]'
    cells += [median, spread]
    for _, key, form, factor, _ in _COLUMNS:
      value = row.get(key)
      cells.append('' if value is None else format(factor * value, form))
    self._line(cells)
    if len(self._reasons) > known:
      print(f'[{known + 1}] {row["reason"]}', flush=True)

  def _line(self, cells: Sequence[str]) -> None:
    sides = '<' * len(measurement.LABELS) + '>' * (2 + len(_COLUMNS))
    each = zip(cells, sides, self._widths, strict=True)
    padded = [f'{cell:{side}{width}}' for cell, side, width in each]
    print('  '.join(padded).rstrip(), flush=True)


def write(result: Mapping[str, Any], path: str) -> None:
  """Writes a result as JSON, one row a line, all of it or nothing."""
  rest = {key: value for key, value in result.items() if key != 'rows'}
  # Lines of rows make a readable difference between two committed results.
  head = json.dumps(rest, indent=2).removesuffix('\n}')
  rows = ',\n'.join('    ' + json.dumps(row) for row in result['rows'])
  file = pathlib.Path(path).resolve()  # A link stays one.
  part = file.with_name(f'{file.name}.{os.getpid()}.part')
  part.write_text(f'{head},\n  "rows": [\n{rows}\n  ]\n}}\n')
  os.replace(part, file)
