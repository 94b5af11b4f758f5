"""LSTM on pixel-wise MNIST: 784 steps of one pixel.

Source: the public study agru_benchmark, which ran all of 300 epochs.

Published: 0.9739 (1 run); Chang et al., 2019, have 0.973.
Measured: 0.3597 (1 seed, NVIDIA H200, commit 8e118ca), of the best epoch, the
18th: it does not reproduce the study yet, see below. With the forget bias of 2
that the study has for rows, 0.4459 (1 seed, NVIDIA H200, commit 2e1d30a).

  python train.py --config=configs/lstm_pixel_smnist.py
"""

import ml_collections

from configs import lstm_smnist


def get_config() -> ml_collections.ConfigDict:
  config = lstm_smnist.get_config()
  config.data.sequence = 'pixel'
  # Long sequences are learned late: all epochs are run, as the study did.
  config.num_epochs = 300
  config.early_stopping.patience = 0
  # The study's config for pixels is not published. While pixels are dark, as
  # the first hundred are, c and h stay 0. With a forget bias of 2 and these
  # weights that state is unstable: backward through it the gradient grows by
  # about sigmoid(2) + 1 / 4 a step, to a norm of 7e12 for the bias and 5e3 for
  # the rest, and clipped to a norm of 1 nothing but the bias is left of it.
  # With 1 the loss falls to 1.70 in 18 epochs; in the next one gradients, of a
  # norm of 8,600 in the mean, undo that, and while the loss is back at 2.3 the
  # plateau rule halves the learning rate until nothing is learned any more.
  config.model.options.LSTM.forget_bias = 1.0
  return config
