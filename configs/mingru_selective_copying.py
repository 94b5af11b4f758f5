"""minGRU, three layers, on selective copying: 16 symbols among 4,096 steps.

Source: Feng et al., 2024, "Were RNNs all we needed?", table 1. Sizes, rates and
the parts between layers are ours.

Published: 0.995 +- 0.002 (3 layers, 400,000 steps).
Measured: not yet.

  python train.py --config=configs/mingru_selective_copying.py
"""

import ml_collections

from configs import base_selective_copying


def get_config() -> ml_collections.ConfigDict:
  config = base_selective_copying.get_config()
  config.model.layer = 'MinGRU'
  config.model.num_layers = 3
  config.model.norm = 'layer'
  config.model.residual = True
  config.model.dropout_rate = 0.1
  return config
