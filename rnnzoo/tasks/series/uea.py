"""The UEA and UCR archives of time series, read by the library aeon.

aeon brings some data sets, JapaneseVowels and BasicMotions among them, and
downloads all else. It needs numba; where that cannot be installed, arrays that
were converted elsewhere serve:

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
from rnnzoo.tasks.series import sequence_checks

SPLITS = ('train', 'test')


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
    ConnectionError: the data could not be downloaded.
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
        f' (rnnzoo/tasks/series/uea.py); {error}'
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
    if 'not in the list of valid' in text:
      hint = _did_you_mean(name)
      raise ValueError(
          f'{name!r} is no data set of the UEA and UCR archives that aeon'
          f' knows{hint and f"; {hint}"}'
      ) from error
    if 'download' in text:
      raise ConnectionError(
          f'{name} is not in {place or "aeon"}, and the download failed; where'
          ' there is a network, rnnzoo.tasks.series.uea.convert writes arrays'
          f' for config.data.manual_dir ({text})'
      ) from error
    raise ValueError(f'{name} {split} cannot be read: {text}') from error
  y = np.asarray(labels)
  if form.kind == 'classification':
    y = y.astype(str)
  arrays = {'x': x, 'lengths': lengths, 'y': y}
  return npz.parse(arrays, form, f'{name} {split}')


def _did_you_mean(name: str) -> str:
  """Returns a hint at a data set of nearly that name, '' if there is none."""
  from aeon.datasets import tsc_datasets  # Slow to import, and an extra.

  known = [*tsc_datasets.multivariate, *tsc_datasets.univariate]
  return fields.did_you_mean(name, known)
