"""Rows of the results in benchmarks/, and their pivot tables.

A result has a header and rows: fields of a case, `program`, `direction`, `ms`,
`low_ms`, `high_ms`, `mib`, `compile_s`, `error`, `status`, and further facts.
Rows with a `part` are in no table. Training runs have a layout of their own,
without a header.
"""

from collections.abc import Iterable, Sequence
import json
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent

FORWARD, BOTH = DIRECTIONS = ('forward', 'forward+backward')

# Milliseconds forward and forward+backward, batch 16 x time 1024, by heads x
# head dim. FlashRNN (Pöppel et al., 2025) is its fused CUDA kernel, bfloat16,
# without the input projection; cuDNN is torch's LSTM, float16, with it. Both on
# an H100 or H200.
PUBLISHED = 'docs/published_ms.json'

Row = dict[str, Any]


def load(name: str) -> Any:
  """Returns the content of a JSON file, from the project's root."""
  return json.loads((ROOT / name).read_text(encoding='utf-8'))


def rows(name: str) -> list[Row]:
  """Returns rows of benchmarks/<name>.json, each with the header's facts."""
  data = load(f'benchmarks/{name}.json')
  if isinstance(data, list):
    return data
  head = {
      'device': data['device']['kind'],
      'jax': data['versions'].get('jax'),
      'date': data['date'],
      # Several runs, whose rows do not say which commit is theirs.
      'commit': None if 'later' in data else data.get('commit'),
  }
  count = data['device'].get('count', 1)
  if count > 1:
    head['device'] = f'{count} x {head["device"]}'
  if 'cpu' in (data['device'].get('platform'), data['device']['kind']):
    head['device'] += f', {data["host_cores"]} cores'
  return [head | row for row in data['rows'] if 'part' not in row]


def timed(name: str) -> list[Row]:
  """Returns the `rows` that have times and are right."""
  return [row for row in rows(name) if row['status'] == 'ok' and 'ms' in row]


class Cells(dict[Any, Any]):
  """Rows of a line of a table by program, and of a program by direction.

  A format of a program is milliseconds, forward / forward and backward, and a
  format of anything in a row that is missing is `none`.
  """

  def __init__(self, none: str):
    super().__init__()
    self.none = none

  def __missing__(self, key: Any) -> 'Cells':
    return Cells(self.none)

  def __format__(self, digits: str) -> str:
    rows = [self.get(way, {}) for way in DIRECTIONS]
    right = [row.get('status') == 'ok' and 'ms' in row for row in rows]
    if not any(right):
      return self.none
    return ' / '.join(
        format(row['ms'], digits) if good else '-'
        for row, good in zip(rows, right, strict=True)
    )


def pivot(
    found: Iterable[Row],
    index: Sequence[str],
    columns: Sequence[str] = ('program', 'direction'),
    none: str = '-',
) -> list[Row]:
  """Returns the lines of a table: fields of the case, and `own`, their rows.

  If several rows fit one cell, it has the fastest.

  Args:
    found: the rows.
    index: fields of a line.
    columns: the fields by which `own` has rows, one or two.
    none: text for a cell without a row.
  """
  lines: dict[tuple[Any, ...], Row] = {}
  for row in found:
    case = tuple(row.get(key) for key in index)
    new = dict(zip(index, case, strict=True)) | {'own': Cells(none)}
    cells = lines.setdefault(case, new)['own']
    *outer, last = (row.get(name) for name in columns)
    for key in outer:
      cells = cells.setdefault(key, Cells(none))
    ms = lambda row: row.get('ms', float('inf'))
    if last not in cells or ms(row) < ms(cells[last]):
      cells[last] = row
  return list(lines.values())


def table(heads: Sequence[Any], lines: Iterable[Sequence[Any]]) -> list[str]:
  """Returns a table in Markdown."""
  text = [f'| {" | ".join(map(str, line))} |' for line in (heads, *lines)]
  return [text[0], '|' + '---|' * len(heads), *text[1:]]


def made(heads: str, line: str, items: Iterable[Row]) -> list[str]:
  """Returns a table: `heads`, and a line for each item.

  Args:
    heads: text with ' | ' between cells.
    line: a format of an item's fields, with ' | ' between cells.
    items: the lines.
  """
  cells = [line.format(**item).split(' | ') for item in items]
  return table(heads.split(' | '), cells)


def sheet(
    found: Iterable[Row],
    heads: str,
    line: str,
    items: Iterable[Row],
    *more: str,
) -> str:
  """Returns the table of `made`, and the sentence of `source` for its rows."""
  return with_source(made(heads, line, items), found, *more)


def source(found: Iterable[Row], *more: str) -> str:
  """Returns where rows come from: devices, versions, dates and commits."""
  found = list(found)
  each = lambda key, size=None: ', '.join(
      sorted({str(row[key])[:size] for row in found if row.get(key)})
  )
  commits = each('commit', 7)
  words = [each('device'), f'jax {each("jax")}', each('date', 10), *more]
  words += [f'commit{"s" * ("," in commits)} {commits}'] if commits else []
  return ', '.join(word for word in words if word) + '.'


def with_source(lines: list[str], found: Iterable[Row], *more: str) -> str:
  """Returns a table with the sentence of `source`."""
  return '\n'.join([*lines, '', source(found, *more)])


def size(row: Row) -> str:
  """Returns batch, time and features; features of several heads in two."""
  heads, features = row.get('num_heads') or 1, row['features']
  parts = [heads, features // heads] if heads > 1 else [features]
  return ' x '.join(map(str, [row['batch'], row['time'], *parts]))


def heads_of(row: Row) -> str:
  """Returns batch x time x heads x head dim."""
  heads = row['num_heads']
  sizes = row['batch'], row['time'], heads, row['features'] // heads
  return ' x '.join(map(str, sizes))
