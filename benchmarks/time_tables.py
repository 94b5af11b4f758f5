"""Tables of times: layers beside other paths, other libraries and devices."""

from collections.abc import Mapping, Sequence

from benchmarks import pivots


def cpu_peers() -> str:
  """The table of CPU times beside flax and torch."""
  found = [
      r for r in pivots.timed('cpu_peers') if r['direction'] == pivots.BOTH
  ]
  for row in found:
    row['library'] = row['program'].split('.')[0]
  index = 'batch', 'time', 'in_features', 'features', 'layer'
  lines = [
      [
          ' x '.join(map(str, sizes)),
          layer,
          *(
              f'{own[name]["ms"]:.1f}' if name in own else ''
              for name in ('rnnzoo', 'flax', 'torch')
          ),
      ]
      for (*sizes, layer), own in pivots.pivot(
          found, index, ['library']
      ).items()
  ]
  versions = pivots.load('benchmarks/cpu_peers.json')['versions']
  more = [f'{k} {v}' for k, v in versions.items() if k != 'jax']
  heads = 'batch x time x in x features', 'layer', 'rnnzoo, ms'
  heads = *heads, 'flax.nnx, ms', 'torch, ms'
  return pivots.with_source(pivots.table(heads, lines), found, *more)


def compile_time() -> str:
  """The table of seconds that XLA takes to compile a gradient."""
  found = pivots.rows('compile_time')
  heads = 'program', 'all threads, s', 'wall, s', 'fusions', 'loops'
  lines = [
      [
          row['program'],
          f'{row["cpu_s"]:.2f}',
          f'{row["compile_s"]:.2f}',
          row['fusions'],
          row['loops'],
          f'{row["mib"]:.1f}',
      ]
      for row in found
  ]
  return pivots.with_source(
      pivots.table([*heads, 'temporary, MiB'], lines), found
  )


def linear() -> str:
  """The table of linear and diagonal recurrences on a GPU."""
  found = pivots.timed('linear_h200')
  for row in found:
    row['name'] = f'`{row["layer"]}`'
    if row['projection'] == 'with':
      row['name'] += ' layer, with its projection'
    if row['layer'] == 'projection':
      row['name'] = 'that projection alone'

  def share(own):
    ways = [own.get(('pallas', way)) for way in pivots.DIRECTIONS]
    if not any(ways):
      return pivots.both(own, 'dot', 3, '')
    cells = []
    for row in ways:
      fraction = row and row.get('copy_fraction')
      percent = f' ({100 * fraction:.0f} %)' if fraction else ''
      cells.append(f'{row["ms"]:.3f}{percent}' if row else '-')
    return ' / '.join(cells)

  index = 'name', 'batch', 'time', 'features', 'dtype'
  lines = [
      [name, ' x '.join(map(str, sizes)), dtype, share(own)]
      + [pivots.both(own, 'associative_scan', 3, '')]
      for (name, *sizes, dtype), own in pivots.pivot(found, index).items()
  ]
  heads = 'recurrence', 'batch x time x features', 'dtype'
  kernel = "GPU kernel, ms (% of a copy's bandwidth)"
  lines = pivots.table([*heads, kernel, '`associative_scan`, ms'], lines)
  return pivots.with_source(lines, found)


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
  published = data['published_ms']
  lines = _on_gates(given, published['FlashRNN fused, bfloat16'])
  cudnn = published['cuDNN, float16, with projection']
  lines += ['', *_with_projection(whole, cudnn)]
  runs = f'{1 + len(data.get("later", ()))} runs'
  return pivots.with_source(lines, found, runs)


def _published(times: Mapping[str, Sequence[float]], shape: str) -> str:
  pair = times.get(shape)
  return f'{pair[0]:.2f} / {pair[1]:.2f}' if pair else ''


def _on_gates(found: list[pivots.Row], flashrnn) -> list[str]:
  """Returns the table of cells on given gates, a column a layer."""
  index, columns = ('sizes', 'shape', 'dtype'), (
      'layer',
      'program',
      'direction',
  )
  layers = list(dict.fromkeys(row['layer'] for row in found))

  def cell(own, layer, program):
    own = {key[1:]: row for key, row in own.items() if key[0] == layer}
    return pivots.both(own, program, 2, '')

  lines = [
      [
          sizes,
          *(cell(own, layer, 'pallas') for layer in layers),
          cell(own, 'LSTM', 'lax_scan_8'),
          _published(flashrnn, shape),
      ]
      for (sizes, shape, _), own in pivots.pivot(found, index, columns).items()
  ]
  heads = [_HEADS, *(f'`{layer}`' for layer in layers)]
  heads += ['LSTM by hand, `lax.scan` unrolled by 8', 'LSTM of FlashRNN']
  return pivots.table(heads, lines)


def _with_projection(found: list[pivots.Row], cudnn) -> list[str]:
  """Returns the table of layers on x, a column a path."""
  index = 'sizes', 'shape', 'dtype', 'layer'
  lines = []
  for (sizes, shape, dtype, layer), own in pivots.pivot(found, index).items():
    paths = 'pallas', 'scan', 'cudnn'
    cells = [pivots.both(own, path, 2, '') for path in paths]
    same = (layer, dtype) == ('LSTM', 'bfloat16')
    theirs = _published(cudnn, shape) if same else ''
    lines.append([f'`{layer}`', sizes, dtype, *cells, theirs])
  heads = 'layer, with its projection', _HEADS, 'dtype', 'GPU kernel'
  heads = *heads, "`'scan'`", "JAX's cuDNN", "torch's cuDNN, float16"
  return pivots.table(heads, lines)


_HEADS = 'batch x time x heads x head dim'


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
  batches = sorted({row['batch'] for row in found})
  columns = 'batch', 'direction'
  lines = [
      [f'`{layer}`', units, *(pivots.both(own, batch, 2) for batch in batches)]
      for (layer, units), own in sorted(
          pivots.pivot(found, ('layer', 'features'), columns).items()
      )
  ]
  heads = 'layer', 'units', *(f'batch {batch}' for batch in batches)
  return pivots.with_source(pivots.table(heads, lines), found)


def agru_ladder() -> str:
  """The table of one A-GRU, from a Python loop to the kernel."""
  here, found = pivots.timed('agru_ladder'), pivots.timed('dense_h200')
  there = [
      row
      for row in found
      if (row['layer'], row['projection']) == ('AGRU', 'with')
      and row['direction'] == pivots.BOTH
  ]
  for row in here + there:
    names = 'batch', 'time', 'in_features', 'features'
    row['size'] = ' x '.join(str(row[name]) for name in names)
  head = ['batch x time x in x features']
  sizes = list(dict.fromkeys(row['size'] for row in here))
  on_gpu = pivots.pivot(there, ['size'], ['program'])
  gpu = lambda path: [
      f'{own[path]["ms"]:.2f}' if path in own else '' for own in on_gpu.values()
  ]
  lines: list[list[str]] = [['', *('CPU, ms' for _ in sizes)]]
  lines[0] += ['H200, ms' for _ in on_gpu]
  for (program,), own in pivots.pivot(here, ['program'], ['size']).items():
    cells = [f'{own[s]["ms"]:.1f}' if s in own else '-' for s in sizes]
    lines.append([program, *cells, *gpu('scan' if 'rnnzoo' in program else '')])
  lines.append(
      ["`rnnzoo.AGRU`, `'pallas'`", *('' for _ in sizes), *gpu('pallas')]
  )
  heads = [*head, *sizes, *(key for (key,) in on_gpu)]
  return '\n'.join(
      [
          *pivots.table(heads, lines),
          '',
          pivots.source(here)[:-1] + f'; {pivots.source(there)}',
      ]
  )


def processes() -> str:
  """The table of training steps with one process a device."""
  found = pivots.timed('processes_2_h200')
  lines = []
  for alone, own in zip(found[::2], found[1::2], strict=True):
    late = '-'
    if 'late_s' in own:
      late = (
          f'{own["late_s"]:.0f} s; {own["steps"]} steps in'
          f' {own["seconds_with_late"]:.1f} s, same bits'
      )
      if not own['same_bits']:
        raise ValueError(f'{own["layer"]}: a late process changed the result')
    times = f'{alone["ms"]:.2f}', f'{own["ms"]:.2f}'
    cells = own['layer'], *times, f'{own["weak_scaling"]:.2f}', late
    lines.append(cells)
  heads = 'layers', 'alone, ms', 'together, ms', 'weak scaling'
  return pivots.with_source(
      pivots.table([*heads, 'one process late'], lines), found
  )


def devices(name: str) -> str:
  """The table of training steps on several devices."""
  found = pivots.timed(name)
  for row in found:
    row['sizes'] = pivots.heads_of(row)
    if row.get('param_dtype', 'float32') != 'float32':
      row['dtype'] += f', {row["param_dtype"]} parameters'
  many = {2: 'two', 4: 'four'}[max(row['devices'] for row in found)]
  lines = []
  index = 'layer', 'sizes', 'dtype'
  for key, own in pivots.pivot(found, index, ['program']).items():
    ways = [own['Explicit'], own['Auto']]
    lines.append(
        [
            *key,
            f'{own["one device"]["ms"]:.2f}',
            *(f'{row["ms"]:.2f} ({row["weak_scaling"]:.2f})' for row in ways),
            f'{max(row["error"] for row in ways):.1e}',
        ]
    )
  heads = 'layers', 'batch a device x time x heads x head dim', 'dtype'
  heads = *heads, 'one device, ms', f'{many}, Explicit axis'
  heads = *heads, f'{many}, Auto axis', 'difference of an update'
  return pivots.with_source(pivots.table(heads, lines), found)


def linear_over_time(name: str) -> str:
  """The table of a linear recurrence with time over devices."""
  found = pivots.timed(name)
  count = max(row['devices'] for row in found)
  many = {2: 'two', 4: 'four'}[count]
  lines = []
  gates = {'': 'gates', 'resets': 'resets', 'slow': 'slow gates'}
  gates['slow_resets'] = 'slow gates, resets'
  for row in found:
    row['gates'] = gates[row['layer'].removeprefix('linear_scan').strip('_')]
  index, ways = ('gates', 'direction'), ['devices']
  for key, own in pivots.pivot(found, index, ways).items():
    one, all_of = own[1], own[count]
    gb = (f'{row["mib"] * 2**20 / 1e9:.1f}' for row in (one, all_of))
    times = f'{one["ms"]:.2f}', f'{all_of["ms"]:.2f}'
    lines.append([*key, *times, f'{one["ms"] / all_of["ms"]:.2f}', *gb])
  heads = 'a', 'pass', 'one device, ms', many, 'times as fast'
  heads = *heads, 'GB of a device, one', many
  return pivots.with_source(pivots.table(heads, lines), found)


def stacks() -> str:
  """The table of layers in depth, in turn and at the same time."""
  found = pivots.timed('stacks_h200')
  index = 'layer', 'batch', 'time', 'features', 'num_heads'
  lines = []
  for key, own in pivots.pivot(found, index).items():
    name, batch, time, features, heads = key
    depth, layer = name.split(' x ')
    of = lambda program, own=own: [
        own.get((program, d)) for d in pivots.DIRECTIONS
    ]
    turn, once, peer = map(of, ('in turn', 'at once', 'cudnn'))
    speedup = ' / '.join(
        f'{a["ms"] / b["ms"]:.2f}' if b else '-'
        for a, b in zip(turn, once, strict=True)
    )
    gradients = [row for row in (turn[1], once[1]) if row]
    seconds = [row['compile_s'] for row in gradients if 'compile_s' in row]
    lines.append(
        [
            f'{depth} x `{layer}`'
            f' {f"{heads} x {features // heads}" if heads > 1 else features}',
            f'{batch} x {time}',
            *map(_pair, (turn, once)),
            speedup,
            ' -> '.join(f'{s:.1f}' for s in seconds),
            _pair(peer) if all(peer) else '',
        ]
    )
  heads = 'layers', 'batch x time', 'in turn, ms', 'at the same time'
  heads = *heads, 'times as fast', 'compile, s', 'cuDNN'
  return pivots.with_source(pivots.table(heads, lines), found)


def _pair(found: Sequence[pivots.Row | None]) -> str:
  return ' / '.join('-' if row is None else f'{row["ms"]:.3g}' for row in found)


def resets() -> str:
  """The table of a linear recurrence with resets."""
  found = pivots.timed('resets_h100')
  for row in found:
    share = row['layer'].removeprefix('linear_scan').strip('_')
    share = share.removesuffix('_resets').replace('%', ' %')
    row['resets'] = share or 'none'
  index = 'batch', 'time', 'features', 'resets'
  lines = []
  for (*sizes, share), own in pivots.pivot(found, index).items():
    of = lambda program, own=own: [
        own.get((program, d)) for d in pivots.DIRECTIONS
    ]
    before, now = of('before'), of('pallas')
    cells = _pair(before) if all(before) else '', _pair(now)
    lines.append([' x '.join(map(str, sizes)), share, *cells])
  heads = 'batch x time x features', 'steps that reset', 'before, ms'
  return pivots.with_source(pivots.table([*heads, 'now, ms'], lines), found)


def large_batches() -> str:
  """The table of many rows and of large heads."""
  index = 'layer', 'batch', 'time', 'features'
  found = pivots.timed('large_batches_h200')
  line = pivots.timed('cudnn_h200')
  cudnn = pivots.pivot([row for row in line if row['num_heads'] == 1], index)
  lines = []
  for key, own in sorted(pivots.pivot(found, index).items()):
    first, scan = (own[way, pivots.BOTH] for way in ('time-major', 'scan'))
    ways = 'time-major', 'batch-major', 'scan'
    megabytes = (f'{row["mib"] * 2**20 / 1e6:,.0f}' for row in (first, scan))
    lines.append(
        [
            f'`{key[0]}`',
            ' x '.join(map(str, key[1:])),
            *(pivots.both(own, way, 2) for way in ways),
            pivots.both(cudnn.get(key, {}), 'cudnn', 2),
            f'{first["compile_s"]:.1f}',
            *megabytes,
        ]
    )
  heads = 'layer', 'batch x time x features', '`None`, time-major'
  heads = *heads, 'batch-major', "`'scan'`", 'cuDNN, float16', 'compile, s'
  return pivots.with_source(
      pivots.table([*heads, 'MB', "MB, `'scan'`"], lines), found
  )


def small_heads() -> str:
  """The table of gradients of R of small heads, before and after."""
  found = pivots.timed('small_heads_h200')
  for row in found:
    row['sizes'] = pivots.heads_of(row)
  names = {'by head': 'copied by head', 'in place': 'in place'}
  lines = []
  for key, own in pivots.pivot(found, ('sizes', 'projection')).items():
    cells = [
        (pivots.both(own, p, 2), f'{own[p, pivots.BOTH]["mib"]:,}')
        for p in names
    ]
    lines.append([*key, *sum(cells, ())])
  heads = ['batch x time x heads x head dim', 'projection']
  for name in names.values():
    heads += [f'{name}, ms', 'MiB']
  return pivots.with_source(pivots.table(heads, lines), found)


def scanned() -> str:
  """The table of rollouts beside the class that programs copy."""
  found = pivots.timed('scanned_rnn_h200')
  lines = []
  names = {
      'ScannedRNN': 'rnnzoo.ScannedRNN',
      'GRU': 'rnnzoo.GRU without resets',
  }
  for row in found:
    row['name'] = f'{names[row["layer"]]}, {row["dtype"]}'
    if row['program'] == 'flax':
      row['name'] = 'flax nn.scan(GRUCell), where(reset)'
  found = [row for row in found if row['program'] != 'scan']
  for (program,), own in pivots.pivot(found, ['name'], ['direction']).items():
    cells = (
        f'{own[d]["ms"]:.2f}' if d in own else '-' for d in pivots.DIRECTIONS
    )
    lines.append([program, *cells])
  heads = 'program', 'forward, ms', 'forward and backward, ms'
  return pivots.with_source(pivots.table(heads, lines), found)


def peers() -> str:
  """Tables of layers beside other libraries', one a shape."""
  text = []
  for (shape,), cells in pivots.pivot(
      pivots.rows('peers_h200'), ['shape']
  ).items():
    del cells
    found = [row for row in pivots.rows('peers_h200') if row['shape'] == shape]
    layers = list(dict.fromkeys(row['layer'] for row in found))
    index, columns = ('program', 'version'), ('layer', 'direction')
    lines = [
        [f'{name} {version or ""}', *(pivots.both(own, x, 2) for x in layers)]
        for (name, version), own in pivots.pivot(found, index, columns).items()
    ]
    text.append(
        pivots.with_source(pivots.table(['library', *layers], lines), found)
    )
  return '\n\n'.join(text)
