"""Fields of configs for your own sequences, in .npz files.

A file holds x [N, T, F] and y [N], and lengths [N] if sequences end at
different steps: numpy.savez('mine.npz', x=x, y=y, lengths=lengths).
rnnzoo/tasks/series/npz.py says all of it, sequences.py beside it how a folder
of files is read.

Columns, classes, lengths and missing values are checked and told before
training, and kept in report.json.

`configs/base.py` explains all fields but those of `config.data`.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.task = 'sequences'
  config.batch_size = 32
  config.num_epochs = 100
  config.optimizer.plateau_factor = 0.5
  config.early_stopping.patience = 20

  data = config.data
  data.unlock()
  # 'files' for those of data.path, or 'tfds:<name>' for a set of TFDS whose
  # examples are images or numbers with a class, as 'tfds:fashion_mnist'.
  data.source = 'files'
  # Where TFDS keeps its sets; '' for its default.
  data.data_dir = ''
  # Images of TFDS as sequences: of a 'row' or a 'pixel' a step.
  data.sequence = 'row'
  # An .npz file, or a folder of them.
  data.path = ''
  # 'classification', whose y holds integers, booleans or strings, or
  # 'regression', whose y holds numbers.
  data.kind = 'classification'
  # Whether y has an answer for every step. A step without one has the label
  # -100, or NaN.
  data.every_step = False
  # Whether each column is shifted and scaled to mean 0 and deviation 1 over the
  # valid training steps, and for 'regression' each number of y likewise.
  # Metrics are in the units of y anyway.
  data.standardize = True
  # NaN in x: 'refuse', or 'zero', by which it becomes 0 after standardisation.
  data.missing = 'refuse'
  # The part of the training data that validates, where no file does.
  data.validation_fraction = 0.15
  # The part that tests, where no file does.
  data.test_fraction = 0.15
  # Chooses these parts, with np.random.RandomState; the same for all seeds.
  data.split_seed = 0
  data.lock()
  return config
