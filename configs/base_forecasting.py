"""Fields of configs that forecast series, packaged ones or your own.

A file holds y [N, T], N series with NaN where a step is missing, and perhaps x
[N, T, F], known beforehand, and lengths [N].
rnnzoo/tasks/series/forecasting.py says all of it.

`configs/base.py` explains all fields but those of `config.data`.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'forecasting'
  config.batch_size = 32
  config.num_epochs = 40
  config.early_stopping.patience = 10

  data = config.data
  data.unlock()
  # 'files' for the file of data.path, or a series of the library aeon:
  # 'airline', 'lynx', 'shampoo_sales' or 'uschange'.
  data.source = 'airline'
  # An .npz file.
  data.path = ''
  # Steps that a model sees before the first that it forecasts.
  data.context = 36
  # Steps that it forecasts.
  data.horizon = 12
  # Steps of a season: 12 for months of a year; 1 for none.
  data.season = 12
  # The units of a window: 'mean' for the mean of |y| in its context, 'standard'
  # for mean and standard deviation.
  data.scaling = 'mean'
  # 'point', 'quantiles', 'gaussian' or 'student'.
  data.head = 'gaussian'
  # 'autoregressive', which draws paths step by step, or 'seq2seq', whose second
  # layers answer all of the horizon.
  data.decoder = 'autoregressive'
  # Paths that an autoregressive model draws for a forecast.
  data.num_paths = 100
  # Batches of random windows that count as an epoch.
  data.steps_per_epoch = 50
  # Horizons at the end of each series that test.
  data.num_test_windows = 1
  # Horizons before those that validate.
  data.num_validation_windows = 1
  data.lock()
  return config
