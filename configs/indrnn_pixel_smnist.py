"""IndRNN, six layers, on pixel-wise MNIST: 784 steps of one pixel.

Source: Li et al., 2018, IndRNN, section 5.2, and the authors' published code.

Published: 0.990.
Measured: not yet.

  python train.py --config=configs/indrnn_pixel_smnist.py
"""

import math

import ml_collections

from configs import base_smnist


def get_config() -> ml_collections.ConfigDict:
  config = base_smnist.get_config()
  config.data.sequence = 'pixel'
  config.batch_size = 32
  # Long sequences are learned late.
  config.num_epochs = 300
  config.early_stopping.patience = 30
  config.model.layer = 'IndRNN'
  config.model.num_layers = 6
  config.model.norm = 'batch'
  config.model.dropout_rate = 0.1
  config.model.share_dropout_over_time = True
  config.model.options.IndRNN = {
      # 5^(1/784): all steps together amplify by no more than 5.
      'max_abs': math.pow(5, 1 / 784),
  }
  config.model.last_layer_options.IndRNN = {
      # The last layer keeps memory to the end.
      'recurrent_range': (2 ** (-1 / 784), 2 ** (1 / 784)),
  }
  config.optimizer.learning_rate = 2e-4
  config.optimizer.clip_norm = 0.0
  config.optimizer.clip_value = 10.0
  config.optimizer.weight_decay_exclude = 'recurrent_kernel|bias'
  return config
