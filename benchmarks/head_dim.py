"""Plots milliseconds over head dim for README.md, from dense_h200.json.

  python benchmarks/head_dim.py

Public times of other programs are beside measured ones, and say so.
"""

import json
import pathlib

from matplotlib import figure as figures

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE / 'head_dim_h200.png'

# (layer, implementation), its label, and how it is drawn.
MEASURED = (
    ('GRU', 'pallas', 'GRU, kernels', 'C0o-'),
    ('LSTM', 'pallas', 'LSTM, kernels', 'C1o-'),
    ('GRU', 'scan', "GRU, 'scan'", 'C0^:'),
    ('LSTM', 'scan', "LSTM, 'scan'", 'C1^:'),
    ('LSTM', 'lax_scan_8', 'LSTM, lax.scan unrolled by 8', 'C7v:'),
)
PUBLISHED = (
    ('FlashRNN fused, bfloat16', 'LSTM, FlashRNN (published)', 'C2s-'),
    (
        'cuDNN, float16, with projection',
        "LSTM, torch's cuDNN, float16, with W x (published)",
        'C3D-',
    ),
)


def curves(result: dict, way: int) -> dict[str, dict[int, float]]:
  """Returns milliseconds by head dim, by label.

  Args:
    result: the content of dense_h200.json.
    way: 0 for forward, 1 for forward and backward.
  """
  direction = ('forward', 'forward+backward')[way]
  shapes = {
      name: sizes
      for name, sizes in result['shapes'].items()
      if (sizes['batch'], sizes['time']) == (16, 1024)
  }
  dims = {
      name: sizes['features'] // sizes['num_heads']
      for name, sizes in shapes.items()
  }
  found: dict[str, dict[int, float]] = {}
  for layer, implementation, label, _ in MEASURED:
    found[label] = {
        dims[row['shape']]: row['median_ms']
        for row in result['rows']
        if row['shape'] in dims
        and row['status'] == 'ok'
        and (row['layer'], row['implementation']) == (layer, implementation)
        and (row['dtype'], row['projection']) == ('bfloat16', 'without')
        and row['direction'] == direction
    }
  for program, label, _ in PUBLISHED:
    found[label] = {
        dims[shape]: times[way]
        for shape, times in result['published_ms'][program].items()
        if shape in dims
    }
  return found


def plot(result: dict) -> figures.Figure:
  """Returns the figure: forward on the left, with backward on the right."""
  figure = figures.Figure(figsize=(11, 4.4), layout='constrained')
  axes = figure.subplots(1, 2)
  styles = {label: style for *_, label, style in (*MEASURED, *PUBLISHED)}
  for way, ax in enumerate(axes):
    for label, points in curves(result, way).items():
      x = sorted(points)
      ax.plot(x, [points[d] for d in x], styles[label], label=label, ms=5)
    ax.set_title(('forward', 'forward and backward')[way])
    ax.set_xscale('log', base=2)
    ax.set_yscale('log')
    ticks = (16, 24, 64, 128, 256, 512, 1024)
    ax.set_xticks(ticks, [str(d) for d in ticks])
    ax.set_xlabel('head dim, units of one block of R')
    ax.set_ylabel('milliseconds')
    ax.grid(alpha=0.3)
  figure.legend(
      *axes[0].get_legend_handles_labels(),
      loc='outside lower center',
      ncols=3,
      fontsize=8,
  )
  figure.suptitle(
      '1,024 steps, batch 16, bfloat16, gates given:'
      f' {result["device"]["kind"]}, jax {result["versions"]["jax"]},'
      f' {result["date"][:10]}\n768 units in'
      ' heads; 512 and 1,024: one head',
      fontsize=10,
  )
  return figure


def main() -> None:
  """Writes the figure."""
  result = json.loads((HERE / 'dense_h200.json').read_text(encoding='utf-8'))
  plot(result).savefig(TARGET, dpi=130)


if __name__ == '__main__':
  main()
