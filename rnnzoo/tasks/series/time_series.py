"""Classification or regression of time series: the UEA and UCR archives.

JapaneseVowels (nine speakers, 12 columns, 7 to 29 steps) is the default:
sequences end at different steps, so it shows lengths and masks. BasicMotions
(four motions, 6 columns, 100 steps) is the second that needs no network; of
regressions, Covid3Month and CardanoSentiment need none. The library aeon brings
these, and downloads all else. It needs numba; where that cannot be installed,
arrays that were converted elsewhere serve:

    from rnnzoo.tasks.series import time_series
    time_series.convert('EigenWorms', 'data')

writes data/EigenWorms/train.npz and test.npz, which `read` finds in the
directory 'data', and which the task 'sequences' can read too.

References:
  Bagnall et al., The UEA multivariate time series classification archive, 2018.
  Middlehurst et al., aeon: a Python toolkit for learning from time series,
  2024.
"""

import os
import pathlib

import ml_collections
import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_checks
from rnnzoo.tasks.series import sequence_task
from rnnzoo.tasks.series import sequences

SPLITS = ('train', 'test')

_RULES: fields.Rules = {
    **sequence_task.RULES,
    'name': fields.text(),
    'manual_dir': fields.text(),
    'kind': fields.one_of(('classification', 'regression')),
    'split': fields.one_of(('archive', 'pooled')),
    'test_fraction': fields.number(0, 1, above=True, below=True),
}


class TimeSeries(sequence_task.SequenceTask):
  """A data set of the archives; a class or a number a sequence."""

  rules = _RULES

  def __init__(self, config: ml_collections.ConfigDict):
    """Reads the data of a config as in `configs/base_time_series.py`.

    Raises:
      ModuleNotFoundError: the extra 'timeseries' is not installed.
    """
    self._set_up(config)
    data = config.data
    if data.split == 'archive':
      fields.check_unread(data, {'test_fraction': 0.15}, 'split')
    parts = read(data.name, data.manual_dir, data.kind)
    if data.split == 'pooled':
      parts = {'train': sequence_arrays.concatenate(parts.values(), False)}
    super().__init__(config, data.name, *sequences.divided(parts, data))


def read(
    name: str,
    directory: str | os.PathLike[str] = '',
    kind: str = 'classification',
) -> dict[str, sequence_arrays.Sequences]:
  """Returns the archive's 'train' and 'test', with labels as text.

  Args:
    name: the data set's name, as 'JapaneseVowels'.
    directory: holds a folder of that name, with converted arrays or aeon's .ts
      files; aeon downloads to such a folder where there is none. '' for aeon's
      own.
    kind: 'classification', or 'regression' for numbers in place of labels.

  Raises:
    ModuleNotFoundError: aeon is needed, and is not installed.
  """
  form = npz.Form(kind, missing='zero')
  place, files = None, []
  if directory:
    place = fields.expand_directory(directory, 'config.data.manual_dir')
    files = [place / name / f'{split}.npz' for split in SPLITS]
  if any(file.is_file() for file in files):
    parts = {str(file): npz.read(file, form) for file in files}
  else:
    parts = {f'{name} {s}': _load(name, s, place, form) for s in SPLITS}
  first, other = parts.items()
  sequence_checks.check_fit(*other, *first)
  return dict(zip(SPLITS, parts.values(), strict=True))


def convert(name: str, directory: str | os.PathLike[str]) -> None:
  """Writes a data set's train.npz and test.npz to a folder of its name.

  It raises what `read` does.
  """
  path = pathlib.Path(directory) / name
  splits = read(name)
  path.mkdir(parents=True, exist_ok=True)
  for split, part in splits.items():
    np.savez_compressed(path / f'{split}.npz', **part._asdict())


def _load(
    name: str, split: str, place: pathlib.Path | None, form: npz.Form
) -> sequence_arrays.Sequences:
  """Returns a split by aeon, of files in a place; None is aeon's own."""
  try:
    from aeon import datasets  # Slow to import, and an extra.
  except ImportError as error:  # Also numba's, for a numpy that it refuses.
    raise ModuleNotFoundError(
        f"{name} is read by aeon: pip install 'rnnzoo[timeseries]', or name a"
        ' directory of converted arrays in config.data.manual_dir'
        f' (rnnzoo/tasks/series/time_series.py); {error}'
    ) from error
  try:
    cases, labels = getattr(datasets, f'load_{form.kind}')(
        name, split=split, extract_path=place and str(place)
    )
    x, lengths = sequence_arrays.pad([np.asarray(case).T for case in cases])
  except MemoryError:
    raise
  except Exception as error:  # aeon raises many kinds.
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise ValueError(
        f'{name} {split} cannot be read: {text}; config.data.name must be a set'
        ' of the UEA and UCR archives (of numbers to predict with'
        " config.data.kind='regression'), and where there is no network,"
        ' rnnzoo.tasks.series.time_series.convert writes arrays for'
        ' config.data.manual_dir'
    ) from error
  y = np.asarray(labels)
  if form.kind == 'classification':
    y = y.astype(str)
  arrays = {'x': x, 'lengths': lengths, 'y': y}
  return npz.parse(arrays, form, f'{name} {split}')
