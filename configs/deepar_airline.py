"""DeepAR on the passengers of airlines by month: three LSTMs of 40, Gaussian.

Source: Salinas et al., DeepAR, 2017, section 4: the model and Adam at 1e-3.

Published: nothing on these data.
Measured: MASE 0.3644 +- 0.0132 (3 seeds, cpu, commit a771d6c3).
A season before: MASE 1.5709.

  python train.py --config=configs/deepar_airline.py
"""

import ml_collections

from configs import base_forecasting


def get_config() -> ml_collections.ConfigDict:
  config = base_forecasting.get_config()
  config.model.layer = 'LSTM'
  config.model.features = 40
  config.model.num_layers = 3
  config.optimizer.clip_norm = 10.0
  return config
