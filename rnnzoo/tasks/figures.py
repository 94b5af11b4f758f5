"""Figures that need no display and touch no global state."""

from collections.abc import Mapping, Sequence
import pathlib
import textwrap

import numpy as np

# Counts of more classes than this are too small to be read.
_MOST_COUNTED = 64


def plain(text: str) -> str:
  """Returns a text that is drawn as it is: a '$' in it begins no formula."""
  return text.replace('$', r'\$')


def shorten(name: str, most: int = 24) -> str:
  """Returns a name of at most so many letters, without its middle if longer."""
  if len(name) <= most:
    return name
  return f'{name[: most // 2]}…{name[len(name) - (most - 1) // 2 :]}'


def make_figure(
    columns: int, size: tuple[float, float], title: str, rows: int = 1
):
  """Returns (figure, axes [rows, columns]).

  The size is width and height in inches; a title of several lines adds to it.
  """
  from matplotlib import figure as figures  # Slow to import.

  lines = textwrap.wrap(title, int(11 * size[0]))
  size = size[0], size[1] + 0.17 * max(0, len(lines) - 1)
  figure = figures.Figure(figsize=size, layout='constrained')
  figure.suptitle(plain('\n'.join(lines)), fontsize='medium')
  return figure, figure.subplots(rows, columns, squeeze=False)


def plot_confusions(
    path: pathlib.Path,
    title: str,
    matrix: Sequence[Sequence[int]],
    class_names: Sequence[str],
) -> None:
  """Draws the confusion matrix, with its counts up to 64 classes.

  The counts [classes, classes] have a row for each true class. Long names lose
  their middles.
  """
  names = [plain(shorten(name, 40)) for name in class_names]
  counts = np.asarray(matrix)
  few = len(names) <= _MOST_COUNTED
  cell = max(0.2, 4.0 / len(names))
  longest = 0.08 * max(map(len, names))
  side = cell * len(names) + 1.0
  turned = longest > 0.8 * cell
  size = side + longest, side + longest * turned
  figure, ((axis,),) = make_figure(1, size, title)
  # Log scale: the diagonal would hide the few confusions, which matter here.
  image = axis.imshow(np.log1p(counts), cmap='Blues', vmin=0.0)
  # Black on light cells, white on dark ones.
  luminance = image.to_rgba(image.get_array())[..., :3] @ (0.30, 0.59, 0.11)
  for row, column in np.argwhere(counts) if few else ():
    axis.text(
        column,
        row,
        str(counts[row, column]),
        ha='center',
        va='center',
        fontsize=min(9.0, 100.0 * cell / len(str(counts.max()))),
        color='black' if luminance[row, column] > 0.5 else 'white',
    )
  axis.set_xticks(range(len(names)), names, rotation=90 * turned)
  axis.set_yticks(range(len(names)), names)
  note = '' if few else ' (the counts are in report.json)'
  axis.set_xlabel(f'predicted{note}')
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

  `accuracies` lists all seeds by length; `chance` is the accuracy of a
  model that guesses, and `trained_to` the greatest length in training.
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


def plot_forecasts(
    path: pathlib.Path,
    title: str,
    past: np.ndarray,
    ahead: np.ndarray,
    quantiles: np.ndarray,
) -> None:
  """Draws forecasts beside what came, one panel a window.

  The arrays are the context of each window [B, C], the true steps [B, H], and
  the quantiles .05 to .95 of the forecasts [B, H, 19].
  """
  figure, axes = make_figure(1, (7.0, 2.4 * len(past)), title, len(past))
  before, steps = past.shape[1], np.arange(ahead.shape[1])
  for (axis,), own, true, quantile in zip(
      axes, past, ahead, quantiles, strict=True
  ):
    # The last step of the context joins both parts.
    axis.plot(np.arange(-before, 0), own, 'k-', lw=1)
    axis.plot([-1, *steps], [own[-1], *true], 'k.-', lw=1, label='true')
    for level, color in ((0, '0.85'), (5, '0.65')):
      axis.fill_between(
          steps,
          quantile[:, level],
          quantile[:, -1 - level],
          color=color,
          label=f'{90 - 10 * level} %',
      )
    axis.plot(steps, quantile[:, 9], 'C0-', label='median')
    axis.grid(alpha=0.3)
  axes[0][0].legend(fontsize='small', loc='upper left')
  axes[-1][0].set_xlabel('step, from the first that is forecast')
  figure.savefig(path, dpi=120)
