"""minLSTM on the characters of a text: which one comes next?

Source: Feng et al., 2024; see configs/base_characters.py.
The published number is the loss in nats a character on tiny Shakespeare: pass
that text as --config.data.path.

Published: 1.555 nats.
Measured: 1.564 nats on tiny Shakespeare's last 5 % (1 seed, H200, commit
cde32d8).

  python train.py --config=configs/minlstm_characters.py
"""

import ml_collections

from configs import base_characters


def get_config() -> ml_collections.ConfigDict:
  config = base_characters.get_config()
  config.model.layer = 'MinLSTM'
  return config
