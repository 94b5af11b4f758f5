"""LSTM on JapaneseVowels: 12 columns, 7 to 29 steps, nine speakers.

Two layers; the recipe is that of configs/base_time_series.py.

Published: nothing with this recipe.
Measured: 0.9746 +- 0.0061 (5 seeds, CPU, commit 013f410).

  python train.py --config=configs/lstm_japanese_vowels.py
"""

import ml_collections

from configs import base_time_series


def get_config() -> ml_collections.ConfigDict:
  config = base_time_series.get_config()
  config.model.layer = 'LSTM'
  return config
