"""GRU on the word problem of A5: trained on 64 elements, tested on 1,024.

Source: no published recipe; the problem, with the label of every prefix, is
that of Merrill, Petty and Sabharwal, 2024, "The illusion of state".

Published: none.
Measured: 0.0908 at length 1,024 (5 seeds, H200, commit cde32d8).

  python train.py --config=configs/gru_a5.py
"""

import ml_collections

from configs import base_state_tracking


def get_config() -> ml_collections.ConfigDict:
  config = base_state_tracking.get_config()
  config.data.language = 'A5'
  config.data.label_steps = 'every'
  config.data.max_length = 64
  # Every prefix has its label: there are shorter strings in each.
  config.data.min_length = 64
  config.data.test_lengths = (64, 128, 256, 512, 1024)
  config.model.layer = 'GRU'
  config.model.features = 128
  return config
