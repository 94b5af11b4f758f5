"""Fields of all configs of translation; each changes a few lines.

`configs/base.py` explains the fields that are not here.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'translation'

  data = config.data
  data.unlock()
  # 'dates', which are made on the spot, 'files', or 'tfds:<name>' for a set of
  # TFDS, as 'tfds:wmt16_translate/de-en', whose supervised keys say which
  # language is the source.
  data.source = 'dates'
  # Where TFDS keeps its sets; '' for its default.
  data.data_dir = ''
  # Files of one sentence a line, UTF-8, plain or .gz; line n of a source
  # belongs to line n of its target.
  data.train_source = ''
  # See train_source.
  data.train_target = ''
  # See train_source.
  data.validation_source = ''
  # See train_source.
  data.validation_target = ''
  # See train_source.
  data.test_source = ''
  # See train_source.
  data.test_target = ''
  # Dates to train on; 1,000 others validate, and 1,000 test.
  data.num_dates = 10000
  # Of the days, and of the ways to write them.
  data.dates_seed = 0
  # 'words', 'characters' or 'subwords' (byte-pair encoding).
  data.source_tokens = 'words'
  # The same for the target.
  data.target_tokens = 'words'
  # Whether case is dropped.
  data.lowercase = True
  # How often a token must be in the lines to train on; others are <unk>.
  data.min_count = 1
  # The greatest number of tokens of each language; the most frequent stay.
  data.vocabulary_size = 100000
  # Training pairs are sorted into so many groups by length, at most; a batch is
  # of one group.
  data.num_buckets = 1
  # A translation has so many tokens at most.
  data.output_length = 100
  # Beams of the search; 1 takes the most likely token in every step.
  data.num_beams = 1
  # Beams are compared by log-likelihood / length^length_penalty.
  data.length_penalty = 0.0
  # Lines that are translated at once; no effect on the result but rounding.
  data.decode_batch_size = 128
  data.lock()

  model = config.model
  model.unlock()
  # Features of the embeddings, whose entries dropout_rate is of, too.
  model.embed_features = 64
  # Hidden features of additive attention; 0 for no attention.
  model.attention_features = 0
  # Whether the encoder runs in both directions, with model.features each.
  model.is_bidirectional = False
  # Weights are drawn from N(0, init_std^2), and biases are zero; 0 for the
  # layers' own initialisers.
  model.init_std = 0.0
  # The chance that a step of training sees the target's own token; else it sees
  # the one that the model finds most likely.
  model.teacher_forcing = 1.0
  model.lock()
  model.options.unlock()
  model.last_layer_options.unlock()
  return config
