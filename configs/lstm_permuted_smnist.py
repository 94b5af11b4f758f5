"""LSTM on permuted MNIST: 784 pixels in one fixed random order.

The recipe is that of configs/lstm_pixel_smnist.py.

Published: 0.926, with another permutation (Chang et al., 2019).
Measured: not yet.

  python train.py --config=configs/lstm_permuted_smnist.py
"""

import ml_collections

from configs import lstm_pixel_smnist


def get_config() -> ml_collections.ConfigDict:
  config = lstm_pixel_smnist.get_config()
  config.data.sequence = 'permuted'
  return config
