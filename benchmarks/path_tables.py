"""Tables of paths over time: memory, iterations, and the path of `None`."""

from typing import Any

from benchmarks import pivots


def memory() -> str:
  """The table of what is kept between forward and backward."""
  found = _memory('memory_cpu', '4000_steps')
  quoted = {'scan': "'scan'"}
  lines = [
      [
          f'`{row["layer"]}`',
          f'`{quoted.get(row["program"], row["program"])}`',
          f'{row["mib"]:.0f}',
          f'{row["ms"]:.0f}',
      ]
      for row in found
  ]
  return pivots.with_source(
      pivots.table(['layer', 'path', 'MiB', 'ms'], lines), found
  )


def inner_steps() -> str:
  """The table of the iRevRNN over its inner steps."""
  found = _memory('memory_cpu', 'inner_steps')
  paths = list(dict.fromkeys(row['program'] for row in found))
  lines = []
  for (name,), own in pivots.pivot(found, ['layer'], ['program']).items():
    pairs = [(f'{own[p]["mib"]:.0f}', f'{own[p]["ms"]:.0f}') for p in paths]
    lines.append([name.split('_')[1], *sum(pairs, ())])
  heads = sum(((f"`'{p}'`, MiB", 'ms') for p in paths), ('inner steps',))
  return pivots.with_source(pivots.table(heads, lines), found)


def _memory(name: str, shape: str | None = None) -> list[pivots.Row]:
  """Returns rows of the suite 'memory', of a shape if one is named."""
  return [row for row in pivots.timed(name) if shape in (None, row['shape'])]


# MB, and sequences a second: irevrnn's README, on an RTX 3080.
_PUBLISHED_STACKS = (245, 1250), (892, 580), (3245, 140)


def irevrnn_stacks() -> str:
  """The table of the cases that irevrnn's authors publish."""
  found = [
      row
      for row in _memory('memory_cpu')
      if row['shape'].endswith(' x IRevRNN')
  ]
  lines = [
      [
          f'{row["shape"].split()[0]} x {row["features"]}',
          *(row['time'], row['batch']),
          f'{row["mib"] * 2**20 / 1e6:,.0f}',
          f'{1e3 * row["batch"] / row["ms"]:,.0f}',
          *(f'{number:,}' for number in published),
      ]
      for row, published in zip(found, _PUBLISHED_STACKS, strict=True)
  ]
  heads = 'layers x features', 'steps', 'batch', 'MB', 'sequences/s'
  heads = *heads, 'published: MB', 'sequences/s'
  return pivots.with_source(pivots.table(heads, lines), found)


KEEP = ('gates', 'carries')


def kernel_memory() -> str:
  """The table of what GPU kernels keep between the two passes."""
  found = pivots.timed('memory_gpu')
  for row in found:
    *above, layer = row['layer'].split(' x ')
    heads = row['features'] if layer == 'IndRNN' else row['num_heads']
    row['sizes'] = f'{row["batch"]} x {row["time"]:,} x {row["features"]}'
    row['sizes'] += f', {heads}'
    row |= {'name': f'`{layer}`', 'layers': (above or [1])[0]}
  lines = []
  index = 'name', 'sizes', 'dtype', 'layers'
  for key, own in pivots.pivot(found, index, ['program']).items():
    cells = [
        (f'{row["kept_mib"]:.0f}', f'{row["mib"]:.0f}', f'{row["ms"]:.2f}')
        for row in (own[f"Pallas(keep='{keep}')"] for keep in KEEP)
    ]
    lines.append([*key, *sum(cells, ())])
  heads = ['layer', 'batch x time x features, heads', 'dtype', 'layers']
  for keep in KEEP:
    heads += [f"`keep='{keep}'`: MiB kept", 'temporary', 'ms']
  return pivots.with_source(pivots.table(heads, lines), found)


def newton() -> str:
  """The table of Newton iterations at initialisation."""
  found = pivots.rows('newton_cpu')
  lines = []
  for row in found:
    least = row['least_iterations']
    lines.append(
        [
            f'`{row["layer"]}`',
            '-' if least is None else least,
            row['iterations'],
            f'{row["sensitivity"]:.0e}',
            f'{row["lyapunov"]:.2g}',
            f'{row["in_turn"]:,}{", all" if row["fell_back"] else ""}',
        ]
    )
  heads = 'layer', 'least iterations, K*', 'iterations'
  heads = *heads, 'error of one rounding a step', 'largest Lyapunov exponent'
  return pivots.with_source(
      pivots.table([*heads, 'steps in turn'], lines), found
  )


def newton_trained() -> str:
  """The table of Newton iterations before and after training."""
  found = pivots.rows('newton_trained')
  lines = []
  for (layer,), own in pivots.pivot(
      found, ['layer'], ('time', 'trained', 'dtype')
  ).items():
    cells = []
    for row in own.values():
      words = f'{row["iterations"]} ({row["in_turn"]:,})'
      cells.append(words + ', in turn' if row['fell_back'] else words)
    accuracy = f'{100 * row["test_accuracy"]:.1f} %'
    lines.append([f'`{layer}`', accuracy, *cells, f'{row["lyapunov"]:.2g}'])
  heads = 'layer', 'test accuracy', '37 steps', '1,008 steps, untrained'
  heads = *heads, 'trained', 'trained, float64', 'largest Lyapunov exponent'
  return pivots.with_source(pivots.table(heads, lines), found)


def newton_h200() -> str:
  """The table of paths over time on a GPU, Newton's among them."""
  found = pivots.timed('newton_h200')
  paths = 'associative_scan', 'pallas', 'scan'
  lines = [
      [f'`{layer}`', *(pivots.both(own, path, 2) for path in paths)]
      for (layer,), own in pivots.pivot(found, ['layer']).items()
  ]
  heads = 'layer', *(f"`'{path}'`" for path in paths)
  return pivots.with_source(pivots.table(heads, lines), found)


# Names of layers in the table of long sequences.
_LONG = {
    'SLSTM': 'sLSTM',
    'IndRNN': 'IndRNN, relu',
    'IndRNN_tanh': 'IndRNN, tanh',
    'IndRNN_relu_small': 'IndRNN, relu, x / 100',
    'IndRNN_tanh_small': 'IndRNN, tanh, x / 100',
}


def newton_long(name: str) -> str:
  """The table of long sequences, all steps at once beside a kernel."""
  old = pivots.timed(name, 'before')
  found = pivots.timed(name) + old
  lines = []
  index = 'layer', 'batch', 'time', 'features', 'num_heads'
  for (layer, batch, time, features, heads), own in pivots.pivot(
      found, index
  ).items():
    if layer == 'linear_scan':
      continue
    if layer.startswith('IndRNN'):
      heads = features
    kernel, at_once = (
        [own.get((path, way), {}) for way in pivots.DIRECTIONS]
        for path in ('pallas', 'associative_scan')
    )
    cell = lambda row: f'{row["ms"]:#.3g}' if row else '-'
    both_run = kernel[0] and at_once[0]
    ratio = f'{kernel[0]["ms"] / at_once[0]["ms"]:.1f}' if both_run else '-'
    mib = f'{at_once[0]["mib"]:.0f}' if 'mib' in at_once[0] else '-'
    single = cell(own.get(('single steps', pivots.FORWARD)))
    lines.append(
        [
            _LONG.get(layer, layer),
            f'{batch} x {time:,} x {features}, {heads}',
            *(cell(kernel[0]), cell(at_once[0]), ratio, mib),
            *(cell(kernel[1]), cell(at_once[1])),
            *([single] if old else []),
        ]
    )
  heads = ['layer', 'batch x time x units, heads', "`'pallas'`"]
  heads += ["`'associative_scan'`", 'times faster', 'MiB']
  heads += ["with backward, `'pallas'`", "`'associative_scan'`"]
  heads += ['single steps, before'] if old else []
  return pivots.with_source(pivots.table(heads, lines), found)


def batches() -> str:
  """The table of the path that `None` takes, beside 'scan'."""
  found = [
      row for row in pivots.rows('batches_h100') if row['program'] != 'cudnn'
  ]
  order = 'layer', 'num_heads', 'features', 'batch', 'time', 'shape'
  cudnn = _cudnn('batches_h100')
  lines = []
  for key, own in sorted(pivots.pivot(found, order).items()):
    taken = {k[1]: r for k, r in own.items() if 'of_best' in r}
    scan = {k[1]: r for k, r in own.items() if k[0] == 'scan' and 'ms' in r}
    if len(taken) < 2 or len(scan) < 2:  # It failed, or the time was over.
      continue
    ways = taken[pivots.BOTH], scan[pivots.BOTH]
    path = ways[0]['program']
    lines.append(
        [
            f'`{key[0]}`',
            pivots.size(ways[0]),
            f"`'{path}'`",
            pivots.both(own, path, 2),
            ' / '.join(_of_best(taken[k]) for k in pivots.DIRECTIONS),
            pivots.both(own, 'scan', 2),
            f'{ways[1]["ms"] / ways[0]["ms"]:.1f}',
            pivots.both(cudnn.get((key[0], key[-1]), {}), 'cudnn', 2),
            *(f'{row["compile_s"]:.0f}' for row in ways),
            *(f'{row["mib"]:,.0f}' for row in ways),
        ]
    )
  heads = 'layer', 'batch x time x features', 'path of `None`', 'ms'
  heads = *heads, 'of the best', "`'scan'`, ms", 'times faster', 'cuDNN, ms'
  heads = *heads, 'compile, s', "`'scan'`", 'MiB', "`'scan'`"
  lines = [*pivots.table(heads, lines), '', _slower(found, cudnn)]
  return pivots.with_source(lines, found)


def _cudnn(name: str) -> dict[tuple[Any, ...], dict[Any, pivots.Row]]:
  """Returns the times of torch's cuDNN by layer and shape."""
  found = [row for row in pivots.timed(name) if row['program'] == 'cudnn']
  found = [row for row in found if row['dtype'] == 'float16']
  return pivots.pivot(found, ('layer', 'shape'))


def lengths() -> str:
  """The table of linear recurrences by length."""
  found = pivots.rows('lengths_h200')
  paths = 'pallas', 'associative_scan', 'scan'
  lines = []
  order = 'layer', 'batch', 'time'
  key_of = lambda item: (item[0][0] != 'linear_scan', *item[0])
  for key, own in sorted(pivots.pivot(found, order).items(), key=key_of):
    taken = {k[1]: row for k, row in own.items() if 'of_best' in row}
    if not taken:
      continue
    ways = [taken[k] for k in pivots.DIRECTIONS if k in taken]
    lines.append(
        [
            f'`{key[0]}`',
            f'{key[1]} x {key[2]:,}',
            f"`'{ways[0]['program']}'`",
            *(pivots.both(own, path, 3) for path in paths),
            ' / '.join(map(_of_best, ways)),
            ' / '.join(f'{row["with_copy_ms"]:.3f}' for row in ways),
        ]
    )
  heads = 'recurrence', 'batch x time', 'path of `None`'
  heads = *heads, *(f"`'{path}'`" for path in paths), 'of the best'
  lines = [
      *pivots.table([*heads, 'with a copy'], lines),
      '',
      _slower(found, {}),
  ]
  return pivots.with_source(lines, found)


def _of_best(row: pivots.Row) -> str:
  """Returns a time as a multiple of the best path's, bold above 5 %."""
  text = f'{row["of_best"]:.2f}'
  return f'**{text}**' if row['of_best'] > pivots.SLOWER else text


def _slower(found: list[pivots.Row], cudnn: dict[Any, Any]) -> str:
  """Returns where `None` takes which path, and where it is not the fastest."""
  taken = [row for row in found if 'of_best' in row]
  name = lambda row: f'{row["layer"]} {pivots.size(row)}'

  def programs(among: list[pivots.Row], key: str) -> str:
    """Returns how many are slower, and which, the slowest first."""
    over = [row for row in among if row.get(key, 0) > pivots.SLOWER]
    over.sort(key=lambda row: -row[key])
    if not over:
      return f'none of {len(among)} programs'
    names = [f'{name(row)} {row["direction"]} {row[key]:.2f}' for row in over]
    rest = f' and {len(names) - 12} more' if len(names) > 12 else ''
    shown = ', '.join(names[:12]) + rest
    return f'{len(over)} of {len(among)} programs: {shown}'

  by_path: dict[str, dict[str, None]] = {}
  for row in taken:
    by_path.setdefault(row['program'], {})[name(row)] = None
  most = max(by_path, key=lambda path: len(by_path[path]))
  text = ''.join(
      f"`None` takes `'{path}'` at {', '.join(names)}. "
      for path, names in by_path.items()
      if path != most
  )
  where = 'at all others' if len(by_path) > 1 else 'at all of these'
  text += (
      f"`None` takes `'{most}'` {where}. Another path is more than 5 % faster"
      f' in {programs(taken, "of_best")}. `None` is more than 5 % slower than'
      f" `'scan'` in {programs(taken, 'of_scan')}."
  )
  if cudnn:
    beside = []
    for row in taken:
      own = cudnn.get((row['layer'], row['shape']), {})
      if line := own.get(('cudnn', row['direction'])):
        beside.append(row | {'of_cudnn': row['ms'] / line['ms']})
    text += f' cuDNN is more than 5 % faster in {programs(beside, "of_cudnn")}.'
  return text
