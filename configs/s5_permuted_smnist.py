"""S5, four layers, on permuted MNIST: 784 pixels in one fixed random order.

Source: Smith et al., 2023; see configs/s5_pixel_smnist.py.

Published: 0.9867.
Measured: not yet. With a dropout of .3 it was 0.9790 (1 seed, H200, commit
1801276).

  python train.py --config=configs/s5_permuted_smnist.py
"""

import ml_collections

from configs import s5_pixel_smnist


def get_config() -> ml_collections.ConfigDict:
  config = s5_pixel_smnist.get_config()
  config.data.sequence = 'bit_reversed'
  config.model.features = 128
  config.model.dropout_rate = 0.15
  config.model.options.S5.num_blocks = 2
  config.optimizer.learning_rate = 4e-3
  return config
