"""GRU of 59 million parameters on the characters of a text.

As configs/elman_characters_50m.py, but six layers of GRU alone, without MLPs:
they have that many parameters of their own (59,251,265 with 65 characters).

Published: none.
Measured: 682,000 tokens a second (H100, commit ae086de, nothing else running);
340 steps on tiny Shakespeare without a NaN (commit 4fe450f), and 1.681 nats on
its last 5 % after 240 of them (commit ae086de).

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
