"""Writes the tables of README.md and docs/ from the JSON files in benchmarks/.

  python -m benchmarks.tables

`TABLES` says which document has which table. A table stands between
`<!-- begin NAME -->` and `<!-- end NAME -->`; sentences about it stand in the
document.
"""

from collections.abc import Callable
import functools
import re

from benchmarks import path_tables as paths
from benchmarks import pivots
from benchmarks import score_tables as scores
from benchmarks import time_tables as times


def conversions() -> str:
  """The table of conversions and their largest differences."""
  lines = pivots.made(
      'from and to | its class | largest difference',
      '{library} | `{class}` | {outputs:.0e}',
      pivots.load('benchmarks/conversions.json')['rows'],
  )
  return '\n'.join(lines)


def transformations() -> str:
  """The table of transformations, with the reasons as notes."""
  data = pivots.load('docs/transformations.json')
  notes: dict[str, int] = {}

  def cell(told):
    if told == 'yes':
      return told
    return f'no ({notes.setdefault(told, len(notes) + 1)})'

  lines = [
      [name, *(cell(column[name]) for column in data.values())]
      for name in next(iter(data.values()))
  ]
  lines = pivots.table(['', *(f'`{title}`' for title in data)], lines)
  return '\n'.join([*lines, '', *(f'{i}. `{n}`' for n, i in notes.items())])


def libraries() -> str:
  """The tables of features of recurrent libraries."""
  data, lines = pivots.load('docs/libraries.json'), []
  names = data['libraries']
  for shown in data['tables']:
    places = [names.index(name) for name in (names[0], *shown)]
    own = [
        [row['feature'], *(row['cells'][place] for place in places)]
        for row in data['rows']
    ]
    lines += [*pivots.table(['', names[0], *shown], own), '']
  versions = ', '.join(f'{k} {v}' for k, v in data['versions'].items())
  return '\n'.join([*lines, f'Looked at: {versions}.'])


# Documents, and the tables in each.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    'README.md': {'results': scores.results},
    'docs/benchmarks/cpu.md': {'cpu_peers': times.cpu_peers},
    'docs/benchmarks/dense.md': {
        'dense_h200': times.dense,
        'large_batches': times.large_batches,
        'workloads': times.workloads,
        'stacks': times.stacks,
    },
    'docs/benchmarks/devices.md': {
        'devices_four': functools.partial(times.devices, 'devices_4_h100'),
        'linear_over_time': functools.partial(
            times.linear_over_time, 'linear_over_time_4_h100'
        ),
    },
    'docs/benchmarks/index.md': {'units_and_batch': times.units_and_batch},
    'docs/benchmarks/ladder.md': {'agru_ladder': times.agru_ladder},
    'docs/benchmarks/linear.md': {
        'linear_h200': functools.partial(
            times.linear, 'linear_h200', 'associative_scan'
        ),
        'complex_h200': functools.partial(
            times.linear,
            'complex_h200',
            'associative_scan',
            'lax.associative_scan',
        ),
        'lengths': paths.lengths,
    },
    'docs/benchmarks/memory.md': {'kernel_memory': paths.kernel_memory},
    'docs/benchmarks/newton.md': {
        'newton_long': paths.newton_long,
        'newton': paths.newton,
    },
    'docs/benchmarks/peers.md': {'peers': times.peers},
    'docs/benchmarks/rl.md': {'scanned_rnn': times.scanned},
    'docs/benchmarks/tasks.md': {
        'row_smnist': scores.row_smnist,
        'text': scores.text,
        'time_series': scores.time_series,
        'synthetic': scores.synthetic,
        'state_tracking': scores.state_tracking,
    },
    'docs/converting.md': {'conversions': conversions},
    'docs/internals/kernels.md': {'assembled': paths.assembled},
    'docs/internals/transformations.md': {'transformations': transformations},
    'docs/libraries.md': {'libraries': libraries},
}


def render(document: str, text: str) -> str:
  """Returns a document's text with every table made anew.

  Args:
    document: its path, a key of `TABLES`.
    text: its text.

  Raises:
    ValueError: there is no place for a table.
  """
  for name, made in TABLES[document].items():
    pattern = rf'(<!-- begin {name} -->\n).*?(<!-- end {name} -->)'
    if not re.search(pattern, text, re.DOTALL):
      raise ValueError(f'{document} has no place for the table {name!r}')
    put = lambda match, made=made: f'{match[1]}{made()}\n{match[2]}'
    text = re.sub(pattern, put, text, flags=re.DOTALL)
  return text


def main() -> None:
  """Writes the documents."""
  for document, names in TABLES.items():
    path = pivots.ROOT / document
    made = render(document, path.read_text(encoding='utf-8'))
    path.write_text(made, encoding='utf-8')
    print(f'{document}: {", ".join(names)}')


if __name__ == '__main__':
  main()
