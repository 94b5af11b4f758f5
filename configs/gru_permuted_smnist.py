"""GRU on permuted MNIST: 784 pixels in one fixed random order.

The recipe is that of configs/gru_pixel_smnist.py.

Published: 0.941 with 256 features, with another permutation (Li et al.,
2018, table 2).
Measured: not yet.

  python train.py --config=configs/gru_permuted_smnist.py
"""

import ml_collections

from configs import gru_pixel_smnist


def get_config() -> ml_collections.ConfigDict:
  config = gru_pixel_smnist.get_config()
  config.data.sequence = 'permuted'
  return config
