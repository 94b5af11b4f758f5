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
from collections.abc import Iterator, Sequence
import itertools
import os
import re
from typing import NamedTuple

import numpy as np

from rnnzoo.tasks import fields

JOINTS = 25
# A Kinect tracks at most this many bodies in a frame.
MOST_BODIES = 6

# A Kinect sees no further than some metres.
MOST_METRES = 1e3

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


DATASETS = {
    'ntu60': Dataset(60, 56_880, 302, ('cross_subject', 'cross_view')),
    'ntu120': Dataset(120, 114_480, 535, ('cross_subject', 'cross_setup')),
}


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


def training_mask(names: Sequence[Name], protocol: str) -> np.ndarray:
  """Returns bool [N], which recordings train by a protocol; the others test."""
  trains = {
      'cross_subject': lambda name: name.subject in TRAINING_SUBJECTS,
      'cross_view': lambda name: name.camera in (2, 3),
      'cross_setup': lambda name: name.setup % 2 == 0,
  }[protocol]
  mask = np.array([trains(name) for name in names], bool)
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

  The authors publish such lists at https://github.com/shahroudy/NTURGB-D. Other
  text in the file is ignored.
  """
  path = fields.expand(path, 'config.data.missing_list')
  text = path.read_text(errors='replace')
  names = frozenset(match.group() for match in _NAME.finditer(text))
  if not names:
    raise ValueError(
        f'{path} has no name like S001C002P003R002A013, so it is no list of'
        ' missing skeletons'
    )
  return names


def check_frames(frames: np.ndarray, name: str) -> None:
  """Raises ValueError unless all numbers are positions, and frames show bodies.

  `frames` are [n, bodies, 25, 3], in metres; the message begins with the name.
  """
  wrong = ~(np.abs(frames) < MOST_METRES)
  if wrong.any():
    frame, body, joint, axis = np.argwhere(wrong)[0]
    raise ValueError(
        f'{name} must be finite numbers of metres, within {MOST_METRES:g};'
        f' frame {frame}, body {body}, joint {joint}, counted from 0, has'
        f' {"xyz"[axis]}={frames[frame, body, joint, axis]:g}'
    )
  shown = np.any(frames, axis=(1, 2, 3))
  if not shown.all():
    raise ValueError(
        f'{name} shows nobody in its frame {shown.argmin()}, counted from 0, of'
        f' {len(shown)}: all is zero; leave such frames out, as'
        ' array[array.any(axis=(1, 2, 3))] does, and do not count padding in'
        ' the length'
    )


def read(path: str | os.PathLike[str]) -> list[dict[Id, list[float]]]:
  """Returns the bodies of each frame: 75 numbers by id, x, y, z of each joint.

  A body whose joints are all zero is absent, and left out.
  """
  path = fields.expand(path)
  # Opening a pipe would wait for whoever writes to it.
  if path.exists() and not path.is_file():
    raise ValueError(f'{path} is no regular file; name a .skeleton file')
  content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
  if not content.isascii():
    raise ValueError(f'{path} is no text in ASCII; unpack a packed file')
  words = iter(content.decode('ascii').split())
  try:
    num_frames = _take_count(words, 'frames', 1, 10**6)
    frames = [_take_frame(words) for _ in range(num_frames)]
    if any(True for _ in words):
      raise ValueError(f'more follows the last of {num_frames} frames')
  except ValueError as error:
    raise ValueError(f'{path} is no whole .skeleton file: {error}') from error
  if not any(frames):
    raise ValueError(f'{path}: none of {num_frames} frames has a body')
  return frames


def _take(words: Iterator[str], count: int) -> list[str]:
  """Returns the next fields."""
  found = list(itertools.islice(words, count))
  if len(found) < count:
    raise ValueError('it ends early')
  return found


def _take_count(words: Iterator[str], noun: str, least: int, most: int) -> int:
  (text,) = _take(words, 1)
  value = int(text) if text.isdecimal() and len(text) < 10 else -1
  if not least <= value <= most:
    raise ValueError(
        f'the number of {noun} must be from {least} to {most}; got'
        f' {text[:40]!r}'
    )
  return value


def _take_frame(words: Iterator[str]) -> dict[Id, list[float]]:
  bodies: dict[Id, list[float]] = {}
  ids: list[str] = []
  for _ in range(_take_count(words, 'bodies', 0, MOST_BODIES)):
    name = _take(words, 10)[0]
    _take_count(words, 'joints', JOINTS, JOINTS)
    joints: list[float] = []
    for _ in range(JOINTS):
      joints += map(float, _take(words, 12)[:3])
    if not all(abs(x) < MOST_METRES for x in joints):  # NaN is not either.
      raise ValueError(f'a body has joints beyond {MOST_METRES:g} metres')
    if any(joints):
      bodies[name, ids.count(name)] = joints
    ids.append(name)
  return bodies
