"""sLSTM on cycle navigation: trained on up to 40 steps, tested on 2,048.

Source: no published recipe; the languages and their lengths are those of
Delétang et al., 2023, "Neural networks and the Chomsky hierarchy".

Published: none.
Measured: 1.0000 at length 2,048 (5 seeds, H200, commit caa1fe7).

  python train.py --config=configs/slstm_cycle_navigation.py
"""

import ml_collections

from configs import base_state_tracking


def get_config() -> ml_collections.ConfigDict:
  config = base_state_tracking.get_config()
  config.data.language = 'cycle_navigation'
  config.model.layer = 'SLSTM'
  # With four heads of 16 units some seeds hold for 2,048 steps, others do not.
  config.model.features = 128
  config.model.options.SLSTM.num_heads = 1
  # The default is zeros: R then takes long to matter.
  config.model.options.SLSTM.recurrent_kernel_init = 'orthogonal'
  config.optimizer.learning_rate = 2e-3
  config.optimizer.schedule = 'cosine'
  config.num_epochs = 150
  return config
