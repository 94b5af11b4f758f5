"""LSTM on pixel-wise CIFAR-10: 1024 steps of one pixel's three channels.

Source: Chang et al., 2019, AntisymmetricRNN, section 5.2; the optimiser is that
of configs/base_cifar.py.

Published: none with this recipe.
Measured: not yet.

  python train.py --config=configs/lstm_pixel_cifar.py
"""

import ml_collections

from configs import base_cifar


def get_config() -> ml_collections.ConfigDict:
  config = base_cifar.get_config()
  config.model.layer = 'LSTM'
  # Long sequences are learned late.
  config.num_epochs = 100
  config.early_stopping.patience = 30
  return config
