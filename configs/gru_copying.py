"""GRU on copy memory with a delay of 200.

Source: no published recipe for this delay; see configs/base_copying.py.

Published: none for this delay.
Measured: not yet.

  python train.py --config=configs/gru_copying.py
"""

import ml_collections

from configs import base_copying


def get_config() -> ml_collections.ConfigDict:
  config = base_copying.get_config()
  config.model.layer = 'GRU'
  return config
