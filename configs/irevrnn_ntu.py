r"""iRevRNN, six layers, on NTU RGB+D: which action do 4 frames show?

Source: the example of action recognition in irevrnn's public code: 4 frames, 3
inner steps, batch 32, at most 2000 epochs, each body centred in each frame. Its
recurrent weights, those of the inner steps among them, do not decay.

Published: nothing.
Measured: not yet. Synthetic motions, by the second command: 0.9180 +- 0.0049
(3 seeds, 2 CPU cores, commit 58fcddc): where each body is centred, persons who
approach and who part look alike. With --config.data.centre=sequence it is
1.0000 +- 0.0000 (3 seeds, the same commit).

  python train.py --config=configs/irevrnn_ntu.py
  python train.py --config=configs/irevrnn_ntu.py \
      --config.num_epochs=60 --config.num_seeds=3
"""

import ml_collections

from configs import base_skeletons


def get_config() -> ml_collections.ConfigDict:
  config = base_skeletons.get_config()
  config.data.num_steps = 4
  config.data.centre = 'body'
  config.num_epochs = 2000
  config.batch_size = 32
  config.model.layer = 'IRevRNN'
  config.model.num_layers = 6
  config.model.norm = 'batch'
  config.model.dropout_rate = 0.1
  config.model.share_dropout_over_time = True
  config.model.options.IRevRNN = {
      # Reversible steps inside each time step.
      'inner_steps': 3,
      # The bound of |w|, |a| and |b|.
      'max_abs': 1.002,
      # The standard deviation that a and b start with.
      'inner_scale': 1e-8,
  }
  config.model.last_layer_options.IRevRNN = {
      # The last layer keeps memory to the end.
      'recurrent_range': (0.9, 1.0),
  }
  config.optimizer.clip_norm = 20.0
  config.optimizer.weight_decay = 1e-4
  config.optimizer.weight_decay_exclude = 'recurrent_kernel|cell_params|bias'
  return config
