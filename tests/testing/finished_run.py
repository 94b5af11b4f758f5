"""The files of a finished run, for tests of what reads them."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import ml_collections

from rnnzoo.training import files
from rnnzoo.training import report as report_lib
from rnnzoo.training import run_data
from rnnzoo.training import run_directory


def write(
    directory: pathlib.Path,
    experiment: str,
    dataset: str,
    tests: Sequence[Mapping[str, Any]],
    history: Sequence[Mapping[str, Any]],
    **more: Any,
) -> None:
  """Writes what a finished run leaves behind.

  Args:
    directory: of the run; the names in its config make it one of its own.
    experiment: its name.
    dataset: the name of the data set.
    tests: metrics of each seed.
    history: the epochs of all seeds.
    **more: entries of report.json.
  """
  config = ml_collections.ConfigDict({'task': 'sign', 'name': str(directory)})
  run_directory.open_or_create(
      config, run_data.Data(dataset), str(directory), experiment
  )
  results = []
  for seed, test in enumerate(tests):
    result = {
        **run_directory.owner(directory, seed),
        'dataset': dataset,
        'test': dict(test),
        'num_parameters': 1234,
        'num_epochs': len(history),
        'history': list(history),
    }
    path = directory / f'seed_{seed}'
    path.mkdir()
    files.write_json(path / 'result.json', files.signed(result))
    results.append(report_lib.of_seed(result))
  report = {
      'experiment': experiment,
      'dataset': dataset,
      'diverged': [],
      'higher_is_better': True,
      'test': {name: {} for name in next(iter(tests), {'loss': 0})},
      'seeds': results,
      **more,
  }
  files.write_json(directory / 'report.json', files.signed(report))
