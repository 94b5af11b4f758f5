"""Synthetic motions: a stand-in for NTU RGB+D, in its format.

A body is a tree of 25 joints whose bones keep their lengths; a motion turns
some joints, or moves the body, as functions of time. Persons differ in size and
vigour, cameras in where they stand, recordings in length and speed, and every
position is noisy. Three pairs of motions ('lift arms' and 'lower arms', say)
have equal poses in opposite order.
"""

from collections.abc import Sequence
import functools

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
    right: (_RIGHT.get(parent, parent), (-x, y, z))
    for left, right in _RIGHT.items()
    for parent, (x, y, z) in [_BONES[left]]
}

# A part of a motion: the joint, the axis that it turns about, by how many
# radians, and the course of time. The joint None moves the whole body along the
# axis, by metres.
_LIFT = ((4, 'z', 2.6, 'rise'), (8, 'z', -2.6, 'rise'))
_SIT = (
    *((hip, 'x', 1.4, 'rise') for hip in (12, 16)),
    *((knee, 'x', -1.4, 'rise') for knee in (13, 17)),
    (None, 'y', -0.4, 'rise'),
)
_WALK = (
    (12, 'x', 0.5, 'swing'),
    (16, 'x', -0.5, 'swing'),
    (4, 'x', -0.4, 'swing'),
    (8, 'x', 0.4, 'swing'),
    (None, 'z', -0.7, 'rise'),
)
_back = lambda parts: tuple(
    (*part, 'fall' if course == 'rise' else course) for *part, course in parts
)

# The parts of each motion. Two persons make the last two.
_MOTIONS = {
    'wave, right': ((8, 'z', -2.2, 'hold'), (9, 'z', -0.7, 'swing')),
    'wave, left': ((4, 'z', 2.2, 'hold'), (5, 'z', 0.7, 'swing')),
    'lift arms': _LIFT,
    'lower arms': _back(_LIFT),
    'kick, right': ((16, 'x', 1.3, 'once'),),
    'kick, left': ((12, 'x', 1.3, 'once'),),
    'sit down': _SIT,
    'stand up': _back(_SIT),
    'bow': ((1, 'x', -0.9, 'once'),),
    'jump': ((None, 'y', 0.35, 'hops'),),
    'approach': _WALK,
    'part': _back(_WALK),
}
CLASS_NAMES = tuple(_MOTIONS)

_CAMERA_YAWS = {1: 0.0, 2: -0.785, 3: 0.785}


@functools.lru_cache(1)
def generate(num_subjects: int = 20) -> ntu_arrays.Recordings:
  """Returns every motion twice by every subject, each seen by three cameras."""
  names = [
      ntu_files.Name(subject % 17 + 1, camera, subject + 1, number, action)
      for subject in range(num_subjects)
      for action in range(1, len(_MOTIONS) + 1)
      for number in (1, 2)
      for camera in _CAMERA_YAWS
  ]
  rng, noise = np.random.RandomState(0), np.random.default_rng(0)
  count = len(names)
  sizes = rng.uniform(0.85, 1.15, num_subjects).astype(np.float32)
  vigours = rng.uniform(0.8, 1.2, num_subjects)
  lengths = rng.randint(24, 56, count)
  speeds = rng.uniform(0.75, 1.35, count)
  phases = rng.uniform(0, 2 * np.pi, count)
  yaws = [_CAMERA_YAWS[name.camera] for name in names]
  turns = rotations(yaws + rng.uniform(-0.15, 0.15, count), 'y')
  places = rng.uniform((-0.4, -0.3, 3.5), (0.4, 0.1, 4.5), (count, 3))
  recordings = []
  for index, name in enumerate(names):
    motion, person = CLASS_NAMES[name.action - 1], name.subject - 1
    time = (np.arange(lengths[index]) + 0.5) / lengths[index]
    time **= speeds[index]
    pose = _pose(_MOTIONS[motion], time, phases[index], vigours[person])
    pose *= sizes[person]
    # The second body stands opposite to the first, 2.2 m away.
    other = pose * np.array((-1, 1, -1), np.float32)
    other[..., 2] -= 2.2
    bodies = np.stack([pose, other], axis=1) @ turns[index].T
    bodies += places[index].astype(np.float32)
    bodies += 0.01 * noise.standard_normal(bodies.shape, np.float32)
    if motion not in CLASS_NAMES[-2:]:
      bodies[:, 1] = 0
    bodies.setflags(write=False)  # Every call returns this very array.
    recordings.append(bodies)
  return ntu_arrays.Recordings(names, recordings)


def _pose(
    motion: Sequence[tuple], time: np.ndarray, phase: float, vigour: float
) -> np.ndarray:
  """Returns the joints of a body, [n, 25, 3], before it is placed."""
  ease = lambda x: np.clip(x, 0, 1) ** 2 * (3 - 2 * np.clip(x, 0, 1))
  rise = ease(1.4 * time - 0.2)
  # From -1 or 0 to 1.
  courses = {
      'rise': rise,
      'fall': 1 - rise,
      'once': np.sin(np.pi * time) ** 2,
      'hold': ease(5 * time) * ease(5 * (1 - time)),
      'hops': np.sin(2 * np.pi * time) ** 2,
      'swing': np.sin(6 * np.pi * time + phase),
  }
  joints = np.zeros((len(time), ntu_files.JOINTS, 3), np.float32)
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
