"""Plots the suites 'batches' and 'lengths', and joins the files of their parts.

  python benchmarks/sweeps.py runs/lengths.json
  python benchmarks/sweeps.py --into=benchmarks runs/batches_*.json \
      runs/cudnn.json runs/lengths_*.json

The figure of a file goes beside it, as .png. With --into, files of a suite and
a GPU become one, as batches_h100.json, with cuDNN's line of
benchmarks/cudnn.py; of a case that several have, the last is taken.

'batches' has microseconds a step over the batch, by layer and features. A panel
of 'lengths' has the steps of a layer at a batch; dotted lines copy their inputs
from the host. Crosses are times of the path that `None` takes where another one
is more than 5 % faster.
"""

from collections.abc import Iterable, Iterator, Sequence
import json
import pathlib
import re
import sys
from typing import Any

from matplotlib import figure as figures

DIRECTIONS = ('forward', 'forward+backward')
COLORS = {'pallas': 'C0', 'scan': 'C1', 'associative_scan': 'C2', 'cudnn': 'C3'}
SUITES = 'batches', 'lengths'

# As a multiple of the best path's time.
SLOWER = 1.05

Row = dict[str, Any]


def join(results: Iterable[Row]) -> dict[str, Row]:
  """Returns results by the name of their file, one a suite and GPU.

  Rows of another commit than the last file's say theirs.
  """
  joined: dict[str, Row] = {}
  lines: dict[str, Row] = {}
  for result in results:
    found = re.search('[HB][1-9]00', result['device']['kind'])
    card = found[0].lower() if found else result['device']['platform']
    if result['suite'] == 'cudnn':
      lines[card] = result
      continue
    if result['suite'] not in SUITES:
      raise ValueError(result['suite'])
    name = f'{result["suite"]}_{card}'
    case = lambda row: (row['layer'], row['shape'], row['dtype'])
    new = {case(row) for row in result['rows']}
    earlier = joined.get(name, {'rows': [], 'shapes': {}})
    for shape, sizes in result['shapes'].items():
      if earlier['shapes'].get(shape, sizes) != sizes:
        raise ValueError(f'{shape} is {earlier["shapes"][shape]}, and {sizes}')
    kept = [
        row | {'commit': row.get('commit', earlier['commit'])}
        for row in earlier['rows']
        if case(row) not in new
    ]
    joined[name] = result | {
        'rows': kept + result['rows'],
        'shapes': earlier['shapes'] | result['shapes'],
    }
  for card, line in lines.items():
    if own := joined.get(f'batches_{card}'):
      sizes = lambda data, row: tuple(data['shapes'][row['shape']].values())
      names = {sizes(own, row): row['shape'] for row in own['rows']}
      own['cudnn'] = line | {
          'rows': [
              row | {'shape': names[sizes(line, row)]}
              for row in line['rows']
              if sizes(line, row) in names
          ]
      }
      del own['cudnn']['shapes']
  return joined


def timed_rows(result: Row, direction: str) -> list[Row]:
  """Returns the rows of a direction with times, cuDNN's too, with all sizes."""
  return [
      row | result['shapes'][row['shape']]
      for row in result['rows'] + result.get('cudnn', {'rows': []})['rows']
      if row['direction'] == direction and 'median_ms' in row
  ]


def lines(
    rows: Sequence[Row], size: str, steps: bool = False
) -> dict[tuple, dict[int, float]]:
  """Returns milliseconds by size, for each path, with and without a copy.

  Args:
    rows: of a panel.
    size: the one that varies.
    steps: whether to return microseconds a step; of the longest sequences, if
      there are several.
  """
  found: dict[tuple, dict[int, float]] = {}
  for row in sorted(rows, key=lambda row: row['time']):
    for copies, key in enumerate(('median_ms', 'with_copy_ms')):
      if key in row:
        label = row['implementation'], row['dtype'], bool(copies)
        scale = 1e3 / row['time'] if steps else 1
        found.setdefault(label, {})[row[size]] = scale * row[key]
  return found


def draw(ax, found: dict[tuple, dict[int, float]], size: str) -> None:
  """Draws a line for each path."""
  for (path, dtype, copies), own in found.items():
    name = f'{path}, {dtype}{", with a copy" if copies else ""}'
    style = {'color': COLORS[path], 'ls': ':' if copies else '-', 'marker': '.'}
    x = sorted(own)
    ax.plot(x, [own[k] for k in x], label=name, **style)
  ax.set_xscale('log', base=2)
  ax.set_yscale('log')
  ax.set_xlabel(size)
  ax.grid(alpha=0.3)


def cross(ax, rows: Sequence[Row], size: str, steps: bool = False) -> None:
  """Marks times of choices that are not the best."""
  over = [row for row in rows if row.get('of_best', 1) > SLOWER]
  for own in lines(over, size, steps).values():
    ax.plot([*own], [*own.values()], 'kx')


def batches(result: Row) -> figures.Figure:
  """Returns the figure: a row a layer and direction, a column a head size."""
  groups: dict[tuple, dict[tuple, list[Row]]] = {}
  for direction in DIRECTIONS:
    for row in timed_rows(result, direction):
      own = groups.setdefault((row['layer'], direction), {})
      size = row['num_heads'], row['features']
      own.setdefault(size, []).append(row)
  columns = sorted({size for own in groups.values() for size in own})
  figure = figures.Figure(
      figsize=(2.4 * max(1, len(columns)), 2.3 * max(1, len(groups))),
      layout='constrained',
  )
  if not groups:
    return figure
  axes = figure.subplots(len(groups), len(columns), squeeze=False, sharex='col')
  for line, ((layer, direction), own) in zip(
      axes, sorted(groups.items()), strict=True
  ):
    for ax, (heads, features) in zip(line, columns, strict=True):
      rows = own.get((heads, features), [])
      draw(ax, lines(rows, 'batch', steps=True), 'batch')
      cross(ax, rows, 'batch', steps=True)
      sizes = f'{heads} x {features // heads}' if heads > 1 else features
      ax.set_title(f'{layer} {sizes}\n{direction}', fontsize=8)
    line[0].set_ylabel('µs a step')
  axes[0, 0].legend(fontsize=6)
  return figure


def panels(result: Row) -> Iterator[tuple[str, dict[str, list[Row]]]]:
  """Yields a title and the rows of each direction, which differ in steps."""
  by_way = {way: timed_rows(result, way) for way in DIRECTIONS}
  fixed = lambda row: (row['layer'], row['batch'], row['features'])
  for key in sorted({fixed(row) for own in by_way.values() for row in own}):
    layer, batch, features = key
    rows = {
        way: [row for row in own if fixed(row) == key]
        for way, own in by_way.items()
    }
    yield f'{layer}, batch {batch}, {features} features', rows


def lengths(result: Row) -> figures.Figure:
  """Returns the figure; a row of it has times and speedups of a panel."""
  found = list(panels(result))
  height = 2.5 * max(1, len(found))
  figure = figures.Figure(figsize=(16, height), layout='constrained')
  if not found:
    return figure
  axes = figure.subplots(len(found), 4, squeeze=False)
  for four, (title, by_way) in zip(axes, found, strict=True):
    for way, (direction, rows) in enumerate(by_way.items()):
      own = lines(rows, 'time')
      # As many copies in both.
      scans = {key[2]: line for key, line in own.items() if key[0] == 'scan'}
      speedups = {
          key: {k: scans[key[2]][k] / v for k, v in line.items()}
          for key, line in own.items()
          if line.keys() <= scans.get(key[2], {}).keys()
      }
      draw(four[way], own, 'steps')
      cross(four[way], rows, 'time')
      draw(four[2 + way], speedups, 'steps')
      four[way].set_ylabel('milliseconds')
      four[2 + way].set_ylabel("times as fast as 'scan'")
      for ax in (four[way], four[2 + way]):
        ax.set_title(f'{title}, {direction}', fontsize=8)
    four[0].legend(fontsize=6)
  return figure


def plot(result: Row) -> figures.Figure:
  """Returns the figure of a suite."""
  figure = {'batches': batches, 'lengths': lengths}[result['suite']](result)
  figure.suptitle(
      f'{result["device"]["kind"]}, jax {result["versions"]["jax"]},'
      f' {result["date"][:10]}'
  )
  return figure


def write(result: Row, path: pathlib.Path) -> None:
  """Writes a result, one row a line, as `rnnzoo.benchmark.report` does."""
  rest = {key: value for key, value in result.items() if key != 'rows'}
  head = json.dumps(rest, indent=1).removesuffix('\n}')
  rows = ',\n'.join('  ' + json.dumps(row) for row in result['rows'])
  path.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n', encoding='utf-8')


def main(arguments: Sequence[str]) -> None:
  """Plots each file, or joins all."""
  option = '--into='
  into = [a.removeprefix(option) for a in arguments if a.startswith(option)]
  names = [a for a in arguments if not a.startswith('--')]
  if not names or len(names) + len(into) != len(arguments):
    sys.exit('sweeps.py: name a result, as in sweeps.py runs/benchmark.json')
  if len(into) > 1:
    sys.exit(f'sweeps.py: --into is given {len(into)} times; once would work')
  for folder in into:
    if not pathlib.Path(folder).is_dir() or not folder:
      sys.exit(f'sweeps.py: --into={folder}: there is no folder of this name')
  results: dict[pathlib.Path, Row] = {}
  for name in names:
    path = pathlib.Path(name)
    try:
      results[path] = json.loads(path.read_text(encoding='utf-8'))
      if not results[path]['rows']:
        sys.exit(f'sweeps.py: {name!r} has no rows, so nothing is drawn')
      if not into:
        figure = plot(results[path])
        figure.savefig(path.with_suffix('.png'), dpi=80)
        print(path.with_suffix('.png'))
    except OSError as error:
      sys.exit(f'sweeps.py: {error}')
    except (AttributeError, KeyError, TypeError, ValueError):
      sys.exit(f"sweeps.py: {name!r} is not a result of {' or '.join(SUITES)}")
  if into:
    try:
      joined = join(results.values())
      drawn = {name: plot(result) for name, result in joined.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      sys.exit(f'sweeps.py: these are not results of the suites: {error!r}')
    for name, result in joined.items():
      path = pathlib.Path(into[0]) / f'{name}.json'
      try:
        write(result, path)
        drawn[name].savefig(path.with_suffix('.png'), dpi=70)
      except OSError as error:
        sys.exit(f'sweeps.py: {error}')
      print(path, path.with_suffix('.png'))


if __name__ == '__main__':
  main(sys.argv[1:])
