"""Elman network on row-wise MNIST: 28 steps of 28 pixels.

The recipe is agru_benchmark's for its GRU, see configs/base_smnist.py; the
study has no Elman network.

Published: nothing with this recipe.
Measured: 0.9831 +- 0.0015 (5 seeds, NVIDIA H200, commit caa1fe7).

  python train.py --config=configs/elman_smnist.py
"""

import ml_collections

from configs import base_smnist


def get_config() -> ml_collections.ConfigDict:
  config = base_smnist.get_config()
  config.model.layer = 'Elman'
  return config
