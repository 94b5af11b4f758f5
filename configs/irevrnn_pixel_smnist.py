"""iRevRNN, six layers, on pixel-wise MNIST: 784 steps of one pixel.

Source: the example of the public project irevrnn: 6 layers of 128, 3 inner
steps, Adam at 2e-4, weight decay 1e-4, gradients clipped to a norm of 20,
dropout .1, pixels from -1 to 1, |w| <= 1.002.

Published: nothing.
Measured: not yet.

  python train.py --config=configs/irevrnn_pixel_smnist.py
"""

import ml_collections

from configs import irevrnn_smnist


def get_config() -> ml_collections.ConfigDict:
  config = irevrnn_smnist.get_config()
  config.data.sequence = 'pixel'
  config.data.scaling = 'symmetric'
  config.batch_size = 32
  # Long sequences are learned late.
  config.num_epochs = 300
  config.early_stopping.patience = 30
  config.model.num_layers = 6
  config.model.dropout_rate = 0.1
  config.model.share_dropout_over_time = True
  config.model.last_layer_options.IRevRNN = {
      # The last layer keeps memory to the end.
      'recurrent_range': (2 ** (-1 / 784), 2 ** (1 / 784)),
  }
  config.optimizer.learning_rate = 2e-4
  config.optimizer.clip_norm = 20.0
  return config
