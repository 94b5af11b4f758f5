"""LSTM on the word problem of A5, with noise on the tokens of training.

Source: that of configs/lstm_a5.py. Noise asks for a state that corrects itself,
so that it holds for strings longer than those of training.

Published: none.
Measured: 0.9996 +- 0.0008 at length 1,024 (5 seeds, the least 0.998, H100,
commit 914fc5e). With 256 features it was 0.9352, and in float32 without noise
in validation 0.9436, ended by the clock after 629 of 800 epochs (commit
b606ed3). The training accuracy tells the seeds that hold: with noise on the
tokens they have all strings right.

  python train.py --config=configs/lstm_a5_noise.py
"""

import ml_collections

from configs import lstm_a5


def get_config() -> ml_collections.ConfigDict:
  config = lstm_a5.get_config()
  config.data.input_noise = 0.01
  config.data.clean_epochs = 100
  config.data.validation_noise = 0.02
  config.num_epochs = 400
  config.num_seeds = 5
  config.seeds_at_once = 5
  config.model.features = 512
  config.model.dtype = 'bfloat16'
  config.optimizer.learning_rate = 1e-3
  config.optimizer.schedule = 'cosine'
  # With a carry of zeros the identity as the first token leaves it at zero:
  # some seeds fail on strings that begin with it.
  config.model.options.LSTM.learn_initial_carry = True
  return config
