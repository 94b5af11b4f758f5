"""LSTM on noise-padded CIFAR-10: 32 rows, then noise up to 1000 steps.

Source: Chang et al., 2019, AntisymmetricRNN, section 5.3; the optimiser is that
of configs/base_cifar.py.

Published: 0.116.
Measured: not yet.

  python train.py --config=configs/lstm_noise_cifar.py
"""

import ml_collections

from configs import lstm_pixel_cifar


def get_config() -> ml_collections.ConfigDict:
  config = lstm_pixel_cifar.get_config()
  config.data.sequence = 'noise_padded'
  return config
