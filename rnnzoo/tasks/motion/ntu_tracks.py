"""Tracks of persons: which bodies of a recording are one person.

A camera numbers the bodies that it sees. It gives a new id to a person whom it
lost, sometimes exchanges the ids of two persons, and sees ghosts: a second body
in the place of a person. Here each body gets its own id back (`follow`), bodies
of one person are joined, and the two main persons are chosen (`arrange`).
"""

from collections.abc import Mapping, Sequence
import itertools
import math
import os
from typing import NamedTuple

import numpy as np

from rnnzoo.tasks.motion import ntu_files

# Persons of a recording that are used, and the shape of a frame of them.
BODIES = 2
FRAME = (BODIES, ntu_files.JOINTS, 3)

# Two bodies are one person if the later begins this near to the earlier's last
# place: mean distance of joints in metres, and metres for each frame between.
_REACH, _STEP = 0.5, 0.1
# Two persons exchanged their ids if one jumps this far, to its partner's last
# place. Two bodies are one person if their joints are this near on average.
_JUMP, _SAME = 1.0, 0.2

_NOWHERE = (math.inf,) * 3


class Body(NamedTuple):
  """One body."""

  # int [n], rising: the frames that show it, counted from 0.
  frames: np.ndarray
  # float32 [n, 25, 3], x, y, z in metres: to the right, up, and away from the
  # camera.
  joints: np.ndarray


def read(path: str | os.PathLike[str]) -> tuple[np.ndarray, str]:
  """Returns the main persons of a `.skeleton` file, as `arrange` does."""
  frames = ntu_files.read(path)
  return arrange(follow(frames), len(frames))


def follow(
    frames: Sequence[Mapping[ntu_files.Id, Sequence[float]]],
) -> list[Body]:
  """Returns the bodies of a file in the order they came.

  The frames, with bodies by id, are those of `ntu_files.read`.
  """
  bodies: dict[ntu_files.Id, tuple[list, list]] = {}
  owners: dict[ntu_files.Id, ntu_files.Id] = {}
  last: dict[ntu_files.Id, tuple[int, list[float]]] = {}
  for frame, here in enumerate(frames):
    middle = lambda x: [math.fsum(x[n::3]) / ntu_files.JOINTS for n in range(3)]
    places = {key: middle(joints) for key, joints in here.items()}
    _change_back(owners, last, places, frame)
    for key, joints in here.items():
      shown, positions = bodies.setdefault(owners[key], ([], []))
      shown.append(frame)
      positions.append(joints)
      last[owners[key]] = frame, places[key]
  array = lambda x: np.array(x, np.float32).reshape(-1, *FRAME[1:])
  return [Body(np.array(shown), array(x)) for shown, x in bodies.values()]


def _change_back(owners: dict, last: dict, places: dict, frame: int) -> None:
  """Changes the owners of ids where two persons exchanged theirs.

  `owners` has the body of each id, `last` each body's last frame and place, and
  `places` the place of each id in this frame.
  """
  for one, place in places.items():
    mine = owners.setdefault(one, one)
    before, was = last.get(mine, (frame, place))
    if math.dist(place, was) < _JUMP + _STEP * (frame - before):
      continue
    for other, body in owners.items():
      was = last[body][1] if body in last else _NOWHERE
      stays = math.dist(places.get(other, _NOWHERE), was) < _REACH
      if math.dist(place, was) < _REACH and not stays:
        owners[one], owners[other] = body, mine
        break


def arrange(bodies: Sequence[Body], num_frames: int) -> tuple[np.ndarray, str]:
  """Returns the two main persons, and a text of the frames and persons dropped.

  A body whose joints are all zero is absent. Bodies that share no frame, or lie
  upon each other there, are one person if the later begins near to the
  earlier's last place. The main person is the one whose x, y and z vary most,
  as the data set's authors chose it. Frames without a main person are dropped.

  Returns:
    float32 [n, 2, 25, 3], zeros where a person is absent; and a text, '' where
    nothing is dropped.
  """
  persons = _join(bodies)
  frames = np.zeros((num_frames, *FRAME), np.float32)
  for index, person in enumerate(persons[:BODIES]):
    frames[person.frames, index] = person.joints
  frames = frames[frames.any(axis=(1, 2, 3))]
  seen = len({frame for person in persons for frame in person.frames})
  whole = f'of {num_frames} frames, which show'
  dropped = (
      (num_frames - seen, f'{whole} nobody'),
      (seen - len(frames), f'{whole} neither main person'),
      (len(persons) - BODIES, f'of {len(persons)} persons'),
  )
  text = '; '.join(f'{count} {noun}' for count, noun in dropped if count > 0)
  return frames, text


def _join(bodies: Sequence[Body]) -> list[Body]:
  """Returns the persons, the main one first; the nearest bodies join first."""
  shown = []
  for body in bodies:
    seen = body.joints.any(axis=(1, 2))
    if seen.any():
      shown.append(Body(body.frames[seen], body.joints[seen]))
  persons = dict(enumerate(shown))
  # The person of each body.
  owners = list(persons)
  for _, i, j in sorted(_links(shown)):
    i, j = owners[i], owners[j]
    if i == j or _are_apart(persons[i], persons[j]):
      continue
    both = zip(persons[i], persons.pop(j), strict=True)
    frames, joints = map(np.concatenate, both)
    frames, first = np.unique(frames, return_index=True)
    persons[i] = Body(frames, joints[first])
    owners = [i if owner == j else owner for owner in owners]
  spread = lambda body: -float(np.sum(np.var(body.joints, axis=(0, 1))))
  return sorted(persons.values(), key=spread)


def _links(bodies: Sequence[Body]) -> list[tuple[float, int, int]]:
  """Returns (distance, i, j): body i begins near to the last place of j."""
  places = [body.joints.mean(axis=1) for body in bodies]
  links = []
  for i, j in itertools.permutations(range(len(bodies)), 2):
    begin, frames = bodies[i].frames[0], bodies[j].frames
    before = np.searchsorted(frames, begin) - 1
    if before >= 0:
      distance = math.dist(places[i][0], places[j][before])
      if distance < _REACH + _STEP * (begin - frames[before]):
        links.append((distance, i, j))
  return links


def _are_apart(one: Body, other: Body) -> bool:
  """Returns whether a frame that shows both bodies has them in two places."""
  _, i, j = np.intersect1d(one.frames, other.frames, True, return_indices=True)
  distances = np.linalg.norm(one.joints[i] - other.joints[j], axis=-1)
  return bool((distances.mean(axis=1) > _SAME).any())
