"""Fields of all configs of texts that go on from window to window.

The recipe is AWD-LSTM's for WikiText-2, as published: three layers of 1,150,
embeddings of 400 that map to logits too, dropout of whole tokens, of units for
all steps of a window and of R, and SGD at 30 with gradients clipped to a norm
of .25.

`configs/base.py` and `configs/base_text.py` explain the fields that are not
here.
"""

import ml_collections
from ml_collections import config_dict

from configs import base_text


def get_config() -> ml_collections.ConfigDict:
  config = base_text.get_config()
  config.task = 'text_stream'
  config.batch_size = 80
  config.num_epochs = 750

  data = config.data
  data.unlock()
  # An epoch reads the whole text.
  del data.steps_per_epoch
  # Standard deviation of the place where two windows meet, in tokens; lengths
  # have 1.4 times that. The publication draws lengths (5) and, of one window in
  # twenty, halves it. Windows of validation and test start from an empty memory
  # and have test_context tokens.
  data.context_jitter = 4
  data.lock()
  data.update(tokens='words', context=70, test_context=4096)

  model = config.model
  model.unlock()
  for name in ('conv_width', 'mlp', 'mlp_features', 'is_tied'):
    del model[name]
  # Features of the embedding and of the last layer; None for `features`.
  model.embedding_features = config_dict.placeholder(int)
  # The share of the vocabulary whose vectors are zero in a step.
  model.token_dropout_rate = 0.1
  # The same of embedded units, for all steps of a window.
  model.input_dropout_rate = 0.65
  # The same of units of the last layer.
  model.output_dropout_rate = 0.4
  # The factor in the loss of the mean square of the last outputs (AR).
  model.activation_penalty = 2.0
  # The same of their changes from step to step (TAR).
  model.change_penalty = 1.0
  model.lock()
  model.update(features=1150, embedding_features=400)
  model.update(dropout_rate=0.2, dropconnect_rate=0.5)
  model.options.unlock()
  model.last_layer_options.unlock()

  config.optimizer.name = 'sgd'
  config.optimizer.b1 = 0.0
  config.optimizer.learning_rate = 30.0
  config.optimizer.weight_decay = 1.2e-6
  config.optimizer.weight_decay_exclude = ''
  config.optimizer.average_patience = 5
  return config
