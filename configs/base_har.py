"""Fields of all configs of human activity recognition.

`configs/base.py` explains all fields but those of `config.data`.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'har'
  config.batch_size = 64
  config.num_epochs = 100
  config.optimizer.plateau_factor = 0.5
  config.early_stopping.patience = 20

  data = config.data
  data.unlock()
  # The directory that holds the folder 'UCI HAR Dataset'.
  data.manual_dir = ''
  # Whether each column is shifted and scaled to mean 0 and deviation 1 over the
  # training steps.
  data.standardize = True
  # The part of the training people that validate.
  data.validation_fraction = 0.15
  # Chooses that part, with np.random.RandomState; the same for all seeds.
  data.split_seed = 0
  data.lock()
  return config
