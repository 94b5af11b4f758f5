"""Tables of times: layers beside other paths, other libraries and devices."""

from collections.abc import Mapping, Sequence

from benchmarks import pivots

Row = pivots.Row


def cpu_peers() -> str:
  """The table of CPU times beside flax and torch."""
  rows = pivots.timed('cpu_peers')
  found = [row for row in rows if row['direction'] == pivots.BOTH]
  for row in found:
    row['library'] = row['program'].split('.')[0]
  index = 'batch', 'time', 'in_features', 'features', 'layer'
  versions = pivots.load('benchmarks/cpu_peers.json')['versions']
  return pivots.sheet(
      found,
      'batch x time x in x features | layer | rnnzoo, ms | flax.nnx, ms |'
      ' torch, ms',
      '{batch} x {time} x {in_features} x {features} | {layer} |'
      ' {own[rnnzoo][ms]:.1f} | {own[flax][ms]:.1f} | {own[torch][ms]:.1f}',
      pivots.pivot(found, index, ['library']),
      *(f'{k} {v}' for k, v in versions.items() if k != 'jax'),
  )


def linear(name: str, *ways: str) -> str:
  """The table of linear and diagonal recurrences on a GPU, beside other ways.

  Each recurrence is there on given gates, else as a layer with its products.
  """
  rows = pivots.timed(name)
  given = {row['layer'] for row in rows if row['projection'] == 'without'}
  layers = {row['layer'] for row in rows} - given - {'projection'}
  found = [
      row
      for row in rows
      if row['projection'] == 'without' or row['layer'] in layers
  ]
  index = 'layer', 'batch', 'time', 'features', 'dtype'
  items = pivots.pivot(found, index, none='')
  for item in items:
    item['share'] = _share(item['own'])
  return pivots.sheet(
      found,
      'recurrence | batch x time x features | dtype | GPU kernel, ms (% of a'
      " copy's bandwidth) | " + ' | '.join(f'`{way}`, ms' for way in ways),
      '`{layer}` | {batch} x {time} x {features} | {dtype} | {share} | '
      + ' | '.join(f'{{own[{way}]:.3f}}' for way in ways),
      items,
  )


def _share(own: pivots.Cells) -> str:
  """Returns times of kernels, with shares of a copy's bandwidth."""
  cells = []
  for way in pivots.DIRECTIONS:
    row = own['pallas'].get(way)
    fraction = row and row.get('copy_fraction')
    percent = f' ({100 * fraction:.0f} %)' if fraction else ''
    cells.append(f'{row["ms"]:.3f}{percent}' if row else '-')
  return ' / '.join(cells)


_HEADS = 'batch x time x heads x head dim'


def dense() -> str:
  """The tables of cells with a dense recurrent kernel on a GPU."""
  data = pivots.load('benchmarks/dense_h200.json')
  found = pivots.timed('dense_h200')
  for row in found:
    row['sizes'] = pivots.heads_of(row)
  given, whole = (
      [row for row in found if row['projection'] == projection]
      for projection in ('without', 'with')
  )
  published = pivots.load(pivots.PUBLISHED)
  given = [row for row in given if row['batch'] == 16]
  lines = _on_gates(given, published['FlashRNN fused, bfloat16'])
  cudnn = published['cuDNN, float16, with projection']
  lines += ['', *_with_projection(whole, cudnn)]
  runs = f'{1 + len(data.get("later", ()))} runs'
  return pivots.with_source(lines, found, runs)


def _published(times: Mapping[str, Sequence[float]], shape: str) -> str:
  pair = times.get(shape)
  return f'{pair[0]:.2f} / {pair[1]:.2f}' if pair else ''


def _on_gates(found: list[Row], flashrnn) -> list[str]:
  """Returns the table of cells on given gates, a column a layer."""
  for row in found:
    row['cell'] = f'{row["layer"]} {row["program"]}'
  index = 'sizes', 'shape', 'dtype'
  items = pivots.pivot(found, index, ('cell', 'direction'), none='')
  for item in items:
    item['flashrnn'] = _published(flashrnn, item['shape'])
  names = dict.fromkeys(row['layer'] for row in found)
  layers = [name for name in names if name != 'AntisymmetricRNN']
  heads = [_HEADS, *(f'`{layer}`' for layer in layers)]
  heads += ['LSTM of FlashRNN']
  cells = ['{sizes}', *(f'{{own[{layer} pallas]:.2f}}' for layer in layers)]
  cells += ['{flashrnn}']
  return pivots.made(' | '.join(heads), ' | '.join(cells), items)


def _with_projection(found: list[Row], cudnn) -> list[str]:
  """Returns the table of layers on x, a column a path."""
  index = 'sizes', 'shape', 'dtype', 'layer'
  items = pivots.pivot(found, index, none='')
  for item in items:
    same = (item['layer'], item['dtype']) == ('LSTM', 'bfloat16')
    item['torch'] = _published(cudnn, item['shape']) if same else ''
  return pivots.made(
      f'layer, with its projection | {_HEADS} | dtype | GPU kernel |'
      " `'scan'` | JAX's cuDNN | torch's cuDNN, float16",
      '`{layer}` | {sizes} | {dtype} | {own[pallas]:.2f} | {own[scan]:.2f} |'
      ' {own[cudnn]:.2f} | {torch}',
      items,
  )


def units_and_batch() -> str:
  """The table of LSTMs and GRUs with one head, by units and batch."""
  found = [
      row
      for row in pivots.timed('dense_h200')
      if (row['dtype'], row['projection']) == ('bfloat16', 'without')
      and (row['num_heads'], row['time']) == (1, 1024)
      and row['program'] == 'pallas'
      and row['layer'] in ('GRU', 'LSTM')
  ]
  found.sort(key=lambda row: (row['layer'], row['features']))
  batches = sorted({row['batch'] for row in found})
  return pivots.sheet(
      found,
      ' | '.join(['layer', 'units', *(f'batch {n}' for n in batches)]),
      ' | '.join(
          ['`{layer}`', '{features}', *(f'{{own[{n}]:.2f}}' for n in batches)]
      ),
      pivots.pivot(found, ('layer', 'features'), ('batch', 'direction')),
  )


def agru_ladder() -> str:
  """The table of one A-GRU, from a Python loop to the layer."""
  found = pivots.timed('agru_ladder')
  for row in found:
    names = 'batch', 'time', 'in_features', 'features'
    row['size'] = ' x '.join(str(row[name]) for name in names)
  items = pivots.pivot(found, ['program'], ['size'])
  sizes = list(dict.fromkeys(row['size'] for row in found))
  for item in items:
    own = [item['own'].get(size, {}).get('ms') for size in sizes]
    item['cells'] = ' | '.join(f'{ms:.1f}' if ms else '-' for ms in own)
  heads = ' | '.join(f'{size}, ms' for size in sizes)
  heads = f'batch x time x in x features | {heads}'
  return pivots.sheet(found, heads, '{program} | {cells}', items)


_COUNTS = {2: 'two', 4: 'four'}


def devices(name: str) -> str:
  """The table of training steps on several devices."""
  found = pivots.timed(name)
  for row in found:
    row['sizes'] = pivots.heads_of(row)
    if row.get('param_dtype', 'float32') != 'float32':
      row['dtype'] += f', {row["param_dtype"]} parameters'
  many = _COUNTS[max(row['devices'] for row in found)]
  items = pivots.pivot(found, ('layer', 'sizes', 'dtype'), ['program'])
  for item in items:
    ways = item['own']['Explicit'], item['own']['Auto']
    item['error'] = max(row['error'] for row in ways)
  return pivots.sheet(
      found,
      'layers | batch a device x time x heads x head dim | dtype | one device,'
      f' ms | {many}, Explicit axis | {many}, Auto axis | difference of an'
      ' update',
      '{layer} | {sizes} | {dtype} | {own[one device][ms]:.2f} |'
      ' {own[Explicit][ms]:.2f} ({own[Explicit][weak_scaling]:.2f}) |'
      ' {own[Auto][ms]:.2f} ({own[Auto][weak_scaling]:.2f}) | {error:.1e}',
      items,
  )


def linear_over_time(name: str) -> str:
  """The table of a linear recurrence with time over devices."""
  found = pivots.timed(name)
  count = max(row['devices'] for row in found)
  gates = {'': 'gates', 'resets': 'resets', 'slow': 'slow gates'}
  gates['slow_resets'] = 'slow gates, resets'
  for row in found:
    row['gates'] = gates[row['layer'].removeprefix('linear_scan').strip('_')]
    row['gb'] = row['mib'] * 2**20 / 1e9
  items = pivots.pivot(found, ('gates', 'direction'), ['devices'])
  for item in items:
    one, many = item['own'][1], item['own'][count]
    item |= {'one': one, 'many': many, 'times': one['ms'] / many['ms']}
  return pivots.sheet(
      found,
      f'a | pass | one device, ms | {_COUNTS[count]} | times as fast |'
      f' GB of a device, one | {_COUNTS[count]}',
      '{gates} | {direction} | {one[ms]:.2f} | {many[ms]:.2f} | {times:.2f} |'
      ' {one[gb]:.1f} | {many[gb]:.1f}',
      items,
  )


def stacks() -> str:
  """The table of layers in depth, in turn and together."""
  found = pivots.timed('stacks_h200')
  index = 'layer', 'batch', 'time', 'features', 'num_heads'
  items = pivots.pivot(found, index)
  for item in items:
    item['depth'], item['cell'] = item['layer'].split(' x ')
    heads, features = item['num_heads'], item['features']
    item['size'] = f'{heads} x {features // heads}' if heads > 1 else features
    ways = item['own']['in turn'], item['own']['at once']
    item['times'] = ' / '.join(
        f'{ways[0][each]["ms"] / ways[1][each]["ms"]:.2f}'
        if each in ways[1]
        else '-'
        for each in pivots.DIRECTIONS
    )
    peer = item['own']['cudnn']
    item['cudnn'] = f'{peer:.3g}' if len(peer) == 2 else ''
  return pivots.sheet(
      found,
      'layers | batch x time | in turn, ms | together | times as fast | cuDNN',
      '{depth} x `{cell}` {size} | {batch} x {time} | {own[in turn]:.3g} |'
      ' {own[at once]:.3g} | {times} | {cudnn}',
      items,
  )


def workloads() -> str:
  """The table of published programs, beside 'scan', flax and cuDNN."""
  found = pivots.timed('workloads_h200')
  items = pivots.pivot(found, ['shape', 'layer', 'in_features'])
  for item in items:
    item['size'] = pivots.size(item['own']['rnnzoo'][pivots.BOTH])
    for name, program in (('flax', 'flax.nnx'), ('cudnn', 'cudnn')):
      ways = item['own'][program].values()
      item[name] = ' / '.join(f'{row["ahead"]:.1f}' for row in ways)
  return pivots.sheet(
      found,
      'program | layers | batch x time x features | inputs | rnnzoo, ms |'
      " `'scan'` | flax | cuDNN | times as fast as flax | as cuDNN",
      '{shape} | {layer} | {size} | {in_features} | {own[rnnzoo]:.2f} |'
      " {own[rnnzoo's scan]:.1f} | {own[flax.nnx]:.1f} | {own[cudnn]:.1f} |"
      ' {flax} | {cudnn}',
      items,
  )


def large_batches() -> str:
  """The table of many rows and of large heads."""
  rows = pivots.timed('large_batches_h200')
  found = [row for row in rows if row['layer'] == 'LSTM']
  line = [row for row in pivots.timed('cudnn_h200') if row['num_heads'] == 1]
  index = 'layer', 'batch', 'time', 'features'
  case = lambda item: [item[name] for name in index]
  sizes = [case(row) for row in found]
  items = pivots.pivot(found + [r for r in line if case(r) in sizes], index)
  return pivots.sheet(
      found,
      'layer | batch x time x features | `None`, time-major | batch-major |'
      " `'scan'` | cuDNN, float16",
      '`{layer}` | {batch} x {time} x {features} | {own[time-major]:.2f} |'
      ' {own[batch-major]:.2f} | {own[scan]:.2f} | {own[cudnn]:.2f}',
      sorted(items, key=case),
  )


def scanned() -> str:
  """The table of rollouts beside the class that programs copy."""
  rows = pivots.timed('scanned_rnn_h200')
  found = [row for row in rows if row['program'] != 'scan']
  names = {
      'ScannedRNN': 'rnnzoo.ScannedRNN',
      'GRU': 'rnnzoo.GRU without resets',
  }
  for row in found:
    row['name'] = f'{names[row["layer"]]}, {row["dtype"]}'
    if row['program'] == 'flax':
      row['name'] = 'flax nn.scan(GRUCell), where(reset)'
  return pivots.sheet(
      found,
      'program | forward, ms | forward and backward, ms',
      '{name} | {own[forward][ms]:.2f} | {own[forward+backward][ms]:.2f}',
      pivots.pivot(found, ['name'], ['direction']),
  )


def peers() -> str:
  """Tables of layers beside other libraries', one a shape."""
  text, rows = [], pivots.rows('peers_h200')
  for row in rows:
    row['version'] = row['version'] or ''
  for shape in dict.fromkeys(row['shape'] for row in rows):
    found = [row for row in rows if row['shape'] == shape]
    layers = list(dict.fromkeys(row['layer'] for row in found))
    cells = [f'{{own[{layer}]:.2f}}' for layer in layers]
    index = 'program', 'version'
    items = pivots.pivot(found, index, ('layer', 'direction'))
    heads = ' | '.join(['library', *layers])
    line = ' | '.join(['{program} {version}', *cells])
    text.append(pivots.sheet(found, heads, line, items))
  return '\n\n'.join(text)
