"""GRU on your own sequences: an example to start from.

  python train.py --config=configs/gru_sequences.py --config.data.path=mine.npz

Source: configs/base_sequences.py, which says what mine.npz holds.

Published: nothing; the data are yours.
Measured: not yet.

  python train.py --config=configs/gru_sequences.py
"""

import ml_collections

from configs import base_sequences


def get_config() -> ml_collections.ConfigDict:
  config = base_sequences.get_config()
  config.model.layer = 'GRU'
  return config
