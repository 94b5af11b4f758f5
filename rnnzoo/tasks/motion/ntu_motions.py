"""Synthetic motions: a stand-in for NTU RGB+D, in its format.

A body is a tree of 25 joints whose bones keep their lengths; a motion turns
some joints, or moves the body, as functions of time. Persons differ in size and
vigour, cameras in where they stand, recordings in length and speed, and every
position is noisy. Three pairs of motions ('lift arms' and 'lower arms', say)
have equal poses in opposite order.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools

import numpy as np

from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_files

DATASET = 'synthetic motions, NOT NTU RGB+D'

# Joints of a Kinect's skeleton, each after the one that it hangs on. A bone
# goes from there: x (to the body's left, as it faces the camera), y (up) and z
# (away), in metres. Joint 0 is the spine's base.
_BONES = {
    1: (0, (0, 0.25, 0)),  # The spine's middle.
    20: (1, (0, 0.24, 0)),  # The spine at the shoulders.
    2: (20, (0, 0.08, 0)),  # The neck.
    3: (2, (0, 0.16, 0)),  # The head.
    4: (20, (0.18, -0.04, 0)),  # The left shoulder, elbow, wrist and hand.
    5: (4, (0.04, -0.26, 0)),
    6: (5, (0.02, -0.24, 0)),
    7: (6, (0, -0.07, 0)),
    21: (7, (0, -0.07, 0)),  # The left hand's tip and thumb.
    22: (6, (0.03, -0.04, 0)),
    12: (0, (0.09, -0.04, 0)),  # The left hip, knee, ankle and foot.
    13: (12, (0.02, -0.40, 0)),
    14: (13, (0.01, -0.39, 0)),
    15: (14, (0, -0.06, -0.10)),
}
# The joint to the right of each on the left.
_RIGHT = {joint: joint + 4 for joint in (4, 5, 6, 7, 12, 13, 14, 15)}
_RIGHT |= {21: 23, 22: 24}
_BONES |= {
    _RIGHT[joint]: (_RIGHT.get(parent, parent), (-x, y, z))
    for joint, (parent, (x, y, z)) in _BONES.items()
    if joint in _RIGHT
}

# A part of a motion: the joint, the axis that it turns about, by how many
# radians, and the course of time. The joint None moves the whole body along the
# axis, by metres.
_WALK = (
    (12, 'x', 0.5, 'swing'),
    (16, 'x', -0.5, 'swing'),
    (4, 'x', -0.4, 'swing'),
    (8, 'x', 0.4, 'swing'),
)

# Parts that wait for their course of time.
_LIFT = ((4, 'z', 2.6), (8, 'z', -2.6))
_SIT = (
    *((hip, 'x', 1.4) for hip in (12, 16)),
    *((knee, 'x', -1.4) for knee in (13, 17)),
    (None, 'y', -0.4),
)
_APPROACH = ((None, 'z', -0.7),)
_in = lambda course, parts: tuple((*part, course) for part in parts)

# The parts of each motion. Two persons make the motions in `_TOGETHER`.
_MOTIONS = {
    'wave, right': ((8, 'z', -2.2, 'hold'), (9, 'z', -0.7, 'swing')),
    'wave, left': ((4, 'z', 2.2, 'hold'), (5, 'z', 0.7, 'swing')),
    'lift arms': _in('rise', _LIFT),
    'lower arms': _in('fall', _LIFT),
    'kick, right': ((16, 'x', 1.3, 'once'),),
    'kick, left': ((12, 'x', 1.3, 'once'),),
    'sit down': _in('rise', _SIT),
    'stand up': _in('fall', _SIT),
    'bow': ((1, 'x', -0.9, 'once'),),
    'jump': ((None, 'y', 0.35, 'hops'),),
    'approach': (*_WALK, *_in('rise', _APPROACH)),
    'part': (*_WALK, *_in('fall', _APPROACH)),
}
_TOGETHER = ('approach', 'part')
CLASS_NAMES = tuple(_MOTIONS)

# Metres from the first to the second body, at the start of 'approach'.
_APART = 2.2
_CAMERA_YAWS = {1: 0.0, 2: -0.785, 3: 0.785}
_NOISE = 0.01
_LENGTHS = (24, 56)


@functools.lru_cache(1)
def generate(
    num_subjects: int = 20, num_replications: int = 2, seed: int = 0
) -> ntu_arrays.Recordings:
  """Returns every motion by every subject, seen by three cameras.

  Each subject has its own setup of cameras.
  """
  rng = np.random.RandomState(seed)
  names = [
      ntu_files.Name((subject - 1) % 17 + 1, camera, subject, number, action)
      for subject, action, number, camera in itertools.product(
          range(1, num_subjects + 1),
          range(1, len(_MOTIONS) + 1),
          range(1, num_replications + 1),
          _CAMERA_YAWS,
      )
  ]
  count = len(names)
  sizes = rng.uniform(0.85, 1.15, num_subjects).astype(np.float32)
  vigours = rng.uniform(0.8, 1.2, num_subjects)
  lengths = rng.randint(*_LENGTHS, count)
  speeds = rng.uniform(0.75, 1.35, count)
  phases = rng.uniform(0, 2 * np.pi, count)
  yaws = [_CAMERA_YAWS[name.camera] for name in names]
  turns = rotations(yaws + rng.uniform(-0.15, 0.15, count), 'y')
  places = rng.uniform((-0.4, -0.3, 3.5), (0.4, 0.1, 4.5), (count, 3))
  noise = np.random.default_rng(seed)
  recordings = []
  for index, name in enumerate(names):
    motion, person = CLASS_NAMES[name.action - 1], name.subject - 1
    time = (np.arange(lengths[index]) + 0.5) / lengths[index]
    courses = _courses(time ** speeds[index], phases[index])
    pose = _pose(_MOTIONS[motion], courses, vigours[person]) * sizes[person]
    # The second body stands opposite to the first.
    other = pose * np.array((-1, 1, -1), np.float32)
    other[..., 2] -= _APART
    bodies = np.stack([pose, other], axis=1) @ turns[index].T
    bodies += places[index].astype(np.float32)
    bodies += _NOISE * noise.standard_normal(bodies.shape, np.float32)
    if motion not in _TOGETHER:
      bodies[:, 1] = 0
    bodies.setflags(write=False)  # Every access returns this very array.
    recordings.append(bodies)
  return ntu_arrays.Recordings(names, recordings)


def _courses(time: np.ndarray, phase: float) -> dict[str, np.ndarray]:
  """Returns the courses of time by name, [n] each, from -1 or 0 to 1."""
  ease = lambda x: np.clip(x, 0, 1) ** 2 * (3 - 2 * np.clip(x, 0, 1))
  rise = ease(1.4 * time - 0.2)
  return {
      'rise': rise,
      'fall': 1 - rise,
      'once': np.sin(np.pi * time) ** 2,
      'hold': ease(5 * time) * ease(5 * (1 - time)),
      'hops': np.sin(2 * np.pi * time) ** 2,
      'swing': np.sin(6 * np.pi * time + phase),
  }


def _pose(
    motion: Sequence[tuple], courses: Mapping[str, np.ndarray], vigour: float
) -> np.ndarray:
  """Returns the joints of a body, [n, 25, 3], before it is placed."""
  num_frames = len(courses['rise'])
  joints = np.zeros((num_frames, ntu_files.JOINTS, 3), np.float32)
  own = {}
  for joint, axis, amount, course in motion:
    value = amount * vigour * courses[course]
    if joint is None:
      joints[:, 0, 'xyz'.index(axis)] = value
    else:
      own[joint] = rotations(value, axis)
  unturned = np.eye(3, dtype=np.float32)
  turns = {0: unturned}
  for joint, (parent, bone) in _BONES.items():
    offset = turns[parent] @ np.array(bone, np.float32)
    joints[:, joint] = joints[:, parent] + offset
    turns[joint] = turns[parent] @ own.get(joint, unturned)
  return joints


def rotations(angles: np.ndarray, axis: str) -> np.ndarray:
  """Returns matrices [..., 3, 3] that turn by angles [...], in radians."""
  i, j = {'x': (1, 2), 'y': (2, 0), 'z': (0, 1)}[axis]
  matrix = np.zeros((*np.shape(angles), 3, 3), np.float32)
  matrix[..., range(3), range(3)] = 1
  matrix[..., i, i] = matrix[..., j, j] = np.cos(angles)
  matrix[..., j, i] = np.sin(angles)
  matrix[..., i, j] = -np.sin(angles)
  return matrix
