"""Elman on modular arithmetic: trained on up to 40 tokens, tested on 2,048.

Source: no published recipe; the languages and their lengths are those of
Delétang et al., 2023, "Neural networks and the Chomsky hierarchy".

Published: none.
Measured: 1.0000 at length 2,048 (3 seeds, H200, commit caa1fe7).

  python train.py --config=configs/elman_modular_arithmetic.py
"""

import ml_collections

from configs import base_state_tracking


def get_config() -> ml_collections.ConfigDict:
  config = base_state_tracking.get_config()
  config.data.language = 'modular_arithmetic'
  config.model.layer = 'Elman'
  # 128 features have 87 % of the training strings right after 300 epochs.
  config.model.features = 256
  config.model.options.Elman.recurrent_kernel_init = 'orthogonal'
  config.optimizer.learning_rate = 5e-4
  config.optimizer.schedule = 'cosine'
  config.num_epochs = 500
  return config
