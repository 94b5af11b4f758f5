"""Elman network on parity: trained on up to 40 bits, tested on 2,048.

Source: no published recipe; the languages and their lengths are those of
Delétang et al., 2023, "Neural networks and the Chomsky hierarchy".

Published: none.
Measured: 1.0000 at length 2,048 (5 seeds, H200, commit cde32d8).

  python train.py --config=configs/elman_parity.py
"""

import ml_collections

from configs import base_state_tracking


def get_config() -> ml_collections.ConfigDict:
  config = base_state_tracking.get_config()
  config.model.layer = 'Elman'
  # Whoever can learn parity does so early.
  config.num_epochs = 20
  # Nor does it need weight decay.
  config.optimizer.name = 'adam'
  config.optimizer.weight_decay = 0.0
  return config
