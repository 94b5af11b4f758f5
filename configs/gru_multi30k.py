"""GRU encoder-decoder without attention on Multi30k, German to English.

Decoder input [embedding; context], h_0 = context, logits of [embedding; h;
context]; words seen twice, embedding 256, hidden 512, dropout .5, weights from
N(0, .01^2), teacher forcing .5, batch 128, Adam, gradients clipped to a norm of
1, ten epochs. After Cho et al., 2014. Multi30k: Elliott et al., 2016, test of
2016.

Published: perplexity 34.662, or 37.460 with BLEU 20.61
(bentrevett/pytorch-seq2seq, notebook 2, an old and the current version).
Measured: perplexity 10.5, BLEU 24.1 (1 seed, H200, commit cde32d8).

  python train.py --config=configs/gru_multi30k.py
"""

import ml_collections

from configs import base_translation


def get_config() -> ml_collections.ConfigDict:
  config = base_translation.get_config()
  config.num_epochs = 10
  data = config.data
  data.source = 'files'
  data.train_source = 'multi30k/train.de.gz'
  data.train_target = 'multi30k/train.en.gz'
  data.validation_source = 'multi30k/val.de.gz'
  data.validation_target = 'multi30k/val.en.gz'
  data.test_source = 'multi30k/test_2016_flickr.de.gz'
  data.test_target = 'multi30k/test_2016_flickr.en.gz'
  data.min_count = 2
  data.num_buckets = 4
  data.num_beams = 5
  data.length_penalty = 1.0
  model = config.model
  model.layer = 'GRU'
  model.features = 512
  model.embed_features = 256
  model.dropout_rate = 0.5
  model.init_std = 0.01
  model.teacher_forcing = 0.5
  return config
