"""Counts iterations of Newton's method before and after training.

  python train.py --config=configs/gru_smnist.py --workdir=runs/gru ...
  python benchmarks/newton_trained.py runs/gru ...

Each run's layer sees the rows of test images of MNIST, one image after the
other: 1,008 steps, by `rnnzoo.verify`. Pixels are from 0 to 1, as the runs must
have had them (`data.scaling='minmax'`). `--output` names a JSON file.
"""

import dataclasses
import datetime
import json
import pathlib

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp

import rnnzoo
from rnnzoo import training

_OUTPUT = flags.DEFINE_string('output', None, 'The JSON file to write.')
_COMMIT = flags.DEFINE_string('commit', '', 'The commit that is measured.')

IMAGES = 36


def verify(model, images) -> dict[str, object]:
  """Returns the fields of `rnnzoo.Verification` for a model's first layer.

  Args:
    model: a classifier of rows.
    images: [1, steps, features].
  """
  return dataclasses.asdict(rnnzoo.verify(model.backbone.layers[0], images))


def main(argv) -> None:
  """Verifies the layers of the runs that are named."""
  rows = []
  for directory in argv[1:]:
    run = training.load(directory)
    images = jnp.asarray(run.task.splits['test']['inputs'][:IMAGES])
    images = images.reshape(1, -1, images.shape[-1]) / 255.0
    fresh = run.task.build_model(nnx.Rngs(0))
    report = (pathlib.Path(directory) / 'report.json').read_text('utf-8')
    accuracy = json.loads(report)['test']['accuracy']['mean']
    rows.append(
        {
            'layer': type(run.model.backbone.layers[0]).__name__,
            'epochs': run.config.num_epochs,
            'features': run.model.backbone.layers[0].out_features,
            'test_accuracy': accuracy,
            'before': verify(fresh, images),
            'after': verify(run.model, images),
        }
    )
    print(rows[-1]['layer'], rows[-1]['before'], rows[-1]['after'], flush=True)
    if _OUTPUT.value:
      write(rows)


def write(rows) -> None:
  """Writes the rows so far."""
  result = {
      'jax': jax.__version__,
      'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
      'commit': _COMMIT.value,
      'rows': rows,
  }
  path = pathlib.Path(_OUTPUT.value)
  path.write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
