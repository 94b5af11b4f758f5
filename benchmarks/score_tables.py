"""Tables of trained models: scores beside published ones."""

import ast
import re
import statistics

from benchmarks import pivots


def published(experiment: str) -> str:
  """Returns the sentence after 'Published:' in a config's docstring."""
  if ' with model.layer=' in experiment:
    return 'none'  # That score is another layer's.
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
  kept = re.compile(r'\w+( with data.scaling=standard)?')
  found = [row for row in found if kept.fullmatch(row['experiment'])]
  found.sort(key=lambda row: -row['accuracy']['mean'])
  for row in found:
    row |= {'score': scores(row), 'published': percent(row['experiment'])}
    row |= row['seeds'][0]
  return pivots.sheet(
      found,
      'config | test accuracy, % | published, % | parameters',
      '`{experiment}` | {score} | {published} | {parameters:,}',
      found,
  )


def _gpu_runs() -> list[pivots.Row]:
  """Returns training runs on GPU kernels, as configs have them."""
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
  return found


def results() -> str:
  """The table of the README: runs beside published scores."""
  found = [row for row in _gpu_runs() if row['published']]
  lines = pivots.made(
      'config | test accuracy, % | published, % | seconds of training',
      '`{experiment}` | {score} | {published} | {all:.0f}',
      found,
  )
  return '\n'.join(lines)


_BLEUS = {'greedy_bleu': 'greedy', 'sacrebleu': "sacrebleu's default"}
_BLEUS['greedy_sacrebleu'] = 'greedy'


def text() -> str:
  """The table of characters and translation."""
  rows = pivots.rows('text_h200')
  kept = 'test_context', 'subwords', '59m', 'model.layer'
  found = [
      row
      for row in rows
      if ' with ' not in row['experiment']
      or any(word in row['experiment'] for word in kept)
  ]
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


_TASKS = {
    'adding problem of 1,000 steps': 'adding, 1,000 steps',
    'copy memory with a delay of 200': 'copying, delay 200',
    'copy memory with a delay of 1,000': 'copying, delay 1,000',
    'selective copying of 16 among 4,096': 'selective copying, 4,096 steps',
}


def synthetic() -> str:
  """The table of adding and copying: each layer's best run."""
  rows = pivots.rows('synthetic_h200')
  found = [row for row in rows if not row['over_length']]
  for row in found:
    epochs = row['seeds'][0]['epochs']
    row['ms'] = row['mse']['mean'] if 'mse' in row else 0
    row['text'] = f'{row["ms"]:.1e} ({epochs})'
    if 'mse' not in row:
      row['ms'] = -row['accuracy']['mean']
      row['text'] = f'{-100 * row["ms"]:.1f} % ({epochs})'
  return _best(found, _TASKS)


def time_series() -> str:
  """The table of two archives: each layer's accuracy."""
  found = [row for row in pivots.rows('time_series') if 'accuracy' in row]
  for row in found:
    mean, std = row['accuracy']['mean'], row['accuracy']['std']
    row['ms'], row['text'] = -mean, f'{100 * mean:.1f} ± {100 * std:.1f}'
    row['device'] = row['device'].upper()
  return _best(found, {row['dataset']: row['dataset'] for row in found})


def _best(found: list[pivots.Row], tasks: dict[str, str]) -> str:
  """Returns the table of the best runs, a line a layer and a column a task."""
  items = pivots.pivot(found, ['layer'], ['dataset'])
  for item in items:
    cells = (item['own'].get(name, {}).get('text', '-') for name in tasks)
    item['cells'] = ' | '.join(cells)
  heads = ' | '.join(['layer', *tasks.values()])
  items.sort(key=lambda item: item['layer'])
  line = '`{layer}` | {cells}'
  return pivots.sheet(found, heads, line, items, seeds(found))


def state_tracking() -> str:
  """The table of accuracies at two lengths: each layer's best run."""
  found = [row for row in pivots.rows('synthetic_h200') if row['over_length']]
  for row in found:
    own = {int(n): 100 * x for n, x in row['over_length'].items()}
    row['text'] = f'{own[min(own)]:.1f} / {own[max(own)]:.1f}'
    row['ms'] = -own[max(own)]
  return _best(found, {row['dataset']: row['dataset'] for row in found})
