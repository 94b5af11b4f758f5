"""Tables of trained models: scores beside published ones."""

import ast
import re
import statistics

from benchmarks import agru_ablations as ablations
from benchmarks import pivots


def published(experiment: str) -> str:
  """Returns the sentence after 'Published:' in a config's docstring."""
  path = pivots.ROOT / 'configs' / f'{experiment.split(" with ")[0]}.py'
  doc = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8')))
  match = re.search(r'Published: (.*?)\.\n', doc or '', re.DOTALL)
  return ' '.join(match[1].split()) if match else ''


def percent(experiment: str) -> str:
  """Returns the published accuracy of a config, in percent."""
  match = re.match(r'(0\.\d+)(?: \+- (0\.\d+))?', published(experiment))
  if match is None:
    return ''
  return ' ± '.join(f'{100 * float(x):.2f}' for x in match.groups() if x)


def scores(row: pivots.Row, metric: str = 'accuracy') -> str:
  """Returns mean and deviation of a metric, in percent."""
  return f'{100 * row[metric]["mean"]:.2f} ± {100 * row[metric]["std"]:.2f}'


def seeds(found: list[pivots.Row]) -> str:
  """Returns how many seeds rows have."""
  counts = sorted({str(len(row['seeds'])) for row in found})
  return f'seeds: {" or ".join(counts)}'


def row_smnist() -> str:
  """The table of test accuracies on row-wise MNIST."""
  found = [row for row in pivots.rows('smnist') if row['dataset'] == 'MNIST']
  found.sort(key=lambda row: -row['accuracy']['mean'])
  heads = 'config', 'test accuracy, %', 'published, %', 'seeds', 'parameters'
  lines = [
      [
          f'`{row["experiment"]}`',
          scores(row),
          percent(row['experiment']),
          len(row['seeds']),
          f'{row["seeds"][0]["parameters"]:,}',
          row['commit'],
      ]
      for row in found
  ]
  return pivots.with_source(pivots.table([*heads, 'commit'], lines), found)


def gpu_runs() -> str:
  """The table of training runs on GPU kernels, as configs have them."""
  found = [
      r for r in pivots.rows('gpu_runs') if ' with ' not in r['experiment']
  ]
  found.sort(key=lambda row: row['experiment'])
  lines = []
  for row in found:
    name, own = row['experiment'], row['seeds']
    score = f'{100 * row["accuracy"]["mean"]:.2f}'
    if len(own) > 1:
      score = f'{scores(row)} ({len(own)} seeds)'
    epoch = statistics.mean(seed['seconds_per_epoch'] for seed in own)
    (epochs,) = {seed['epochs'] for seed in own}
    times = f'{epoch:.2f}', f'{epoch * epochs:.0f}'
    lines.append([f'`{name}`', score, percent(name), epochs, *times])
  heads = 'config', 'test accuracy, %', 'published, %', 'epochs'
  heads = *heads, 'seconds an epoch', 'seconds in all'
  return pivots.with_source(pivots.table(heads, lines), found)


def gpu_recipes() -> str:
  """The table of runs whose recipe is not, or no more, that of a config."""
  found = [r for r in pivots.rows('gpu_runs') if ' with ' in r['experiment']]
  found.sort(key=lambda row: row['experiment'])
  lines = []
  for row in found:
    name, changed = row['experiment'].split(' with ')
    own = ', '.join(f'{100 * seed["accuracy"]:.2f}' for seed in row['seeds'])
    epochs = row['seeds'][0]['epochs']
    published = percent(name)
    lines.append([f'`{name}`', changed, own, published, epochs, row['commit']])
  heads = 'config', 'changed', 'test accuracy, %', 'published, %', 'epochs'
  return pivots.with_source(
      pivots.table([*heads, 'commit'], lines), found, seeds(found)
  )


def agru_ablations() -> str:
  """The table of the A-GRU's ablations."""
  data = pivots.load('benchmarks/agru_ablations.json')
  count = data['rows'][0]['seeds']
  text = ablations.table(data)
  return (
      f'{text} {pivots.source(pivots.rows("agru_ablations"), f"{count} seeds")}'
  )


def text() -> str:
  """The table of characters and translation."""
  found = pivots.rows('text_h200')
  bleus = {'greedy_bleu': 'greedy', 'sacrebleu': "sacrebleu's default"}
  bleus['greedy_sacrebleu'] = 'greedy'
  lines = []
  for row in found:
    others, seed = row['others'], row['seeds'][0]
    if 'bleu' in row:
      test = f'BLEU {row["bleu"]["mean"]:.1f}'
      test += f', perplexity {others["perplexity"]:.1f}'
      for name, words in bleus.items():
        if name in others:
          test += f', {words} {others[name]:.1f}'
    else:
      test = f'{others["loss"]:.3f} nats'
      test += f', {row["bits_per_character"]["mean"]:.3f} bits'
    name, rate = row['experiment'], row.get('tokens_per_second')
    tokens = f'{rate / 1000:,.0f} K' if rate else '-'
    parameters = f'{seed["parameters"]:,}'
    sizes = seed['epochs'], parameters, tokens
    lines.append([f'`{name}`', test, published(name), *sizes])
  heads = 'config', 'test', 'published', 'epochs', 'parameters'
  lines = pivots.table([*heads, 'tokens a second'], lines)
  return pivots.with_source(lines, found, seeds(found))


def synthetic() -> str:
  """The table of adding and copying."""
  found = [
      row for row in pivots.rows('synthetic_h200') if not row['over_length']
  ]
  lines = []
  for row in found:
    if 'mse' in row:
      test = f'MSE {row["mse"]["mean"]:.1e}'
    else:
      test = f'{100 * row["accuracy"]["mean"]:.1f} % of the symbols'
    epochs = row['seeds'][0]['epochs']
    lines.append([f'`{row["experiment"]}`', row['dataset'], test, epochs])
  lines = pivots.table(['config', 'task', 'test', 'epochs'], lines)
  return pivots.with_source(lines, found, seeds(found))


def state_tracking() -> str:
  """The table of accuracy over length."""
  found = [row for row in pivots.rows('synthetic_h200') if row['over_length']]
  found.sort(key=lambda row: (row['dataset'], row['layer']))
  sizes = sorted({int(n) for row in found for n in row['over_length']})
  lines = []
  for row in found:
    cells = [row['over_length'].get(str(n)) for n in sizes]
    name, _, fields = row['experiment'].partition(' with ')
    own = f'model.layer={row["layer"]}'
    rest = ', '.join(f for f in fields.split(', ') if f and f != own)
    changed = f'{name} with {rest}' if rest else name
    numbers = ('-' if x is None else f'{100 * x:.1f}' for x in cells)
    lines.append([f'`{changed}`', f'`{row["layer"]}`', *numbers])
  heads = 'config', 'layer', *(f'{n:,}' for n in sizes)
  return pivots.with_source(pivots.table(heads, lines), found, seeds(found))
