"""Skeletons for a trained model: from `.skeleton` files, or arrays, checked.

    from rnnzoo import training
    from rnnzoo.tasks.motion import skeleton_inputs

    trained = training.load('runs/mine')
    files = sorted(pathlib.Path('recordings').glob('*.skeleton'))
    classes = trained.predict(skeleton_inputs.read(files, trained.config))

Dimensions are those of `skeleton_frames`.
"""

from collections.abc import Iterable, Sequence
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
_KEYS = ('frames', 'length', 'offsets', 'label')
# Metres from the origin to where it should be: float16 rounds to less.
_NEAR = 1e-2


def read(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    config: ml_collections.ConfigDict,
) -> dict[str, np.ndarray]:
  """Returns inputs of `predict`, as `prepare` does, of `.skeleton` files.

  Args:
    paths: one file or B files, whose names may be any.
    config: the run's config, as `training.load` returns it.

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
  return prepare(recordings, config)


def prepare(
    recordings: Sequence[np.ndarray], config: ml_collections.ConfigDict
) -> dict[str, np.ndarray]:
  """Returns inputs of `predict`, of recordings as the camera sees them.

  Args:
    recordings: B arrays [frames, 2, 25, 3], each of as many frames as it has:
      x, y, z in metres; the main body first, and zeros where a body is absent.
    config: the run's config, as `training.load` returns it.

  Returns:
    'frames' [B, L, 2, 25, 3], padded by zeros, thinned out and centred as
    `config.data` says; 'length' int32 [B]; 'offsets' float32 [B, S, T],
    `config.data.test_samplings` samplings that all recordings share.
  """
  if config.get('task') != 'skeletons':
    raise ValueError(
        'the config must be of a run of the task skeletons, as'
        f' training.load(run).config; it is of {config.get("task")!r}'
    )
  if not len(recordings):
    raise ValueError('recordings must be one at least; got none')
  arrays = []
  for index, recording in enumerate(recordings):
    name = f'recording {index}'
    array = array_checks.numbers(recording, name, _AXES[1:], noun=_NOUN)
    ntu_files.check_frames(array, name)
    arrays.append(array.astype(np.float32))
  inputs = skeleton_frames.pad(arrays, config.data)
  return {**inputs, 'offsets': _offsets(len(arrays), config.data)}


def check(given: Any, data: ml_collections.ConfigDict) -> dict[str, np.ndarray]:
  """Returns 'frames', 'length' int32 and 'offsets' float32, if they fit.

  Args:
    given: a dict of such arrays; without 'offsets', it gets `prepare`'s. A
      'label', as in the splits of the task, is left out.
    data: `config.data` of the run.
  """
  given = array_checks.by_name(given, _KEYS, _KEYS[:2])
  frames = array_checks.numbers(given['frames'], 'frames', _AXES, noun=_NOUN)
  if frames.dtype not in (np.float16, np.float32):
    frames = frames.astype(np.float32)
  batch, most = frames.shape[:2]
  length = array_checks.integers(
      given['length'], 'length', batch, most, row='recording'
  )
  valid = np.arange(most) < length[:, np.newaxis]
  # Nothing reads frames after a recording's end.
  frames = np.where(valid[:, :, None, None, None], frames, 0)
  for row, count in enumerate(length):
    ntu_files.check_frames(frames[row, :count], f'recording {row} of frames')
  main = frames[:, 0, 0]  # In the first frame, or the other body there.
  seen = np.where(main.any(axis=(1, 2), keepdims=True), main, frames[:, 0, 1])
  far = np.abs(seen[:, skeleton_frames.SPINE]).max(axis=-1) > _NEAR
  if data.centre != 'none' and far.any():  # Any origin might be the camera.
    raise ValueError(
        "frames must have their origin at the middle of a body's spine, as"
        f' config.data.centre={data.centre!r} says; those of recording'
        f' {far.argmax()} have not; skeleton_inputs.prepare makes inputs of'
        ' recordings as the camera sees them, .read of .skeleton files'
    )
  offsets = given.get('offsets', _offsets(batch, data))
  axes = (batch, 'S', data.num_steps)
  offsets = array_checks.numbers(offsets, 'offsets', axes)
  rounded = offsets.astype(np.float32)
  wrong = ~((offsets >= 0) & (rounded < 1))
  if wrong.any():
    raise ValueError(
        'offsets must be numbers from 0, below 1; got'
        f' {offsets[wrong][0]:.15g}; without offsets, the config has some'
    )
  return {'frames': frames, 'length': length, 'offsets': rounded}


def _offsets(batch: int, data: ml_collections.ConfigDict) -> np.ndarray:
  # Equal for each recording: an answer does not depend on its batch.
  one = skeleton_frames.offsets(1, data.test_samplings, data)
  return np.repeat(one, batch, axis=0)
