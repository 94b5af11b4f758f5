"""IndRNN on JapaneseVowels: 12 columns, 7 to 29 steps, nine speakers.

Two layers; the recipe is that of configs/base_time_series.py.

Published: nothing with this recipe.
Measured: 0.9714 +- 0.0076 (5 seeds, CPU, commit 013f410).

  python train.py --config=configs/indrnn_japanese_vowels.py
"""

import math

import ml_collections

from configs import base_time_series


def get_config() -> ml_collections.ConfigDict:
  config = base_time_series.get_config()
  config.model.layer = 'IndRNN'
  config.model.options.IndRNN = {
      # 2^(1/29): all steps together amplify by no more than 2.
      'max_abs': math.pow(2, 1 / 29),
  }
  return config
