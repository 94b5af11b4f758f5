"""RG-LRU, two layers, on row-wise MNIST: 28 steps of 28 pixels.

The recipe is agru_benchmark's, see configs/base_smnist.py; two layers, because
the gates of one see a single row each.

Published: nothing with this recipe.
Measured: 0.9822 (1 seed, CPU, commit 0fa0101).

  python train.py --config=configs/rglru_smnist.py
"""

import ml_collections

from configs import base_smnist


def get_config() -> ml_collections.ConfigDict:
  config = base_smnist.get_config()
  config.model.layer = 'RGLRU'
  config.model.num_layers = 2
  return config
