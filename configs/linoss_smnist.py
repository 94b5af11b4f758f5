"""LinOSS, two layers, on row-wise MNIST: 28 steps of 28 pixels.

The recipe is agru_benchmark's, see configs/base_smnist.py; two layers, because
the gates of one see a single row each.

Published: nothing with this recipe.
Measured: 0.9875 (1 seed, H200, commit 58c92e5). Without the gates the output is
linear in x, and it was 0.9131.

  python train.py --config=configs/linoss_smnist.py
"""

import ml_collections

from configs import base_smnist


def get_config() -> ml_collections.ConfigDict:
  config = base_smnist.get_config()
  config.model.layer = 'LinOSS'
  config.model.num_layers = 2
  config.model.options.LinOSS = {'gated': True}
  return config
