"""Collects finished training runs into one JSON file.

  python benchmarks/collect_runs.py --commit=$(git rev-parse --short HEAD) \
      runs/agru_smnist runs/gru_smnist

Rows are added to the output, and replace earlier rows of their experiment. Runs
of one experiment that are named together, each with its own seeds, are one row.
"""

import csv
import datetime
import json
import pathlib
import re
import statistics

from absl import app
from absl import flags

_COMMIT = flags.DEFINE_string(
    'commit', None, 'The commit that the runs were made with.', required=True
)
_OUTPUT = flags.DEFINE_string(
    'output', 'benchmarks/smnist.json', 'The JSON file to add to.'
)

# Fields that name a place of data, which says nothing of the run.
_PLACES = re.compile(r'data\.(name|path|\w+_dir|(\w+_)?(source|target))')
# Scores that a run of translation measures beside its metrics.
_BLEUS = ('sacrebleu', 'greedy_bleu', 'greedy_sacrebleu')


def epochs(directory: pathlib.Path, seed: int) -> list[dict[str, str]]:
  """Returns the times of a seed's epochs that did not compile."""
  path = directory / f'seed_{seed}' / 'seconds.csv'
  if not path.exists():
    return []
  with path.open(encoding='utf-8', newline='') as file:
    return [row for row in csv.DictReader(file) if row['compiled'] == '0']


def seconds_per_epoch(directory: pathlib.Path, seed: int) -> float | None:
  """Returns the mean over a seed's epochs, or None."""
  seconds = [float(row['seconds']) for row in epochs(directory, seed)]
  return round(statistics.mean(seconds), 4) if seconds else None


def tokens_per_second(directory: pathlib.Path, config: dict) -> float | None:
  """Returns the rate of the fastest epoch of characters, or None.

  Others may use the device too: the fastest epoch was disturbed least.
  """
  context = config['data'].get('context')
  found = epochs(directory, config['seed']) if context else []
  rates = [float(row.get('sequences_per_second') or 0) for row in found]
  return round((context or 0) * max(rates, default=0.0)) or None


def collect(directory: pathlib.Path, commit: str) -> dict:
  """Returns one row from a run directory of `train.py`."""
  read = lambda name: json.loads((directory / name).read_text(encoding='utf-8'))
  report, run = read('report.json'), read('run.json')
  config = read('config.json')
  metric = next(iter(report['test']))  # The main one comes first.
  ended = datetime.datetime.fromtimestamp(
      (directory / 'report.json').stat().st_mtime, datetime.UTC
  )
  name = report['experiment'].split(' with ')[0]
  pairs = ', '.join(
      f'{key}={value}'
      for key, value in report['changed'].items()
      if f'{key}=' in report['experiment'] and not _PLACES.fullmatch(key)
  )
  name += f' with {pairs}' * bool(pairs)
  over_length = report.get('accuracy_over_length', {})
  return {
      'experiment': name,
      'layer': config['model']['layer'],
      'features': config['model']['features'],
      'dataset': report['dataset'],
      metric: report['test'][metric],
      'others': {
          other: value['mean']
          for other, value in report['test'].items()
          if other != metric
      }
      | {
          name: statistics.mean(seed['test'][name] for seed in report['seeds'])
          for name in _BLEUS
          if name in report['seeds'][0]['test']
      },
      'tokens_per_second': tokens_per_second(directory, config),
      'over_length': {
          length: value['mean'] for length, value in over_length.items()
      },
      'seeds': [
          {
              'seed': seed['seed'],
              metric: seed['test'][metric],
              'epochs': seed['num_epochs'],
              'parameters': seed['num_parameters'],
              'seconds_per_epoch': seconds_per_epoch(directory, seed['seed']),
          }
          for seed in report['seeds']
      ],
      'device': run['device'],
      'jax': run['jax'],
      'flax': run['flax'],
      'commit': commit,
      'date': ended.date().isoformat(),
  }


def joined(rows: list[dict]) -> dict:
  """Returns one row of all seeds of runs of one experiment.

  Args:
    rows: results of `collect`, one for each run.

  Raises:
    ValueError: a seed is in two runs, or runs differ in more than their seeds.
  """
  if len(rows) == 1:
    return rows[0]
  name = rows[0]['experiment']
  of_seeds = ('others', 'tokens_per_second', 'over_length', 'seeds', 'date')
  metric = next(key for key in rows[0]['seeds'][0] if key in rows[0])
  for key in rows[0]:
    if key not in (*of_seeds, metric) and len({row[key] for row in rows}) > 1:
      raise ValueError(f'The runs of {name} differ in {key!r}.')
  seeds = [seed for row in rows for seed in row['seeds']]
  seeds.sort(key=lambda seed: seed['seed'])
  if len({seed['seed'] for seed in seeds}) < len(seeds):
    raise ValueError(f'Two runs of {name} have the same seed.')
  scores = [seed[metric] for seed in seeds]
  counts = [len(row['seeds']) for row in rows]

  def means(field):
    return {
        key: statistics.fmean([row[field][key] for row in rows], counts)
        for key in rows[0][field]
    }

  return rows[0] | {
      metric: {
          'mean': statistics.mean(scores),
          'std': statistics.pstdev(scores),  # The population's, as in a run.
      },
      'others': means('others'),
      'tokens_per_second': (
          max(row['tokens_per_second'] or 0 for row in rows) or None
      ),
      'over_length': means('over_length'),
      'seeds': seeds,
      'date': max(row['date'] for row in rows),
  }


def main(argv: list[str]) -> None:
  """Adds the run directories named on the command line."""
  path = pathlib.Path(_OUTPUT.value)
  rows = json.loads(path.read_text(encoding='utf-8')) if path.exists() else []
  by_name = {row['experiment']: row for row in rows}
  runs: dict[str, list[dict]] = {}
  for directory in argv[1:]:
    row = collect(pathlib.Path(directory), _COMMIT.value)
    runs.setdefault(row['experiment'], []).append(row)
  by_name |= {name: joined(found) for name, found in runs.items()}
  rows = [by_name[name] for name in sorted(by_name)]
  path.write_text(json.dumps(rows, indent=2) + '\n', encoding='utf-8')
  print(f'{path}: {len(rows)} rows')


if __name__ == '__main__':
  app.run(main)
