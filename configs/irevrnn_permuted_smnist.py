"""iRevRNN, six layers, on permuted MNIST: 784 pixels in one fixed random order.

Source: see configs/irevrnn_pixel_smnist.py.

Published: nothing.
Measured: not yet.

  python train.py --config=configs/irevrnn_permuted_smnist.py
"""

import ml_collections

from configs import irevrnn_pixel_smnist


def get_config() -> ml_collections.ConfigDict:
  config = irevrnn_pixel_smnist.get_config()
  config.data.sequence = 'permuted'
  return config
