"""Synthetic motions: a stand-in for NTU RGB+D, in its format.

A body is a tree of 25 joints whose bones keep their lengths; a motion turns
some joints, or moves the body, as functions of time. Persons differ in size and
vigour, cameras in where they stand, recordings in length and speed, and every
position is noisy. Three pairs of motions ('lift arms' and 'lower arms', say)
have the same poses in opposite order.
"""

from collections.abc import Iterable
import functools

import numpy as np

from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_files

DATASET = 'synthetic motions, NOT NTU RGB+D'

# For every joint of a Kinect's skeleton: the joint it hangs on, and from there
# x (to its left, as it faces the camera), y (up) and z (away), in metres.
_BONES = (
    (-1, (0, 0, 0)),  # 0, the spine's base
    (0, (0, 0.25, 0)),  # 1, its middle
    (20, (0, 0.08, 0)),  # 2, the neck
    (2, (0, 0.16, 0)),  # 3, the head
    (20, (0.18, -0.04, 0)),  # 4 to 7, the left shoulder, elbow, wrist, hand
    (4, (0.04, -0.26, 0)),
    (5, (0.02, -0.24, 0)),
    (6, (0, -0.07, 0)),
    (20, (-0.18, -0.04, 0)),  # 8 to 11, the same to the right
    (8, (-0.04, -0.26, 0)),
    (9, (-0.02, -0.24, 0)),
    (10, (0, -0.07, 0)),
    (0, (0.09, -0.04, 0)),  # 12 to 15, the left hip, knee, ankle, foot
    (12, (0.02, -0.40, 0)),
    (13, (0.01, -0.39, 0)),
    (14, (0, -0.06, -0.10)),
    (0, (-0.09, -0.04, 0)),  # 16 to 19, the same to the right
    (16, (-0.02, -0.40, 0)),
    (17, (-0.01, -0.39, 0)),
    (18, (0, -0.06, -0.10)),
    (1, (0, 0.24, 0)),  # 20, the spine at the shoulders
    (7, (0, -0.07, 0)),  # 21 and 22, the left hand's tip and thumb
    (6, (0.03, -0.04, 0)),
    (11, (0, -0.07, 0)),  # 23 and 24, the same to the right
    (10, (-0.03, -0.04, 0)),
)
# A joint comes after the one that it hangs on.
_ORDER = (0, 1, 20, 2, 3, 4, 5, 6, 7, 21, 22, 8, 9, 10, 11, 23, 24) + tuple(
    range(12, 20)
)

_HIPS, _KNEES = (12, 16), (13, 17)

# A part of a motion: the joint, the axis that it turns about, by how many
# radians, and the course of time. The joint None moves the whole body along the
# axis, by metres.
_SIT = (
    *((hip, 'x', 1.4) for hip in _HIPS),
    *((knee, 'x', -1.4) for knee in _KNEES),
    (None, 'y', -0.4),
)
_LIFT_ARMS = ((4, 'z', 2.6), (8, 'z', -2.6))
_WALK = (
    (12, 'x', 0.5, 'swing'),
    (16, 'x', -0.5, 'swing'),
    (4, 'x', -0.4, 'swing'),
    (8, 'x', 0.4, 'swing'),
)


def _course(parts: Iterable, course: str) -> tuple:
  return tuple((*part, course) for part in parts)


# The name of each motion, and its parts for the first and the second body.
_MOTIONS = (
    ('wave, right', ((8, 'z', -2.2, 'hold'), (9, 'z', -0.7, 'swing')), None),
    ('wave, left', ((4, 'z', 2.2, 'hold'), (5, 'z', 0.7, 'swing')), None),
    ('lift arms', _course(_LIFT_ARMS, 'rise'), None),
    ('lower arms', _course(_LIFT_ARMS, 'fall'), None),
    ('kick, right', ((16, 'x', 1.3, 'once'),), None),
    ('kick, left', ((12, 'x', 1.3, 'once'),), None),
    ('sit down', _course(_SIT, 'rise'), None),
    ('stand up', _course(_SIT, 'fall'), None),
    ('bow', ((1, 'x', -0.9, 'once'),), None),
    ('jump', ((None, 'y', 0.35, 'hops'),), None),
    (
        'approach',
        (*_WALK, (None, 'z', -0.7, 'rise')),
        (*_WALK, (None, 'z', -0.7, 'rise')),
    ),
    (
        'part',
        (*_WALK, (None, 'z', -0.7, 'fall')),
        (*_WALK, (None, 'z', -0.7, 'fall')),
    ),
)
CLASS_NAMES = tuple(name for name, _, _ in _MOTIONS)

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

  Args:
    num_subjects: how many persons. Each has a setup of cameras of its own.
    num_replications: how often each makes each motion.
    seed: of all that is random.
  """
  rng = np.random.RandomState(seed)
  names = [
      ntu_files.Name(
          (subject - 1) % 17 + 1, camera, subject, replication, action
      )
      for subject in range(1, num_subjects + 1)
      for action in range(1, len(_MOTIONS) + 1)
      for replication in range(1, num_replications + 1)
      for camera in sorted(_CAMERA_YAWS)
  ]
  sizes = rng.uniform(0.85, 1.15, num_subjects)
  vigours = rng.uniform(0.8, 1.2, num_subjects)
  lengths = rng.randint(*_LENGTHS, len(names)).astype(np.int32)
  starts = ntu_arrays.starts_of(lengths)
  of_frame = np.repeat(np.arange(len(names)), lengths)
  # Time from 0 to 1, with a recording's own speed.
  place = np.arange(len(of_frame)) - starts[of_frame]
  time = (place + 0.5) / lengths[of_frame]
  time **= rng.uniform(0.75, 1.35, len(names))[of_frame]
  courses = _courses(time, rng.uniform(0, 2 * np.pi, len(names))[of_frame])

  subjects = np.array([name.subject - 1 for name in names])[of_frame]
  actions = np.array([name.action - 1 for name in names])[of_frame]
  bodies = [
      _pose(
          [parts[body] for _, *parts in _MOTIONS],
          actions,
          courses,
          vigours[subjects],
      )
      for body in range(ntu_files.BODIES)
  ]
  frames = np.stack(bodies, axis=1)
  frames *= sizes[subjects, None, None, None].astype(np.float32)
  # The second stands opposite to the first.
  frames[:, 1] *= np.array((-1, 1, -1), np.float32)
  frames[:, 1, :, 2] -= _APART
  frames = _seen(frames, names, of_frame, rng)
  noise = np.random.default_rng(seed).standard_normal(
      frames.shape, dtype=np.float32
  )
  frames += _NOISE * noise
  alone = np.array([parts is None for _, _, parts in _MOTIONS])
  frames[alone[actions], 1] = 0
  frames.setflags(write=False)  # It is the same array next time.
  return ntu_arrays.Recordings(names, frames, starts, lengths)


def _courses(time: np.ndarray, phase: np.ndarray) -> dict[str, np.ndarray]:
  """Returns the courses of time by name, [frames] each, from -1 or 0 to 1."""
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


def _pose(motions, actions, courses, vigours) -> np.ndarray:
  """Returns the joints of a body, [frames, 25, 3], each its action's motion."""
  angles: dict[tuple[int, str], np.ndarray] = {}
  shift = np.zeros((len(actions), 3))
  for action, motion in enumerate(motions):
    chosen = actions == action
    for joint, axis, amount, course in motion or ():
      value = (amount * vigours * courses[course])[chosen]
      if joint is None:
        shift[chosen, 'xyz'.index(axis)] += value
      else:
        angle = angles.setdefault((joint, axis), np.zeros(len(actions)))
        angle[chosen] += value
  # None is no turn.
  turns: dict[int, np.ndarray | None] = {0: None}
  joints = np.zeros((len(actions), ntu_files.JOINTS, 3), np.float32)
  joints[:, 0] = shift
  for joint in _ORDER:
    parent, bone = _BONES[joint]
    if joint:
      turn = turns[joint] = turns[parent]
      offset = np.array(bone, np.float32)
      joints[:, joint] = joints[:, parent]
      joints[:, joint] += offset if turn is None else turn @ offset
    for axis in 'xz':
      if (joint, axis) in angles:
        turn, own = turns[joint], rotations(angles[joint, axis], axis)
        turns[joint] = own if turn is None else turn @ own
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


def _seen(frames, names, of_frame, rng) -> np.ndarray:
  """Returns frames as their cameras see them."""
  yaws = np.array([_CAMERA_YAWS[name.camera] for name in names])
  yaws += rng.uniform(-0.15, 0.15, len(names))
  turns = rotations(yaws, 'y')[of_frame]
  places = rng.uniform((-0.4, -0.3, 3.5), (0.4, 0.1, 4.5), (len(names), 3))
  places = places.astype(np.float32)
  turned = frames.reshape(len(frames), -1, 3) @ turns.swapaxes(1, 2)
  return turned.reshape(frames.shape) + places[of_frame, None, None]
