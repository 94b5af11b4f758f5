"""Files of made-up sequences, in the formats that tasks read."""

import pathlib

import numpy as np

from rnnzoo.tasks.series import har


def arrays(count: int = 24, length: int = 6) -> dict[str, np.ndarray]:
  """Returns ragged sequences of two columns; the class is one's sign."""
  rng = np.random.default_rng(0)
  y = np.arange(count) % 2
  x = rng.standard_normal((count, length, 2)).astype(np.float32)
  x[..., 1] = 3.0 + 2.0 * y[:, None]
  return {'x': x, 'y': y, 'lengths': 1 + np.arange(count) % length}


def write_npz(path: pathlib.Path, **more: np.ndarray) -> pathlib.Path:
  """Writes `arrays`, some of them replaced."""
  path.parent.mkdir(parents=True, exist_ok=True)
  np.savez(path, **{**arrays(), **more})
  return path


def write_archive(directory: pathlib.Path, name: str) -> None:
  """Writes what `time_series.convert` would, for a data set of that name."""
  for split in ('train', 'test'):
    write_npz(directory / name / f'{split}.npz')


def write_har(directory: pathlib.Path, windows: int = 8) -> pathlib.Path:
  """Writes the text files of UCI HAR, with windows of four steps.

  The windows of activity k hold k; each person has two of them, and those of
  the test are 101 and more.
  """
  root = directory / 'UCI HAR Dataset'
  rng = np.random.default_rng(0)
  for split in ('train', 'test'):
    folder = root / split / 'Inertial Signals'
    folder.mkdir(parents=True)
    labels = np.arange(windows) % 2 + 1
    people = np.arange(windows) // 2 + {'train': 1, 'test': 101}[split]
    np.savetxt(root / split / f'y_{split}.txt', labels, '%d')
    np.savetxt(root / split / f'subject_{split}.txt', people, '%d')
    for signal in har.SIGNALS:
      values = labels[:, None] + 0.01 * rng.standard_normal((windows, 4))
      np.savetxt(folder / f'{signal}_{split}.txt', values, ' %.7e')
  return directory
