"""NTU RGB+D 60 and 120: names of recordings, official splits, and the reader.

The protocols say which recordings train, and which test:

  cross_subject   half of the persons train, the second half tests (both);
  cross_view      cameras 2 and 3 train, camera 1 tests (60 only);
  cross_setup     even setups train, odd ones test (120 only).

A `.skeleton` file is one recording of a Kinect camera, as text.

A file is named SsssCcccPpppRrrrAaaa: setup, camera, subject (performer),
replication and action, all counted from 1. It holds

    the number of frames
    for each frame: the number of bodies
      for each body: a line of 10 fields, the first the body's id
        the number of joints, 25
        for each joint: a line of 12 fields, the first three x, y, z in metres

The reader ignores all fields after x, y, z (depth and color coordinates,
orientations, tracking states): the sensor wrote infinities there.

References:
  Shahroudy, Liu, Ng, Wang, NTU RGB+D: a large scale dataset for 3D human
  activity analysis, 2016, section 4.1 (cross-subject, cross-view).
  Liu, Shahroudy, Perez, Wang, Duan, Kot, NTU RGB+D 120: a large-scale benchmark
  for 3D human activity understanding, 2019 (106 subjects, cross-setup).
"""

import codecs
from collections.abc import Mapping, Sequence
import math
import os
import pathlib
import re
import types
from typing import NamedTuple

import numpy as np

from rnnzoo.tasks import fields

JOINTS = 25
# A Kinect tracks at most this many bodies in a frame.
MOST_BODIES = 6

# A Kinect sees no further than some metres.
MOST_METRES = 1e3

# Real files have about ten ids. All pairs of ids are compared.
_MOST_IDS = 1000

# The real files have at most 300 frames, less than 7 MB.
_MOST_BYTES = 64 * 2**20

# Digits of other scripts are numbers to Python, and would give a recording two
# names.
_NAME = re.compile(r'S(\d{3})C(\d{3})P(\d{3})R(\d{3})A(\d{3})', flags=re.ASCII)

# An id in the file, and how many bodies before this one have it in this frame.
# A camera might give two bodies one id.
Id = tuple[str, int]

PROTOCOLS = ('cross_subject', 'cross_view', 'cross_setup')

# The 20 subjects up to number 40 train in NTU RGB+D 60 as well.
TRAINING_SUBJECTS = frozenset(
    (1, 2, 4, 5, 8, 9, 13, 14, 15, 16, 17, 18, 19, 25, 27, 28, 31, 34, 35, 38)
    + (45, 46, 47, 49, 50, 52, 53, 54, 55, 56, 57, 58, 59, 70, 74, 78, 80, 81)
    + (82, 83, 84, 85, 86, 89, 91, 92, 93, 94, 95, 97, 98, 100, 103)
)


class Dataset(NamedTuple):
  """Counts of a data set."""

  classes: int  # Number of actions.
  files: int  # Number of recordings.
  # Length of the authors' list of recordings whose skeletons are missing or
  # incomplete.
  missing: int
  protocols: tuple[str, str]  # Names of the protocols that its authors define.


DATASETS: Mapping[str, Dataset] = types.MappingProxyType(
    {
        'ntu60': Dataset(60, 56_880, 302, ('cross_subject', 'cross_view')),
        'ntu120': Dataset(120, 114_480, 535, ('cross_subject', 'cross_setup')),
    }
)


class Name(NamedTuple):
  """The numbers in a file's name, all counted from 1."""

  setup: int  # Number of the camera setup: 1 to 17, or to 32 in NTU RGB+D 120.
  camera: int  # 1 to 3.
  subject: int  # Number of the person: 1 to 40, or to 106.
  replication: int  # 1 or 2.
  action: int  # Number of the class: 1 to 60, or to 120.

  def text(self) -> str:
    """Returns the name without its ending: 'S001C002P003R002A013'."""
    return 'S{:03}C{:03}P{:03}R{:03}A{:03}'.format(*self)


def parse_name(name: str) -> Name:
  """Returns the numbers in a name with or without '.skeleton', in any case."""
  match = _NAME.fullmatch(re.sub(r'(?i)\.skeleton\Z', '', name))
  numbers = [int(number) for number in match.groups()] if match else [0]
  if min(numbers) < 1:
    raise ValueError(
        f'{name!r} is not named like S001C002P003R002A013.skeleton, with'
        ' numbers from 1, of the digits 0 to 9'
    )
  return Name(*numbers)


def check_protocol(dataset: str, protocol: str) -> None:
  """Raises ValueError unless one of `DATASETS` has the protocol."""
  known = DATASETS[dataset].protocols
  if protocol not in known:
    raise ValueError(
        f'{dataset} has no {protocol!r} protocol; it has'
        f' {" and ".join(map(repr, known))}'
    )


def is_training(name: Name, protocol: str) -> bool:
  """Returns whether a recording trains by one of `PROTOCOLS`; else it tests."""
  return {
      'cross_subject': name.subject in TRAINING_SUBJECTS,
      'cross_view': name.camera in (2, 3),
      'cross_setup': name.setup % 2 == 0,
  }[protocol]


def training_mask(names: Sequence[Name], protocol: str) -> np.ndarray:
  """Returns bool [N], which recordings train; the others test."""
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


def read_missing(path: str | os.PathLike[str]) -> frozenset[str]:
  """Returns the names in a list of recordings to leave out, without endings.

  The authors publish two such lists,
  NTU_RGBD_samples_with_missing_skeletons.txt and
  NTU_RGBD120_samples_with_missing_skeletons.txt, at
  https://github.com/shahroudy/NTURGB-D. Other text in the file is ignored.
  """
  path = fields.expand(path, 'config.data.missing_list')
  if not path.is_file():
    raise FileNotFoundError(f'the list of missing skeletons {path} is no file')
  text = path.read_text(errors='replace')
  names = frozenset(match.group() for match in _NAME.finditer(text))
  if not names:
    raise ValueError(
        f'{path} has no name like S001C002P003R002A013, so it is no list of'
        ' missing skeletons'
    )
  return names


def find_wrong(frames: np.ndarray) -> tuple[int, ...] | None:
  """Returns where the first number is that is no position, None for nowhere."""
  wrong = ~(np.abs(frames) < MOST_METRES)
  return tuple(np.argwhere(wrong)[0].tolist()) if wrong.any() else None


def read(path: str | os.PathLike[str]) -> list[dict[Id, list[float]]]:
  """Returns the bodies of each frame: 75 numbers by id, x, y, z of each joint.

  A body whose joints are all zero is absent, and left out.
  """
  path = fields.expand(path)
  lines = _Lines(path, _read_text(path))
  num_frames = lines.take_count('frames', 1, 10**6)
  frames: list[dict[Id, list[float]]] = []
  ids: set[Id] = set()
  for frame in range(num_frames):
    frames.append(_take_frame(lines))
    ids.update(frames[-1])
    if len(ids) > _MOST_IDS:
      raise ValueError(
          f'{path} must have bodies of at most {_MOST_IDS:,} ids; it has more'
          f' in frame {frame}'
      )
  while lines.are_left():
    if lines.take('nothing').strip():
      raise lines.error(f'comes after the last of {num_frames} frames')
  if not ids:
    raise ValueError(f'{path}: none of {num_frames} frames has a body')
  return frames


def _read_text(path: pathlib.Path) -> str:
  # Opening a pipe would wait for whoever writes to it.
  if path.exists() and not path.is_file():
    raise ValueError(f'{path} is no regular file')
  with path.open('rb') as file:
    content = file.read(_MOST_BYTES + 1)
  if len(content) > _MOST_BYTES:
    raise ValueError(f'{path} has more than {_MOST_BYTES:,} bytes')
  try:
    return content.removeprefix(codecs.BOM_UTF8).decode('ascii')
  except UnicodeDecodeError as error:
    line = content.count(b'\n', 0, error.start) + 1
    raise ValueError(
        f'{path}, line {line}: is no text in ASCII; unpack a packed file'
    ) from None


class _Lines:
  """The lines of a file, taken one after another."""

  def __init__(self, path: pathlib.Path, text: str):
    self._path = path
    self._lines = text.splitlines()
    self._taken = 0

  def are_left(self) -> bool:
    return self._taken < len(self._lines)

  def take(self, wanted: str) -> str:
    """Returns the next line, which holds `wanted`."""
    if not self.are_left():
      raise ValueError(
          f'{self._path} ends after line {self._taken}, where {wanted}, must'
          ' follow'
      )
    self._taken += 1
    return self._lines[self._taken - 1]

  def take_fields(self, noun: str, count: int) -> list[str]:
    found = self.take(f'{noun}, {count} fields').split()
    if len(found) != count:
      raise self.error(f'{noun} must have {count} fields; got {len(found)}')
    return found

  def take_count(self, noun: str, least: int, most: int) -> int:
    text = self.take(f'the number of {noun}').strip()
    value = int(text) if text.isdecimal() and len(text) < 10 else -1
    if not least <= value <= most:
      allowed = f'from {least} to {most:,}' if least < most else str(least)
      raise self.error(
          f'the number of {noun} must be {allowed}; got {text[:40]!r}'
      )
    return value

  def error(self, message: str) -> ValueError:
    """Returns an error about the line that was taken last."""
    return ValueError(f'{self._path}, line {self._taken}: {message}')


def _take_frame(lines: _Lines) -> dict[Id, list[float]]:
  bodies: dict[Id, list[float]] = {}
  ids: list[str] = []
  for _ in range(lines.take_count('bodies', 0, MOST_BODIES)):
    name = lines.take_fields('a body', 10)[0]
    lines.take_count('joints', JOINTS, JOINTS)
    joints: list[float] = []
    for _ in range(JOINTS):
      joints += _take_joint(lines)
    if any(joints):
      bodies[name, ids.count(name)] = joints
    ids.append(name)
  return bodies


def _take_joint(lines: _Lines) -> tuple[float, float, float]:
  texts = lines.take_fields('a joint', 12)[:3]
  try:
    x, y, z = map(float, texts)
  except ValueError:
    x = y = z = math.nan
  # Python reads 1_0 as 10. A sum with NaN is not below the bound either.
  if '_' in ''.join(texts) or not abs(x) + abs(y) + abs(z) < MOST_METRES:
    raise lines.error(
        'x, y, z of a joint must be numbers of metres; got'
        f' {" ".join(texts)[:60]}'
    )
  return x, y, z
