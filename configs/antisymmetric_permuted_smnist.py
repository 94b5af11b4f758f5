"""AntisymmetricRNN, gated, on permuted MNIST: 784 pixels in one random order.

Source: Chang et al., 2019, AntisymmetricRNN, table 1; see
configs/antisymmetric_pixel_smnist.py.

Published: 0.931 gated, 0.958 plain, with another permutation.
Measured: not yet. Plain, with inputs of mean 0 and a cosine schedule of 80
epochs from 2e-3, it was 0.8416 (1 seed, NVIDIA H200, commit 33ad0a6), and 0.846
on the training set.

  python train.py --config=configs/antisymmetric_permuted_smnist.py
"""

import ml_collections

from configs import antisymmetric_pixel_smnist


def get_config() -> ml_collections.ConfigDict:
  config = antisymmetric_pixel_smnist.get_config()
  config.data.sequence = 'permuted'
  return config
