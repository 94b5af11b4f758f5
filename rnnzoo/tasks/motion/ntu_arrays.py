"""Recordings of skeletons as arrays: in memory, and as a folder of two files.

  frames.npy    float32 [frames of all, 2, 25, 3], mapped into memory;
  index.json    names, how many frames each has, and their source.

`rnnzoo.tasks.motion.ntu_conversion` makes such a folder. The index is written
last, so where it is, the whole is.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib

import numpy as np

from rnnzoo.tasks.motion import ntu_files

FRAMES, INDEX = 'frames.npy', 'index.json'

# Checked at a time: 2.4 MB, which stay in a cache while they are.
_CHECKED_FRAMES = 4096


@dataclasses.dataclass(frozen=True)
class Recordings:
  """Recordings of two bodies, one after the other.

  Attributes:
    names: of each, N.
    frames: float32 [frames of all, 2, 25, 3]: x, y, z in metres, zeros for an
      absent body.
    starts: int64 [N], where in `frames` each begins.
    lengths: int32 [N], how many frames each has, one at least.
  """

  names: Sequence[ntu_files.Name]
  frames: np.ndarray
  starts: np.ndarray
  lengths: np.ndarray

  def of(self, index: int) -> np.ndarray:
    """Returns the frames of one recording, [n, 2, 25, 3]."""
    start = int(self.starts[index])
    return self.frames[start : start + int(self.lengths[index])]

  def select(self, indices: np.ndarray) -> 'Recordings':
    """Returns some of the recordings; their frames are not copied."""
    return Recordings(
        [self.names[index] for index in indices],
        self.frames,
        self.starts[indices],
        self.lengths[indices],
    )


def starts_of(lengths: np.ndarray) -> np.ndarray:
  """Returns where each of several recordings begins, int64 [N]."""
  return np.cumsum(lengths, dtype=np.int64) - lengths


def write_index(
    directory: pathlib.Path,
    names: Sequence[str],
    lengths: Sequence[int],
    source: str,
) -> None:
  """Writes the index, once the frames are written.

  Args:
    directory: of both files.
    names: of the recordings, without endings.
    lengths: frames of each.
    source: says which files were converted, to tell conversions apart.
  """
  content = {'source': source, 'names': names, 'lengths': lengths}
  partial = directory / (INDEX + '.part')
  partial.write_text(json.dumps(content), encoding='utf-8')
  os.replace(partial, directory / INDEX)


def read_source(directory: str | os.PathLike[str]) -> str | None:
  """Returns the source of a converted folder, or None if it holds nothing.

  Raises:
    ValueError: the index is damaged.
  """
  path = pathlib.Path(directory) / INDEX
  return _read_index(path)['source'] if path.is_file() else None


def read(directory: str | os.PathLike[str]) -> Recordings:
  """Returns the recordings of a folder; their frames stay on the disk.

  Args:
    directory: of files by `rnnzoo.tasks.motion.ntu_conversion`.

  Raises:
    FileNotFoundError: there is no such folder, or it is not whole.
    ValueError: a file in it is damaged, or a frame shows nobody or holds a
      number that is no position: NaN, an infinity, or 1,000 m and more.
  """
  directory = pathlib.Path(directory)
  if directory.is_file():
    raise FileNotFoundError(
        f'{directory} is a file; name the folder that python -m'
        ' rnnzoo.tasks.motion.ntu_conversion made, which holds'
        f' {INDEX} and {FRAMES}'
    )
  for name in (INDEX, FRAMES):
    if not (directory / name).is_file():
      raise FileNotFoundError(
          f'{directory} has no {name}; python -m'
          ' rnnzoo.tasks.motion.ntu_conversion makes it from .skeleton files'
      )
  index = _read_index(directory / INDEX)
  try:
    frames = np.load(directory / FRAMES, mmap_mode='r', allow_pickle=False)
    if not isinstance(frames, np.ndarray):
      raise ValueError('it holds several arrays, as an .npz file')
  except (ValueError, EOFError) as error:
    raise ValueError(
        f'{directory / FRAMES} is damaged: {error}; copy or convert it again'
    ) from error
  lengths = np.asarray(index['lengths'], np.int32)
  shape = (int(lengths.sum()), ntu_files.BODIES, ntu_files.JOINTS, 3)
  if frames.shape != shape or frames.dtype != np.float32:
    raise ValueError(
        f'{directory / FRAMES} must hold float32 {shape}, as {INDEX} says; it'
        f' holds {frames.dtype} {frames.shape}'
    )
  try:
    names = [ntu_files.parse_name(name) for name in index['names']]
    if len(set(names)) < len(names):
      raise ValueError('it lists a recording twice')
  except ValueError as error:
    raise ValueError(f'{directory / INDEX} is damaged: {error}') from error
  recordings = Recordings(names, frames, starts_of(lengths), lengths)
  _check_numbers(recordings, directory / FRAMES)
  return recordings


def _check_numbers(recordings: Recordings, path: pathlib.Path) -> None:
  """Raises ValueError unless each frame shows somebody, by positions.

  Args:
    recordings: all of a file, whose pages are read once.
    path: of the file.
  """
  most = ntu_files.MOST_METRES
  for start in range(0, len(recordings.frames), _CHECKED_FRAMES):
    frames = recordings.frames[start : start + _CHECKED_FRAMES]
    # A NaN is the least and the greatest number, and less than none.
    positions = -most < frames.min() and frames.max() < most
    if positions and (shown := frames.any(axis=(1, 2, 3))).all():
      continue
    if positions:
      frame = int(shown.argmin())
    else:
      frame, body, joint, axis = np.argwhere(~(np.abs(frames) < most))[0]
    index = int(np.searchsorted(recordings.starts, start + frame, 'right')) - 1
    name = recordings.names[index].text()
    place = f'frame {start + frame - recordings.starts[index]}'
    if positions:
      raise ValueError(
          f'{path} is damaged: {name} shows nobody in its {place}, counted from'
          ' 0: all is zero; convert it again'
      )
    raise ValueError(
        f'{path} is damaged: {name} has'
        f' {"xyz"[axis]}={frames[frame, body, joint, axis]:g} in its {place},'
        f' body {body}, joint {joint}, counted from 0; all must be numbers of'
        f' metres within {most:g}; copy or convert it again'
    )


def _read_index(path: pathlib.Path) -> dict:
  try:
    index = json.loads(path.read_text(encoding='utf-8'))
    whole = (
        isinstance(index['source'], str)
        and len(index['names']) == len(index['lengths']) > 0
        and all(isinstance(name, str) for name in index['names'])
        and all(
            type(length) is int and 0 < length < 2**31
            for length in index['lengths']
        )
    )
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{path} is damaged: {error!r}') from error
  if not whole:
    raise ValueError(f'{path} is damaged: it does not list recordings')
  return index
