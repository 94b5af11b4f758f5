"""Tables of paths over time: memory, iterations, and the path of `None`."""

from collections.abc import Sequence

from benchmarks import pivots

Row = pivots.Row


def kernel_memory() -> str:
  """The table of arrays that GPU kernels keep between the two passes."""
  rows = pivots.timed('memory_gpu')
  found = [row for row in rows if row['dtype'] == 'bfloat16']
  for row in found:
    *above, layer = row['layer'].split(' x ')
    heads = row['features'] if layer == 'IndRNN' else row['num_heads']
    row |= {'name': layer, 'layers': (above or [1])[0], 'heads': heads}
    row['keep'] = row['program'].split("'")[1]
  index = 'name', 'batch', 'time', 'features', 'heads', 'dtype', 'layers'
  heads, line = 'layer | batch x time x features, heads | dtype | layers', (
      '`{name}` | {batch} x {time:,} x {features}, {heads} | {dtype} | {layers}'
  )
  for keep in ('gates', 'carries'):
    heads += f" | `keep='{keep}'`: MiB kept | temporary | ms"
    fields = 'kept_mib]:.0f', 'mib]:.0f', 'ms]:.2f'
    line += ''.join(f' | {{own[{keep}][{field}}}' for field in fields)
  items = pivots.pivot(found, index, ['keep'])
  return pivots.sheet(found, heads, line, items)


def assembled() -> str:
  """The table of kernels compiled for cards that were not there."""
  found = pivots.rows('assembled')
  families: dict[str, Row] = {}
  for row in found:
    family = families.setdefault(row['family'], {'family': row['family']})
    cell = family.setdefault(row['capability'], [])
    cell.append(row)
  capabilities = sorted({row['capability'] for row in found}, key=float)

  def text(rows: Sequence[Row]) -> str:
    right = [row for row in rows if row['status'] == 'ok']
    refused = len(rows) - len(right)
    spill = max(row['spill_bytes'] for row in right)
    return f'{len(right)}, {spill}' + f', {refused} refused' * bool(refused)

  lines = [
      [family['family'], *(text(family[each]) for each in capabilities)]
      for family in families.values()
  ]
  heads = ['kernels', *capabilities]
  return pivots.with_source(pivots.table(heads, lines), found)


def newton() -> str:
  """The table of Newton iterations at initialisation."""
  found = [row for row in pivots.rows('newton_cpu') if 'iterations' in row]
  found = [row for row in found if row['direction'] == pivots.FORWARD]
  for row in found:
    row['all'] = ', all' if row['fell_back'] else ''
    least = row['least_iterations']
    row['least'] = '-' if least is None else least
  return pivots.sheet(
      found,
      'layer | least iterations, K* | iterations | error of one rounding a step'
      ' | largest Lyapunov exponent | steps in turn',
      '`{layer}` | {least} | {iterations} | {sensitivity:.0e} |'
      ' {lyapunov:.2g} | {in_turn:,}{all}',
      found,
  )


# Names of layers in the table of long sequences.
_LONG = {
    'SLSTM': 'sLSTM',
    'IndRNN': 'IndRNN, relu',
    'IndRNN_tanh': 'IndRNN, tanh',
    'IndRNN_relu_small': 'IndRNN, relu, x / 100',
    'IndRNN_tanh_small': 'IndRNN, tanh, x / 100',
}


def newton_long() -> str:
  """The table of long sequences, all steps at once beside a kernel."""
  found = pivots.timed('newton_long_h200')
  index = 'layer', 'batch', 'time', 'features', 'num_heads'
  items = pivots.pivot(found, index)
  items = [item for item in items if item['layer'] != 'linear_scan']
  for item in items:
    if item['layer'].startswith('IndRNN'):
      item['num_heads'] = item['features']
    item['layer'] = _LONG.get(item['layer'], item['layer'])
    kernel, at_once = (
        item['own'][path].get(pivots.FORWARD, {})
        for path in ('pallas', 'associative_scan')
    )
    both_run = kernel and at_once
    ratio = f'{kernel["ms"] / at_once["ms"]:.1f}' if both_run else '-'
    mib = f'{at_once["mib"]:.0f}' if 'mib' in at_once else '-'
    item |= {'ratio': ratio, 'mib': mib}
  heads = (
      "layer | batch x time x units, heads | `'pallas'` |"
      " `'associative_scan'` | times faster | MiB | with backward, `'pallas'` |"
      " `'associative_scan'`"
  )
  line = (
      '{layer} | {batch} x {time:,} x {features}, {num_heads} |'
      ' {own[pallas][forward][ms]:#.3g} |'
      ' {own[associative_scan][forward][ms]:#.3g} | {ratio} | {mib} |'
      ' {own[pallas][forward+backward][ms]:#.3g} |'
      ' {own[associative_scan][forward+backward][ms]:#.3g}'
  )
  return pivots.sheet(found, heads, line, items)


def lengths() -> str:
  """The table of linear recurrences by length: some lines."""
  found = pivots.rows('lengths_h200')
  index = 'layer', 'batch', 'time'
  items = []
  for item in pivots.pivot(found, index):
    rows = [row for own in item['own'].values() for row in own.values()]
    ways = [row for row in rows if 'of_best' in row]
    ways.sort(key=lambda row: pivots.DIRECTIONS.index(row['direction']))
    shown = item['layer'] != 'MinLSTM' and item['time'] in (1024, 16384)
    if shown and ways:
      item['path'] = ways[0]['program']
      item['best'] = ' / '.join(f'{row["of_best"]:.2f}' for row in ways)
      item['copy'] = ' / '.join(f'{row["with_copy_ms"]:.3f}' for row in ways)
      items.append(item)
  order = lambda item: [item[name] for name in index]
  items.sort(key=lambda item: (item['layer'] != 'linear_scan', order(item)))
  return pivots.sheet(
      found,
      "recurrence | batch x time | path of `None` | `'pallas'` |"
      " `'associative_scan'` | `'scan'` | of the best | with a copy",
      "`{layer}` | {batch} x {time:,} | `'{path}'` | {own[pallas]:.3f} |"
      ' {own[associative_scan]:.3f} | {own[scan]:.3f} | {best} | {copy}',
      items,
  )
