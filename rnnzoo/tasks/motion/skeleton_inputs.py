"""Skeletons for a trained model: from `.skeleton` files, or arrays, checked.

    from rnnzoo import training
    from rnnzoo.tasks.motion import skeleton_inputs

    trained = training.load('runs/mine')
    files = sorted(pathlib.Path('recordings').glob('*.skeleton'))
    classes = trained.predict(skeleton_inputs.read(files, trained.config))

Dimensions: B batch, L frames of the longest recording, T frames that a model
sees, S samplings of one recording.
"""

from collections.abc import Iterable, Sequence
import os
import sys
from typing import Any

import ml_collections
import numpy as np

from rnnzoo.tasks import array_checks
from rnnzoo.tasks import fields
from rnnzoo.tasks.motion import ntu_files
from rnnzoo.tasks.motion import ntu_tracks
from rnnzoo.tasks.motion import skeleton_frames

_KEYS = ('frames', 'length', 'offsets', 'label')
# Metres from the origin to where it should be: float16 rounds to less.
_NEAR = 1e-2
_ORIGINS = {
    'sequence': "the middle of the main body's spine in the first frame",
    'frame': "the middle of the main body's spine in each frame",
    'body': "the middle of each body's spine in each frame",
}


def read(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    config: ml_collections.ConfigDict,
) -> dict[str, np.ndarray]:
  """Returns inputs of `predict`, as `prepare` does, of `.skeleton` files.

  Args:
    paths: one file or B files, whose names may be any.
    config: the run's config, as `training.load` returns it.

  Raises:
    ValueError: a file is damaged, or a folder, or no path; there are none; or
      the config is of another task.
    OSError: a file cannot be read.
  """
  if isinstance(paths, str | bytes) or not isinstance(paths, Iterable):
    paths = [paths]
  recordings = []
  for path in map(fields.expand, paths):
    if path.is_dir():
      raise ValueError(
          f'{path} is a folder; name the files in it, as'
          f" sorted(pathlib.Path({str(path)!r}).glob('*.skeleton')) does"
      )
    frames, dropped = ntu_tracks.read(path)
    recordings.append(frames)
    if dropped:  # Output is for results alone.
      warning = f'WARNING: data: {path}: not used are {dropped}'
      print(warning, file=sys.stderr, flush=True)
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

  Raises:
    ValueError: an array has another shape, a number that is no position or a
      frame that shows nobody, there are none, or the config is of another task.
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
    array = _numbers(recording, f'recording {index}', ('frames',))
    _check_positions(array[np.newaxis], f'recording {index}')
    arrays.append(array.astype(np.float32))
    _present(arrays[-1][np.newaxis], np.ones((1, len(array)), bool), index)
  inputs = skeleton_frames.pad(arrays, config.data)
  return {**inputs, 'offsets': _offsets(len(arrays), config.data)}


def check(given: Any, data: ml_collections.ConfigDict) -> dict[str, np.ndarray]:
  """Returns 'frames', 'length' int32 and 'offsets' float32, if they fit.

  Args:
    given: a dict of such arrays; without 'offsets', it gets `prepare`'s. A
      'label', as in the splits of the task, is left out.
    data: `config.data` of the run.
  """
  array_checks.check(given, _KEYS[:2])
  array_checks.by_name(given, _KEYS)
  frames = _numbers(given['frames'], 'frames', ('B', 'L'))
  if frames.dtype not in (np.float16, np.float32):
    frames = frames.astype(np.float32)
  batch, most = frames.shape[:2]
  length = array_checks.integers(
      given['length'],
      'length',
      batch,
      most,
      of=', the frames that there are',
      row='recording',
  )
  valid = np.arange(most) < length[:, np.newaxis]
  # Nothing reads frames after a recording's end.
  frames = np.where(valid[:, :, None, None, None], frames, 0)
  _check_positions(frames, 'frames')
  _check_origin(frames, _present(frames, valid), valid, data.centre)
  offsets = given.get('offsets')
  if offsets is None:
    offsets = _offsets(batch, data)
  else:
    offsets = _checked_offsets(offsets, batch, data.num_steps)
  return {'frames': frames, 'length': length, 'offsets': offsets}


def _numbers(given: Any, name: str, axes: tuple[str, ...]) -> np.ndarray:
  """Returns an array of frames, which have these axes before their own."""
  try:
    return array_checks.numbers(given, name, (*axes, *ntu_tracks.FRAME))
  except ValueError as error:
    if getattr(given, 'shape', ())[-3:] != (1, *ntu_tracks.FRAME[1:]):
      raise
    raise ValueError(
        f'{error}; the second body of a recording of one is zeros, as by'
        ' np.concatenate([frames, np.zeros_like(frames)], axis=-3)'
    ) from error


def _check_positions(frames: np.ndarray, name: str) -> None:
  """Raises ValueError for a number that is no position: frames [B, L, ...]."""
  if place := ntu_files.find_wrong(frames):
    row, frame, body, joint, axis = place
    of = f'recording {row}, ' if name == 'frames' else ''
    raise ValueError(
        f'{name} must be finite numbers of metres, within'
        f' {ntu_files.MOST_METRES:g}; {of}frame {frame}, body {body}, joint'
        f' {joint} has {"xyz"[axis]}={frames[place]:g}'
    )


def _present(
    frames: np.ndarray, valid: np.ndarray, first: int = 0
) -> np.ndarray:
  """Returns which bodies are seen, bool [B, L, 2]; some in each valid frame."""
  present = np.any(frames != 0, axis=(3, 4))
  if (empty := valid & ~present.any(2)).any():
    row, frame = np.argwhere(empty)[0]
    raise ValueError(
        f'frame {frame} of recording {first + row}, which has a length of'
        f' {valid[row].sum()}, shows nobody: all is zero; leave such frames'
        ' out, as array[array.any(axis=(1, 2, 3))] does, and do not count'
        ' padding in the length'
    )
  return present


def _offsets(batch: int, data: ml_collections.ConfigDict) -> np.ndarray:
  # Equal for each recording: an answer does not depend on its batch.
  one = skeleton_frames.offsets(1, data.test_samplings, data)
  return np.repeat(one, batch, axis=0)


def _checked_offsets(given: Any, batch: int, num_steps: int) -> np.ndarray:
  """Returns offsets as float32 [B, S, T]."""
  offsets = array_checks.numbers(given, 'offsets', (batch, 'S', num_steps))
  rounded = offsets.astype(np.float32)
  wrong = ~((offsets >= 0) & (rounded < 1))
  if wrong.any():
    raise ValueError(
        'offsets must be numbers from 0, below 1; got'
        f' {offsets[wrong][0]:.15g}; without offsets, the config has some'
    )
  return rounded


def _check_origin(
    frames: np.ndarray, present: np.ndarray, valid: np.ndarray, centre: str
) -> None:
  """Raises ValueError unless the origin is where `centre` has it."""
  if centre == 'none':  # Any origin might be the camera.
    return
  spines = frames[..., skeleton_frames.SPINE, :].astype(np.float32)
  if centre == 'body':
    one_is_far = np.abs(spines[:, :, :1]).max(-1) > _NEAR
    spine = np.where(one_is_far, spines[:, :, 0], spines[:, :, 1])
  else:
    spine = skeleton_frames.origins(spines, present)
  if centre == 'sequence':
    spine, valid = spine[:, :1], valid[:, :1]
  far = valid & (np.abs(spine).max(-1) > _NEAR)
  if far.any():
    row, frame = np.argwhere(far)[0]
    where = ', '.join(f'{x:.3g}' for x in spine[row, frame])
    raise ValueError(
        f'frames must have their origin at {_ORIGINS[centre]}, as'
        f' config.data.centre={centre!r} says; in frame {frame} of recording'
        f' {row} that is at ({where}) m. rnnzoo.tasks.motion.skeleton_inputs'
        '.prepare(recordings, config) makes inputs of recordings as the camera'
        ' sees them, and .read(paths, config) of .skeleton files'
    )
