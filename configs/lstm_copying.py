"""LSTM on copy memory with a delay of 200.

Source: C. Tallec and Y. Ollivier, 2018, "Can recurrent neural networks warp
time?", who draw each feature's forget bias. The other numbers are ours.

Published: none for this delay.
Measured: 0.9980 of the symbols recalled (1 seed, H200, commit 33ad0a6).

  python train.py --config=configs/lstm_copying.py
"""

import ml_collections

from configs import base_copying


def get_config() -> ml_collections.ConfigDict:
  config = base_copying.get_config()
  config.model.layer = 'LSTM'
  config.model.options.LSTM = {
      # Gates that forget half in 1 to 220 steps. With a forget bias of 5 for
      # all, and half of the epochs, .9757 were recalled.
      'chrono_steps': 220,
  }
  config.num_epochs = 300
  config.optimizer.learning_rate = 3e-3
  config.optimizer.schedule = 'cosine'
  return config
