"""IndRNN, eleven residual layers, on NTU RGB+D.

Source: Li et al., 2019, Deep IndRNN, and the authors' published code. Their
blocks add up after every two layers, 5 times; here each layer is one block.

Published: 0.842 (cross-subject), 0.902 (cross-view), NTU RGB+D 60.
Measured: not yet.

  python train.py --config=configs/indrnn_residual_ntu.py
"""

import ml_collections

from configs import indrnn_ntu


def get_config() -> ml_collections.ConfigDict:
  config = indrnn_ntu.get_config()
  config.model.num_layers = 11
  config.model.residual = True
  config.model.dropout_rate = 0.5
  config.optimizer.plateau_patience = 150
  return config
