"""LSTM on the characters of a text: which one comes next?

The recipe of minGRU, see configs/base_text.py.

Published: none.
Measured: 1.568 nats on tiny Shakespeare's last 5 % (1 seed, H200, commit
cde32d8).

  python train.py --config=configs/lstm_characters.py
"""

import ml_collections

from configs import base_text


def get_config() -> ml_collections.ConfigDict:
  config = base_text.get_config()
  config.model.layer = 'LSTM'
  return config
