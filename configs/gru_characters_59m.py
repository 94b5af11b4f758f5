"""GRU of 59 million parameters on the characters of a text.

As configs/elman_characters_50m.py, but six layers of GRU alone, without MLPs:
they have that many parameters of their own (59,251,265 with 65 characters).

Published: none.
Measured: not yet.

  python train.py --config=configs/gru_characters_59m.py
"""

import ml_collections

from configs import elman_characters_50m


def get_config() -> ml_collections.ConfigDict:
  config = elman_characters_50m.get_config()
  config.model.layer = 'GRU'
  config.model.mlp = None
  config.model.mlp_features = None
  return config
