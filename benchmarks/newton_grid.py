"""Plots all steps at once beside the other paths, for docs/choosing.md.

  python benchmarks/newton_grid.py

The times are those of newton_grid_h200.json, by newton_long.py.
"""

import json
import pathlib

from matplotlib import figure as figures

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE / 'newton_grid_h200.png'

# How each path is drawn.
STYLES = {'scan': 'C7v:', 'pallas': 'C0s-', 'associative_scan': 'C1o-'}


def plot(result: dict) -> figures.Figure:
  """Returns the figure: milliseconds over steps, for each batch and units."""
  sizes = list(
      dict.fromkeys((row['batch'], row['features']) for row in result['rows'])
  )
  figure = figures.Figure(figsize=(11, 3.6), layout='constrained')
  axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
  for (batch, units), ax in zip(sizes, axes, strict=True):
    for path, style in STYLES.items():
      points = {
          row['time']: row['median_ms']
          for row in result['rows']
          if (row['batch'], row['features'], row['path'])
          == (batch, units, path)
          and row['status'] == 'ok'
      }
      ax.plot(list(points), list(points.values()), style, label=f"'{path}'")
    ax.set_title(f'batch {batch}, units {units}', fontsize=10)
    ax.set_xscale('log')
    ax.set_yscale('log')
    ax.set_xlabel('steps')
    ax.grid(alpha=0.3)
  axes[0].set_ylabel('milliseconds, forward')
  axes[0].legend(fontsize=8)
  figure.suptitle(
      f'GRU, float32, gates given: {result["device"]}, jax {result["jax"]},'
      f' {result["date"]}',
      fontsize=10,
  )
  return figure


def main() -> None:
  """Writes the figure."""
  text = (HERE / 'newton_grid_h200.json').read_text(encoding='utf-8')
  plot(json.loads(text)).savefig(TARGET, dpi=130)


if __name__ == '__main__':
  main()
