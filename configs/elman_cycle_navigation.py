"""Elman on cycle navigation: trained on up to 40 steps, tested on 2,048.

Source: no published recipe; the languages and their lengths are those of
Delétang et al., 2023, "Neural networks and the Chomsky hierarchy".

Published: none.
Measured: 0.9904 at length 2,048 (5 seeds, H200, commit caa1fe7).

  python train.py --config=configs/elman_cycle_navigation.py
"""

import ml_collections

from configs import base_state_tracking


def get_config() -> ml_collections.ConfigDict:
  config = base_state_tracking.get_config()
  config.data.language = 'cycle_navigation'
  config.model.layer = 'Elman'
  # With 64 features one or two seeds of five do not hold for 2,048 steps.
  config.model.features = 128
  config.model.options.Elman.recurrent_kernel_init = 'orthogonal'
  config.optimizer.name = 'adam'
  config.optimizer.weight_decay = 0.0
  config.optimizer.learning_rate = 1e-3
  config.optimizer.schedule = 'step'
  config.optimizer.step_epochs = 120
  config.num_epochs = 160
  return config
