"""LSTM on pixel-wise MNIST: 784 steps of one pixel.

Source: the public study agru_benchmark, which ran all of 300 epochs.

Published: 0.9739 (1 run).
Measured: 0.9881 (1 seed, NVIDIA H200, commit 013f410), of epoch 96.

  python train.py --config=configs/lstm_pixel_smnist.py
"""

import ml_collections

from configs import lstm_smnist


def get_config() -> ml_collections.ConfigDict:
  config = lstm_smnist.get_config()
  config.data.sequence = 'pixel'
  # Long sequences are learned late: all epochs are run, as the study did.
  config.num_epochs = 300
  config.early_stopping.patience = 0
  # With dark pixels as zeros, c and h stay 0 for the first hundred steps, and
  # no run passed 46 % (forget bias 1 and 2, NVIDIA H200).
  config.data.scaling = 'standard'
  # With the fans of torch's one [4 features, in_features] matrix.
  config.model.options.LSTM.kernel_init = 'xavier_uniform_fused'
  config.model.options.LSTM.recurrent_kernel_init = 'xavier_uniform_fused'
  return config
