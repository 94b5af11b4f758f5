r"""LSTM, two layers, on NTU RGB+D: which action do 8 frames show?

Source: Shahroudy et al., 2016, NTU RGB+D, whose LSTM of two layers sees one
random frame of each of 8 segments; all else is of configs/base_skeletons.py.

Published: none with this recipe.
Measured: not yet. Synthetic motions, by the second command: 1.0000 +- 0.0000
(3 seeds, 2 CPU cores, commit 013f410).

  python train.py --config=configs/lstm_ntu.py
  python train.py --config=configs/lstm_ntu.py \
      --config.num_epochs=40 --config.num_seeds=3
"""

import ml_collections

from configs import base_skeletons


def get_config() -> ml_collections.ConfigDict:
  config = base_skeletons.get_config()
  config.data.num_steps = 8
  config.model.layer = 'LSTM'
  config.model.num_layers = 2
  config.model.dropout_rate = 0.5
  config.model.share_dropout_over_time = True
  config.optimizer.learning_rate = 1e-3
  config.optimizer.plateau_factor = 0.5
  config.optimizer.plateau_patience = 10
  config.early_stopping.patience = 30
  return config
