"""RG-LRU with factors in (-1, 1) on parity: trained on up to 128 bits.

Source: no published recipe; the languages and their lengths are those of
Delétang et al., 2023, "Neural networks and the Chomsky hierarchy". A memory
whose factor can be negative counts modulo 2 (Grazzi, Siems et al., 2024).

Published: none.
Measured: 1.0000 at length 2,048 (1 seed, CPU, commit 104db13). Trained on up to
40 bits at 3e-3 it holds to length 40 alone.

  python train.py --config=configs/rglru_parity.py
"""

import ml_collections

from configs import base_state_tracking


def get_config() -> ml_collections.ConfigDict:
  config = base_state_tracking.get_config()
  config.model.layer = 'RGLRU'
  config.model.options.RGLRU = {'signed': True}
  config.num_epochs = 40
  config.data.max_length = 128
  config.optimizer.learning_rate = 1e-2
  config.optimizer.name = 'adam'
  config.optimizer.weight_decay = 0.0
  return config
