"""AntisymmetricRNN, gated, on pixel-wise CIFAR-10: 1024 steps of one pixel.

Source: Chang et al., 2019, AntisymmetricRNN, section 5.2: 256 features. Step
size and damping are from the grid that the paper searched; the optimiser is
that of configs/base_cifar.py.

Published: none with this recipe.
Measured: not yet.

  python train.py --config=configs/antisymmetric_pixel_cifar.py
"""

import ml_collections

from configs import lstm_pixel_cifar


def get_config() -> ml_collections.ConfigDict:
  config = lstm_pixel_cifar.get_config()
  config.model.layer = 'AntisymmetricRNN'
  config.model.features = 256
  config.model.options.AntisymmetricRNN = {
      # Whether the input gates each step.
      'gated': True,
      # The step size.
      'epsilon': 0.01,
      # The damping.
      'gamma': 0.01,
  }
  return config
