"""What a training run leaves: metric files, curves, the final report.

Every file names the data set that the numbers come from, so that a result on a
stand-in cannot be taken for the real one.
"""

from collections.abc import Mapping, Sequence
import csv
import io
import json
import os
import pathlib
from typing import Any

import numpy as np

# One epoch's numbers by name; the columns of metrics.csv.
Row = Mapping[str, float | int]


def write_atomically(path: pathlib.Path, content: str) -> None:
  """Writes a file that is there as a whole or not at all."""
  partial = path.with_name(path.name + '.part')
  partial.write_text(content, encoding='utf-8')
  os.replace(partial, path)


def write_json(path: pathlib.Path, content: Any) -> None:
  """Writes a JSON file that is there as a whole or not at all."""
  write_atomically(path, json.dumps(content, indent=2) + '\n')


def write_csv(path: pathlib.Path, dataset: str, history: Sequence[Row]) -> None:
  """Writes one line an epoch, the data set's name in the first column."""
  text = io.StringIO()
  writer = csv.DictWriter(
      text,
      ['dataset', *history[0]] if history else ['dataset'],
      lineterminator='\n',
  )
  writer.writeheader()
  for row in history:
    writer.writerow({'dataset': dataset, **row})
  write_atomically(path, text.getvalue())


class Events:
  """TensorBoard events of one seed. Use as a context manager.

  Args:
    directory: where the event files go.
    dataset: the name of the data set, written as a text.
    first_epoch: events of an earlier process from this epoch on are void.
  """

  def __init__(self, directory: pathlib.Path, dataset: str, first_epoch: int):
    import tensorboardX  # Slow to import.

    self._writer = tensorboardX.SummaryWriter(
        str(directory), purge_step=first_epoch
    )
    self._writer.add_text('dataset', dataset, first_epoch)

  def __enter__(self) -> 'Events':
    return self

  def __exit__(self, *unused_exception) -> None:
    self._writer.close()

  def write(self, row: Row, **more: float) -> None:
    """Writes one event for each number of an epoch."""
    for name, value in {**row, **more}.items():
      if name != 'epoch':
        self._writer.add_scalar(name, value, row['epoch'])
    self._writer.flush()


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


def summarize(
    name: str, dataset: str, results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Returns the report over all seeds: each number's mean and std.

  Args:
    name: of the experiment.
    dataset: the name of the data set.
    results: one a seed, as the loop writes them to result.json.

  Returns:
    The std is that of the population (divided by the number of seeds), as in
    the published tables that we compare with. The confusion matrix is the sum.
  """
  summary = {}
  for metric in ('accuracy', 'precision', 'recall', 'f1', 'loss'):
    values = [result['test'][metric] for result in results]
    summary[metric] = {
        'mean': float(np.mean(values)),
        'std': float(np.std(values)),
    }
  confusions = [result['test']['confusion_matrix'] for result in results]
  return {
      'experiment': name,
      'dataset': dataset,
      'num_seeds': len(results),
      'test': summary,
      'confusion_matrix': np.sum(confusions, axis=0).tolist(),
      'seeds': [
          {key: value for key, value in result.items() if key != 'history'}
          for result in results
      ],
  }


def format_report(report: Mapping[str, Any]) -> str:
  """Returns the report as text for people."""
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
    lines.append(f'  {metric:<10}{value["mean"]:.4f} +- {value["std"]:.4f}')
  return '\n'.join(lines) + '\n'


def plot_curves(
    path: pathlib.Path, title: str, histories: Mapping[str, Sequence[Row]]
) -> None:
  """Draws loss and accuracy over the epochs, all seeds in one figure.

  Args:
    path: the PNG file.
    title: what is shown, with the name of the data set.
    histories: the epochs of each seed by the seed's name.
  """
  figure, axes = _figure(1, 2, (10.0, 4.0), title)
  for quantity, axis in zip(('loss', 'accuracy'), axes, strict=True):
    for index, (name, history) in enumerate(histories.items()):
      epochs = [row['epoch'] for row in history]
      for split, style in (('train', '--'), ('validation', '-')):
        axis.plot(
            epochs,
            [row[f'{split}_{quantity}'] for row in history],
            style,
            color=f'C{index % 10}',
            label=f'{name} {split}',
        )
    axis.set_xlabel('epoch')
    axis.set_ylabel(quantity)
    axis.grid(alpha=0.3)
  axes[0].set_yscale('log')
  axes[1].legend(fontsize='small')
  figure.savefig(path, dpi=120)


def plot_confusions(
    path: pathlib.Path,
    title: str,
    matrix: Sequence[Sequence[int]],
    class_names: Sequence[str],
) -> None:
  """Draws the confusion matrix with its counts."""
  figure, ((axis,),) = _figure(1, 1, (6.0, 6.0), title, squeeze=False)
  counts = np.asarray(matrix)
  # Log scale: the diagonal would hide the few confusions, which matter here.
  axis.imshow(np.log1p(counts), cmap='Blues')
  for row, column in np.ndindex(counts.shape):
    if counts[row, column]:
      axis.text(
          column,
          row,
          str(counts[row, column]),
          ha='center',
          va='center',
          fontsize='small',
          color='white' if row == column else 'black',
      )
  axis.set_xticks(range(len(class_names)), class_names)
  axis.set_yticks(range(len(class_names)), class_names)
  axis.set_xlabel('predicted')
  axis.set_ylabel('true')
  figure.savefig(path, dpi=120)


def _figure(
    rows: int,
    columns: int,
    size: tuple[float, float],
    title: str,
    squeeze: bool = True,
):
  """Returns a figure that needs no display and touches no global state."""
  from matplotlib import figure as figures  # Slow to import.

  figure = figures.Figure(figsize=size, layout='constrained')
  figure.suptitle(title, fontsize='medium')
  return figure, figure.subplots(rows, columns, squeeze=squeeze)
