"""AntisymmetricRNN, gated, on pixel-wise MNIST: 784 steps of one pixel.

Source: Chang et al., 2019, AntisymmetricRNN, table 1: 128 features. Step size
and damping are from the grid that the paper searched; the optimiser is that of
configs/base_smnist.py.

Published: 0.988 gated, 0.980 plain.
Measured: not yet.

  python train.py --config=configs/antisymmetric_pixel_smnist.py
"""

import ml_collections

from configs import antisymmetric_smnist


def get_config() -> ml_collections.ConfigDict:
  config = antisymmetric_smnist.get_config()
  config.data.sequence = 'pixel'
  # The paper's order of step size for hundreds of steps.
  config.model.options.AntisymmetricRNN.epsilon = 0.01
  # Long sequences are learned late.
  config.num_epochs = 300
  config.early_stopping.patience = 30
  return config
