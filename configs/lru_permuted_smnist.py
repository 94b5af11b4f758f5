"""LRU, four layers, on permuted MNIST: 784 pixels in one fixed random order.

Source: Orvieto et al., 2023; see configs/lru_pixel_smnist.py.

Published: nothing.
Measured: 0.9753 (1 seed, H200, commit 58c92e5). With radii from .9, half the
states, dropout of .3 and 60 epochs it was 0.9736. By
--config.data.sequence=bit_reversed it was 0.9803.

  python train.py --config=configs/lru_permuted_smnist.py
"""

import ml_collections

from configs import lru_pixel_smnist


def get_config() -> ml_collections.ConfigDict:
  config = lru_pixel_smnist.get_config()
  config.data.sequence = 'permuted'
  config.num_epochs = 80
  config.model.features = 128
  config.model.dropout_rate = 0.25
  config.model.label_smoothing = 0.1
  config.model.options.LRU.state_features = 128
  config.model.options.LRU.min_radius = 0.5
  config.model.options.LRU.max_phase = 0.31
  config.optimizer.weight_decay = 0.05
  return config
