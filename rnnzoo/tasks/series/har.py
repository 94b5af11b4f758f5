"""Human activity recognition: six activities, from a phone at the waist.

UCI HAR has windows of 128 steps (2.56 s at 50 Hz) of nine signals, of 30
people; nobody is in both the test and the training set. People are split off
for validation, too, since windows of one person are alike.

The archive is read as it is unpacked:

    UCI HAR Dataset/
      train/y_train.txt                       an activity a line, from 1 to 6
      train/subject_train.txt                 a person a line
      train/Inertial Signals/body_acc_x_train.txt     a window of 128 a line
      test/...                                as in train

References:
  Anguita, Ghio, Oneto, Parra, Reyes-Ortiz, A public domain dataset for human
  activity recognition using smartphones, ESANN 2013.
"""

import pathlib
from typing import Literal

import ml_collections
import numpy as np

from rnnzoo import settings
from rnnzoo.tasks import array_checks
from rnnzoo.tasks import fields
from rnnzoo.tasks.series import answers
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_task
from rnnzoo.tasks.series import sequences

_FOLDER = 'UCI HAR Dataset'
# The files of signals, in the order of the columns of x.
SIGNALS = tuple(
    f'{signal}_{axis}'
    for signal in ('body_acc', 'body_gyro', 'total_acc')
    for axis in 'xyz'
)

# Names of the activities, which the files number from 1.
ACTIVITIES = (
    *('walking', 'walking_upstairs', 'walking_downstairs'),
    *('sitting', 'standing', 'laying'),
)

_RULES: fields.Rules = {
    **sequence_task.RULES,
    'manual_dir': fields.text(),
}


class HumanActivity(sequence_task.SequenceTask):
  """An activity a window."""

  rules = _RULES

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the data of a config as in `configs/base_har.py`."""
    self._set_up(config)
    super().__init__(config, 'UCI HAR', *_read_all(config.data))


def read(
    directory: pathlib.Path, split: str
) -> tuple[sequence_arrays.Sequences, np.ndarray]:
  """Returns (windows with activities from 1, people [N]) of 'train' or 'test'.

  The directory is the folder 'UCI HAR Dataset', or one that holds it.
  """
  folder = _root(directory) / split
  if not folder.is_dir():
    raise FileNotFoundError(
        f'{folder} is missing; config.data.manual_dir must hold the folder'
        f' {_FOLDER!r} as it is unpacked'
    )
  columns = [
      _numbers(folder / f'Inertial Signals/{signal}_{split}.txt', float, 2)
      for signal in SIGNALS
  ]
  labels, people = (
      _numbers(folder / f'{name}_{split}.txt', int, 1)
      for name in ('y', 'subject')
  )
  sizes = {column.shape for column in columns}
  windows = {len(x) for x in (*columns, labels, people)}
  if len(sizes) > 1 or len(windows) > 1:
    raise ValueError(
        f'{folder} must have a line for each window in each file, of as many'
        f' numbers; its signals have {sorted(sizes)}, and there are'
        f' {len(labels)} activities and {len(people)} people'
    )
  most = len(ACTIVITIES)
  y = array_checks.integers(labels, f'{folder}: y', len(labels), most)
  arrays = {'x': np.stack(columns, axis=-1), 'y': y}
  form = npz.Form('classification', missing='never')
  return npz.parse(arrays, form, str(folder)), people


def _root(directory: pathlib.Path) -> pathlib.Path:
  folder = directory / _FOLDER
  return folder if folder.is_dir() else directory


def _read_all(data: ml_collections.ConfigDict):
  """Returns (the three splits, classes)."""
  directory = fields.expand_directory(data.manual_dir, 'config.data.manual_dir')
  train, people = read(directory, 'train')
  test, others = read(directory, 'test')
  if both := sorted(set(people.tolist()) & set(others.tolist())):
    settings.warn(
        f'{directory}: the people {both} are in train and in test, so the test'
        ' does not tell how well the model does on people that it never saw'
    )
  everyone = np.unique(people)
  size = max(1, round(len(everyone) * data.validation_fraction))
  _, chosen = sequence_arrays.split_off(
      np.zeros(len(everyone), np.int32), size, data.split_seed
  )
  validates = np.isin(people, everyone[chosen])
  splits, kind = sequences.encode(
      {
          'train': train.rows(~validates),
          'validation': train.rows(validates),
          'test': test,
      },
      every_step=False,
  )
  names = [ACTIVITIES[int(label) - 1] for label in kind.names]
  return splits, answers.Classes(names)


def _numbers(path: pathlib.Path, dtype: type, axes: Literal[1, 2]):
  """Returns the numbers of a text file, one row a line, with 1 or 2 axes."""
  try:
    return np.loadtxt(path, dtype=dtype, ndmin=axes)
  except ValueError as error:
    # numpy goes on about arguments of its own.
    reason = str(error).partition(';')[0]
    raise ValueError(f'{path} is no table of numbers: {reason}') from error
