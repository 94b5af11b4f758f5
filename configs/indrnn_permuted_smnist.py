"""IndRNN, six layers, on permuted MNIST: 784 pixels in one fixed random order.

Source: Li et al., 2018, IndRNN, section 5.2; see
configs/indrnn_pixel_smnist.py.

Published: 0.960, with another permutation.
Measured: not yet.

  python train.py --config=configs/indrnn_permuted_smnist.py
"""

import ml_collections

from configs import indrnn_pixel_smnist


def get_config() -> ml_collections.ConfigDict:
  config = indrnn_pixel_smnist.get_config()
  config.data.sequence = 'permuted'
  return config
