"""The figure of a run: its curves. It names its data set."""

from collections.abc import Mapping, Sequence
import pathlib

import numpy as np

from rnnzoo.tasks import figures
from rnnzoo.training import files


def plot_curves(
    path: pathlib.Path,
    title: str,
    histories: Mapping[str, Sequence[files.Row]],
    quantities: Sequence[str],
) -> None:
  """Draws quantities over the epochs, all seeds in one figure.

  Args:
    path: the PNG file.
    title: what is shown, with the name of the data set.
    histories: the epochs of each seed by the seed's name.
    quantities: of training and validation: 'loss', which gets a logarithmic
      axis, and others.
  """
  count = len(quantities)
  figure, (axes,) = figures.make_figure(count, (5.0 * count, 4.0), title)
  for quantity, axis in zip(quantities, axes, strict=True):
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
    if quantity == 'loss':
      axis.set_yscale('log')
  axes[-1].legend(fontsize='small')
  figure.savefig(path, dpi=120)
