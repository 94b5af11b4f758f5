"""Fields of all configs of copy memory; each changes a few lines.

`configs/base.py` explains all fields but those of `config.data`, and
`rnnzoo/tasks/synthetic/copying.py` the task.
"""

import ml_collections
from ml_collections import config_dict

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'copying'
  config.num_epochs = 100

  data = config.data
  data.unlock()
  # How many steps each symbol is to be remembered, the others aside.
  data.delay = 200
  # How many symbols are shown and named.
  data.num_symbols = 10
  # Steps that the loss counts: 'all', as in the literature, or only those on
  # which symbols are 'recalled'.
  data.loss_steps = 'all'
  # Training steps of an epoch, each with a batch of new sequences.
  data.steps_per_epoch = 200
  # Sequences of validation.
  data.num_validation = 500
  # Sequences of the test.
  data.num_test = 1000
  # Of validation and test, which are the same for all seeds.
  data.seed = 0
  data.lock()

  model = config.model
  model.unlock()
  # 'plain' or 'gated' for the blocks of a language model, each with norms,
  # residuals and such an MLP; None for the layers alone.
  model.mlp = config_dict.placeholder(str)
  # Steps that a convolution before each layer of such a block sees; 0 for none.
  model.conv_width = 0
  model.lock()
  model.options.unlock()
  model.last_layer_options.unlock()
  return config
