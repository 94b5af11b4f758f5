"""Fields of all Lorenz configs; each changes a few lines.

`configs/base.py` explains all fields but those of `config.data`.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'lorenz'
  config.batch_size = 64
  config.num_epochs = 50
  config.optimizer.learning_rate = 3e-3
  config.optimizer.schedule = 'cosine'

  data = config.data
  data.unlock()
  # Trajectories to train on.
  data.num_train = 1024
  # Trajectories that validate.
  data.num_validation = 128
  # Trajectories that test.
  data.num_test = 256
  # Steps of each.
  data.length = 128
  # Units of time from one step to the next.
  data.interval = 0.05
  # How many steps ahead the forecast is; 1 for the next step.
  data.horizon = 5
  # Deviation of noise that is added to inputs, not to answers.
  data.noise = 0.0
  # Whether inputs and answers are shifted and scaled to mean 0 and deviation 1.
  # The metrics are in units of the system anyway.
  data.standardize = True
  # Chooses where trajectories start, with np.random.RandomState.
  data.data_seed = 0
  data.lock()
  return config
