"""GRU on UCI HAR: 9 columns, 128 steps, six activities.

Published: nothing with this recipe.
Measured: not yet, on UCI HAR.

  python train.py --config=configs/gru_har.py
"""

import ml_collections

from configs import base_har


def get_config() -> ml_collections.ConfigDict:
  config = base_har.get_config()
  config.model.layer = 'GRU'
  return config
