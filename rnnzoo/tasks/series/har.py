"""Human activity recognition: six activities, from a phone at the waist.

UCI HAR has windows of 128 steps (2.56 s at 50 Hz) of nine signals, of 30
people; nobody is in both the test and the training set. People are split off
for validation, too, since windows of one person are alike.

The archive is read as it is unpacked:

    UCI HAR Dataset/
      activity_labels.txt                     "1 WALKING"
      train/y_train.txt                       an activity a line, from 1 to 6
      train/subject_train.txt                 a person a line
      train/Inertial Signals/body_acc_x_train.txt     a window of 128 a line
      test/...                                as in train

If it is not there, BasicMotions of the UEA archive stands in for it: four
motions, from a watch.

References:
  Anguita, Ghio, Oneto, Parra, Reyes-Ortiz, A public domain dataset for human
  activity recognition using smartphones, ESANN 2013.
"""

import pathlib
from typing import Literal
import warnings

import ml_collections
import numpy as np

from rnnzoo import settings
from rnnzoo.tasks import fields
from rnnzoo.tasks.series import answers
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_task
from rnnzoo.tasks.series import sequences
from rnnzoo.tasks.series import uea
from rnnzoo.tasks.text import files as text_files

_FOLDER = 'UCI HAR Dataset'
_STAND_IN = 'BasicMotions'
# The files of signals, in the order of the columns of x.
SIGNALS = tuple(
    f'{signal}_{axis}'
    for signal in ('body_acc', 'body_gyro', 'total_acc')
    for axis in 'xyz'
)

_RULES: fields.Rules = {
    **sequence_task.RULES,
    'manual_dir': fields.text(),
}


class HumanActivity(sequence_task.SequenceTask):
  """An activity a window."""

  rules = _RULES

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the data of a config as in `configs/base_har.py`.

    Raises:
      ValueError: a field or a file holds something that cannot be.
      FileNotFoundError: `data.manual_dir` lacks a file.
      ModuleNotFoundError: there is no directory, and the extra 'timeseries',
        which has the data that stand in, is not installed.
    """
    self._set_up(config)
    data = config.data
    if data.manual_dir:
      name = 'UCI HAR'
      splits, kind = _human_activity(data)
    else:
      name = f'{_STAND_IN} in place of UCI HAR'
      print(
          f'WARNING: this run trains on {name}; pass the directory that holds'
          f' the folder {_FOLDER!r} as --config.data.manual_dir.',
          flush=True,
      )
      splits, kind = sequences.encode(uea.read(_STAND_IN), every_step=False)
      splits = sequence_arrays.complete_splits(
          splits,
          {'validation': data.validation_fraction},
          data.split_seed,
          stratify=True,
      )
    super().__init__(config, name, splits, kind)


def read(
    directory: pathlib.Path, split: str
) -> tuple[sequence_arrays.Sequences, np.ndarray]:
  """Returns (windows with activities from 1, people [N]) of 'train' or 'test'.

  The directory is the folder 'UCI HAR Dataset', or one that holds it.
  """
  folder = _root(directory) / split
  columns: list[np.ndarray] = []
  for signal in SIGNALS:
    path = folder / 'Inertial Signals' / f'{signal}_{split}.txt'
    columns.append(_numbers(path, np.float64, 2))
    if columns[-1].shape != columns[0].shape:
      raise ValueError(
          f'{path} has {list(columns[-1].shape)} numbers, but those of'
          f' {SIGNALS[0]} are {list(columns[0].shape)}'
      )
  windows = len(columns[0])
  each = []
  for name in ('y', 'subject'):
    path = folder / f'{name}_{split}.txt'
    each.append(_numbers(path, np.int32, 1))
    if each[-1].shape != (windows,):
      raise ValueError(
          f'{path} must have one number a line, and {windows} lines as the'
          f' signals have; it has {list(each[-1].shape)}'
      )
  labels, people = each
  arrays = {'x': np.stack(columns, axis=-1), 'y': labels}
  form = npz.Form('classification', missing='never')
  return npz.parse(arrays, form, str(folder)), people


def _root(directory: pathlib.Path) -> pathlib.Path:
  folder = directory / _FOLDER
  return folder if folder.is_dir() else directory


def _human_activity(data: ml_collections.ConfigDict):
  """Returns (the three splits, classes)."""
  directory = fields.expand_directory(data.manual_dir, 'config.data.manual_dir')
  train, people = read(directory, 'train')
  test, others = read(directory, 'test')
  if both := sorted(set(people.tolist()) & set(others.tolist())):
    settings.warn(
        f'{directory}: the people {both} are in train and in test, so the test'
        ' does not tell how well the model does on people that it never saw'
    )
  if train.x.shape[1] != test.x.shape[1]:
    raise ValueError(
        f'{directory}: windows have {test.x.shape[1]} numbers a line in test,'
        f' but {train.x.shape[1]} in train'
    )
  everyone = np.unique(people)
  if len(everyone) < 2:
    raise ValueError(
        f'{directory}: subject_train.txt names one person only, {everyone[0]};'
        ' people are split off for validation, so it needs two at least'
    )
  size = max(1, round(len(everyone) * data.validation_fraction))
  if size == len(everyone):
    # Two decimals, rounded down: it must leave somebody.
    most = 100 * (size - 1) // size / 100
    raise ValueError(
        f'config.data.validation_fraction={data.validation_fraction} leaves'
        f' nobody to train on, of the {size} people in {directory}, each of'
        f' whom trains or validates; at most {most} leaves one'
    )
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
  return splits, answers.Classes(_activities(directory, kind.names))


def _activities(directory: pathlib.Path, labels: tuple[str, ...]) -> list[str]:
  """Returns the names of activities, whose labels are such as '1'."""
  path = _root(directory) / 'activity_labels.txt'
  text = text_files.read(str(path), 'config.data.manual_dir')
  words = [line.split(None, 1) for line in text.splitlines()]
  pairs = [pair for pair in words if len(pair) == 2]
  names = {number: name.strip().lower() for number, name in pairs}
  if len(names) < len(pairs):
    raise ValueError(f'{path} gives several names to one activity: {pairs}')
  if unknown := [label for label in labels if label not in names]:
    raise ValueError(
        f'{path} has no name for the activity {unknown[0]}; a line must be a'
        " number and a name, as '1 WALKING'"
    )
  found = [names[label] for label in labels]
  if len(set(found)) < len(found):
    raise ValueError(f'{path} gives one name to several activities: {found}')
  return found


def _numbers(
    path: pathlib.Path, dtype: type, axes: Literal[1, 2]
) -> np.ndarray:
  """Returns the numbers of a text file, one row a line, with 1 or 2 axes."""
  if not path.is_file():
    raise FileNotFoundError(
        f'{path} is missing; config.data.manual_dir must hold the folder'
        f' {_FOLDER!r} as it is unpacked'
    )
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # An empty file is told below.
      found: np.ndarray = np.loadtxt(path, dtype=dtype, ndmin=axes)
  except ValueError as error:
    # numpy goes on about arguments of its own.
    reason = str(error).partition(';')[0]
    raise ValueError(f'{path} is no table of numbers: {reason}') from error
  if not found.size:
    raise ValueError(f'{path} is empty')
  with np.errstate(over='ignore'):
    single = found.astype(np.float32)
  if axes == 2 and not np.isfinite(single).all():
    row, place = np.argwhere(~np.isfinite(single))[0]
    raise ValueError(
        f'{path} must hold numbers that are finite in float32; number'
        f' {place + 1} of row {row + 1} is {single[row, place]}'
    )
  return found
