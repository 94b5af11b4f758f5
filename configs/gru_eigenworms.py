"""GRU on EigenWorms: 6 columns, 17,984 steps, five worms.

Five layers of 32, batch 4 and Adam at 3e-5 are what DEER (Lim et al., 2024) was
trained with. The score is that of another model, LinOSS, over five random
splits of training and test sequences together, 70 / 15 / 15 %: `split_seed` is
to change with `seed`.

Published: 0.950 +- 0.044 (LinOSS, Rusch and Rus, 2024, 5 seeds).
Measured: not yet.

  python train.py --config=configs/gru_eigenworms.py
"""

import ml_collections

from configs import base_time_series


def get_config() -> ml_collections.ConfigDict:
  config = base_time_series.get_config()
  config.data.name = 'EigenWorms'
  config.data.split = 'pooled'
  config.batch_size = 4
  config.eval_batch_size = 64
  config.num_epochs = 200
  config.model.layer = 'GRU'
  config.model.features = 32
  config.model.num_layers = 5
  config.model.dropout_rate = 0.0
  config.model.label_smoothing = 0.0
  config.optimizer.learning_rate = 3e-5
  return config
