"""Counts iterations of Newton's method before and after training.

  python train.py --config=configs/gru_smnist.py --workdir=runs/gru ...
  python benchmarks/newton_trained.py runs/gru ...

Each run's first layer sees the rows of test images of MNIST, one image after
another, by `rnnzoo.verify`: 37 and 1,008 steps. Pixels are from 0 to 1, as the
runs must have had them (`data.scaling='minmax'`). `--output` names a JSON file.
"""

import dataclasses
import json
import pathlib

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo import training
from rnnzoo.benchmark import command_line
from rnnzoo.benchmark import report
from rnnzoo.benchmark import timing

_OUTPUT = flags.DEFINE_string('output', None, 'The JSON file to write.')

# (steps, dtype, whether the weights are trained)
CASES = [
    (37, 'float32', True),
    (1008, 'float32', False),
    (1008, 'float32', True),
    (1008, 'float64', True),
]

# K* above this is not searched for.
_MOST = 16


def verify(layer, images, dtype: str) -> dict[str, object]:
  """Returns the fields of `rnnzoo.Verification`, computed in a dtype."""
  with jax.enable_x64(dtype == 'float64'):
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(lambda x: jnp.asarray(x, dtype), state)
    found = rnnzoo.verify(
        nnx.merge(graphdef, state),
        jnp.asarray(images, dtype),
        implementation=rnnzoo.AssociativeScan(max_iterations=_MOST),
    )
  return dataclasses.asdict(found)


def main(argv) -> None:
  """Verifies the layers of the runs that are named."""
  command_line.writable(_OUTPUT.value)
  rows: list[dict] = []
  for directory in argv[1:]:
    run = training.load(directory)
    images = run.task.splits['test']['inputs'][:36] / np.float32(255)
    images = images.reshape(1, -1, images.shape[-1])
    fresh = run.task.build_model(nnx.Rngs(0))
    text = (pathlib.Path(directory) / 'report.json').read_text('utf-8')
    accuracy = json.loads(text)['test']['accuracy']['mean']
    layers = [model.backbone.layers[0] for model in (fresh, run.model)]
    for steps, dtype, trained in CASES:
      found = verify(layers[trained], images[:, :steps], dtype)
      rows.append(
          {
              'layer': type(layers[0]).__name__,
              'time': steps,
              'features': layers[0].out_features,
              'dtype': dtype,
              'program': 'associative_scan',
              'status': 'ok',
              'epochs': run.config.num_epochs,
              'test_accuracy': accuracy,
              'trained': trained,
              **found,
          }
      )
      print(rows[-1], flush=True)
    if _OUTPUT.value:
      result = {'command': 'python benchmarks/newton_trained.py'}
      result |= timing.environment() | {'rows': rows}
      report.write(result, _OUTPUT.value)


if __name__ == '__main__':
  app.run(main)
