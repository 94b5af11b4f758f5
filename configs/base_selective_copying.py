"""Fields of all configs of selective copying; each changes a few lines.

`configs/base.py` explains all fields but those of `config.data`, and
`rnnzoo/tasks/synthetic/copying.py` the task.
"""

import ml_collections
from ml_collections import config_dict

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'selective_copying'
  config.num_epochs = 100
  config.batch_size = 64
  # Sequences are long.
  config.eval_batch_size = 100

  data = config.data
  data.unlock()
  # Steps of symbols and noise; the symbols are named on further steps.
  data.length = 4096
  # How many symbols are shown and named.
  data.num_symbols = 16
  # Tokens that there are, noise and marker among them.
  data.num_tokens = 16
  # Training steps of an epoch, each with a batch of new sequences.
  data.steps_per_epoch = 1000
  # Sequences of validation.
  data.num_validation = 200
  # Sequences of the test.
  data.num_test = 1000
  # Pairs of a length and of epochs that train on it, in turn, before all others
  # train on `length`; each length is compiled for itself. Validation, and so
  # early stopping and plateaus, have `length` throughout.
  data.curriculum = ()
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
