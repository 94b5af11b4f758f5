"""GRU encoder and decoder on the passengers of airlines by month, quantiles.

Source: the baseline of many papers on forecasts.

Published: nothing on these data.
Measured: MASE 0.3990 +- 0.0547 (3 seeds, cpu, commit a771d6c3).
A season before: MASE 1.5709.

  python train.py --config=configs/seq2seq_airline.py
"""

import ml_collections

from configs import base_forecasting


def get_config() -> ml_collections.ConfigDict:
  config = base_forecasting.get_config()
  config.model.layer = 'GRU'
  config.model.features = 40
  config.data.decoder = 'seq2seq'
  config.data.head = 'quantiles'
  return config
