"""GRU encoder-decoder with attention on Multi30k, German to English.

As configs/gru_multi30k.py, but the encoder runs in both directions, and the
decoder looks at all of its outputs: Bahdanau et al., 2015.

Published: perplexity 25.572, packed and masked 23.179 with BLEU 28.11
(bentrevett/pytorch-seq2seq, notebooks 3 and 4).
Measured: perplexity 7.9, BLEU 33.5 (1 seed, H200, commit cde32d8).

  python train.py --config=configs/attention_multi30k.py
"""

import ml_collections

from configs import gru_multi30k


def get_config() -> ml_collections.ConfigDict:
  config = gru_multi30k.get_config()
  config.model.is_bidirectional = True
  config.model.attention_features = 512
  return config
