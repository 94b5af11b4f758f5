"""Figures that need no display and touch no global state."""

from collections.abc import Mapping, Sequence
import pathlib

import numpy as np


def plain(text: str) -> str:
  """Returns a text that is drawn as it is: a '$' in it begins no formula."""
  return text.replace('$', r'\$')


def make_figure(
    columns: int, size: tuple[float, float], title: str, rows: int = 1
):
  """Returns (figure, axes [rows, columns]).

  Args:
    columns: columns of axes.
    size: width and height in inches.
    title: the title, with the name of the data set.
    rows: rows of axes.
  """
  from matplotlib import figure as figures  # Slow to import.

  figure = figures.Figure(figsize=size, layout='constrained')
  figure.suptitle(plain(title), fontsize='medium', wrap=True)
  return figure, figure.subplots(rows, columns, squeeze=False)


def plot_confusions(
    path: pathlib.Path,
    title: str,
    matrix: Sequence[Sequence[int]],
    class_names: Sequence[str],
) -> None:
  """Draws the confusion matrix with its counts."""
  figure, ((axis,),) = make_figure(1, (6.0, 6.0), title)
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
  names = list(map(plain, class_names))
  axis.set_xticks(range(len(names)), names)
  axis.set_yticks(range(len(names)), names)
  axis.set_xlabel('predicted')
  axis.set_ylabel('true')
  figure.savefig(path, dpi=120)


def plot_over_length(
    path: pathlib.Path,
    title: str,
    accuracies: Mapping[int, Sequence[float]],
    seeds: Sequence[int],
    chance: float,
    trained_to: int,
) -> None:
  """Draws accuracy over the length of test sequences, one line a seed.

  Args:
    path: path of the file.
    title: the figure's title.
    accuracies: accuracies of each seed, by length.
    seeds: names of the seeds.
    chance: the accuracy of a model that guesses.
    trained_to: the greatest length in training.
  """
  figure, ((axis,),) = make_figure(1, (6.0, 4.0), title)
  for index, seed in enumerate(seeds):
    values = [of_seeds[index] for of_seeds in accuracies.values()]
    axis.plot([*accuracies], values, marker='o', label=f'seed {seed}')
  axis.axhline(chance, color='gray', linestyle=':', label='chance')
  axis.axvline(trained_to, color='gray', linestyle='--', label='trained up to')
  axis.set_xscale('log', base=2)
  axis.set_xticks([*accuracies], [f'{length:,}' for length in accuracies])
  axis.set_xticks([], minor=True)
  axis.set_ylim(-0.02, 1.02)
  axis.set_xlabel('length of test sequences')
  axis.set_ylabel('accuracy')
  axis.legend(fontsize='small')
  figure.savefig(path, dpi=120)


def plot_attention(
    path: pathlib.Path,
    title: str,
    examples: Sequence[tuple[np.ndarray, Sequence[str], Sequence[str]]],
) -> None:
  """Draws which tokens of the source each token of the target looked at.

  Args:
    path: path of the file.
    title: title of the figure.
    examples: (weights [T, S], S tokens of the source, T of the target).
  """
  longest = max(max(weights.shape) for weights, _, _ in examples)
  side = min(max(3.0, 0.25 * longest + 1.5), 12.0)
  size = (side * len(examples), side + 0.5)
  figure, (axes,) = make_figure(len(examples), size, title)
  for axis, (weights, source, target) in zip(axes, examples, strict=True):
    axis.imshow(weights, cmap='Blues', vmin=0.0, vmax=1.0)
    axis.set_xticks(range(len(source)), list(map(plain, source)), rotation=90)
    axis.set_yticks(range(len(target)), list(map(plain, target)))
    axis.set_xlabel('source')
    axis.set_ylabel('translation')
  figure.savefig(path, dpi=120)
