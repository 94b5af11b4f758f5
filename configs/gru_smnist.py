"""GRU on row-wise MNIST: 28 steps of 28 pixels.

Source: the public study agru_benchmark, whose baselines have Xavier weights;
see configs/base_smnist.py.

Published: 0.9897 +- 0.0006 (5 runs).
Measured: 0.9896 +- 0.0004 (5 seeds, NVIDIA H200, commit 33ad0a6).
With pixels from 0 to 1, and a plateau rule without a floor or a least
improvement, it was 0.9886 +- 0.0007 (3 seeds, commit b28890b).

  python train.py --config=configs/gru_smnist.py
"""

import ml_collections

from configs import base_smnist


def get_config() -> ml_collections.ConfigDict:
  config = base_smnist.get_config()
  config.model.layer = 'GRU'
  config.model.options.GRU = {
      # Initialiser of W.
      'kernel_init': 'xavier_uniform',
      # Initialiser of R.
      'recurrent_kernel_init': 'xavier_uniform',
  }
  # Inputs of mean 0.
  config.data.scaling = 'standard'
  # The study's rule.
  config.optimizer.plateau_floor = 1e-5
  config.optimizer.plateau_min_delta = 1e-4
  return config
