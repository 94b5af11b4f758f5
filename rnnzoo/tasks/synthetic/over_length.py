"""The report of tests at several lengths: accuracy over length."""

from collections.abc import Mapping, Sequence
import csv
import pathlib
from typing import Any

import numpy as np

from rnnzoo.tasks import figures
from rnnzoo.tasks import protocol

# Mean accuracy from which on a length counts as solved.
SOLVED = 0.995


def report(
    accuracies: Mapping[int, Sequence[float]],
    seeds: Sequence[int],
    dataset: str,
    chance: float,
    trained_to: int,
) -> protocol.Report:
  """Returns numbers, a table and a figure.

  In the numbers 'accuracy_over_length' has mean, std and the accuracy of each
  seed for every length. 'solved_to' is the greatest length to which the mean is
  at least `SOLVED` at all lengths, None where there is none.

  Args:
    accuracies: of each seed, by length, ascending.
    seeds: their names.
    dataset: the name of the data.
    chance: the accuracy of a model that guesses.
    trained_to: the greatest length in training.
  """
  rows = {
      str(length): {
          'mean': float(np.mean(of_seeds)),
          'std': float(np.std(of_seeds)),
          'seeds': list(of_seeds),
      }
      for length, of_seeds in accuracies.items()
  }
  solved_to = None
  for length, of_seeds in accuracies.items():
    if np.mean(of_seeds) < SOLVED:
      break
    solved_to = length
  return protocol.Report(
      {'accuracy_over_length': rows, 'chance': chance, 'solved_to': solved_to},
      {
          'accuracy_over_length.csv': lambda path, _: _write(
              path, dataset, rows
          ),
          'accuracy_over_length.png': lambda path, title: (
              figures.plot_over_length(
                  path, title, accuracies, seeds, chance, trained_to
              )
          ),
      },
  )


def _write(
    path: pathlib.Path, dataset: str, rows: Mapping[str, Mapping[str, Any]]
) -> None:
  with path.open('w', encoding='utf-8', newline='') as file:
    table = csv.writer(file, lineterminator='\n')
    table.writerow(['dataset', 'length', 'mean', 'std'])
    for length, row in rows.items():
      table.writerow([dataset, length, row['mean'], row['std']])
