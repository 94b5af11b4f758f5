"""LRU, four layers, on pixel-wise MNIST: 784 steps of one pixel.

Source: Orvieto et al., 2023, LRU, for the layer. Sizes and rates are those of
configs/s5_pixel_smnist.py.

Published: nothing.
Measured: 0.9927 (1 seed, H200, commit 1801276).

  python train.py --config=configs/lru_pixel_smnist.py
"""

import ml_collections

from configs import s5_pixel_smnist


def get_config() -> ml_collections.ConfigDict:
  config = s5_pixel_smnist.get_config()
  config.num_epochs = 50
  config.model.layer = 'LRU'
  config.model.features = 96
  config.model.dropout_rate = 0.1
  config.model.label_smoothing = 0.0
  config.model.options.LRU = {
      'state_features': 64,
      'min_radius': 0.9,
      'max_radius': 0.999,
      'gated': True,
  }
  config.optimizer.learning_rate = 4e-3
  config.optimizer.weight_decay = 0.01
  return config
