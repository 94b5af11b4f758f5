"""Figures of a run: curves and confusions. Each names its data set."""

from collections.abc import Mapping, Sequence
import pathlib

import numpy as np

from rnnzoo.training import files


def plot_curves(
    path: pathlib.Path, title: str, histories: Mapping[str, Sequence[files.Row]]
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
            # None, which becomes NaN, leaves a gap.
            np.array([row[f'{split}_{quantity}'] for row in history], float),
            style,
            color=f'C{index % 10}',
            label=f'{name} {split}',
        )
    axis.set_xlabel('epoch')
    axis.set_ylabel(quantity)
    axis.grid(alpha=0.3)
  axes[0].set_yscale('log')
  axes[1].legend(fontsize='small')
  with files.naming(path):
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
  with files.naming(path):
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
  figure.suptitle(title, fontsize='medium', wrap=True)
  return figure, figure.subplots(rows, columns, squeeze=squeeze)
