"""NTU RGB+D's `.skeleton` files: one recording of a Kinect camera, as text.

A file is named SsssCcccPpppRrrrAaaa: setup, camera, subject (performer),
replication and action, all counted from 1. It holds

    the number of frames
    for each frame: the number of bodies
      for each body: a line of 10 fields, the first the body's id
        the number of joints, 25
        for each joint: a line of 12 fields, the first three x, y, z in metres

Depth and color coordinates, orientations and tracking states come after x, y, z
and are not read: the sensor wrote infinities there.

References:
  Shahroudy, Liu, Ng, Wang, NTU RGB+D: a large scale dataset for 3D human
  activity analysis, 2016.
  Liu, Shahroudy, Perez, Wang, Duan, Kot, NTU RGB+D 120: a large-scale benchmark
  for 3D human activity understanding, 2019.
"""

import bisect
import codecs
import collections
from collections.abc import Sequence
import hashlib
import itertools
import math
import os
import pathlib
import re
import stat
from typing import NamedTuple, NoReturn

import numpy as np

from rnnzoo.tasks import fields

JOINTS = 25
# Bodies that a frame can have, as many as a Kinect tracks, and that are used.
MOST_BODIES = 6
BODIES = 2
# The middle of the spine, among joints counted from 0.
CENTRE = 1

# Kinect sees no further than some metres.
MOST_METRES = 1e3

# Bodies are one person where one begins this near to where the other was, on
# average over joints: in metres, and in metres for each frame between them.
_REACH, _STEP = 0.5, 0.1
# Persons change their ids where one goes this far at once, to where another
# was; two bodies are one where they are this near, on average over joints.
_JUMP, _SAME = 1.0, 0.2
# Real files have about ten ids. All pairs of them are compared.
_MOST_IDS = 1000

_BODY_FIELDS = 10
_JOINT_FIELDS = 12

# The real files have at most 300 frames, less than 7 MB.
_MOST_BYTES = 64 * 2**20

# Digits of other scripts are numbers to Python, and would be second names of
# the same recordings.
_NAME = re.compile(r'S(\d{3})C(\d{3})P(\d{3})R(\d{3})A(\d{3})', flags=re.ASCII)


class Name(NamedTuple):
  """The numbers in a file's name, all counted from 1.

  Attributes:
    setup: of cameras: 1 to 17, or to 32 in NTU RGB+D 120.
    camera: 1 to 3.
    subject: the person: 1 to 40, or to 106.
    replication: 1 or 2.
    action: the class: 1 to 60, or to 120.
  """

  setup: int
  camera: int
  subject: int
  replication: int
  action: int

  def text(self) -> str:
    """Returns the name without its ending: 'S001C002P003R002A013'."""
    return 'S{:03}C{:03}P{:03}R{:03}A{:03}'.format(*self)


class Body(NamedTuple):
  """One body, as a file has it, even where it changes ids with another one.

  Attributes:
    frames: int [n], rising: the frames that it is in, counted from 0.
    joints: float32 [n, 25, 3], x, y, z in metres: to the right, up, and away
      from the camera.
  """

  frames: np.ndarray
  joints: np.ndarray


class Recording(NamedTuple):
  """A file: how many frames, and the bodies in the order they came."""

  num_frames: int
  bodies: tuple[Body, ...]


def parse_name(name: str) -> Name:
  """Returns the numbers in a name with or without '.skeleton', in any case.

  Raises:
    ValueError: it is no such name.
  """
  match = _NAME.fullmatch(re.sub(r'(?i)\.skeleton\Z', '', name))
  numbers = [int(number) for number in match.groups()] if match else [0]
  if min(numbers) < 1:
    raise ValueError(
        f'{name!r} is not named like S001C002P003R002A013.skeleton, with'
        ' numbers from 1, of the digits 0 to 9'
    )
  return Name(*numbers)


def find_names(text: str) -> frozenset[str]:
  """Returns all names of recordings in a text, without endings."""
  return frozenset(match.group() for match in _NAME.finditer(text))


def read(path: str | os.PathLike[str]) -> Recording:
  """Returns a file's bodies.

  Args:
    path: the file.

  Raises:
    ValueError: it is not in the format, or not whole, or has no body, or is a
      folder or a pipe; the message names the file and the line.
    OSError: it cannot be read.
  """
  path = fields.expand(path)
  # Opening a pipe would wait for whoever writes to it.
  if path.exists() and not path.is_file():
    raise ValueError(f'{path} is no regular file')
  with path.open('rb') as file:
    content = file.read(_MOST_BYTES + 1)
  if len(content) > _MOST_BYTES:
    raise ValueError(f'{path} has more than {_MOST_BYTES:,} bytes')
  try:
    text = content.removeprefix(codecs.BOM_UTF8).decode('ascii')
  except UnicodeDecodeError as error:
    line = content.count(b'\n', 0, error.start) + 1
    raise ValueError(
        f'{path}, line {line}: is no text in ASCII; unpack a packed file'
    ) from None
  return _Reader(path, text).recording()


def arrange(recording: Recording) -> np.ndarray:
  """Returns the two main persons, float32 [n, 2, 25, 3], zeros where absent.

  A body whose joints are all zero is absent. Bodies that share no frame, or lie
  upon each other there, are one person if one begins near to where the other
  was: a camera gives new ids to persons that it lost. The main person is the
  one whose x, y and z vary most, as the data set's authors chose it. Frames
  without one of the two are left out; see `left_out`.

  Args:
    recording: of a file.
  """
  frames = np.zeros((recording.num_frames, BODIES, JOINTS, 3), np.float32)
  for index, person in enumerate(_persons(recording)[:BODIES]):
    frames[person.frames, index] = person.joints
  return frames[frames.any(axis=(1, 2, 3))]


def left_out(recording: Recording) -> str:
  """Returns how many frames and persons `arrange` leaves out; '' for none."""
  persons, total = _persons(recording), recording.num_frames
  count = lambda some: len({n for person in some for n in person.frames})
  seen, used = count(persons), count(persons[:BODIES])
  texts = (
      (total - seen, f'of {total} frames, which show nobody'),
      (seen - used, f'of {total} frames, which show neither main person'),
      (len(persons) - BODIES, f'of {len(persons)} persons'),
  )
  return '; '.join(f'{number} {text}' for number, text in texts if number > 0)


def _persons(recording: Recording) -> list[Body]:
  """Returns the bodies where they are seen, the main person first.

  Bodies of one person are joined, those that are nearest first.
  """
  bodies = []
  for body in recording.bodies:
    seen = body.joints.any(axis=(1, 2))
    if seen.any():
      bodies.append(Body(body.frames[seen], body.joints[seen]))
  # As lists, which are faster for few numbers.
  frames = [body.frames.tolist() for body in bodies]
  places = [body.joints.mean(axis=1).tolist() for body in bodies]
  links = []
  for i, j in itertools.permutations(range(len(bodies)), 2):
    before = bisect.bisect_left(frames[j], frames[i][0]) - 1
    if before >= 0:
      distance = math.dist(places[i][0], places[j][before])
      if distance < _REACH + _STEP * (frames[i][0] - frames[j][before]):
        links.append((distance, i, j))
  persons = dict(enumerate(bodies))
  # The person of each body.
  owners = list(persons)
  for _, i, j in sorted(links):
    i, j = owners[i], owners[j]
    if i == j or _are_apart(persons[i], persons[j]):
      continue
    both = persons[i], persons.pop(j)
    frames_of_both, first = np.unique(
        np.concatenate([body.frames for body in both]), return_index=True
    )
    joints = np.concatenate([body.joints for body in both])
    persons[i] = Body(frames_of_both, joints[first])
    owners = [i if owner == j else owner for owner in owners]
  spread = lambda body: -float(np.sum(np.var(body.joints, axis=(0, 1))))
  return sorted(persons.values(), key=spread)


def _are_apart(one: Body, other: Body) -> bool:
  """Returns whether two bodies are two in a frame that has both."""
  _, i, j = np.intersect1d(one.frames, other.frames, True, return_indices=True)
  distances = np.linalg.norm(one.joints[i] - other.joints[j], axis=-1)
  return bool((distances.mean(axis=1) > _SAME).any())


def _change_back(owners: dict, last: dict, places: dict, frame: int) -> None:
  """Changes whose body an id is where persons changed their ids.

  Args:
    owners: of each id, whose body it is.
    last: of each body, the frame where it was last, and its place there.
    places: of each id that the frame has, its place there.
    frame: which one.
  """
  for one, place in places.items():
    mine = owners.setdefault(one, one)
    before, was = last.get(mine, (frame, place))
    if math.dist(place, was) < _JUMP + _STEP * (frame - before):
      continue
    for other, body in owners.items():
      was = last[body][1] if body in last else (math.inf,) * 3
      stays = math.dist(places.get(other, (math.inf,) * 3), was) < _REACH
      if math.dist(place, was) < _REACH and not stays:
        owners[one], owners[other] = body, mine
        break


class _Reader:
  """The lines of a file, and how far they are read."""

  def __init__(self, path: pathlib.Path, text: str):
    self._path = path
    self._lines = text.splitlines()
    self._next = 0

  def recording(self) -> Recording:
    num_frames = self._count('frames', 1, 10**6)
    bodies: dict[tuple[str, int], tuple[list, list]] = {}
    owners: dict[tuple[str, int], tuple[str, int]] = {}
    last: dict[tuple[str, int], tuple[int, list[float]]] = {}
    for frame in range(num_frames):
      ids: list[str] = []
      here: dict[tuple[str, int], list[float]] = {}
      for _ in range(self._count('bodies', 0, MOST_BODIES)):
        body_id, joints = self._body()
        # A camera might give two bodies one id.
        key = body_id, ids.count(body_id)
        ids.append(body_id)
        if any(joints):
          here[key] = joints
      places = {
          key: [math.fsum(joints[axis::3]) / JOINTS for axis in range(3)]
          for key, joints in here.items()
      }
      _change_back(owners, last, places, frame)
      if len(owners) > _MOST_IDS:
        raise ValueError(
            f'{self._path} must have bodies of at most {_MOST_IDS:,} ids; it'
            f' has more in frame {frame}'
        )
      for key, joints in here.items():
        frames, positions = bodies.setdefault(owners[key], ([], []))
        frames.append(frame)
        positions.append(joints)
        last[owners[key]] = frame, places[key]
    while self._next < len(self._lines):
      if self._lines[self._next].strip():
        raise self._error(f'comes after the last of {num_frames} frames')
      self._next += 1
    if not bodies:
      raise ValueError(f'{self._path}: none of {num_frames} frames has a body')
    return Recording(
        num_frames,
        tuple(
            Body(
                np.asarray(frames, np.int64),
                np.asarray(positions, np.float32).reshape(-1, JOINTS, 3),
            )
            for frames, positions in bodies.values()
        ),
    )

  def _body(self) -> tuple[str, list[float]]:
    """Returns a body's id and its joints' x, y, z one after the other."""
    given = self._take(f'a body, {_BODY_FIELDS} fields').split()
    if len(given) != _BODY_FIELDS:
      raise self._error(
          f'a body must have {_BODY_FIELDS} fields; got {len(given)}', -1
      )
    self._count('joints', JOINTS, JOINTS)
    numbers: list[float] = []
    for _ in range(JOINTS):
      line = self._take(f'a joint, {_JOINT_FIELDS} fields').split()
      if len(line) != _JOINT_FIELDS:
        raise self._error(
            f'a joint must have {_JOINT_FIELDS} fields; got {len(line)}', -1
        )
      try:
        x, y, z = float(line[0]), float(line[1]), float(line[2])
      except ValueError:
        x = y = z = math.nan
      # Python reads 1_0 as 10.
      if '_' in line[0] or '_' in line[1] or '_' in line[2]:
        x = math.nan
      # This finds NaN as well.
      if not abs(x) + abs(y) + abs(z) < MOST_METRES:
        raise self._error(
            'x, y, z of a joint must be numbers of metres; got'
            f' {" ".join(line[:3])[:60]}',
            -1,
        )
      numbers += (x, y, z)
    return given[0], numbers

  def _count(self, noun: str, least: int, most: int) -> int:
    text = self._take(f'the number of {noun}').strip()
    value = int(text) if text.isdecimal() and len(text) < 10 else -1
    if not least <= value <= most:
      allowed = f'from {least} to {most:,}' if least < most else str(least)
      raise self._error(
          f'the number of {noun} must be {allowed}; got {text[:40]!r}', -1
      )
    return value

  def _take(self, wanted: str) -> str:
    """Returns the next line, which is `wanted`."""
    if self._next == len(self._lines):
      raise ValueError(
          f'{self._path} ends after line {len(self._lines)}, where {wanted},'
          ' must follow'
      )
    self._next += 1
    return self._lines[self._next - 1]

  def _error(self, message: str, offset: int = 0) -> ValueError:
    line = self._next + 1 + offset
    return ValueError(f'{self._path}, line {line}: {message}')


# Finds `.skeleton` files in a folder and in all folders that it leads to.
#
# Links are followed. Each folder is searched once, however many ways lead to
# it, so links may go in circles; a file with two paths is found once. Paths
# without links come first.


class Found(NamedTuple):
  """A search's results.

  Attributes:
    paths: of the files, in the order of their names, no two of one name.
    repeated: (path, reason) of links to nothing, folders that another path
      leads to as well, and other paths of a file.
  """

  paths: list[pathlib.Path]
  repeated: list[tuple[pathlib.Path, str]]


def find(source: pathlib.Path) -> Found:
  """Returns the `.skeleton` files of a folder.

  Args:
    source: the folder.

  Raises:
    FileNotFoundError: there is no such folder, or no such file in it.
    NotADirectoryError: it is a file.
    OSError: a folder cannot be read.
    ValueError: two files have one name.
  """
  if not os.path.lexists(source):
    raise FileNotFoundError(f'the folder {source} does not exist')
  if not os.path.exists(source):
    raise FileNotFoundError(
        f'the source {source} is a link to {os.readlink(source)}, which does'
        ' not exist'
    )
  if not os.path.isdir(source):
    raise NotADirectoryError(
        f'the source {source} is a file; name the folder that it is in, all of'
        ' whose .skeleton files are converted'
    )
  files, repeated = _walk(source)
  if not files:
    raise FileNotFoundError(f'{source} has no .skeleton file')
  known: dict[str, pathlib.Path] = {}
  paths, pairs = [], []
  for path in sorted(files, key=lambda path: path.name):
    other = known.setdefault(path.stem, path)
    if other is path:
      paths.append(path)
    elif _are_same(path, other):
      repeated.append((path, f'is the same file as {other}'))
    else:
      pairs.append((other, path))
  if pairs:
    more = f', and so have {len(pairs) - 1:,} more pairs'
    raise ValueError(
        f'{pairs[0][0]} and {pairs[0][1]} have one name'
        f'{more if len(pairs) > 1 else ""}; leave one of them'
    )
  return Found(paths, repeated)


def digest(source: pathlib.Path, paths: Sequence[pathlib.Path]) -> str:
  """Returns a name for these files as they are.

  Args:
    source: the folder.
    paths: of files in it.
  """
  # Arrays converted by other rules have another name.
  result = hashlib.sha256(b'persons')
  for path in paths:
    suffix = ''
    try:
      state = path.stat()
      # Whoever makes it readable wants it converted.
      suffix = '' if os.access(path, os.R_OK) else ' unreadable'
    except OSError:  # A link to nothing, which is skipped.
      state = path.lstat()
    name = printable(str(path.relative_to(source)))
    result.update(
        f'{name} {state.st_size} {state.st_mtime_ns}{suffix}\n'.encode()
    )
  return result.hexdigest()[:16]


def printable(text: str) -> str:
  r"""Returns a text in one line of UTF-8: other characters become '\x..'."""
  text = os.fsencode(text).decode('utf-8', 'backslashreplace')
  return ''.join(
      char if char.isprintable() else char.encode('unicode_escape').decode()
      for char in text
  )


def _walk(
    source: pathlib.Path,
) -> tuple[list[pathlib.Path], list[tuple[pathlib.Path, str]]]:
  """Returns the files of all folders, and what leads to none or none new."""
  files: list[pathlib.Path] = []
  repeated: list[tuple[pathlib.Path, str]] = []
  known: dict[tuple[int, int], pathlib.Path] = {}
  folders = collections.deque([source])
  links: collections.deque[pathlib.Path] = collections.deque()
  while folders or links:
    folder = folders.popleft() if folders else links.popleft()
    try:
      state = folder.stat()
      other = known.setdefault((state.st_dev, state.st_ino), folder)
      if other is not folder:
        repeated.append((folder, f'is the same folder as {other}'))
        continue
      with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
      _refuse(folder, error)
    for entry in entries:
      path = pathlib.Path(entry.path)
      # Some file systems and archivers write names in capitals.
      is_skeleton = path.suffix.lower() == '.skeleton'
      if is_skeleton:
        files.append(path)
      if not entry.is_symlink():
        if entry.is_dir():
          folders.append(path)
        continue
      try:
        if stat.S_ISDIR(path.stat().st_mode):
          links.append(path)
      except PermissionError as error:
        _refuse(path, error)
      except OSError as error:
        if not is_skeleton:  # Else it is read, and skipped.
          repeated.append((path, f'is a link to nothing: {error.strerror}'))
  return files, repeated


def _refuse(folder: pathlib.Path, error: OSError) -> NoReturn:
  raise OSError(
      f'the folder {folder} cannot be read: {error.strerror}; make it readable'
      ' or name a source without it'
  ) from error


def _are_same(path: pathlib.Path, other: pathlib.Path) -> bool:
  try:
    return path.samefile(other)
  except OSError:  # A link to nothing.
    return False
