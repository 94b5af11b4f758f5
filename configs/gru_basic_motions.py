"""GRU on BasicMotions: 6 columns, 100 steps, four motions.

Two layers; the recipe is that of configs/base_time_series.py.

Published: nothing with this recipe.
Measured: 0.9150 +- 0.0200 (5 seeds, CPU, commit 013f410).

  python train.py --config=configs/gru_basic_motions.py
"""

import ml_collections

from configs import base_time_series


def get_config() -> ml_collections.ConfigDict:
  config = base_time_series.get_config()
  config.data.name = 'BasicMotions'
  # There are 34 training sequences.
  config.batch_size = 8
  config.model.layer = 'GRU'
  return config
