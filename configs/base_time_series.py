"""Fields of all configs of the UEA and UCR archives; each changes a few lines.

The extra 'timeseries' has the library that reads them:
pip install 'rnnzoo[timeseries]'. The recipe is our own: two layers with dropout
between them and smoothed labels were best on the validation split of
JapaneseVowels, of three recipes tried with three seeds.

`configs/base.py` explains all fields but those of `config.data`.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'time_series'
  config.batch_size = 32
  config.num_epochs = 60
  config.model.num_layers = 2
  config.model.dropout_rate = 0.3
  config.model.label_smoothing = 0.1

  data = config.data
  data.unlock()
  # The name of a data set in the archive.
  data.name = 'JapaneseVowels'
  # 'regression' for a set of numbers, such as Covid3Month.
  data.kind = 'classification'
  # Where converted arrays or .ts files are, in a folder of that name; aeon
  # downloads to there what is not. '' for aeon's own.
  data.manual_dir = ''
  # 'archive' for its own training and test sets, or 'pooled', by which both
  # together are split by chance, as several papers do.
  data.split = 'archive'
  # Whether each column is shifted and scaled to mean 0 and deviation 1 over the
  # valid training steps.
  data.standardize = True
  # The part of the training data (of all, for 'pooled') that validates. Each
  # class gives about the same share.
  data.validation_fraction = 0.15
  # The part of all that tests, for 'pooled'.
  data.test_fraction = 0.15
  # Chooses these parts, with np.random.RandomState; the same for all seeds.
  data.split_seed = 0
  data.lock()
  return config
