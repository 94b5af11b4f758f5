"""AntisymmetricRNN, gated, on noise-padded CIFAR-10: 32 rows, then noise.

Source: Chang et al., 2019, AntisymmetricRNN, section 5.3: 256 features; see
configs/antisymmetric_pixel_cifar.py.

Published: 0.547 gated, 0.483 plain.
Measured: not yet.

  python train.py --config=configs/antisymmetric_noise_cifar.py
"""

import ml_collections

from configs import antisymmetric_pixel_cifar


def get_config() -> ml_collections.ConfigDict:
  config = antisymmetric_pixel_cifar.get_config()
  config.data.sequence = 'noise_padded'
  return config
