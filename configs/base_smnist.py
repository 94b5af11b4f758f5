"""Fields of all sequential MNIST configs; each changes a few lines.

The numbers are the recipe of agru_benchmark (its LSTM, GRU and A-GRU): Adam at
1e-3, L2 weight decay 1e-4, batch 128, gradients clipped to a norm of 1, the
learning rate halved on a plateau of 5 epochs but not below 1e-5, a least
improvement of 1e-4 there, early stopping after 10, at most 50 epochs, 85 / 15
split, one layer of 128.

`configs/base.py` explains all fields but those of `config.data`.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'smnist'
  config.optimizer.weight_decay = 1e-4
  config.optimizer.plateau_factor = 0.5
  config.optimizer.plateau_floor = 1e-5
  config.optimizer.plateau_min_delta = 1e-4
  config.early_stopping.patience = 10

  data = config.data
  data.unlock()
  # 'mnist'; 'digits' for scikit-learn's 1,797 images of 8 x 8; 'auto' for MNIST
  # if it can be had, else for digits.
  data.source = 'auto'
  # The batch size for digits, if that is less than batch_size: an epoch of so
  # few images would have too few steps.
  data.digits_batch_size = 32
  # Directory of MNIST's four .gz files; '' to download them.
  data.manual_dir = ''
  # Where downloaded files are kept; '' for ~/.cache/rnnzoo/mnist.
  data.data_dir = ''
  # Pixels from 0 to 1: 'minmax' leaves them so, 'standard' takes the training
  # set's mean away and divides by its deviation, 'symmetric' is 2 (x - .5).
  data.scaling = 'minmax'
  # How an image is read: 'row', 'pixel', 'permuted' (pixels in a fixed random
  # order) or 'bit_reversed' (pixels in the order that S4 and S5 call permuted).
  data.sequence = 'row'
  # Chooses the order for 'permuted':
  # np.random.RandomState(permutation_seed).permutation(number of pixels).
  data.permutation_seed = 0
  # The part of the training data that validates.
  data.validation_fraction = 0.15
  # Chooses that part, with np.random.RandomState; the same for all seeds.
  data.split_seed = 0
  data.lock()
  return config
