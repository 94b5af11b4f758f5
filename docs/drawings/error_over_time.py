"""Draws the error against float64 over t: docs/figures/error_over_time.svg.

  python docs/drawings/error_over_time.py

It runs on a CPU in about half a minute. The numbers are kept in
benchmarks/error_over_time.json, so that `--plot_only` draws without computing.
"""

import datetime
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import matplotlib as mpl
from matplotlib import figure as figures
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DATA = ROOT / 'benchmarks' / 'error_over_time.json'
TARGET = ROOT / 'docs' / 'figures' / 'error_over_time.svg'
LAYERS = ('GRU', 'LSTM', 'SLSTM', 'IndRNN', 'MinGRU', 'AGRU')
BATCH, TIME, IN_FEATURES, FEATURES = 4, 1000, 16, 32
# Steps that are plotted: evenly spaced on a logarithmic axis.
STEPS = sorted({round(t) for t in np.geomspace(1, TIME, 40)})


def output(name: str, dtype) -> np.ndarray:
  """Returns h [batch, time, features] of a layer in a dtype, as float64."""
  from flax import nnx

  import rnnzoo

  x = np.random.default_rng(0).normal(size=(BATCH, TIME, IN_FEATURES))
  layer = rnnzoo.LAYERS[name](
      IN_FEATURES,
      FEATURES,
      dtype=dtype,
      implementation='scan',
      rngs=nnx.Rngs(0),
  )
  y = layer(jnp.asarray(x, jnp.float32))
  return np.asarray(y.astype(jnp.float64))


def measure() -> dict:
  """Returns errors at `STEPS` by layer and dtype, relative to the largest h."""
  from rnnzoo.benchmark import timing

  jax.config.update('jax_enable_x64', True)
  errors = {}
  for name in LAYERS:
    exact = output(name, jnp.float64)
    scale = np.abs(exact).max()
    for dtype in ('float32', 'bfloat16'):
      error = np.abs(output(name, getattr(jnp, dtype)) - exact).max(axis=(0, 2))
      errors.setdefault(dtype, {})[name] = [
          float(f'{error[t - 1] / scale:.3g}') for t in STEPS
      ]
  return {
      'command': 'python docs/drawings/error_over_time.py',
      'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
      'commit': timing.commit(),
      'jax': jax.__version__,
      'device': jax.devices()[0].platform,
      'sizes': {
          'batch': BATCH,
          'time': TIME,
          'in_features': IN_FEATURES,
          'features': FEATURES,
      },
      'steps': STEPS,
      'errors': errors,
  }


def plot(data: dict) -> figures.Figure:
  """Returns the figure: a panel for each dtype."""
  figure = figures.Figure(figsize=(9, 3.6), layout='constrained')
  axes = figure.subplots(1, 2)
  for ax, (dtype, errors) in zip(axes, data['errors'].items(), strict=True):
    for name, values in errors.items():
      # A difference of 0 has no place on a logarithmic axis.
      shown = [value or None for value in values]
      ax.plot(
          data['steps'], [np.nan if v is None else v for v in shown], label=name
      )
    ax.set(title=dtype, xscale='log', yscale='log', xlabel='step t')
    ax.grid(alpha=0.3)
  axes[0].set_ylabel('error in h, relative')
  figure.legend(
      *axes[0].get_legend_handles_labels(), loc='outside right center'
  )
  figure.suptitle(
      f'{data["device"]}, jax {data["jax"]}, {data["date"]}', fontsize=9
  )
  return figure


def main() -> None:
  """Measures, unless told not to, and draws."""
  if '--plot_only' not in sys.argv:
    DATA.write_text(json.dumps(measure(), indent=1) + '\n', encoding='utf-8')
  mpl.rcParams.update({'svg.hashsalt': 'rnnzoo', 'svg.fonttype': 'none'})
  data = json.loads(DATA.read_text(encoding='utf-8'))
  plot(data).savefig(TARGET, metadata={'Date': None})


if __name__ == '__main__':
  main()
