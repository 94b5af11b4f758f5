"""What a training run comes to: the results of seeds, and their report.

Every file names the data set that the numbers come from, so that a result on a
stand-in cannot be taken for the real one.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import numpy as np

from rnnzoo.training import figures
from rnnzoo.training import files

# The numbers of a test, of which a report has mean and standard deviation.
METRICS = ('accuracy', 'precision', 'recall', 'f1', 'loss')


def classification_metrics(
    labels: np.ndarray, predictions: np.ndarray, num_classes: int
) -> dict[str, Any]:
  """Returns accuracy, macro precision, recall and F1, and the confusions.

  Args:
    labels: the true classes [N].
    predictions: the predicted ones [N].
    num_classes: of which some may occur in neither.

  Returns:
    Numbers by name; 'confusion_matrix' is a list of rows, one a true class.
  """
  from sklearn import metrics  # Slow to import, and needed once, at the end.

  classes = np.arange(num_classes)
  precision, recall, f1, _ = metrics.precision_recall_fscore_support(
      labels, predictions, labels=classes, average='macro', zero_division=0
  )
  return {
      'accuracy': float(metrics.accuracy_score(labels, predictions)),
      'precision': float(precision),
      'recall': float(recall),
      'f1': float(f1),
      'confusion_matrix': metrics.confusion_matrix(
          labels, predictions, labels=classes
      ).tolist(),
  }


def write_result(path: pathlib.Path, result: Mapping[str, Any]) -> None:
  """Writes a seed's result.json, with a digest of the rest at its end."""
  files.write_json(path, {**result, 'digest': files.digest(result)})


def read_result(path: pathlib.Path, seed: int, dataset: str) -> dict[str, Any]:
  """Returns what `write_result` wrote.

  Args:
    path: the file.
    seed: whose it must be.
    dataset: the name of the data set that it must be of.

  Raises:
    RunFileError: it is not what was written there.
  """
  try:
    result = files.read_json(path, dict)
    digest = result.pop('digest', None)
    if digest != files.digest(result):
      raise files.RunFileError(f'{path} is damaged: it was changed')
    if (result['seed'], result['dataset']) != (seed, dataset):
      raise files.RunFileError(
          f'{path} is not the result of seed {seed} on {dataset}'
      )
  except files.RunFileError as error:
    raise files.RunFileError(
        f'{error}; delete it, and the seed is tested again from its checkpoint'
    ) from error
  return result


def summarize(
    name: str,
    changed: Mapping[str, Any],
    dataset: str,
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
  """Returns the report over all seeds: each number's mean and std.

  Args:
    name: of the experiment.
    changed: the fields in which it differs from the config of its name.
    dataset: the name of the data set.
    results: one a seed, as the loop writes them to result.json.

  Returns:
    The std is that of the population (divided by the number of seeds), as in
    the published tables that we compare with. The confusion matrix is the sum.
    Where a seed has no finite number, neither have mean and std: they are None.
    'diverged' lists the seeds whose training ended with a loss that was not
    finite.
  """
  summary = {}
  for metric in METRICS:
    values = [result['test'][metric] for result in results]
    known = None not in values
    summary[metric] = {
        'mean': float(np.mean(values)) if known else None,
        'std': float(np.std(values)) if known else None,
    }
  confusions = [result['test']['confusion_matrix'] for result in results]
  return {
      'experiment': name,
      'changed': dict(changed),
      'dataset': dataset,
      'num_seeds': len(results),
      'diverged': [result['seed'] for result in results if result['diverged']],
      'test': summary,
      'confusion_matrix': np.sum(confusions, axis=0).tolist(),
      'seeds': [
          {key: value for key, value in result.items() if key != 'history'}
          for result in results
      ],
  }


def format_report(report: Mapping[str, Any]) -> str:
  """Returns the report as text for people."""
  decimals = lambda value: 'none' if value is None else f'{value:.4f}'
  lines = [
      f'experiment: {report["experiment"]}',
      f'dataset: {report["dataset"]}',
  ]
  for seed in report['seeds']:
    lines.append(
        f'seed {seed["seed"]}: test accuracy {seed["test"]["accuracy"]:.4f}'
        f' after epoch {seed["best_epoch"]} of {seed["num_epochs"]}'
        f' ({seed["stopped"]}), {seed["num_parameters"]:,} parameters'
    )
  lines.append(f'test, mean +- std of {report["num_seeds"]} seed(s):')
  for metric, value in report['test'].items():
    lines.append(
        f'  {metric:<10}{decimals(value["mean"])} +- {decimals(value["std"])}'
    )
  return '\n'.join(lines) + '\n'


def write_report(
    directory: pathlib.Path,
    report: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    class_names: Sequence[str],
) -> None:
  """Writes report and figures, unless they are there: a copy may be read-only.

  Args:
    directory: the run directory.
    report: what `summarize` returned.
    results: one a seed, what `report` was made of.
    class_names: for the figure of confusions.
  """
  names = ('report.json', 'report.txt', 'curves.png', 'confusion_matrix.png')
  paths = [directory / name for name in names]
  content = {paths[0]: files.json_text(report), paths[1]: format_report(report)}
  if all(path.exists() for path in paths) and all(
      path.read_bytes() == text.encode() for path, text in content.items()
  ):
    return
  title = f'{report["experiment"]}, {report["dataset"]}'
  histories = {
      f'seed {result["seed"]}': result['history'] for result in results
  }
  figures.plot_curves(paths[2], title, histories)
  figures.plot_confusions(
      paths[3],
      f'{title}, test, {len(results)} seed(s)',
      report['confusion_matrix'],
      class_names,
  )
  for path, text in content.items():
    files.write_atomically(path, text)
