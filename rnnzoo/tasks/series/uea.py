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

from collections.abc import Iterator
import contextlib
import os
import pathlib

import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_checks

SPLITS = ('train', 'test')
_ARRAYS = ('train.npz', 'test.npz')


def read(
    name: str,
    directory: str | os.PathLike[str] = '',
    kind: str = 'classification',
) -> dict[str, sequence_arrays.Sequences]:
  """Returns the archive's 'train' and 'test', with labels as text.

  Args:
    name: the data set's name, as 'JapaneseVowels'.
    directory: a folder of that name with converted arrays or aeon's .ts files,
      or one that holds it; aeon downloads to such a folder where there is none.
      '' for aeon's own.
    kind: 'classification', or 'regression' for numbers in place of labels.

  Raises:
    ModuleNotFoundError: aeon is needed, and is not installed.
    FileNotFoundError: one of train.npz and test.npz is there alone.
    ConnectionError: the data could not be downloaded.
    ValueError: there is no such data set, a file is damaged, `directory` is a
      file, or the two splits have different columns.
  """
  form = npz.Form(kind, missing='zero')
  folder = None
  if directory:
    path = fields.expand_directory(directory, 'config.data.manual_dir')
    folder = _find_folder(path, name)
  files = [folder / file for file in _ARRAYS] if folder else []
  there = [file.is_file() for file in files]
  parts = {}
  if folder and any(there):
    if not all(there):
      raise FileNotFoundError(f'{_missing(name, folder)}; both are needed')
    parts = {str(file): npz.read(file, form) for file in files}
  else:
    for split in SPLITS:
      cases, labels = _load(name, split, folder, kind)
      place = f'{name} {split}'
      if folder:
        file = folder / _text_file(name, split)
        place = str(file)
        if kind == 'classification':
          _check_labels(file, labels)
      arrays = _arrays(cases, labels, place)
      if kind == 'classification':
        arrays['y'] = arrays['y'].astype(str)
      parts[place] = npz.parse(arrays, form, place)
  (first_name, first), (other_name, other) = parts.items()
  sequence_checks.check_fit(
      other_name, other, first_name, first, every_step=False
  )
  return dict(zip(SPLITS, parts.values(), strict=True))


def _find_folder(path: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the folder of a data set: one in a directory, or the directory."""
  texts = [_text_file(name, split) for split in SPLITS]
  files = (*texts, *_ARRAYS) if path.name == name else texts
  is_here = any((path / file).is_file() for file in files)
  return path if is_here and not (path / name).is_dir() else path / name


def convert(name: str, directory: str | os.PathLike[str]) -> None:
  """Writes a data set's train.npz and test.npz, for use without aeon.

  Args:
    name: the data set's name.
    directory: the place for a folder of that name.

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


def _text_file(name: str, split: str) -> str:
  return f'{name}_{split.upper()}.ts'


def _check_labels(file: pathlib.Path, labels) -> None:
  """Raises ValueError for a label that the file's header does not list."""
  with file.open(encoding='utf-8', errors='replace') as lines:
    for line in lines:
      words = line.lower().split()
      if words[:1] == ['@data']:
        return
      if words[:2] == ['@classlabel', 'true'] and words[2:]:
        for i, label in enumerate(map(str, labels)):
          if label.lower() not in words[2:]:
            raise ValueError(
                f'{file}: series {i} has the label {label!r}, but the header'
                f' lists {", ".join(words[2:])}'
            )


def _missing(name: str, folder: pathlib.Path) -> str:
  """Returns a sentence on files that a data set's folder lacks, or ''."""
  if not folder.is_dir():
    return (
        f'{folder} {"is no directory" if folder.exists() else "is not there"}'
    )
  texts = tuple(_text_file(name, split) for split in SPLITS)
  for files in (_ARRAYS, texts):
    lacks = [file for file in files if not (folder / file).is_file()]
    if not lacks:
      return ''
    if len(lacks) < len(files):
      (found,) = set(files) - set(lacks)
      return f'{folder} holds {found} but no {lacks[0]}'
  return (
      f'{folder} holds neither {" and ".join(_ARRAYS)} nor'
      f' {" and ".join(texts)}'
  )


def _arrays(cases, labels, place: str) -> dict[str, np.ndarray]:
  """Returns the arrays of series by aeon, each [F, time]."""
  if not len(cases):
    raise ValueError(f'{place} cannot be read: it has no series')
  series = [np.asarray(case).T for case in cases]
  columns = [one.shape[1] for one in series]
  if len(set(columns)) > 1:
    odd = next(i for i, count in enumerate(columns) if count != columns[0])
    raise ValueError(
        f'{place}: series {odd} has {columns[odd]} columns, but {columns[0]} in'
        ' series 0'
    )
  try:
    x, lengths = sequence_arrays.pad(series)
  except ValueError as error:
    raise ValueError(f'{place}: {error}') from error
  return {'x': x, 'lengths': lengths, 'y': np.asarray(labels)}


def _load(name: str, split: str, folder: pathlib.Path | None, kind: str):
  """Returns (cases, each [F, time], labels) by aeon.

  The folder has the files or gets them by a download; None is aeon's own.
  """
  try:
    from aeon import datasets  # Slow to import, and an extra.
  except ImportError as error:  # Also numba's, for a numpy that it refuses.
    raise ModuleNotFoundError(
        f"{name} is read by aeon: pip install 'rnnzoo[timeseries]', or name a"
        ' directory of converted arrays in config.data.manual_dir'
        f' (rnnzoo/tasks/series/uea.py); {error}'
    ) from error
  missing = _missing(name, folder) if folder else ''  # aeon may make it.
  is_elsewhere = folder and folder.name != name
  if is_elsewhere and missing:
    raise FileNotFoundError(f'{missing}; both are needed')
  try:
    if folder and is_elsewhere:  # aeon asks for a folder of that name.
      return datasets.load_from_ts_file(str(folder / _text_file(name, split)))
    with _without_empty_folders(folder):
      return getattr(datasets, f'load_{kind}')(
          name, split=split, extract_path=str(folder.parent) if folder else None
      )
  except MemoryError:
    raise
  except Exception as error:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if 'not in the list of valid' in text:
      raise ValueError(
          f'{missing and f"{missing}, and "}{name!r} is no data set of the UEA'
          f' and UCR archives that aeon knows{_did_you_mean(name, folder)}'
      ) from error
    if folder and not missing:
      file = folder / _text_file(name, split)
      raise ValueError(f'{file} cannot be read by aeon: {text}') from error
    if isinstance(error, OSError) or 'download' in text:
      own = pathlib.Path(datasets.__file__).parent / 'data' / name
      hint = (
          'where there is a network, rnnzoo.tasks.series.uea.convert writes'
          ' arrays for config.data.manual_dir'
      )
      if folder and not _missing(name, own):
        hint = f"aeon has {name} itself, for config.data.manual_dir=''"
      reason = missing or f'{name} does not come with aeon'
      raise ConnectionError(
          f'{reason}, and the download failed; {hint} ({text})'
      ) from error
    raise ValueError(f'{name} cannot be read by aeon: {text}') from error


@contextlib.contextmanager
def _without_empty_folders(folder: pathlib.Path | None) -> Iterator[None]:
  """Removes the folders that aeon makes and then has nothing to put into."""
  made = []
  if folder:
    made = [part for part in (folder, *folder.parents) if not part.exists()]
  try:
    yield
  except BaseException:
    for part in made:
      with contextlib.suppress(OSError):  # It is not there, or not empty.
        part.rmdir()
    raise


def _did_you_mean(name: str, folder: pathlib.Path | None) -> str:
  """Returns a hint at a data set of nearly that name, '' if there is none."""
  from aeon.datasets import tsc_datasets  # Slow to import, and an extra.

  known = [*tsc_datasets.multivariate, *tsc_datasets.univariate]
  if folder and folder.parent.is_dir():
    known += [part.name for part in folder.parent.iterdir() if part.is_dir()]
  hint = fields.did_you_mean(name, known)
  return hint and f'; {hint}'
