"""GRU that forecasts the Lorenz system, .25 units of time ahead.

That nothing changes has an MSE of 126 on the test. Loss and training are in
standardised units, the MSE in units of the system.

Published: nothing with these data.
Measured: MSE 0.3270 (1 seed, CPU, commit 013f410).

  python train.py --config=configs/gru_lorenz.py
"""

import ml_collections

from configs import base_lorenz


def get_config() -> ml_collections.ConfigDict:
  config = base_lorenz.get_config()
  config.model.layer = 'GRU'
  return config
