"""The twelve published ablations of the A-GRU, by one command.

  python -m benchmarks.agru_ablations --workdir=sweeps/agru --parallel=4

It is `rnnzoo sweep agru_smnist` of the cases in agru_ablations.txt, three seeds
a case. It writes published numbers beside its own to ablations.md and
ablations.json in the directory of the runs. All other flags go to the sweep.

The study agru_benchmark published them (diagnostic_report.md), with one seed,
42. Its gap is the least validation loss less the training loss of the last
epoch, and its ε is the ε of the last epoch; our table does so too. The rows
with dropout equal the first row, in both: dropout stands between layers, and
there is one layer.
"""

import argparse
from collections.abc import Sequence
import json
import pathlib
import statistics
import sys
from typing import Any

from benchmarks import pivots
from rnnzoo.command import comparison
from rnnzoo.command import sweep
from rnnzoo.training import files

CASES = str(pivots.ROOT / 'benchmarks/agru_ablations.txt')

Row = dict[str, Any]


def measured(directory: pathlib.Path, cases: str) -> Row:
  """Returns published and own numbers, for a JSON file.

  Args:
    directory: the folder of the finished runs.
    cases: the file of the cases.
  """
  committed = pivots.load('benchmarks/agru_ablations.json')['rows']
  published = {row['case']: row['published'] for row in committed}
  rows, datasets = [], set()
  for name, case in sweep.read_cases(cases).items():
    run = comparison.read(directory / name)
    datasets.add(run.report['dataset'])
    accuracy = comparison.statistics(run, 'accuracy')
    gaps = [
        min(row['validation_loss'] for row in history)
        - history[-1]['train_loss']
        for history in run.histories
    ]
    # A learned number is a column of each epoch; a frozen one is not.
    epsilons = [
        value
        for history in run.histories
        for column, value in history[-1].items()
        if column.endswith('.epsilon')
    ]
    if not epsilons:
      given = dict(flag.split('=') for flag in case.flags)
      epsilons = [float(given.get('--config.model.options.AGRU.epsilon', 1))]
    rows.append(
        {
            'case': name,
            'published': published[name],
            'accuracy': accuracy.mean,
            'std': accuracy.std,
            'seeds': len(run.histories),
            'gap': statistics.mean(gaps),
            'epsilon': statistics.mean(epsilons),
        }
    )
  return {'datasets': sorted(datasets), 'rows': rows}


def table(data: Row) -> str:
  """Returns published and own numbers in Markdown; means over the seeds."""
  items = [
      row | {'score': 100 * row['accuracy'], 'spread': 100 * row['std']}
      for row in data['rows']
  ]
  lines = pivots.made(
      'case | published: accuracy | gap | ε | here: accuracy | gap | ε',
      '{case} | {published[accuracy]:.2f} | {published[gap]:.4f} |'
      ' {published[epsilon]:.3f} | {score:.2f} ± {spread:.2f} | {gap:.4f} |'
      ' {epsilon:.3f}',
      items,
  )
  return '\n'.join([*lines, '', f'Data: {", ".join(data["datasets"])}.'])


def main(words: Sequence[str]) -> int:
  """Trains all cases and writes the table; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--workdir', required=True, help='directory of the runs')
  parser.add_argument('--cases', default=CASES, help='a file with fewer cases')
  parsed, rest = parser.parse_known_args(words)
  directory = files.make_directory(parsed.workdir, '--workdir')
  flags = [f'--workdir={directory}', f'--cases={parsed.cases}']
  if sweep.main(['agru_smnist', *flags, '--config.num_seeds=3', *rest]):
    return 3
  data = measured(directory, parsed.cases)
  text = json.dumps(data, indent=2) + '\n'
  files.write_atomically(directory / 'ablations.json', text)
  files.write_atomically(directory / 'ablations.md', table(data) + '\n')
  print(table(data))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
