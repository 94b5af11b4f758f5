"""Rewrites every result in benchmarks/ into the one layout of rows, once.

A header (date, commit, device, versions and facts of the run) and rows: fields
of the case, program, direction, ms, low_ms, high_ms, mib, compile_s, error,
status, and facts of the row.
"""

import json
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
MIB = 2**20
DIRECTIONS = ('forward', 'forward+backward')
HEAD = (
    'suite',
    'about',
    'note',
    'command',
    'date',
    'commit',
    'device',
    'host_cores',
    'load_average',
    'versions',
    'xla_flags',
    'copy',
)
CASE = (
    'part',
    'suite',
    'case',
    'kernel',
    'layer',
    'layers',
    'shape',
    'batch',
    'time',
    'in_features',
    'features',
    'num_heads',
    'head_dim',
    'dtype',
    'param_dtype',
    'projection',
    'inner_steps',
    'devices',
    'processes',
)
MEASURED = (
    'program',
    'direction',
    'ms',
    'low_ms',
    'high_ms',
    'mib',
    'compile_s',
    'error',
    'status',
    'reason',
)
RENAMED = {
    'implementation': 'program',
    'path': 'program',
    'kind': 'program',
    'setting': 'program',
    'gradient': 'program',
    'median_ms': 'ms',
    'disagreement': 'error',
    'difference': 'error',
    'differences': 'error',
    'heads': 'num_heads',
    'cell': 'layer',
    'stack': 'layer',
    'temp_mib': 'mib',
    'what': 'note',
}
BYTES = {
    'temp_bytes': 'mib',
    'argument_bytes': 'argument_mib',
    'output_bytes': 'output_mib',
    'peak_bytes': 'peak_mib',
    'kept_bytes': 'kept_mib',
}
SIZES = {'B': 'batch', 'T': 'time', 'I': 'in_features', 'F': 'features'}


def plain(row):
  """Returns a row with the layout's names."""
  found = {}
  for key, value in row.items():
    if key in BYTES:
      found[BYTES[key]] = None if value is None else value / MIB
    elif key in ('temp_mb',):
      found['mib'] = value * 1e6 / MIB
    elif key == 'sizes':
      found |= {SIZES[k]: v for k, v in value.items()}
    elif key == 'shape' and isinstance(value, dict):
      found |= value
    elif RENAMED.get(key) == 'error' and 'error' in row:
      found[key] = value
    else:
      found[RENAMED.get(key, key)] = value
  return found


def ordered(row):
  """Returns a row in the layout's order; a status is given to all."""
  row = {'status': 'ok'} | row
  if row.get('reason') == '':
    del row['reason']
  first = [key for key in (*CASE, *MEASURED) if key in row]
  return {
      **{k: row[k] for k in first},
      **{k: v for k, v in row.items() if k not in first},
  }


def head(data):
  """Returns the header."""
  found = {k: v for k, v in data.items() if k != 'rows'}
  device = found.pop('device', None)
  found['device'] = device if isinstance(device, dict) else {'kind': device}
  versions = dict(found.pop('versions', {}))
  if 'jax' in found:
    versions['jax'] = found.pop('jax')
  found['versions'] = versions
  if 'cores' in found:
    found['host_cores'] = found.pop('cores')
  first = [key for key in HEAD if key in found]
  return {
      **{k: found[k] for k in first},
      **{k: v for k, v in found.items() if k not in first},
  }


def pairs(row, names):
  """Yields a row a program and direction of [forward, both] milliseconds."""
  rest = {k: v for k, v in row.items() if k not in names}
  for key, program in names.items():
    for direction, ms in zip(DIRECTIONS, row.get(key, ()), strict=False):
      yield rest | {'program': program, 'direction': direction, 'ms': ms}


def part(name, rows):
  """Returns rows of part."""
  return [{'part': name} | row for row in rows]


def with_shapes(data):
  """Rows with the sizes of their shapes."""
  shapes = data.pop('shapes', {})
  rows = [shapes.get(str(row.get('shape')), {}) | row for row in data['rows']]
  return rows


def suites(data):
  """Returns rows of suites."""
  rows = with_shapes(data)
  if 'cudnn' in data:  # The torch library's times, a result of their own.
    line = data.pop('cudnn')
    sizes = {
        row['shape']: {
            k: row[k]
            for k in ('batch', 'time', 'in_features', 'features', 'num_heads')
        }
        for row in rows
    }
    own = {'date': line['date'], 'commit': line['commit']}
    data['versions'] |= line['versions']
    rows += [sizes[row['shape']] | row | own for row in line['rows']]
  for name in ('variants', 'memory'):
    rows += part(name, data.pop(name, []))
  for row in data.pop('training', []):
    rows.append({'part': 'training'} | row)
  return rows


def variants(data):
  """Returns rows of variants."""
  rows = []
  for row in suites(data):
    if row.get('part') == 'variants':
      rest = {k: v for k, v in row.items() if k not in ('one_ms',)}
      rows.append(rest)
      if 'one_ms' in row:
        alone = {
            k: v
            for k, v in row.items()
            if k
            not in (
                'one_ms',
                'median_ms',
                'low_ms',
                'high_ms',
                'weak_scaling',
                'kind',
                'sums',
            )
        }
        rows.append(alone | {'program': 'one device', 'ms': row['one_ms']})
    else:
      rows.append(row)
  return rows


def compile_time(data):
  """Returns rows of compile time."""
  batch, time, in_features, features = data.pop('sizes')
  own = {
      'batch': batch,
      'time': time,
      'in_features': in_features,
      'features': features,
  }
  rows = []
  for row in data['rows']:
    data['device'], data['jax'] = row.pop('device'), row.pop('jax')
    row['compile_s'] = row.pop('wall_s')
    rows.append(own | row)
  return rows


def ladder(data):
  """Returns rows of ladder."""
  return [
      {'ms' if k == 'processor_ms' else k: v for k, v in row.items()}
      for row in data['rows']
  ]


def large_batches(data):
  """Returns rows of large batches."""
  rows = []
  for row in data['rows']:
    ways = ('time-major', 'batch-major', 'scan')
    rest = {k: v for k, v in row.items() if k not in ways}
    for way in ways:
      if way in row:
        own = dict(row[way])
        own['path_taken'] = own.pop('path')
        rows.append(rest | {'program': way} | own)
  return rows


def stacks(data):
  """Returns rows of stacks."""
  rows = []
  for row in data['rows']:
    names = ('batch', 'time', 'in_features', 'features', 'num_heads', 'layers')
    rest = {
        'layer': row['layer'],
        **dict(zip(names, row['shape'], strict=True)),
    }
    rest['direction'] = row['direction']
    for way in ('in turn', 'at once'):
      if way in row:
        own = {'error': row['differences']} if way == 'at once' else {}
        rows.append(rest | {'program': way} | row[way] | own)
    if 'cudnn_ms' in row:
      rows.append(rest | {'program': 'cudnn', 'ms': row['cudnn_ms']})
  return rows


def over_time(data):
  """Returns rows of over time."""
  batch, time, features = data.pop('shape')
  dtype = data.pop('dtype')
  count = data['device']['count']
  rows = []
  for row in data['rows']:
    for n in (1, count):
      own = {
          'case': row['case'],
          'batch': batch,
          'time': time,
          'features': features,
          'dtype': dtype,
          'devices': n,
          'program': 'linear_scan',
          'direction': row['direction'],
          'ms': row[f'ms_{n}'],
          'mib': row[f'gb_{n}'] * 1e9 / MIB,
      }
      if n > 1:
        own |= {
            'error': max(row['differences']),
            'errors': row['differences'],
            'times': row['times'],
        }
      rows.append(own)
  return rows


def memory(data):
  """Returns rows of memory."""
  rows = []
  machine = {}
  for name, own in list(data.items()):
    sizes = own.pop('sizes')
    facts = {k: own[k] for k in ('date', 'commit')}
    case = {}
    if name in ('settings', 'inner_steps'):
      case = dict(
          zip(('batch', 'time', 'in_features', 'features'), sizes, strict=True)
      )
    if name == 'stacks':
      case = {'layer': 'IRevRNN', 'in_features': sizes, 'setting': 'scan'}
    if name == 'inner_steps':
      case['layer'] = 'IRevRNN'
    for row in own.pop('rows'):
      if name == 'kernels':
        row['setting'] = row.pop('keep')
      rows.append(
          {'part': name, 'dtype': 'float32', 'direction': 'forward+backward'}
          | case
          | row
          | facts
      )
    machine = machine or own
    data.pop(name)
  data |= machine
  return rows


def newton_long(data):
  """Returns rows of newton long."""
  rows = list(data['rows'])
  if 'before' in data:
    before = data.pop('before')
    rows += [
        {'part': 'before', 'commit': before['commit']} | row
        for row in before['rows']
    ]
    data['note'] += f' before: {before["note"]}'
  rows += part('again', data.pop('again', []))
  found = []
  for row in rows:
    gradient = row.pop('gradient', None)
    found.append({'dtype': 'float32'} | row | {'direction': 'forward'})
    if gradient:
      keys = ('case', 'batch', 'time', 'features', 'heads', 'path', 'commit')
      same = {k: row[k] for k in keys if k in row}
      found.append(
          {'dtype': 'float32'}
          | same
          | gradient
          | {'direction': 'forward+backward'}
      )
  return found


def newton_trained(data):
  """Returns rows of newton trained."""
  rows = []
  for row in data['rows']:
    cases = row.pop('cases')
    for case in cases:
      own = dict(case)
      own['time'] = own.pop('steps')
      rows.append(row | {'program': 'associative_scan'} | own)
  return rows


def processes(data):
  """Returns rows of processes."""
  rows = []
  for row in data['rows']:
    data['device'] = {'kind': row.pop('device'), 'count': row['processes']}
    alone, together = row.pop('alone_ms'), row.pop('together_ms')
    own = {k: row[k] for k in ('stack', 'shape', 'dtype', 'processes', 'steps')}
    rows += [
        own | {'program': 'alone', 'ms': alone},
        row | {'program': 'together', 'ms': together},
    ]
  return rows


def resets(data):
  """Returns rows of resets."""
  dtype = data.pop('dtype')
  rows = []
  for row in data['rows']:
    names = ('batch', 'time', 'features')
    row |= dict(zip(names, row.pop('shape'), strict=True))
    row['dtype'] = dtype
    rows += pairs(row, {'before_ms': 'before', 'ms': 'pallas'})
  return rows


def scanned(data):
  """Returns rows of scanned."""
  sizes = {'batch': 128, 'time': 128, 'in_features': 256, 'features': 256}
  rows = [sizes | row for row in data['rows']]
  return rows + part('later', data.pop('later'))


def step(data):
  """Returns rows of step."""
  sizes = data.pop('sizes')
  rows = [sizes | row for row in data['rows']]
  rows += part('packed', [sizes | row for row in data.pop('packed')])
  return rows


def checks(data):
  """Returns rows of checks."""
  rows = list(data['rows'])
  for row in data.pop('timed', []):
    before = row.pop('before_ms')
    rows.append({'part': 'timed', 'program': 'now'} | row)
    rest = {k: v for k, v in row.items() if k != 'median_ms'}
    rows.append({'part': 'timed', 'program': 'before'} | rest | {'ms': before})
  return rows


def low_tiles(data):
  """Returns rows of low tiles."""
  rows = []
  for row in data['rows']:
    seconds, mb = row.pop('compile_s'), row.pop('temp_mb')
    names = {'pieces_ms': 'pieces', 'tiles_ms': 'tiles'}
    found = list(pairs(row, names))
    for i, both in enumerate(found[1::2]):
      both |= {'compile_s': seconds[i], 'temp_mb': mb[i]}
    rows += found
  return rows


def on_chip(data):
  """Returns rows of on chip."""
  rows = []
  for row in data['rows']:
    rows += pairs(row, {'pieces_ms': 'pieces', 'tiles_ms': 'tiles'})
  for row in data.pop('handoffs'):
    for batch in (128, 256):
      own = {
          'part': 'handoffs',
          'program': row['variant'],
          'batch': batch,
          'ms': row[f'ms_{batch}'],
      }
      rows += pairs(own, {'ms': row['variant']})
  return rows


def tuning_dense(data):
  """Returns rows of tuning dense."""
  rows = []
  for group in data.pop('measurements'):
    unit = group.pop('unit')
    if 'device' in group:
      kind, jax = group.pop('device').split(', jax ')
      group |= {'device': kind, 'jax': jax}
    for row in group.pop('rows'):
      row = dict(row)
      if 'ms' not in row and 'time' in row:
        key = 'ms' if unit == 'ms' else 'us_per_step'
        row[key] = row.pop('time')
      for name in ('exchange', 'config', 'cut'):
        if name in row and 'program' not in row:
          row['program'] = row.pop(name)
      rows.append(group | row)
  return rows


def tuning_streaming(data):
  """Returns rows of tuning streaming."""
  rows = []
  for group in data['rows']:
    measured = group.pop('measured')
    for row in measured:
      row = dict(row)
      if 'shape' in row:
        names = ('batch', 'time', 'features')
        row |= dict(zip(names, row.pop('shape'), strict=True))
      rows.append(
          {'part': group['name']}
          | {k: v for k, v in group.items() if k != 'name'}
          | row
      )
  return rows


def tuning_large(data):
  """Returns rows of tuning large."""
  rows = list(data['rows'])
  for row in rows:
    if 'kernels' in row:
      row['kernel'] = row.pop('kernels')
  return rows + part('kernels', data.pop('kernels', []))


SPECIAL = {
    'batches': suites,
    'cudnn': suites,
    'dense_h200': suites,
    'devices': variants,
    'lengths': suites,
    'linear_h200': suites,
    'newton_cpu': suites,
    'newton_h200': suites,
    'peers': suites,
    'compile_time': compile_time,
    'agru_ladder': ladder,
    'large_batches': large_batches,
    'stacks': stacks,
    'linear_over_time': over_time,
    'memory': memory,
    'newton_long': newton_long,
    'newton_trained': newton_trained,
    'processes': processes,
    'resets': resets,
    'scanned_rnn': scanned,
    'step': step,
    'checks': checks,
    'tuning_low_tiles': low_tiles,
    'tuning_on_chip': on_chip,
    'tuning_dense_h200': tuning_dense,
    'tuning_streaming': tuning_streaming,
    'tuning_large': tuning_large,
}
# Files that hold no times of programs: conversions, errors over time, scores.
KEPT = ('conversions', 'error_over_time')


def write(result, path):
  """Writes one row a line."""
  rest = {k: v for k, v in result.items() if k != 'rows'}
  text = json.dumps(rest, indent=2).removesuffix('\n}')
  rows = ',\n'.join('    ' + json.dumps(row) for row in result['rows'])
  path.write_text(f'{text},\n  "rows": [\n{rows}\n  ]\n}}\n')


def main():
  """Returns rows of main."""
  for path in sorted(HERE.glob('*.json')):
    data = json.loads(path.read_text())
    if isinstance(data, list) or path.stem in KEPT:
      continue
    special = [f for name, f in SPECIAL.items() if path.stem.startswith(name)]
    if path.stem == 'agru_ablations':
      rows = data['rows']
    else:
      rows = special[-1](data) if special else data['rows']
      rows = [ordered(plain(row)) for row in rows]
    write(head(data) | {'rows': rows}, path)


if __name__ == '__main__':
  main()
