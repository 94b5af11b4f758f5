"""The UEA and UCR archives of time series, read by the library aeon.

aeon brings some data sets, JapaneseVowels and BasicMotions among them, and
downloads the others. It needs numba; where that cannot be installed, arrays
that were converted elsewhere serve:

    from rnnzoo.tasks.series import uea
    uea.convert('EigenWorms', 'data')

writes data/EigenWorms/train.npz and test.npz, which `read` finds in the
directory 'data', and which the task 'sequences' can read too.

References:
  Bagnall et al., The UEA multivariate time series classification archive, 2018.
  Middlehurst et al., aeon: a Python toolkit for learning from time series,
  2024.
"""

import os
import pathlib

import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays

SPLITS = ('train', 'test')


def read(
    name: str, directory: str | os.PathLike[str] = ''
) -> dict[str, sequence_arrays.Sequences]:
  """Returns the archive's 'train' and 'test', with labels as text.

  Args:
    name: of the data set, as 'JapaneseVowels'.
    directory: where converted arrays are, or aeon's .ts files are or are to be
      downloaded to, in a folder of that name; '' for aeon's own.

  Raises:
    ModuleNotFoundError: aeon is needed, and is not installed.
    ConnectionError: the data could not be downloaded.
    ValueError: there is no such data set, or a file is damaged.
  """
  path = fields.expand(directory, 'config.data.manual_dir')
  form = npz.Form('classification', missing='zero')
  if directory and (path / name / 'train.npz').is_file():
    return {
        split: npz.read(path / name / f'{split}.npz', form) for split in SPLITS
    }
  found = {}
  for split in SPLITS:
    cases, labels = _load(name, split, str(path) if directory else None)
    if not len(cases):
      raise ValueError(f'{name} cannot be read: its {split} file has no series')
    # aeon has time last.
    x, lengths = sequence_arrays.pad([np.asarray(case).T for case in cases])
    arrays = {'x': x, 'lengths': lengths, 'y': np.asarray(labels, str)}
    found[split] = npz.parse(arrays, form, f'{name} {split}')
  return found


def convert(name: str, directory: str | os.PathLike[str]) -> None:
  """Writes a data set's train.npz and test.npz, for use without aeon.

  Args:
    name: of the data set.
    directory: gets a folder of that name.

  Raises:
    ModuleNotFoundError: aeon is not installed.
    ConnectionError: the data could not be downloaded.
    ValueError: there is no such data set.
  """
  path = pathlib.Path(directory) / name
  splits = read(name)
  path.mkdir(parents=True, exist_ok=True)
  for split, part in splits.items():
    np.savez_compressed(path / f'{split}.npz', **part._asdict())


def _load(name: str, split: str, directory: str | None):
  """Returns (cases, each [F, time], labels) by aeon."""
  try:
    from aeon import datasets  # Slow to import, and an extra.
  except ImportError as error:  # Also numba's, for a numpy that it refuses.
    raise ModuleNotFoundError(
        f"{name} is read by aeon: pip install 'rnnzoo[timeseries]', or name a"
        ' directory of converted arrays in config.data.manual_dir'
        f' (rnnzoo/tasks/series/uea.py); {error}'
    ) from error
  try:
    return datasets.load_classification(
        name, split=split, extract_path=directory
    )
  except Exception as error:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if 'not in the list of valid' in text:
      raise ValueError(
          f'{name!r} is no data set of the UEA and UCR archives that aeon knows'
      ) from error
    file = pathlib.Path(directory or '', name, f'{name}_{split.upper()}.ts')
    if directory and file.is_file():
      raise ValueError(f'{file} cannot be read by aeon: {text}') from error
    if isinstance(error, OSError) or 'download' in text:
      raise ConnectionError(
          f'{name} does not come with aeon and could not be downloaded; where'
          ' there is a network, rnnzoo.tasks.series.uea.convert writes arrays'
          ' for'
          f' config.data.manual_dir ({text})'
      ) from error
    raise ValueError(f'{name} cannot be read by aeon: {text}') from error
