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
  for row in found:
    row |= {'score': scores(row), 'published': percent(row['experiment'])}
    row |= {'count': len(row['seeds']), **row['seeds'][0]}
  return pivots.sheet(
      found,
      'config | test accuracy, % | published, % | seeds | parameters | commit',
      '`{experiment}` | {score} | {published} | {count} | {parameters:,} |'
      ' {commit}',
      found,
  )


def gpu_runs() -> str:
  """The table of training runs on GPU kernels, as configs have them."""
  rows = pivots.rows('gpu_runs')
  found = [row for row in rows if ' with ' not in row['experiment']]
  found.sort(key=lambda row: row['experiment'])
  for row in found:
    own = row['seeds']
    row['score'] = f'{100 * row["accuracy"]["mean"]:.2f}'
    if len(own) > 1:
      row['score'] = f'{scores(row)} ({len(own)} seeds)'
    row['epoch'] = statistics.mean(seed['seconds_per_epoch'] for seed in own)
    (row['epochs'],) = {seed['epochs'] for seed in own}
    row['all'] = row['epoch'] * row['epochs']
    row['published'] = percent(row['experiment'])
  return pivots.sheet(
      found,
      'config | test accuracy, % | published, % | epochs | seconds an epoch |'
      ' seconds in all',
      '`{experiment}` | {score} | {published} | {epochs} | {epoch:.2f} |'
      ' {all:.0f}',
      found,
  )


def gpu_recipes() -> str:
  """The table of runs whose recipe differs from the recipe of a config."""
  rows = pivots.rows('gpu_runs')
  found = [row for row in rows if ' with ' in row['experiment']]
  found.sort(key=lambda row: row['experiment'])
  for row in found:
    row['name'], row['changed'] = row['experiment'].split(' with ')
    own = (f'{100 * seed["accuracy"]:.2f}' for seed in row['seeds'])
    row |= {'own': ', '.join(own), 'published': percent(row['name'])}
    row['epochs'] = row['seeds'][0]['epochs']
  return pivots.sheet(
      found,
      'config | changed | test accuracy, % | published, % | epochs | commit',
      '`{name}` | {changed} | {own} | {published} | {epochs} | {commit}',
      found,
      seeds(found),
  )


def agru_ablations() -> str:
  """The table of the A-GRU's ablations."""
  data = pivots.load('benchmarks/agru_ablations.json')
  found = pivots.rows('agru_ablations')
  own = pivots.source(found, f'{data["rows"][0]["seeds"]} seeds')
  return f'{ablations.table(data)} {own}'


_BLEUS = {'greedy_bleu': 'greedy', 'sacrebleu': "sacrebleu's default"}
_BLEUS['greedy_sacrebleu'] = 'greedy'


def text() -> str:
  """The table of characters and translation."""
  found = pivots.rows('text_h200')
  for row in found:
    others, rate = row['others'], row.get('tokens_per_second')
    if 'bleu' in row:
      row['test'] = f'BLEU {row["bleu"]["mean"]:.1f}'
      row['test'] += f', perplexity {others["perplexity"]:.1f}'
      for name, words in _BLEUS.items():
        if name in others:
          row['test'] += f', {words} {others[name]:.1f}'
    else:
      row['test'] = f'{others["loss"]:.3f} nats'
      row['test'] += f', {row["bits_per_character"]["mean"]:.3f} bits'
    row['tokens'] = f'{rate / 1000:,.0f} K' if rate else '-'
    row |= {'published': published(row['experiment']), **row['seeds'][0]}
  return pivots.sheet(
      found,
      'config | test | published | epochs | parameters | tokens a second',
      '`{experiment}` | {test} | {published} | {epochs} | {parameters:,} |'
      ' {tokens}',
      found,
      seeds(found),
  )


def synthetic() -> str:
  """The table of adding and copying."""
  rows = pivots.rows('synthetic_h200')
  found = [row for row in rows if not row['over_length']]
  for row in found:
    row['epochs'] = row['seeds'][0]['epochs']
    if 'mse' in row:
      row['test'] = f'MSE {row["mse"]["mean"]:.1e}'
    else:
      row['test'] = f'{100 * row["accuracy"]["mean"]:.1f} % of the symbols'
  line = '`{experiment}` | {dataset} | {test} | {epochs}'
  heads = 'config | task | test | epochs'
  return pivots.sheet(found, heads, line, found, seeds(found))


def state_tracking() -> str:
  """The table of accuracy over length."""
  found = [row for row in pivots.rows('synthetic_h200') if row['over_length']]
  found.sort(key=lambda row: (row['dataset'], row['layer']))
  sizes = sorted({int(n) for row in found for n in row['over_length']})
  for row in found:
    name, _, fields = row['experiment'].partition(' with ')
    own = f'model.layer={row["layer"]}'
    rest = ', '.join(f for f in fields.split(', ') if f and f != own)
    row['changed'] = f'{name} with {rest}' if rest else name
    cells = [row['over_length'].get(str(n)) for n in sizes]
    numbers = ('-' if x is None else f'{100 * x:.1f}' for x in cells)
    row['numbers'] = ' | '.join(numbers)
  heads = ' | '.join(['config', 'layer', *(f'{n:,}' for n in sizes)])
  line = '`{changed}` | `{layer}` | {numbers}'
  return pivots.sheet(found, heads, line, found, seeds(found))
