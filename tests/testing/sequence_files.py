"""Files of made-up sequences, in the formats that tasks read."""

import pathlib

import numpy as np


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
