"""Fields of all configs of the adding problem; each changes a few lines.

`configs/base.py` explains all fields but those of `config.data`, and
`rnnzoo/tasks/synthetic/adding.py` the task.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'adding'
  config.num_epochs = 100

  data = config.data
  data.unlock()
  # Steps of a sequence.
  data.length = 1000
  # Training steps of an epoch, each with a batch of new sequences.
  data.steps_per_epoch = 200
  # Sequences of validation.
  data.num_validation = 1000
  # Sequences of the test.
  data.num_test = 1000
  # Of validation and test, which are the same for all seeds.
  data.seed = 0
  data.lock()
  return config
