"""CfC on row-wise MNIST: 28 steps of 28 pixels.

The recipe is agru_benchmark's, see configs/base_smnist.py.

Published: nothing with this recipe.
Measured: 0.9890 (1 seed, CPU, commit 0fa0101).

  python train.py --config=configs/cfc_smnist.py
"""

import ml_collections

from configs import base_smnist


def get_config() -> ml_collections.ConfigDict:
  config = base_smnist.get_config()
  config.model.layer = 'CfC'
  return config
