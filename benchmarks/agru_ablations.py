r"""The twelve published ablations of the A-GRU, by one command.

  python benchmarks/agru_ablations.py --workdir=sweeps/agru
  python benchmarks/agru_ablations.py --workdir=sweeps/agru --parallel=4 \
      --config.data.manual_dir=path/to/idx/files

Published by the study agru_benchmark. This is a `rnnzoo sweep` of
configs/agru_smnist.py, three seeds a case, and writes published numbers beside
its own to ablations.md and ablations.json. All other flags go to the sweep.
Finished runs are not run again.

The study ran one seed, 42. Its gap is the least validation loss less the
training loss of the last epoch, and its ε that of the last epoch; so are those
of the table. The rows with dropout equal the first row, in both: dropout stands
between layers, and there is one layer.
"""

import argparse
from collections.abc import Sequence
import json
import pathlib
import statistics
import sys
from typing import Any, NamedTuple

from rnnzoo.command import comparison
from rnnzoo.command import sweep
from rnnzoo.training import files


class Case(NamedTuple):
  """A row of the study, in diagnostic_results/diagnostic_report.md.

  Attributes:
    fields: of the config, by their names in `config.model.options.AGRU` or, if
      they have a dot, in `config`.
    accuracy: of the test, in percent.
    gap: between training and validation loss.
    epsilon: after training.
  """

  fields: dict[str, Any]
  accuracy: float
  gap: float
  epsilon: float


_FROZEN = {'learn_epsilon': False}
_DECAY, _DROPOUT = 'optimizer.weight_decay', 'model.dropout_rate'
CASES = {
    'baseline': Case({}, 98.70, 0.0496, 0.829),
    'frozen_epsilon': Case(_FROZEN, 98.76, 0.0484, 1.0),
    'gamma_0.1': Case({'gamma': 0.1}, 98.64, 0.0511, 0.888),
    'gamma_0.5': Case({'gamma': 0.5}, 98.86, 0.0374, 1.013),
    'dropout_0.2': Case({_DROPOUT: 0.2}, 98.70, 0.0496, 0.829),
    'dropout_0.3': Case({_DROPOUT: 0.3}, 98.70, 0.0496, 0.829),
    'hidden_64': Case({'model.features': 64}, 98.32, 0.0592, 0.998),
    'weight_decay_0.001': Case({_DECAY: 0.001}, 98.84, 0.0318, 1.568),
    'weight_decay_0.01': Case({_DECAY: 0.01}, 96.84, 0.0127, 1.779),
    'combined': Case(
        _FROZEN | {'gamma': 0.1, _DROPOUT: 0.2, _DECAY: 0.001},
        98.63,
        0.0392,
        1.0,
    ),
    'epsilon_0.1': Case({'epsilon': 0.1}, 98.64, 0.0490, 0.572),
    'frozen_epsilon_0.5_gamma_0.1': Case(
        _FROZEN | {'epsilon': 0.5, 'gamma': 0.1}, 98.78, 0.0487, 0.5
    ),
}


def flags(case: Case) -> list[str]:
  """Returns the flags of a case, as words of a line for `rnnzoo sweep`."""
  path = lambda name: name if '.' in name else f'model.options.AGRU.{name}'
  return [f'--config.{path(name)}={x}' for name, x in case.fields.items()]


def measured(directory: pathlib.Path, names: Sequence[str]) -> dict:
  """Returns published and own numbers, those of the table, for a JSON file.

  Args:
    directory: of the finished runs.
    names: those of `CASES` that are wanted.
  """
  rows, runs = [], []
  for name in names:
    case, run = CASES[name], comparison.read(directory / name)
    runs.append(run)
    accuracy = comparison.statistics(run, 'accuracy')
    gaps = [
        min(row['validation_loss'] for row in history)
        - history[-1]['train_loss']
        for history in run.histories
    ]
    # A learned number is a column of each epoch; a frozen one is not.
    learned = [
        value
        for history in run.histories
        for column, value in history[-1].items()
        if column.endswith('.epsilon')
    ]
    rows.append(
        {
            'case': name,
            'published': {
                'accuracy': case.accuracy,
                'gap': case.gap,
                'epsilon': case.epsilon,
            },
            'accuracy': accuracy.mean,
            'std': accuracy.std,
            'seeds': len(run.histories),
            'gap': statistics.mean(gaps),
            'epsilon': statistics.mean(
                learned or [case.fields.get('epsilon', 1.0)]
            ),
        }
    )
  return {
      'datasets': sorted({run.report['dataset'] for run in runs}),
      'rows': rows,
  }


def table(data: dict) -> str:
  """Returns what `measured` returns in Markdown; means over the seeds."""
  lines = [
      '| case | published: accuracy | gap | ε | here: accuracy | gap | ε |',
      '|---|---|---|---|---|---|---|',
  ]
  for row in data['rows']:
    published = row['published']
    scores = 'none'
    if row['accuracy'] is not None and row['std'] is not None:
      scores = f'{100 * row["accuracy"]:.2f} ± {100 * row["std"]:.2f}'
    lines.append(
        f'| {row["case"]} | {published["accuracy"]:.2f} |'
        f' {published["gap"]:.4f} | {published["epsilon"]:.3f} | {scores} |'
        f' {row["gap"]:.4f} | {row["epsilon"]:.3f} |'
    )
  lines += ['', f'Data: {", ".join(data["datasets"])}.']
  return '\n'.join(lines) + '\n'


def main(words: Sequence[str]) -> int:
  """Trains all cases and writes the table; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--workdir', required=True, help='directory of the runs')
  parser.add_argument(
      '--only', choices=CASES, nargs='+', default=list(CASES), metavar='CASE'
  )
  parsed, rest = parser.parse_known_args(words)
  directory = files.make_directory(parsed.workdir, '--workdir')
  lines = [' '.join([name, *flags(CASES[name])]) for name in parsed.only]
  cases = directory / 'cases.txt'
  files.write_atomically(cases, '\n'.join(lines) + '\n')
  failed = sweep.main(
      [
          'agru_smnist',
          f'--workdir={directory}',
          f'--cases={cases}',
          '--config.num_seeds=3',
          *rest,
      ]
  )
  if failed:
    return 3
  data = measured(directory, parsed.only)
  files.write_atomically(
      directory / 'ablations.json', json.dumps(data, indent=2) + '\n'
  )
  text = table(data)
  files.write_atomically(directory / 'ablations.md', text)
  print(text)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
