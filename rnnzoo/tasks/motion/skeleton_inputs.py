"""Skeletons for a trained model: from `.skeleton` files, or arrays, checked.

    from rnnzoo import training
    from rnnzoo.tasks.motion import skeleton_inputs

    trained = training.load('runs/mine')
    files = sorted(pathlib.Path('recordings').glob('*.skeleton'))
    classes = trained.predict(skeleton_inputs.read(files))

Dimensions are those of `skeleton_frames`.
"""

from collections.abc import Iterable, Mapping, Sequence
import os
import sys
from typing import Any

import ml_collections
import numpy as np

from rnnzoo.tasks import array_checks
from rnnzoo.tasks.motion import ntu_files
from rnnzoo.tasks.motion import ntu_tracks
from rnnzoo.tasks.motion import skeleton_frames

_AXES = ('B', 'L', *ntu_tracks.FRAME)
_NOUN = 'real numbers of two bodies, zeros where one is absent,'
# Metres from the origin to where it should be: float16 rounds to less.
_NEAR = 1e-2


def read(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[np.ndarray]:
  """Returns inputs of `predict`: recordings float32 [frames, 2, 25, 3].

  The paths are one `.skeleton` file or B files, whose names may be any.

  Raises:
    OSError: a file cannot be read.
  """
  if isinstance(paths, str | bytes) or not isinstance(paths, Iterable):
    paths = [paths]
  recordings = []
  for path in paths:
    frames, dropped = ntu_tracks.read(path)
    recordings.append(frames)
    if dropped:  # Output is for results alone.
      print(f'WARNING: data: {path}: not used are {dropped}', file=sys.stderr)
  return recordings


def check(given: Any, data: ml_collections.ConfigDict) -> dict[str, np.ndarray]:
  """Returns 'frames', 'length' and 'offsets' as in the task's splits.

  Args:
    given: B recordings as the camera sees them, each [frames, 2, 25, 3], or a
      dict of 'frames' [B, L, 2, 25, 3] and 'length' int [B] as in the splits.
    data: `config.data` of the run.
  """
  recordings, are_centred = given, isinstance(given, Mapping)
  if are_centred:
    keys = 'frames', 'length'
    given = array_checks.by_name(given, keys, keys)
    frames = array_checks.numbers(given['frames'], 'frames', _AXES, noun=_NOUN)
    length = array_checks.integers(
        given['length'], 'length', *frames.shape[:2], row='recording'
    )
    # Nothing reads frames after a recording's end.
    recordings = [row[:n] for row, n in zip(frames, length, strict=True)]
  arrays = []
  for index, recording in enumerate(recordings):
    name = f'recording {index}'
    array = array_checks.numbers(recording, name, _AXES[1:], noun=_NOUN)
    ntu_files.check_frames(array, name)
    main = array[0, 0 if array[0, 0].any() else 1, skeleton_frames.SPINE]
    if are_centred and data.centre != 'none' and np.abs(main).max() > _NEAR:
      raise ValueError(
          "frames must have their origin at the middle of a body's spine, as"
          f' config.data.centre={data.centre!r} says; those of {name} have not;'
          ' a list of recordings may be as the camera sees them'
      )
    arrays.append(array.astype(np.float32))
  if not arrays:
    raise ValueError('recordings must be one at least; got none')
  # Equal for each recording: an answer does not depend on its batch.
  one = skeleton_frames.offsets(1, data.test_samplings, data)
  offsets = np.repeat(one, len(arrays), axis=0)
  inputs = skeleton_frames.pad(arrays, data, are_centred)
  return {**inputs, 'offsets': offsets}
