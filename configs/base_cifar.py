"""Fields of all configs of sequential CIFAR-10; each changes a few lines.

The recipe is that of configs/base_smnist.py with a tenth of the training data
for validation and pixels of mean 0 and deviation 1.

`configs/base.py` explains all fields but those of `config.data`.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'cifar'
  config.optimizer.weight_decay = 1e-4
  config.optimizer.plateau_factor = 0.5
  config.early_stopping.patience = 10

  data = config.data
  data.unlock()
  # 'cifar10'; 'digits' for scikit-learn's 1,797 grey images of 8 x 8; 'auto'
  # for CIFAR-10 if it is there, else for digits.
  data.source = 'auto'
  # The batch size for digits, if that is less than batch_size.
  data.digits_batch_size = 32
  # Directory of cifar-10-binary.tar.gz.
  data.manual_dir = ''
  # How an image is read: 'row', 'pixel', 'permuted' (pixels in a fixed random
  # order) or 'noise_padded' (rows, then noise).
  data.sequence = 'pixel'
  # Steps of 'noise_padded', rows and noise together.
  data.num_steps = 1000
  # Of the noise in validation and test, the same for all seeds; training draws
  # another one in each step.
  data.noise_seed = 0
  # Pixels from 0 to 1: 'minmax' leaves them so, 'standard' takes each channel's
  # mean away and divides by its deviation, 'symmetric' is 2 (x - .5).
  data.scaling = 'standard'
  # Chooses the order for 'permuted':
  # np.random.RandomState(permutation_seed).permutation(number of pixels).
  data.permutation_seed = 0
  # The part of the training data that validates.
  data.validation_fraction = 0.1
  # Chooses that part, with np.random.RandomState; the same for all seeds.
  data.split_seed = 0
  data.lock()
  return config
