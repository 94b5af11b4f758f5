"""GRU on copy memory with a delay of 200.

Source: no published recipe for this delay; see configs/base_copying.py.

Published: none for this delay.
Measured: 0.9193 of the symbols recalled (1 seed, H200, commit 316e387).

  python train.py --config=configs/gru_copying.py
"""

import ml_collections

from configs import base_copying


def get_config() -> ml_collections.ConfigDict:
  config = base_copying.get_config()
  config.model.layer = 'GRU'
  config.num_epochs = 150
  config.optimizer.learning_rate = 3e-3
  config.optimizer.schedule = 'cosine'
  return config
