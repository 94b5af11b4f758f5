"""Fields of all configs of state tracking; each changes a few lines.

`configs/base.py` explains all fields but those of `config.data`. In
`rnnzoo/tasks/synthetic/`, state_tracking.py explains the task and languages.py
the languages. Any config runs on any language, as by
--config.data.language=even_pairs, but those of parity have another optimiser.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'state_tracking'
  config.num_epochs = 100
  # Test sequences are long.
  config.eval_batch_size = 250
  config.model.features = 64
  # Weight decay decides whether what is learnt on short strings holds for long
  # ones: without it GRU and LSTM count steps on a cycle up to 40 at most.
  config.optimizer.name = 'adamw'
  config.optimizer.learning_rate = 3e-3
  config.optimizer.weight_decay = 0.1

  data = config.data
  data.unlock()
  # 'parity', 'modular_counting', 'cycle_navigation', 'even_pairs',
  # 'modular_arithmetic', or a word problem: 'S3', 'A5' or 'S5'.
  data.language = 'parity'
  # Steps whose labels are trained: the 'last' of a string, or 'every' one.
  data.label_steps = 'last'
  # Deviation of the noise that training adds to the vectors of tokens.
  data.input_noise = 0.0
  # Epochs without that noise, before it.
  data.clean_epochs = 0
  # The same deviation in validation, by which the best epoch is chosen.
  data.validation_noise = 0.0
  # The least length of training and validation.
  data.min_length = 1
  # The greatest length of training and validation.
  data.max_length = 40
  # The lengths of the tests; the last one is the split 'test'.
  data.test_lengths = (40, 128, 256, 512, 1024, 2048)
  # Training steps of an epoch, each with a batch of new strings.
  data.steps_per_epoch = 100
  # Strings of validation.
  data.num_validation = 1000
  # Strings of each test length.
  data.num_test = 500
  # Of validation and tests, which are the same for all seeds.
  data.seed = 0
  data.lock()
  return config
