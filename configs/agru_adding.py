"""A-GRU on the adding problem of 1,000 steps.

Source: no published recipe; see configs/agru_pixel_smnist.py for gamma.

Published: none.
Measured: MSE 2e-05 (1 seed, H200, commit cde32d8).

  python train.py --config=configs/agru_adding.py
"""

import ml_collections

from configs import base_adding


def get_config() -> ml_collections.ConfigDict:
  config = base_adding.get_config()
  config.model.layer = 'AGRU'
  # 0.01 is chaotic over hundreds of steps.
  config.model.options.AGRU = {'gamma': 2.0}
  return config
