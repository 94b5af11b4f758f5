"""AWD-LSTM on the words of a text: which one comes next?

Source: Merity, Keskar and Socher, 2018, "Regularizing and optimizing LSTM
language models"; see configs/base_text_stream.py. Pass a folder with the files
of PTB or WikiText-2 as --config.data.path. For PTB the publication has batches
of 20, 500 epochs, and dropout rates of .4 (input) and .25 (between layers).

Published: test perplexity 65.8 on WikiText-2, 57.3 on PTB.
Measured: nothing on these two. On the English lines of Multi30k, 70 epochs:
test perplexity 32.2 (1 seed, H200, commit 5266d1d).

  python train.py --config=configs/lstm_words.py
"""

import ml_collections

from configs import base_text_stream


def get_config() -> ml_collections.ConfigDict:
  config = base_text_stream.get_config()
  config.model.layer = 'LSTM'
  return config
