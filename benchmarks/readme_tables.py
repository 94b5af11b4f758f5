"""Writes the tables of README.md and docs/ from the JSON files in benchmarks/.

That of docs/libraries.md comes from docs/libraries.json.

  python benchmarks/readme_tables.py

`TABLES` says which document has which table. A table stands between
`<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

import ast
import functools
import json
import pathlib
import re
import runpy
import statistics
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent

DIRECTIONS = ('forward', 'forward+backward')


def load(name: str):
  """Returns the content of benchmarks/<name>."""
  text = (ROOT / 'benchmarks' / name).read_text(encoding='utf-8')
  try:
    return json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(f'benchmarks/{name} is not JSON: {error}') from error


def published(experiment: str) -> str:
  """Returns the published score in a config's docstring, in percent."""
  path = ROOT / 'configs' / f'{experiment.split(" with ")[0]}.py'
  text = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8')))
  match = re.search(r'Published: (0\.\d+)(?: \+- (0\.\d+))?', text)
  if match is None:
    return ''
  mean, std = (float(x) if x else None for x in match.groups())
  return f'{100 * mean:.2f}' + (f' ± {100 * std:.2f}' if std else '')


def row_smnist() -> str:
  """Returns the table of test accuracies on row-wise MNIST."""
  rows = [r for r in load('smnist.json') if r['dataset'] == 'MNIST']
  rows.sort(key=lambda row: -row['accuracy']['mean'])
  lines = [
      '| config | test accuracy, % | published, % | seeds | parameters |'
      ' commit |',
      '|---|---|---|---|---|---|',
  ]
  for row in rows:
    mean, std = row['accuracy']['mean'], row['accuracy']['std']
    seeds = row['seeds']
    name = row['experiment']
    lines.append(
        f'| `{name}` | {100 * mean:.2f} ± {100 * std:.2f}'
        f' | {published(name)} | {len(seeds)} | {seeds[0]["parameters"]:,} |'
        f' {row["commit"]} |'
    )
  first = rows[0]
  devices = ' and '.join(sorted({row['device'] for row in rows}))
  lines += [
      '',
      f'{devices}, jax {first["jax"]}, {max(r["date"] for r in rows)};'
      ' mean ± standard deviation over seeds.',
  ]
  return '\n'.join(lines)


def gpu_runs() -> str:
  """Returns the table of training runs on GPU kernels.

  Runs with other fields than their config's are in the file alone; they shared
  the GPU.
  """
  rows = [r for r in load('gpu_runs.json') if ' with ' not in r['experiment']]
  rows.sort(key=lambda row: row['experiment'])
  lines = [
      '| config | test accuracy, % | published, % | epochs | seconds an epoch |'
      ' seconds in all |',
      '|---|---|---|---|---|---|',
  ]
  for row in rows:
    name, seeds = row['experiment'], row['seeds']
    mean, std = row['accuracy']['mean'], row['accuracy']['std']
    score = f'{100 * mean:.2f}'
    if len(seeds) > 1:
      score += f' ± {100 * std:.2f} ({len(seeds)} seeds)'
    epoch = statistics.mean(seed['seconds_per_epoch'] for seed in seeds)
    (epochs,) = {seed['epochs'] for seed in seeds}
    lines.append(
        f'| `{name}` | {score} |'
        f' {published(name)} | {epochs} | {epoch:.2f} | {epoch * epochs:.0f} |'
    )
  first = rows[0]
  each = lambda key: ' and '.join(sorted({row[key] for row in rows}))
  lines += [
      '',
      f'{each("device")}, jax {first["jax"]}, {each("date")}, one seed'
      ' unless more are told (mean ± standard deviation, and the seconds of'
      f' one), commits {each("commit")}. An epoch: training on 51,000'
      ' images (57,000 permuted, and by IndRNN and iRevRNN), validation, and'
      ' what is written; without compilation.',
  ]
  return '\n'.join(lines)


def gpu_recipes() -> str:
  """Returns the runs whose recipe is not, or no more, that of a config."""
  rows = [r for r in load('gpu_runs.json') if ' with ' in r['experiment']]
  rows.sort(key=lambda row: row['experiment'])
  lines = [
      '| config | changed | test accuracy, % | published, % | epochs |'
      ' commit |',
      '|---|---|---|---|---|---|',
  ]
  for row in rows:
    name, changed = row['experiment'].split(' with ')
    scores = [100 * seed['accuracy'] for seed in row['seeds']]
    lines.append(
        f'| `{name}` | {changed} | {", ".join(f"{x:.2f}" for x in scores)} |'
        f' {published(name)} | {row["seeds"][0]["epochs"]} | {row["commit"]} |'
    )
  return '\n'.join([*lines, '', _source(rows)])


def agru_ablations() -> str:
  """Returns the table of the A-GRU's ablations."""
  data = load('agru_ablations.json')
  program = runpy.run_path(str(ROOT / 'benchmarks' / 'agru_ablations.py'))
  return (
      program['table'](data).rstrip()
      + f' {data["device"]}, jax {data["jax"]}, {data["date"]}, commit'
      f' {data["commit"]}; {data["rows"][0]["seeds"]} seeds.'
  )


def cpu_peers() -> str:
  """Returns the table of CPU times beside flax and torch."""
  data = load('cpu_peers.json')
  lines = [
      '| batch x time x in x features | layer | rnnzoo, ms | flax.nnx, ms |'
      ' torch, ms |',
      '|---|---|---|---|---|',
  ]
  groups: dict[tuple[str, str], list] = {}
  for row in data['rows']:
    groups.setdefault((row['shape'], row['layer']), []).append(row)
  for (_, layer), rows in groups.items():
    sizes = rows[0]['sizes']
    shape = ' x '.join(str(sizes[key]) for key in 'BTIF')
    peers = {'rnnzoo': [], 'flax': [], 'torch': []}
    for row in rows:
      peers[row['program'].split()[0].split('.')[0]].append(row['median_ms'])
    cell = lambda times: f'{min(times):.1f}' if times else ''
    lines.append(
        f'| {shape} | {layer} | {cell(peers["rnnzoo"])} |'
        f' {cell(peers["flax"])} | {cell(peers["torch"])} |'
    )
  versions = ', '.join(f'{k} {v}' for k, v in data['versions'].items())
  lines += [
      '',
      f'{data["device"]["kind"]}, {data["host_cores"]} cores;'
      f' {versions}; {data["date"][:10]}. Forward and backward, float32,'
      ' interleaved medians; the faster of two flax cells for the LSTM.',
  ]
  return '\n'.join(lines)


def compile_time() -> str:
  """Returns the table of seconds that XLA takes to compile a gradient."""
  data = load('compile_time.json')
  lines = [
      '| program | all threads, s | wall, s | fusions | loops |'
      ' temporary, MiB |',
      '|---|---|---|---|---|---|',
  ]
  for row in data['rows']:
    lines.append(
        f'| {row["program"]} | {row["cpu_s"]:.2f} | {row["wall_s"]:.2f} |'
        f' {row["fusions"]} | {row["loops"]} |'
        f' {row["temp_bytes"] / 2**20:.1f} |'
    )
  batch, time, in_features, features = data['sizes']
  lines += [
      '',
      f'{batch} x {time} x {in_features} x {features}, float32, path'
      f" `'scan'`; {data['cores']} idle CPU cores,"
      f' jax {data["rows"][0]["jax"]}, {data["date"]}, commit'
      f' {data["commit"]}. The least of {data["repeats"]} processes, which took'
      ' turns.',
  ]
  return '\n'.join(lines)


def linear_h200() -> str:
  """Returns the table of linear and diagonal recurrences on a GPU."""
  data = load('linear_h200.json')
  times: dict[tuple[str, str, str], dict[tuple[str, str], dict]] = {}
  for row in data['rows']:
    if row['status'] == 'ok':
      name = f'`{row["layer"]}`'
      if row['projection'] == 'with':
        name += ' layer, with its projection'
        if row['layer'] == 'projection':
          name = 'that projection alone'
      case = name, row['shape'], row['dtype']
      run = row['implementation'], row['direction']
      times.setdefault(case, {})[run] = row

  def cell(runs, implementation, percent):
    cells = []
    for direction in ('forward', 'forward+backward'):
      row = runs.get((implementation, direction))
      fraction = row and row.get('copy_fraction')
      share = f' ({100 * fraction:.0f} %)' if percent and fraction else ''
      cells.append(f'{row["median_ms"]:.3f}{share}' if row else '-')
    return ' / '.join(cells) if set(cells) != {'-'} else ''

  lines = [
      '| recurrence | batch x time x features | dtype | GPU kernel, ms (% of a'
      " copy's bandwidth) | `associative_scan`, ms |",
      '|---|---|---|---|---|',
  ]
  for (layer, shape, dtype), runs in times.items():
    sizes = data['shapes'][shape]
    size = f'{sizes["batch"]} x {sizes["time"]} x {sizes["features"]}'
    lines.append(
        f'| {layer} | {size} | {dtype} |'
        f' {cell(runs, "pallas", True) or cell(runs, "dot", False)} |'
        f' {cell(runs, "associative_scan", False)} |'
    )
  versions = data['versions']
  lines += [
      '',
      f'{data["device"]["kind"]}, jax {versions["jax"]}, {data["date"][:10]};'
      f' a copy: {data["copy"]["gb_per_s"]:.0f} GB/s. Forward / forward and'
      ' backward, gates given but for the layer, medians of calls in flight.',
  ]
  return '\n'.join(lines)


def dense_h200() -> str:
  """Returns tables of cells with a dense recurrent kernel on a GPU."""
  data = load('dense_h200.json')
  directions = ('forward', 'forward+backward')
  times: dict[tuple[str, ...], dict[str, float]] = {}
  for row in data['rows']:
    if row['status'] == 'ok' and 'median_ms' in row:
      keys = ('shape', 'dtype', 'projection', 'layer', 'implementation')
      case = tuple(row[key] for key in keys)
      times.setdefault(case, {})[row['direction']] = row['median_ms']

  def cell(*case):
    runs = times.get(case)
    if runs is None:
      return ''
    found = [runs.get(direction) for direction in directions]
    return ' / '.join('-' if ms is None else f'{ms:.2f}' for ms in found)

  def size(shape):
    sizes = data['shapes'][shape]
    heads = sizes['num_heads']
    return (
        f'{sizes["batch"]} x {sizes["time"]} x {heads} x'
        f' {sizes["features"] // heads}'
    )

  def published(name, shape):
    found = data['published_ms'][name].get(shape)
    return f'{found[0]:.2f} / {found[1]:.2f}' if found else ''

  def table(head, body):
    first, *rest = ('| ' + ' | '.join(row) + ' |' for row in (head, *body))
    return [first, '|' + '---|' * len(head), *rest]

  given = [case for case in times if case[2] == 'without']
  layers = list(dict.fromkeys(case[3] for case in given))
  cases = list(dict.fromkeys(case[:3] for case in given))
  lines = table(
      [
          'batch x time x heads x head dim',
          *(f'`{layer}`' for layer in layers),
          'LSTM by hand, `lax.scan` unrolled by 8',
          'LSTM of FlashRNN',
      ],
      [
          [
              size(case[0]),
              *(cell(*case, layer, 'pallas') for layer in layers),
              cell(*case, 'LSTM', 'lax_scan_8'),
              published('FlashRNN fused, bfloat16', case[0]),
          ]
          for case in cases
      ],
  )
  lines.append('')
  cases = [case[:4] for case in times if case[2] == 'with']
  lines += table(
      [
          'layer, with its projection',
          'batch x time x heads x head dim',
          'dtype',
          'GPU kernel',
          "`'scan'`",
          "JAX's cuDNN",
          "torch's cuDNN, float16",
      ],
      [
          [
              f'`{layer}`',
              size(shape),
              dtype,
              cell(shape, dtype, projection, layer, 'pallas'),
              cell(shape, dtype, projection, layer, 'scan'),
              cell(shape, dtype, projection, layer, 'cudnn'),
              published('cuDNN, float16, with projection', shape)
              if (layer, dtype) == ('LSTM', 'bfloat16')
              else '',
          ]
          for shape, dtype, projection, layer in dict.fromkeys(cases)
      ],
  )
  versions = data['versions']
  lines += [
      '',
      f'{data["device"]["kind"]}, jax {versions["jax"]}, {data["date"][:10]},'
      f' runs: {1 + len(data.get("later", ()))}. Milliseconds forward / forward'
      ' and backward, medians of calls in'
      ' flight; above, on given gates in bfloat16. FlashRNN (Pöppel et al.,'
      ' 2025): its fused CUDA kernel, 48 x 16 and 6 x 128 by its own figure for'
      ' an H100, which has 1.97 / 3.47 for its Triton kernel at 48 x 16; the'
      ' others, and torch, by these programs on an H200.',
  ]
  return '\n'.join(lines)


def processes() -> str:
  """Returns the table of training steps with one process a device."""
  data = load('processes_2_h200.json')
  lines = [
      '| layers | alone, ms | together, ms | weak scaling | one process late |',
      '|---|---|---|---|---|',
  ]
  for row in data['rows']:
    late = '-'
    if 'late_s' in row:
      late = (
          f'{row["late_s"]:.0f} s; {row["steps"]} steps in'
          f' {row["seconds_with_late"]:.1f} s, same bits'
      )
      if not row['same_bits']:
        raise ValueError(f'{row["stack"]}: a late process changed the result')
    lines.append(
        f'| {row["stack"]} | {row["alone_ms"]:.2f} | {row["together_ms"]:.2f}'
        f' | {row["weak_scaling"]:.2f} | {late} |'
    )
  first = data['rows'][0]
  lines += [
      '',
      f'{first["processes"]} x {first["device"]}, jax {data["jax"]},'
      f' {data["date"]}, commit {data["commit"]}.',
  ]
  return '\n'.join(lines)


_COUNTS = {2: 'two', 4: 'four'}


def devices(file: str) -> str:
  """Returns the table of training steps on several devices."""
  data = load(file)
  steps: dict[tuple[str, str, str], dict[str, dict]] = {}
  for row in data['rows']:
    dtype, own = row['dtype'], row.get('param_dtype', 'float32')
    if own != 'float32':
      dtype += f', {own} parameters'
    case = row['layer'], row['shape'], dtype
    steps.setdefault(case, {})[row['implementation']] = row
  many = _COUNTS[data['device']['count']]
  lines = [
      '| layers | batch a device x time x heads x head dim | dtype | one device'
      f', ms | {many}, Explicit axis | {many}, Auto axis | difference of an'
      ' update |',
      '|---|---|---|---|---|---|---|',
  ]
  for (layer, shape, dtype), ways in steps.items():
    sizes = data['shapes'][shape]
    heads = sizes['num_heads']
    size = (
        f'{sizes["batch"]} x {sizes["time"]} x {heads} x'
        f' {sizes["features"] // heads}'
    )
    times = [
        f'{ways[kind]["median_ms"]:.2f} ({ways[kind]["weak_scaling"]:.2f})'
        for kind in ('Explicit', 'Auto')
    ]
    error = max(ways[kind]['error'] for kind in ('Explicit', 'Auto'))
    lines.append(
        f'| {layer} | {size} | {dtype} |'
        f' {ways["one device"]["median_ms"]:.2f} | {times[0]} | {times[1]} |'
        f' {error:.1e} |'
    )
  versions = data['versions']
  lines += [
      '',
      f'{data["device"]["count"]} x {data["device"]["kind"]}, jax'
      f' {versions["jax"]}, {data["date"][:10]}, commit {data["commit"][:7]}:'
      ' milliseconds a training step (in brackets: time of one device over that'
      f' of {many}, each with a batch of its own), and the largest relative'
      ' difference of an update from that of one device with the whole batch.',
  ]
  return '\n'.join(lines)


def linear_over_time(file: str) -> str:
  """Returns the table of a linear recurrence with time over devices."""
  data = load(file)
  batch, time, features = data['shape']
  count = data['device']['count']
  many = _COUNTS[count]
  lines = [
      f'| a | pass | one device, ms | {many} | times as fast | GB of a device,'
      f' one | {many} |',
      '|---|---|---|---|---|---|---|',
  ]
  for row in data['rows']:
    lines.append(
        f'| {row["case"]} | {row["direction"]} | {row["ms_1"]:.2f} |'
        f' {row[f"ms_{count}"]:.2f} | {row["times"]:.2f} | {row["gb_1"]:.1f} |'
        f' {row[f"gb_{count}"]:.1f} |'
    )
  lines += [
      '',
      f'`linear_scan` of [{batch}, {time:,}, {features:,}], {data["dtype"]},'
      f' {data["device"]["count"]} x {data["device"]["kind"]}, jax'
      f' {data["versions"]["jax"]}, {data["date"][:10]}, commit'
      f' {data["commit"][:7]}; by `{data["command"]}`.',
  ]
  return '\n'.join(lines)


def stacks() -> str:
  """Returns the table of layers in depth, in turn and at the same time."""
  data = load('stacks_h200.json')
  by_case: dict[Any, dict[str, Any]] = {}
  for row in data['rows']:
    key = row['layer'], *row['shape']
    by_case.setdefault(key, {})[row['direction']] = row
  lines = [
      '| layers | batch x time | in turn, ms | at the same time | times as'
      ' fast | compile, s | cuDNN |',
      '|---|---|---|---|---|---|---|',
  ]
  for key, rows in by_case.items():
    layer, batch, time, _, features, heads, depth = key
    ways = [rows[direction] for direction in DIRECTIONS]
    of = lambda way, ways=ways: [row.get(way, {}).get('ms') for row in ways]
    turn, once = of('in turn'), of('at once')
    speedup = ' / '.join(
        f'{a / b:.2f}' if b else '-' for a, b in zip(turn, once, strict=True)
    )
    seconds = ' -> '.join(
        f'{rows[DIRECTIONS[1]][way]["compile_s"]:.1f}'
        for way in ('in turn', 'at once')
        if 'compile_s' in rows[DIRECTIONS[1]][way]
    )
    peer = [row.get('cudnn_ms') for row in ways]
    size = f'{heads} x {features // heads}' if heads > 1 else features
    lines.append(
        f'| {depth} x `{layer}` {size} | {batch} x {time} | {_pair(turn)} |'
        f' {_pair(once)} | {speedup} | {seconds} |'
        f' {_pair(peer) if all(peer) else ""} |'
    )
  lines += [
      '',
      f'{data["device"]["kind"]}, jax {data["versions"]["jax"]},'
      f' {data["date"][:10]}, commit {data["commit"][:7]}; by'
      f' `{data["command"]}`. bfloat16, batch-major, forward / forward and'
      ' backward; compile seconds of the latter, from the trace on, of the'
      ' cases that were compiled alone. cuDNN has'
      ' one head of as many features, float16, time-major.',
  ]
  return '\n'.join(lines)


def resets() -> str:
  """Returns the table of a linear recurrence with resets."""
  data = load('resets_h100.json')
  lines = [
      '| batch x time x features | steps that reset | before, ms | now, ms |',
      '|---|---|---|---|',
  ]
  for row in data['rows']:
    before = row.get('before_ms')
    lines.append(
        f'| {" x ".join(map(str, row["shape"]))} | {row["resets"]} |'
        f' {_pair(before) if before else ""} | {_pair(row["ms"])} |'
    )
  lines += [
      '',
      f'{data["device"]}, jax {data["jax"]}, {data["date"]}, commit'
      f' {data["commit"][:7]}, by `python benchmarks/resets.py`.'
      f' {data.get("note", "")} `linear_scan` in {data["dtype"]}, milliseconds'
      ' forward / forward and backward.',
  ]
  return '\n'.join(lines)


def _pair(times: list[float | None]) -> str:
  return ' / '.join('-' if time is None else f'{time:.3g}' for time in times)


def conversions() -> str:
  """Returns the table of conversions and their largest differences."""
  lines = [
      '| from and to | its class | largest difference of outputs |'
      ' of final states |',
      '|---|---|---|---|',
  ]
  lines += [
      f'| {row["library"]} | `{row["class"]}` | {row["outputs"]:.0e} |'
      f' {row["states"]:.0e} |'
      for row in load('conversions.json')['rows']
  ]
  return '\n'.join(lines)


def newton() -> str:
  """Returns the table of Newton iterations at initialisation."""
  data = load('newton_cpu.json')
  lines = [
      '| layer | least iterations, K* | iterations | error of one rounding a'
      ' step | largest Lyapunov exponent | steps in turn |',
      '|---|---|---|---|---|---|',
  ]
  for row in data['rows']:
    least = row['least_iterations']
    lines.append(
        f'| `{row["layer"]}` | {"-" if least is None else least} |'
        f' {row["iterations"]} | {row["sensitivity"]:.0e} |'
        f' {row["lyapunov"]:.2g} |'
        f' {row["in_turn"]:,}{", all" if row["fell_back"] else ""} |'
    )
  sizes = data['shapes'][data['rows'][0]['shape']]
  lines += [
      '',
      f'Batch {sizes["batch"]}, {sizes["features"]} features, float32, random'
      f' inputs; jax {data["versions"]["jax"]}, {data["date"][:10]}. K*: the'
      " trajectory is that of 'scan' to 1e-4.",
  ]
  return '\n'.join(lines)


def newton_trained() -> str:
  """Returns the table of Newton iterations before and after training."""
  data = load('newton_trained.json')
  lines = [
      '| layer | test accuracy | 37 steps | 1,008 steps, untrained | trained |'
      ' trained, float64 | largest Lyapunov exponent |',
      '|---|---|---|---|---|---|---|',
  ]

  def cell(case):
    words = f'{case["iterations"]} ({case["in_turn"]:,})'
    return words + ', in turn' if case['fell_back'] else words

  for row in data['rows']:
    cells = ' | '.join(map(cell, row['cases']))
    lines.append(
        f'| `{row["layer"]}` | {100 * row["test_accuracy"]:.1f} % | {cells} |'
        f' {row["cases"][-1]["lyapunov"]:.2g} |'
    )
  first = data['rows'][0]
  lines += [
      '',
      'Iterations, the most of any window, and in brackets the steps that ran'
      ' one after the other, of all windows together; "in turn" where the path'
      f' gave up. {first["features"]} features, {first["epochs"]} epochs of row'
      f' MNIST, float32 but for one column; jax {data["jax"]}, {data["date"]},'
      f' commit {data["commit"]}.',
  ]
  return '\n'.join(lines)


def transformations() -> str:
  """Returns the table of transformations, with the reasons as notes."""
  path = ROOT / 'docs' / 'transformations.json'
  data = json.loads(path.read_text(encoding='utf-8'))
  notes: list[str] = []

  def cell(told):
    if told != 'yes' and told not in notes:
      notes.append(told)
    return told if told == 'yes' else f'no ({notes.index(told) + 1})'

  lines = [
      '|  | ' + ' | '.join(f'`{title}`' for title in data) + ' |',
      '|---|' + '---|' * len(data),
  ]
  for name in next(iter(data.values())):
    cells = [cell(column[name]) for column in data.values()]
    lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
  lines.append('')
  lines += [f'{i}. `{note}`' for i, note in enumerate(notes, 1)]
  return '\n'.join(lines)


def memory() -> str:
  """Returns the table of what is kept between forward and backward."""
  data = load('memory_cpu.json')['settings']
  lines = ['| layer | path | MiB | ms |', '|---|---|---|---|']
  for row in data['rows']:
    lines.append(
        f'| `{row["layer"]}` | `{row["setting"]}` |'
        f' {row["temp_bytes"] / 2**20:.0f} | {row["median_ms"]:.0f} |'
    )
  note = ' MiB: temporary memory by XLA; x, y and the parameters are not among'
  return '\n'.join([*lines, '', _gradient(data) + note + ' them.'])


def kernel_memory() -> str:
  """Returns the table of what GPU kernels keep between the two passes."""
  if not (ROOT / 'benchmarks' / 'memory_gpu.json').exists():
    return 'These times were not taken yet.'
  data = load('memory_gpu.json')['kernels']
  sizes = 'layer', 'batch', 'time', 'features', 'heads', 'dtype', 'layers'
  found: dict[tuple, dict[str, Any]] = {}
  for row in data['rows']:
    found.setdefault(tuple(row[k] for k in sizes), {})[row['keep']] = row
  lines = [
      '| layer | batch x time x features, heads | dtype | layers |'
      " `keep='gates'`: MiB kept | temporary | ms |"
      " `keep='carries'`: MiB kept | temporary | ms |",
      '|---' * 10 + '|',
  ]
  for key, own in found.items():
    layer, batch, time, features, heads, dtype, layers = key
    cells = (
        f'{own[keep]["kept_bytes"] / 2**20:.0f} |'
        f' {own[keep]["temp_bytes"] / 2**20:.0f} |'
        f' {own[keep]["median_ms"]:.2f}'
        for keep in ('gates', 'carries')
    )
    lines.append(
        f'| `{layer}` | {batch} x {time:,} x {features}, {heads or features} |'
        f' {dtype} | {layers} | {" | ".join(cells)} |'
    )
  lines += [
      '',
      f'{data["device"]}, jax {data["jax"]}, {data["date"]}, commit'
      f' {data["commit"]}. As many features in as out. Kept: arrays that'
      ' `jax.vjp` holds; temporary: memory by XLA of a gradient; x, y and the'
      ' parameters are not among them. Milliseconds forward and backward,'
      ' medians of calls in flight.',
  ]
  return '\n'.join(lines)


def _gradient(data, note: str = '') -> str:
  """Returns a sentence on what was measured, with a note on its cores."""
  batch, time, in_features, features = data['sizes']
  return (
      f'Batch {batch}, {time:,} steps, {in_features} to {features} features,'
      f' float32, a gradient; {data["cores"]} CPU cores{note}, jax'
      f' {data["jax"]}, {data["date"]}, commit {data["commit"]}.'
  )


def inner_steps() -> str:
  """Returns the table of the iRevRNN over its inner steps."""
  data = load('memory_cpu.json')['inner_steps']
  found = {(row['path'], row['inner_steps']): row for row in data['rows']}
  paths = dict.fromkeys(path for path, _ in found)
  lines = [
      '| inner steps | '
      + ' | '.join(f"`'{p}'`, MiB | ms" for p in paths)
      + ' |',
      '|---' * (1 + 2 * len(paths)) + '|',
  ]
  for count in dict.fromkeys(count for _, count in found):
    rows = [found[path, count] for path in paths]
    cells = (
        f'{row["temp_bytes"] / 2**20:.0f} | {row["median_ms"]:.0f}'
        for row in rows
    )
    lines.append(f'| {count} | {" | ".join(cells)} |')
  return '\n'.join([*lines, '', _gradient(data)])


# MB, and sequences a second: irevrnn's README, on an RTX 3080.
_PUBLISHED_STACKS = (245, 1250), (892, 580), (3245, 140)


def irevrnn_stacks() -> str:
  """Returns the table of the cases that irevrnn's authors publish."""
  data = load('memory_cpu.json')['stacks']
  lines = [
      '| layers x features | steps | batch | MB | sequences/s | published: MB |'
      ' sequences/s |',
      '|---|---|---|---|---|---|---|',
  ]
  for row, (memory, speed) in zip(data['rows'], _PUBLISHED_STACKS, strict=True):
    lines.append(
        f'| {row["layers"]} x {row["features"]} | {row["time"]} |'
        f' {row["batch"]} | {row["temp_bytes"] / 1e6:,.0f} |'
        f' {1e3 * row["batch"] / row["median_ms"]:,.0f} | {memory:,} |'
        f' {speed:,} |'
    )
  lines += [
      '',
      f"A gradient on `'scan'` from {data['sizes']} features, 3 inner steps,"
      f' float32, on {data["cores"]} CPU cores,'
      f' jax {data["jax"]}, {data["date"]}, commit {data["commit"]}. MB:'
      ' temporary memory by XLA. The published numbers are of an RTX 3080;'
      ' their source says neither R nor whether a gradient was among them.',
  ]
  return '\n'.join(lines)


def large_batches() -> str:
  """Returns the table of many rows and of large heads."""
  data, peer = load('large_batches_h200.json'), load('cudnn_h200.json')
  ways = 'time-major', 'batch-major', 'scan'
  cases: dict[tuple, dict[str, Any]] = {}
  good = [row for row in data['rows'] if 'status' not in row]
  for row in good:
    key = tuple(row[name] for name in ('layer', 'batch', 'time', 'features'))
    cases.setdefault(key, {})[row['direction']] = row
  cudnn: dict[tuple, dict[str, float]] = {}
  for row in peer['rows']:
    shape = peer['shapes'][row['shape']]
    if 'median_ms' in row and shape['num_heads'] == 1:
      sizes = [shape[name] for name in ('batch', 'time', 'features')]
      own = cudnn.setdefault((row['layer'], *sizes), {})
      # Of some sizes there are two measurements.
      best = own.get(row['direction'], row['median_ms'])
      own[row['direction']] = min(best, row['median_ms'])
  heads = [
      *('layer', 'batch x time x features', '`None`, time-major'),
      *('batch-major', "`'scan'`", 'cuDNN, float16', 'compile, s'),
      *('MB', "MB, `'scan'`"),
  ]
  lines = [f'| {" | ".join(heads)} |', '|---' * len(heads) + '|']
  for (layer, *sizes), rows in sorted(cases.items()):
    times = [
        _two({way: rows[way][kind]['ms'] for way in DIRECTIONS}, 2)
        for kind in ways
    ]
    both = rows[DIRECTIONS[1]]
    first = both['time-major']
    cells = [
        f'`{layer}`',
        ' x '.join(map(str, sizes)),
        *times,
        _two(cudnn.get((layer, *sizes)), 2),
        f'{first["compile_s"]:.1f}',
        f'{first["temp_mb"]:,}',
        f'{both["scan"]["temp_mb"]:,}',
    ]
    lines.append(f'| {" | ".join(cells)} |')
  paths = {row[kind]['path'] for row in good for kind in ways[:2]}
  most = max(row[kind]['difference'] for row in good for kind in ways[:2])
  named = ' and '.join(f"`'{path}'`" for path in sorted(paths))
  lines += [
      '',
      f'{data["device"]["kind"]}, jax {data["versions"]["jax"]},'
      f' {data["date"][:10]}, commit {data["commit"][:7]}; by'
      f' `{data["command"]}`. Milliseconds forward / forward and backward,'
      " bfloat16, with the projection; `'scan'` time-major. `None` takes"
      f" {named}; its results differ from those of `'scan'` by up to {most:.1e}"
      ' of their norm.'
      f' Compile seconds, from the trace on ({data["threads"]} at a time), and'
      ' MB of temporary arrays: forward and backward. cuDNN by torch'
      f' {peer["versions"]["torch"]}, time-major, the faster of two runs where'
      ' there are two (benchmarks/cudnn.py).',
  ]
  return '\n'.join(lines)


def small_heads() -> str:
  """Returns the table of gradients of R of small heads, before and after."""
  data = load('small_heads_h200.json')
  names = {'by head': 'copied by head', 'in place': 'in place'}
  heads = ['batch x time x heads x head dim', 'projection']
  for name in names.values():
    heads += [f'{name}, ms', 'MiB']
  lines = [f'| {" | ".join(heads)} |', '|---' * len(heads) + '|']
  groups: dict[tuple, dict[tuple[str, str], dict[str, Any]]] = {}
  for row in data['rows']:
    sizes = row['batch'], row['time'], row['heads'], row['features']
    own = groups.setdefault((*sizes, row['projection']), {})
    own[row['gradient'], row['direction']] = row
  for (*lead, count, features, projection), own in groups.items():
    sizes = *lead, count, features // count
    cells = [' x '.join(map(str, sizes)), projection]
    for kind in names:
      forward, both = (
          own[kind, direction] for direction in ('forward', 'forward+backward')
      )
      cells += [
          f'{forward["median_ms"]:.2f} / {both["median_ms"]:.2f}',
          f'{both["temp_mib"]:,}',
      ]
    lines.append(f'| {" | ".join(cells)} |')
  lines += [
      '',
      f'{data["device"]}, jax {data["jax"]}, {data["date"]}, commit'
      f' {data["commit"]}. `LSTM` in bfloat16, milliseconds forward / forward'
      ' and backward; temporary arrays of a gradient.',
  ]
  return '\n'.join(lines)


def newest(pattern: str) -> tuple[str, Any]:
  """Returns name and content of the newest of some files; '' and {} if none."""
  paths = (ROOT / 'benchmarks').glob(pattern)
  found = [(load(path.name)['date'], path.stem) for path in paths]
  if not found:
    return '', {}
  name = max(found)[1]
  return name, load(f'{name}.json')


def batches() -> str:
  """Returns the table of the path that `None` takes, beside 'scan'."""
  name, data = newest('batches_*.json')
  cudnn = _cudnn(data)
  heads = [
      'layer',
      'batch x time x features',
      'path of `None`',
      'ms',
      'of the best',
      "`'scan'`, ms",
      'times faster',
      *(['cuDNN, ms'] if cudnn else []),
      'compile, s',
      "`'scan'`",
      'MiB',
      "`'scan'`",
  ]
  lines = [f'| {" | ".join(heads)} |', '|---' * len(heads) + '|']
  rows = [row for row in data['rows'] if row['implementation'] != 'cudnn']
  groups: dict[tuple, list[dict[str, Any]]] = {}
  for row in rows:
    sizes = data['shapes'][row['shape']]
    order = 'num_heads', 'features', 'batch', 'time'
    key = row['layer'], *(sizes[name] for name in order), row['shape']
    groups.setdefault(key, []).append(row)
  for (layer, *_, shape), own in sorted(groups.items()):
    timed = [row for row in own if 'median_ms' in row]
    taken = {row['direction']: row for row in timed if 'of_best' in row}
    scan = {
        row['direction']: row
        for row in timed
        if row['implementation'] == 'scan'
    }
    if len(taken) < 2 or len(scan) < 2:  # It failed, or the time was over.
      continue
    ways = [taken, scan]
    both = [way['forward+backward'] for way in ways]
    times = [{k: row['median_ms'] for k, row in way.items()} for way in ways]
    cells = [
        f'`{layer}`',
        _sizes(data['shapes'][shape]),
        f"`'{both[0]['implementation']}'`",
        _two(times[0], 2),
        ' / '.join(_of_best(taken[k]['of_best']) for k in DIRECTIONS),
        _two(times[1], 2),
        f'{both[1]["median_ms"] / both[0]["median_ms"]:.1f}',
        *([_two(cudnn.get((layer, shape)), 2)] if cudnn else []),
        *(f'{row["compile_s"]:.0f}' for row in both),
        *(f'{row["temp_bytes"] / 2**20:,.0f}' for row in both),
    ]
    lines.append(f'| {" | ".join(cells)} |')
  together = {row['compiled_together'] for row in rows if 'median_ms' in row}
  lines += [
      '',
      _slower(data, rows),
      '',
      f'{data["device"]["kind"]}, jax {data["versions"]["jax"]},'
      f' {data["date"][:10]}, commit {_commits(data)}. Milliseconds forward'
      ' / forward and backward, medians of calls in flight; bfloat16, with the'
      ' projection. Faster, seconds and MiB of temporary memory: forward and'
      f' backward. {" or ".join(map(str, sorted(together)))} programs were'
      ' compiled at once.',
  ]
  if cudnn:
    versions = data['cudnn']['versions']
    lines[-1] += (
        f' cuDNN {versions["cudnn"]} by torch {versions["torch"]}: float16,'
        ' time-major.'
    )
  return '\n'.join([*lines, *_figure(name, 'Microseconds a step, by batch')])


def lengths() -> str:
  """Returns the section of linear recurrences by length, '' before a run."""
  name, data = newest('lengths_*.json')
  if not data:
    return ''
  paths = 'pallas', 'associative_scan', 'scan'
  timed = [row for row in data['rows'] if 'median_ms' in row]
  own = _by_direction(timed, 'layer', 'shape')
  taken = {
      (row['layer'], row['shape'], row['direction']): row
      for row in timed
      if 'of_best' in row
  }
  sizes = lambda shape: [data['shapes'][shape][k] for k in ('batch', 'time')]
  cases = sorted(
      {(layer, *sizes(shape), shape) for layer, shape, _ in taken},
      key=lambda case: (case[0] != 'linear_scan', *case),
  )
  names = ' | '.join(f"`'{path}'`" for path in paths)
  lines = [
      '## From one step to 65,536',
      '',
      '`python -m rnnzoo.benchmark --suite=lengths` asks whether `None` takes'
      ' the fastest path. With a copy: inputs come from the host in each call.',
      '',
      f'| recurrence | batch x time | path of `None` | {names} | of the best |'
      ' with a copy |',
      '|---|---|---|---|---|---|---|---|',
  ]
  for layer, batch, time, shape in cases:
    found = {w: taken.get((layer, shape, w)) for w in DIRECTIONS}
    rows = {way: row for way, row in found.items() if row}
    copies = {way: row['with_copy_ms'] for way, row in rows.items()}
    cells = [
        f'`{layer}`',
        f'{batch} x {time:,}',
        f"`'{next(iter(rows.values()))['implementation']}'`",
        *(_two(own[layer, shape].get(path), 3) for path in paths),
        ' / '.join(_of_best(row['of_best']) for row in rows.values()),
        _two(copies, 3),
    ]
    lines.append(f'| {" | ".join(cells)} |')
  lines += [
      '',
      _slower(data, data['rows']),
      '',
      f'{data["device"]["kind"]}, jax {data["versions"]["jax"]},'
      f' {data["date"][:10]}, commit {_commits(data)}. Milliseconds forward /'
      ' forward and backward, medians of calls in flight; 64 features,'
      ' float32, layers with their projections. Short calls are bound by'
      ' dispatch.',
  ]
  figure = _figure(name, "Milliseconds, and times as fast as 'scan', by steps")
  return '\n'.join([*lines, *figure])


def _sizes(shape: dict[str, int]) -> str:
  """Returns the sizes of a shape, as in a table."""
  heads, features = shape['num_heads'], shape['features']
  parts = [heads, features // heads] if heads > 1 else [features]
  return ' x '.join(map(str, [shape['batch'], shape['time'], *parts]))


def _commits(data: dict[str, Any]) -> str:
  """Returns the commits of a result that was measured in parts."""
  found = {row.get('commit', data['commit']) for row in data['rows']}
  return ', '.join(sorted(commit[:7] for commit in found))


def _figure(name: str, words: str) -> list[str]:
  """Returns the lines that show a result's figure, if there is one."""
  if not (ROOT / 'benchmarks' / f'{name}.png').exists():
    return []
  return [
      '',
      f'```{{image}} ../../benchmarks/{name}.png',
      f':alt: {words}',
      '```',
  ]


def _of_best(ratio: float) -> str:
  """Returns a time as a multiple of the best path's, bold above 5 %."""
  return f'**{ratio:.2f}**' if ratio > 1.05 else f'{ratio:.2f}'


def _slower(data: dict[str, Any], rows: list[dict[str, Any]]) -> str:
  """Returns what `None` takes, and where that is not the fastest."""
  taken = [row for row in rows if 'of_best' in row]

  def programs(found, among, key: str) -> str:
    """Returns how many, and which, the slowest first."""
    if not found:
      return f'none of {len(among)} programs'
    found = sorted(found, key=lambda row: -row[key])
    names = [
        f'{_program(data, row)} {row["direction"]} {row[key]:.2f}'
        for row in found
    ]
    text = ', '.join(names[:12])
    if len(names) > 12:
      text += f' and {len(names) - 12} more'
    return f'{len(found)} of {len(among)} programs: {text}'

  by_path: dict[str, list[str]] = {}
  for row in taken:
    own = by_path.setdefault(row['implementation'], [])
    if (name := _program(data, row)) not in own:
      own.append(name)
  most = max(by_path, key=lambda path: len(by_path[path]))
  others = {path: names for path, names in by_path.items() if path != most}
  sentences = [
      f"`None` takes `'{path}'` at {', '.join(names)}."
      for path, names in others.items()
  ]
  where = 'at all others' if others else 'at all of these'
  sentences.append(f"`None` takes `'{most}'` {where}.")
  best = [row for row in taken if row['of_best'] > 1.05]
  sentences.append(
      'Another path is more than 5 % faster in'
      f' {programs(best, taken, "of_best")}.'
  )
  scan = [row for row in taken if row.get('of_scan', 0) > 1.05]
  sentences.append(
      "`None` is more than 5 % slower than `'scan'` in"
      f' {programs(scan, taken, "of_scan")}.'
  )
  if cudnn := _cudnn(data):
    beside = [
        row | {'of_cudnn': row['median_ms'] / line[row['direction']]}
        for row in taken
        for line in [cudnn.get((row['layer'], row['shape']), {})]
        if row['direction'] in line
    ]
    over = [row for row in beside if row['of_cudnn'] > 1.05]
    text = programs(over, beside, 'of_cudnn')
    sentences.append(f'cuDNN is more than 5 % faster in {text}.')
  return ' '.join(sentences)


def _cudnn(data: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
  """Returns cuDNN's times of a result, by layer and shape."""
  rows = data.get('cudnn', {'rows': []})['rows']
  found = _by_direction(rows, 'layer', 'shape')
  return {key: own['cudnn'] for key, own in found.items()}


def _program(data: dict[str, Any], row: dict[str, Any]) -> str:
  """Returns layer and sizes of a row, for a sentence."""
  return f'{row["layer"]} {_sizes(data["shapes"][row["shape"]])}'


def newton_h200() -> str:
  """Returns the table of paths over time on a GPU, Newton's among them."""
  data = load('newton_h200.json')
  paths = 'associative_scan', 'pallas', 'scan'
  times = _by_direction(data['rows'], 'layer')
  lines = [
      '| layer | ' + ' | '.join(f"`'{path}'`" for path in paths) + ' |',
      '|---|---|---|---|',
  ]
  for layer, own in times.items():
    cells = ' | '.join(_two(own.get(path), 2) for path in paths)
    lines.append(f'| `{layer}` | {cells} |')
  lines += [
      '',
      f'{data["device"]["kind"]}, jax {data["versions"]["jax"]},'
      f' {data["date"][:10]}, commit {data["commit"][:7]}. Milliseconds'
      ' forward / forward and backward; medians of calls in flight.',
  ]
  return '\n'.join(lines)


def newton_long(file: str) -> str:
  """Returns the table of long sequences, all steps at once beside a kernel."""
  data = load(file)
  before = data.get('before', {'rows': []})
  keys = 'case', 'batch', 'time', 'features', 'heads'
  cases: dict[tuple[Any, ...], dict[str, dict]] = {}
  for row in data['rows'] + before['rows']:
    if row['status'] == 'ok':
      own = cases.setdefault(tuple(row[key] for key in keys), {})
      own.setdefault(row['path'], row)
  old = bool(before['rows'])
  lines = [
      "| layer | batch x time x units, heads | `'pallas'` |"
      " `'associative_scan'` | times faster | MiB | with backward, `'pallas'` |"
      " `'associative_scan'` |" + ' single steps, before |' * old,
      '|---' * (8 + old) + '|',
  ]
  note = ''
  for (case, batch, time, features, heads), own in cases.items():
    if linear := own.get('linear_scan'):
      note = (
          f' `linear_scan` of {batch} x {time:,} x {features}:'
          f' {linear["median_ms"]:.3f}.'
      )
      continue
    kernel, at_once = own.get('pallas'), own.get('associative_scan')
    cell = lambda row: f'{row["median_ms"]:#.3g}' if row else '-'
    ratio = mib = '-'
    if at_once and kernel:
      ratio = f'{kernel["median_ms"] / at_once["median_ms"]:.1f}'
    if at_once and 'temp_mib' in at_once:
      mib = f'{at_once["temp_mib"]:.0f}'
    lines.append(
        f'| {case} | {batch} x {time:,} x {features}, {heads} | {cell(kernel)}'
        f' | {cell(at_once)} | {ratio} | {mib} |'
        f' {cell((kernel or {}).get("gradient"))} |'
        f' {cell((at_once or {}).get("gradient"))} |'
        + f' {cell(own.get("single steps"))} |' * old
    )
  others = {row['commit'] for row in data['rows'] if 'commit' in row}
  commits = data['commit']
  if others:
    commits += f'; rows of relu and sLSTM {" and ".join(sorted(others))}'
  if 'commit' in before:
    commits += f'; before: {before["commit"]}'
  lines += [
      '',
      f'{data["device"]}, jax {data["jax"]}, {data["date"]}, commit'
      f' {commits}. Milliseconds, forward unless it says so,'
      ' float32, gates given; medians of calls in flight.'
      " MiB: temporary memory by XLA of `'associative_scan'`. A dash: not"
      ' measured.' + note,
  ]
  return '\n'.join(lines)


def _by_direction(rows, *keys) -> dict:
  """Returns times as [the row's keys][implementation][direction]."""
  times: dict = {}
  for row in rows:
    if 'median_ms' in row and row['status'] == 'ok':
      key = row[keys[0]] if len(keys) == 1 else tuple(row[k] for k in keys)
      own = times.setdefault(key, {}).setdefault(row['implementation'], {})
      own[row['direction']] = row['median_ms']
  return times


def _two(runs, digits: int) -> str:
  """Returns times of both directions, or a dash."""
  if runs is None:
    return '-'
  return ' / '.join(
      f'{runs[way]:.{digits}f}' if way in runs else '-' for way in DIRECTIONS
  )


def peers() -> str:
  """Returns a table of layers beside other libraries' for each shape."""
  data = load('peers_h200.json')
  lines: list[str] = []
  for shape in dict.fromkeys(row['shape'] for row in data['rows']):
    rows = [row for row in data['rows'] if row['shape'] == shape]
    versions = {row['implementation']: row['version'] for row in rows}
    times = _by_direction(rows, 'layer')
    sizes = data['shapes'][shape]
    dates = {row.get('date', data['date'])[:10] for row in rows}
    commits = {row.get('commit', data['commit'])[:7] for row in rows}
    heads = '' if sizes['num_heads'] == 1 else f' in {sizes["num_heads"]} heads'
    lines += [
        '| library | ' + ' | '.join(times) + ' |',
        '|---|' + '---|' * len(times),
    ]
    for name, version in versions.items():
      cells = [_two(own.get(name), 2) for own in times.values()]
      lines.append(f'| {name} {version or ""} | ' + ' | '.join(cells) + ' |')
    lines += [
        '',
        f'{data["device"]["kind"]}, jax {data["versions"]["jax"]},'
        f' {", ".join(sorted(dates))}, commit {", ".join(sorted(commits))}.'
        f' Batch {sizes["batch"]}, {sizes["time"]} steps,'
        f' {sizes["features"]} features{heads}, float32 arrays (products in'
        ' TF32). Milliseconds forward / forward and backward; medians, in turn'
        ' with those of the same date and commit.',
        '',
    ]
  return '\n'.join(lines[:-1])


def tokens(row: dict) -> str:
  """Returns the tokens a second of a run's fastest epoch, '-' if unknown."""
  rate = row.get('tokens_per_second')
  return f'{rate / 1000:,.0f} K' if rate else '-'


def text() -> str:
  """Returns the table of characters and translation."""
  lines = [
      '| config | test | published | epochs | parameters | tokens a second |',
      '|---|---|---|---|---|---|',
  ]
  for row in load('text_h200.json'):
    others, seed = row['others'], row['seeds'][0]
    if 'bleu' in row:
      test = f'BLEU {row["bleu"]["mean"]:.1f}'
      test += f', perplexity {others["perplexity"]:.1f}'
      for name, words in (
          ('greedy_bleu', 'greedy'),
          ('sacrebleu', "sacrebleu's default"),
          ('greedy_sacrebleu', 'greedy'),
      ):
        if name in others:
          test += f', {words} {others[name]:.1f}'
    else:
      test = f'{others["loss"]:.3f} nats'
      test += f', {row["bits_per_character"]["mean"]:.3f} bits'
    lines.append(
        f'| `{row["experiment"]}` | {test} |'
        f' {published_words(row["experiment"])} | {seed["epochs"]} |'
        f' {seed["parameters"]:,} | {tokens(row)} |'
    )
  return '\n'.join([*lines, '', _source(load('text_h200.json'))])


def synthetic() -> str:
  """Returns the table of adding and copying."""
  rows = [r for r in load('synthetic_h200.json') if not r['over_length']]
  lines = ['| config | task | test | epochs |', '|---|---|---|---|']
  for row in rows:
    if 'mse' in row:
      test = f'MSE {row["mse"]["mean"]:.1e}'
    else:
      test = f'{100 * row["accuracy"]["mean"]:.1f} % of the symbols'
    lines.append(
        f'| `{row["experiment"]}` | {row["dataset"]} | {test} |'
        f' {row["seeds"][0]["epochs"]} |'
    )
  return '\n'.join([*lines, '', _source(rows)])


def state_tracking() -> str:
  """Returns the table of accuracy over length."""
  rows = [r for r in load('synthetic_h200.json') if r['over_length']]
  lengths = sorted({int(n) for row in rows for n in row['over_length']})
  head = ['config', 'layer', *(f'{n:,}' for n in lengths)]
  lines = ['| ' + ' | '.join(head) + ' |', '|' + '---|' * len(head)]
  for row in sorted(rows, key=lambda row: (row['dataset'], row['layer'])):
    cells = [
        f'{100 * row["over_length"][str(n)]:.1f}'
        if str(n) in row['over_length']
        else '-'
        for n in lengths
    ]
    changed = row['experiment'].replace(f'model.layer={row["layer"]}', '')
    changed = re.sub(r' with $', '', changed.strip(' ,'))
    changed = re.sub(r' with ,? ?', ' with ', changed).removesuffix(' with')
    changed = changed.replace(', ,', ',')
    cells = [f'`{changed}`', f'`{row["layer"]}`', *cells]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join([*lines, '', _source(rows)])


def published_words(experiment: str) -> str:
  """Returns the sentence after 'Published:' in a config's docstring."""
  path = ROOT / 'configs' / f'{experiment.split(" with ")[0]}.py'
  doc = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8')))
  match = re.search(r'Published: (.*?)\.\n', doc or '', re.DOTALL)
  return ' '.join(match[1].split()) if match else ''


def _source(rows) -> str:
  each = lambda key: ' and '.join(sorted({row[key] for row in rows}))
  counts = sorted({str(len(row['seeds'])) for row in rows})
  return (
      f'{each("device")}, jax {each("jax")}, {each("date")}, commits'
      f' {each("commit")}; seeds: {" or ".join(counts)}.'
  )


def agru_ladder() -> str:
  """Returns the table of one A-GRU, from a Python loop to the kernel."""
  data = load('agru_ladder.json')
  gpu = load('dense_h200.json')
  sizes = {
      row['shape']: ' x '.join(str(row['sizes'][key]) for key in 'BTIF')
      for row in data['rows']
  }
  times: dict[str, dict[str, dict]] = {}
  for row in data['rows']:
    times.setdefault(row['program'], {})[row['shape']] = row
  keys = 'batch', 'time', 'in_features', 'features'
  on_gpu: dict[str, dict[str, float]] = {}
  for row in gpu['rows']:
    if (
        (row['layer'], row['projection']) == ('AGRU', 'with')
        and row['direction'] == 'forward+backward'
        and row['status'] == 'ok'
    ):
      # Two suites give one name to two shapes: sizes head the columns.
      own = gpu['shapes'][row['shape']]
      size = ' x '.join(str(own[key]) for key in keys)
      on_gpu.setdefault(size, {})[row['implementation']] = row['median_ms']
  head = ['batch x time x in x features', *sizes.values(), *on_gpu]
  units = ['', *('CPU, ms' for _ in sizes), *('H200, ms' for _ in on_gpu)]
  lines = [head, ['---'] * len(head), units]
  cells = lambda path: [
      f'{own[path]:.2f}' if path in own else '' for own in on_gpu.values()
  ]
  for program, rows in times.items():
    path = 'scan' if 'rnnzoo' in program else ''
    here = (
        f'{rows[shape]["processor_ms"]:.1f}' if shape in rows else '-'
        for shape in sizes
    )
    lines.append([program, *here, *cells(path)])
  lines.append(["`rnnzoo.AGRU`, `'pallas'`", *('' for _ in sizes)])
  lines[-1] += cells('pallas')
  versions, there = data['versions'], gpu['versions']
  return '\n'.join(
      [
          *('| ' + ' | '.join(line) + ' |' for line in lines),
          '',
          f'{data["device"]["kind"]}, processor time of one thread, jax'
          f' {versions["jax"]},'
          f' {data["date"][:10]}; {gpu["device"]["kind"]}, jax {there["jax"]},'
          f' {gpu["date"][:10]}. Forward and backward, float32, medians of'
          ' calls. A dash: not run.',
      ]
  )


def units_and_batch() -> str:
  """Returns the table of LSTMs and GRUs with one head, by units and batch."""
  data = load('dense_h200.json')
  times: dict[tuple[str, int, int], dict[str, float]] = {}
  for row in data['rows']:
    sizes = data['shapes'][row['shape']]
    if (
        row['status'] == 'ok'
        and (row['dtype'], row['projection']) == ('bfloat16', 'without')
        and row['implementation'] == 'pallas'
        and row['layer'] in ('GRU', 'LSTM')
        and (sizes['num_heads'], sizes['time']) == (1, 1024)
    ):
      case = row['layer'], sizes['features'], sizes['batch']
      times.setdefault(case, {})[row['direction']] = row['median_ms']
  batches = sorted({batch for _, _, batch in times})
  head = ['layer', 'units', *(f'batch {batch}' for batch in batches)]
  lines = ['| ' + ' | '.join(head) + ' |', '|' + '---|' * len(head)]
  for layer, units in sorted({case[:2] for case in times}):
    cells = []
    for batch in batches:
      runs = times.get((layer, units, batch))
      ways = ('forward', 'forward+backward')
      cells.append(
          ' / '.join(f'{runs[way]:.2f}' for way in ways) if runs else '-'
      )
    lines.append('| ' + ' | '.join([f'`{layer}`', str(units), *cells]) + ' |')
  lines += [
      '',
      f'{data["device"]["kind"]}, jax {data["versions"]["jax"]},'
      f' {data["date"][:10]}.',
  ]
  return '\n'.join(lines)


def scanned_rnn() -> str:
  """Returns the table of rollouts beside the class that programs copy."""
  data = load('scanned_rnn_h200.json')
  times: dict[str, dict[str, float]] = {}
  for row in data['rows']:
    times.setdefault(row['program'], {})[row['direction']] = row['median_ms']
  lines = [
      '| program | forward, ms | forward and backward, ms |',
      '|---|---|---|',
  ]
  for program, runs in times.items():
    cell = lambda way, runs=runs: f'{runs[way]:.2f}' if way in runs else '-'
    lines.append(
        f'| {program} | {cell("forward")} | {cell("forward+backward")} |'
    )
  lines += [
      '',
      f'{data["device"]}, jax {data["jax"]}, {data["date"]}, commit'
      f' {data["commit"]}.',
  ]
  return '\n'.join(lines)


def planning() -> str:
  """Returns the table of steps on more devices than were measured."""
  path = ROOT / 'benchmarks' / 'data_parallel.py'
  return runpy.run_path(str(path))['table']()


def libraries() -> str:
  """Returns the table of features of recurrent libraries."""
  text = (ROOT / 'docs' / 'libraries.json').read_text(encoding='utf-8')
  data = json.loads(text)
  head = ['', *data['libraries']]
  lines = ['| ' + ' | '.join(head) + ' |', '|' + '---|' * len(head)]
  lines += [
      '| ' + ' | '.join([row['feature'], *row['cells']]) + ' |'
      for row in data['rows']
  ]
  versions = ', '.join(f'{k} {v}' for k, v in data['versions'].items())
  return '\n'.join([*lines, '', f'Looked at: {versions}.'])


# Documents, and the tables in each.
TABLES = {
    'README.md': {'row_smnist': row_smnist, 'gpu_runs': gpu_runs},
    'docs/benchmarks/cpu.md': {
        'cpu_peers': cpu_peers,
        'compile_time': compile_time,
    },
    'docs/benchmarks/dense.md': {
        'dense_h200': dense_h200,
        'small_heads': small_heads,
        'stacks': stacks,
        'large_batches': large_batches,
        'batches': batches,
    },
    'docs/benchmarks/index.md': {'units_and_batch': units_and_batch},
    'docs/benchmarks/ladder.md': {'agru_ladder': agru_ladder},
    'docs/benchmarks/linear.md': {
        'linear_h200': linear_h200,
        'resets': resets,
        'lengths': lengths,
    },
    'docs/benchmarks/planning.md': {'planning': planning},
    'docs/benchmarks/rl.md': {'scanned_rnn': scanned_rnn},
    'docs/choosing.md': {
        'transformations': transformations,
        'memory': memory,
        'inner_steps': inner_steps,
        'irevrnn_stacks': irevrnn_stacks,
        'kernel_memory': kernel_memory,
        'newton_h200': newton_h200,
        'newton_long': functools.partial(newton_long, 'newton_long_h200.json'),
        'newton_long_h100': functools.partial(
            newton_long, 'newton_long_h100.json'
        ),
        'newton': newton,
        'newton_trained': newton_trained,
    },
    'docs/benchmarks/peers.md': {'peers': peers},
    'docs/benchmarks/tasks.md': {
        'text': text,
        'synthetic': synthetic,
        'state_tracking': state_tracking,
        'gpu_recipes': gpu_recipes,
        'agru_ablations': agru_ablations,
    },
    'docs/converting.md': {'conversions': conversions},
    'docs/devices.md': {
        'linear_over_time_h100': functools.partial(
            linear_over_time, 'linear_over_time_4_h100.json'
        ),
        'devices_two': functools.partial(devices, 'devices_2_h100.json'),
        'devices_four': functools.partial(devices, 'devices_4_h100.json'),
        'processes': processes,
    },
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
  for name, table in TABLES[document].items():
    pattern = rf'(<!-- begin {name} -->\n).*?(<!-- end {name} -->)'
    if not re.search(pattern, text, re.DOTALL):
      raise ValueError(f'{document} has no place for the table {name!r}')
    put = lambda match, table=table: f'{match[1]}{table()}\n{match[2]}'
    text = re.sub(pattern, put, text, flags=re.DOTALL)
  return text


def main() -> int:
  """Writes the documents; returns the exit code."""
  if sys.argv[1:]:
    print(__doc__, f'It takes no arguments: {sys.argv[1:]}.', sep='\n')
    return 2
  code = 0
  for document, tables in TABLES.items():
    path = ROOT / document
    try:
      text = render(document, path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
      print(f'{document} stays as it is: {error}', file=sys.stderr)
      code = 1
      continue
    path.write_text(text, encoding='utf-8')
    print(f'{document}: {", ".join(tables)}')
  return code


if __name__ == '__main__':
  sys.exit(main())
