"""Fields of all configs of texts; each changes a few lines.

The recipe is that of Feng et al., Were RNNs all we needed?, 2024, as far as it
is published: three blocks of 384 (convolution of width 4, layer, MLP, each with
pre-norm and residual), dropout .2, windows of 256, batch 64, AdamW at 1e-3 with
b2 .99, gradients clipped to a norm of .25, 5,000 steps. The weight decay is
ours.

`configs/base.py` explains the fields that are not here.
"""

import ml_collections
from ml_collections import config_dict

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'text'
  config.batch_size = 64
  # Twenty epochs of 250 steps.
  config.num_epochs = 20
  config.eval_batch_size = 64

  data = config.data
  data.unlock()
  # A file in UTF-8, cut into three parts, or a folder with a file for each, as
  # those of PTB and WikiText; '' for the topics of Python's own help.
  data.path = ''
  # 'characters', 'bytes', 'bpe' and 'unigram' (subwords of bytes), or 'words'.
  data.tokens = 'characters'
  # The most subwords or words; None for 8,192 subwords or all words.
  data.vocabulary_size = config_dict.placeholder(int)
  # Tokens of a window.
  data.context = 256
  # Tokens of a window of the test; None for those of `context`.
  data.test_context = config_dict.placeholder(int)
  # Training steps that count as an epoch.
  data.steps_per_epoch = 250
  # The part of the text, after that to train on, that validates.
  data.validation_fraction = 0.05
  # The part at the end that tests.
  data.test_fraction = 0.05
  # Tokens of a sample.
  data.sample_length = 500
  # Logits of a sample are divided by this; 0 for the most likely token.
  data.sample_temperature = 0.8
  data.lock()

  model = config.model
  model.unlock()
  model.features = 384
  model.num_layers = 3
  model.dropout_rate = 0.2
  # Steps that the convolution of a block sees; 0 for none.
  model.conv_width = 4
  # 'plain', 'gated' or None.
  model.mlp = 'plain'
  # Features inside an MLP; None for 4 times those of the model, or 8/3 times
  # where it is gated.
  model.mlp_features = config_dict.placeholder(int)
  # Whether the embedding maps to logits as well.
  model.is_tied = False
  model.lock()
  model.options.unlock()
  model.last_layer_options.unlock()

  config.optimizer.name = 'adamw'
  config.optimizer.learning_rate = 1e-3
  config.optimizer.b2 = 0.99
  config.optimizer.weight_decay = 0.1
  config.optimizer.weight_decay_exclude = 'bias|scale|norm|embedding'
  config.optimizer.clip_norm = 0.25
  return config
