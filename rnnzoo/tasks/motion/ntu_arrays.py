"""Recordings of skeletons as arrays: in memory, and as a folder of two files.

  frames.npy    float32 [frames of all, 2, 25, 3], mapped into memory;
  index.json    names, how many frames each has, and their source.

`rnnzoo.tasks.motion.ntu_conversion` makes such a folder. The index is written
last, so where it is, the whole is.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import types

import numpy as np

from rnnzoo.tasks import fields
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


# The official splits of NTU RGB+D 60 and 120, and recordings to leave out.
#
#   cross_subject   half of the persons train, the other half test (both);
#   cross_view      cameras 2 and 3 train, camera 1 tests (60 only);
#   cross_setup     even setups train, odd ones test (120 only).
#
# References: Shahroudy et al., 2016, section 4.1 (cross-subject, cross-view).
# Liu et al., 2019 (cross-subject with 106 subjects, cross-setup).


# Numbers of classes by data set.
CLASSES: Mapping[str, int] = types.MappingProxyType(
    {'ntu60': 60, 'ntu120': 120}
)
PROTOCOLS = ('cross_subject', 'cross_view', 'cross_setup')

# Those up to 40 are the 20 of NTU RGB+D 60.
TRAINING_SUBJECTS = frozenset(
    (1, 2, 4, 5, 8, 9, 13, 14, 15, 16, 17, 18, 19, 25, 27, 28, 31, 34, 35, 38)
    + (45, 46, 47, 49, 50, 52, 53, 54, 55, 56, 57, 58, 59, 70, 74, 78, 80, 81)
    + (82, 83, 84, 85, 86, 89, 91, 92, 93, 94, 95, 97, 98, 100, 103)
)
TRAINING_CAMERAS = frozenset((2, 3))

# How many files a data set has.
FILES: Mapping[str, int] = types.MappingProxyType(
    {'ntu60': 56_880, 'ntu120': 114_480}
)

# How many of them the authors' list of missing or incomplete skeletons has.
MISSING: Mapping[str, int] = types.MappingProxyType(
    {'ntu60': 302, 'ntu120': 535}
)


def is_training(name: ntu_files.Name, protocol: str) -> bool:
  """Returns whether a recording trains; else it tests.

  Args:
    name: of the recording.
    protocol: one of `PROTOCOLS`.

  Raises:
    ValueError: there is no such protocol.
  """
  if protocol == 'cross_subject':
    return name.subject in TRAINING_SUBJECTS
  if protocol == 'cross_view':
    return name.camera in TRAINING_CAMERAS
  if protocol == 'cross_setup':
    return name.setup % 2 == 0
  raise ValueError(
      f'the protocol must be one of {", ".join(map(repr, PROTOCOLS))}; got'
      f' {protocol!r}'
  )


def training_mask(names: Iterable[ntu_files.Name], protocol: str) -> np.ndarray:
  """Returns bool [N], which recordings train.

  Raises:
    ValueError: there is no such protocol, or none of the recordings trains, or
      none tests.
  """
  mask = np.array([is_training(name, protocol) for name in names], bool)
  count = int(np.sum(mask))
  if not 0 < count < len(mask):
    raise ValueError(
        f'config.data.protocol={protocol} takes {count:,} of {len(mask):,}'
        f' recordings to train and {len(mask) - count:,} to test, and needs'
        ' some of both; convert the rest of the data set, or pass another'
        ' protocol'
    )
  return mask


def check_protocol(dataset: str, protocol: str) -> None:
  """Raises ValueError unless the data set has the protocol.

  Args:
    dataset: 'ntu60' or 'ntu120'.
    protocol: one of `PROTOCOLS`.
  """
  wrong = {'ntu60': 'cross_setup', 'ntu120': 'cross_view'}[dataset]
  if protocol == wrong:
    others = [known for known in PROTOCOLS if known != wrong]
    raise ValueError(
        f'{dataset} has no {protocol!r} protocol; it has'
        f' {" and ".join(map(repr, others))}'
    )


def read_missing(path: str | os.PathLike[str]) -> frozenset[str]:
  """Returns the names in a list of recordings to leave out.

  The authors publish two such lists, of recordings whose skeletons are missing
  or incomplete: NTU_RGBD_samples_with_missing_skeletons.txt and
  NTU_RGBD120_samples_with_missing_skeletons.txt, at
  https://github.com/shahroudy/NTURGB-D. Other text in the file is passed over.

  Args:
    path: of the list.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: there is no name in it.
  """
  path = fields.expand(path, 'config.data.missing_list')
  if not path.is_file():
    raise FileNotFoundError(f'the list of missing skeletons {path} is no file')
  names = ntu_files.find_names(path.read_text(errors='replace'))
  if not names:
    raise ValueError(
        f'{path} has no name like S001C002P003R002A013, so it is no list of'
        ' missing skeletons'
    )
  return names
