"""RG-LRU with factors in (-1, 1) on parity: trained on up to 40 bits.

Source: no published recipe; the languages and their lengths are those of
Delétang et al., 2023, "Neural networks and the Chomsky hierarchy". A memory
whose factor can be negative counts modulo 2 (Grazzi, Siems et al., 2024).

Published: none.
Measured: not yet.

  python train.py --config=configs/rglru_parity.py
"""

import ml_collections

from configs import base_state_tracking


def get_config() -> ml_collections.ConfigDict:
  config = base_state_tracking.get_config()
  config.model.layer = 'RGLRU'
  config.model.options.RGLRU = {'signed': True}
  config.num_epochs = 40
  config.optimizer.name = 'adam'
  config.optimizer.weight_decay = 0.0
  return config
