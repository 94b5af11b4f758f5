"""GRU encoder and decoder with attention: written-out dates to ISO 8601.

'the third of march, nineteen ninety four' and seven other ways to write a day
from 1900 to 2099 become '1994-03-03'. The source is read in words, the target
is written in characters. Attention is that of Bahdanau et al., 2015.

Published: none.
Measured: exact match 1.0000 (1 seed, 2 shared CPU cores, 53 s of CPU time with
compilation).

  python train.py --config=configs/gru_dates.py
"""

import ml_collections

from configs import base_translation


def get_config() -> ml_collections.ConfigDict:
  config = base_translation.get_config()
  config.num_epochs = 5
  config.batch_size = 64
  config.data.target_tokens = 'characters'
  config.data.output_length = 12
  config.data.decode_batch_size = 500
  config.model.layer = 'GRU'
  config.model.features = 64
  config.model.embed_features = 32
  config.model.attention_features = 32
  config.model.is_bidirectional = True
  config.optimizer.learning_rate = 4e-3
  config.optimizer.schedule = 'cosine'
  return config
