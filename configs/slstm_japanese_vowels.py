"""sLSTM on JapaneseVowels: 12 columns, 7 to 29 steps, nine speakers.

Two layers; the recipe is that of configs/base_time_series.py.

Published: nothing with this recipe.
Measured: 0.9849 +- 0.0022 (5 seeds, CPU, commit 013f410).

  python train.py --config=configs/slstm_japanese_vowels.py
"""

import ml_collections

from configs import base_time_series


def get_config() -> ml_collections.ConfigDict:
  config = base_time_series.get_config()
  config.model.layer = 'SLSTM'
  config.model.options.SLSTM = {
      # Diagonal blocks of R, as in xLSTM.
      'num_heads': 4,
  }
  return config
