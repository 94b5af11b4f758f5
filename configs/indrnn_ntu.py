"""IndRNN, six layers, on NTU RGB+D: which action do 20 frames show?

Source: Li et al., 2018, IndRNN, section 5.4, and the authors' published code.

Published: 0.818 (cross-subject), 0.880 (cross-view), NTU RGB+D 60.
Measured: not yet. Synthetic motions, by the second command: 1.0000
(1 seed, 2 CPU cores, commit 013f410).

  python train.py --config=configs/indrnn_ntu.py
  python train.py --config=configs/indrnn_ntu.py --config.num_epochs=40
"""

import math

import ml_collections

from configs import base_skeletons


def get_config() -> ml_collections.ConfigDict:
  config = base_skeletons.get_config()
  config.model.layer = 'IndRNN'
  config.model.features = 512
  config.model.num_layers = 6
  config.model.norm = 'batch'
  # That of the measured runs; 0.9 is the default.
  config.model.norm_momentum = 0.99
  config.model.dropout_rate = 0.4
  config.model.share_dropout_over_time = True
  config.model.options.IndRNN = {
      # 5^(1/20): all steps together amplify by no more than 5.
      'max_abs': math.pow(5, 1 / 20),
  }
  config.model.last_layer_options.IndRNN = {
      # The last layer keeps memory to the end.
      'recurrent_range': (2 ** (-1 / 20), 2 ** (1 / 20)),
  }
  config.batch_size = 128
  config.optimizer.clip_norm = 0.0
  config.optimizer.clip_value = 10.0
  config.optimizer.weight_decay = 1e-4
  config.optimizer.weight_decay_exclude = 'recurrent_kernel|bias'
  return config
