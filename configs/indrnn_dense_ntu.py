"""IndRNN, densely connected, with augmentation, on NTU RGB+D.

Source: Li et al., 2019, Deep IndRNN, and the authors' published code. Their
three dense blocks have 8, 6 and 4 pairs of layers, a bottleneck and one that
adds 48 features; here 18 layers of 48 features are one block. The angles and
factors of the augmentation are ours.

Published: 0.867 (cross-subject), 0.940 (cross-view), NTU RGB+D 60.
Measured: not yet.

  python train.py --config=configs/indrnn_dense_ntu.py
"""

import ml_collections

from configs import indrnn_ntu


def get_config() -> ml_collections.ConfigDict:
  config = indrnn_ntu.get_config()
  config.data.rotation = 20.0
  config.data.scale = 0.1
  config.model.features = 48
  config.model.num_layers = 18
  config.model.dense = True
  config.model.dropout_rate = 0.3
  config.optimizer.plateau_patience = 150
  return config
