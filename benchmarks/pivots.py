"""Rows of the results in benchmarks/, and tables that are pivots of them.

A result has a header and rows: fields of a case, `program`, `direction`, `ms`,
`low_ms`, `high_ms`, `mib`, `compile_s`, `error`, `status`, and further facts. A
file of several parts says in `part` which of them a row belongs to. Training
runs have a layout of their own, without a header.
"""

from collections.abc import Iterable, Sequence
import json
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent

FORWARD, BOTH = DIRECTIONS = ('forward', 'forward+backward')

# More than this share slower than the best path is bold, and named.
SLOWER = 1.05

Row = dict[str, Any]


def load(name: str) -> Any:
  """Returns the content of a JSON file, from the project's root."""
  text = (ROOT / name).read_text(encoding='utf-8')
  try:
    return json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(f'{name} is not JSON: {error}') from error


def rows(name: str, part: str | None = None) -> list[Row]:
  """Returns rows of benchmarks/<name>.json, each with the header's facts.

  Args:
    name: of the file.
    part: of the file, if it has several.
  """
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
  return [head | row for row in data['rows'] if row.get('part') == part]


def timed(name: str, part: str | None = None) -> list[Row]:
  """Returns those of `rows` that have times and are right."""
  found = rows(name, part)
  return [row for row in found if row['status'] == 'ok' and 'ms' in row]


def pivot(
    found: Iterable[Row],
    index: Sequence[str],
    columns: Sequence[str] = ('program', 'direction'),
) -> dict[tuple[Any, ...], dict[Any, Row]]:
  """Returns rows by fields of the case, and by program and direction.

  Of several rows for one cell the fastest is taken.

  Args:
    found: the rows.
    index: fields of a line.
    columns: fields of a cell; of one field the key is its value.
  """
  lines: dict[tuple[Any, ...], dict[Any, Row]] = {}
  for row in found:
    own = lines.setdefault(tuple(row.get(key) for key in index), {})
    key: Any = tuple(row.get(name) for name in columns)
    key = key if len(key) > 1 else key[0]
    ms = lambda row: row.get('ms', float('inf'))
    if key not in own or ms(row) < ms(own[key]):
      own[key] = row
  return lines


def table(heads: Sequence[Any], lines: Iterable[Sequence[Any]]) -> list[str]:
  """Returns a table in Markdown."""
  text = [f'| {" | ".join(map(str, line))} |' for line in (heads, *lines)]
  return [text[0], '|' + '---|' * len(heads), *text[1:]]


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


def both(own: dict[Any, Row], program: str, digits: int, none='-') -> str:
  """Returns milliseconds of a program, forward / forward and backward."""
  found = [own.get((program, way), {}) for way in DIRECTIONS]
  right = [row.get('status') == 'ok' and 'ms' in row for row in found]
  if not any(right):
    return none
  return ' / '.join(
      f'{row["ms"]:.{digits}f}' if good else '-'
      for row, good in zip(found, right, strict=True)
  )


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
