"""LSTM on the word problem of A5: trained on 64 elements, tested on 1,024.

Source: no published recipe; the problem, with the label of every prefix, is
that of Merrill, Petty and Sabharwal, 2024, "The illusion of state".

Published: none.
Measured: 0.7810 at length 1,024 (2 seeds: 0.930 and 0.632, H200, commit
33ad0a6); with 128 features, 100 epochs at 3e-3 and strings of 64 alone it was
0.1396 (5 seeds, commit cde32d8).

  python train.py --config=configs/lstm_a5.py
"""

import ml_collections

from configs import base_state_tracking


def get_config() -> ml_collections.ConfigDict:
  config = base_state_tracking.get_config()
  config.data.language = 'A5'
  config.data.label_steps = 'every'
  config.data.max_length = 64
  # Strings of all lengths: the short ones are learnt first.
  config.data.min_length = 1
  config.data.test_lengths = (64, 128, 256, 512, 1024)
  config.model.layer = 'LSTM'
  config.model.features = 256
  config.num_epochs = 400
  config.optimizer.learning_rate = 2e-3
  return config
