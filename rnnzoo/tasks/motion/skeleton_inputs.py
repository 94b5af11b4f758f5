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

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from rnnzoo import settings
from rnnzoo.tasks import array_inputs
from rnnzoo.tasks import fields
from rnnzoo.tasks.motion import ntu_arrays
from rnnzoo.tasks.motion import ntu_files

# Frames of skeletons: which ones a model sees, and from where.
#
# A recording is cut into T segments of equal length, and a model sees one frame
# of each: a random one in training, so that no two epochs see the same, and in
# evaluation several fixed random choices, whose logits are averaged. Training
# may also turn and scale the whole recording.
#
# Dimensions: N recordings, B batch, L frames of the longest recording, T
# segments, S samplings of one recording.
#
# References: Li, Li, Cook, Zhu, Gao, 2018, IndRNN, section 5.4 (segments of 20
# frames).


CENTRES = ('sequence', 'frame', 'body', 'none')


def pad(
    recordings: ntu_arrays.Recordings,
    indices: np.ndarray,
    max_frames: int,
    centre: str,
    dtype: np.typing.DTypeLike,
) -> dict[str, np.ndarray]:
  """Returns recordings of one length, filled up with zeros.

  Args:
    recordings: all there are.
    indices: int [N], which of them.
    max_frames: of a longer recording, this many frames are taken, as far apart
      as possible.
    centre: where the origin is: 'sequence' for the middle of the main body's
      spine in the first frame, 'frame' for the same in each frame, 'body' for
      the middle of its own spine, for each body in each frame, 'none' for the
      camera.
    dtype: of the result.

  Returns:
    'frames' [N, L, 2, 25, 3] and 'length' int32 [N].
  """
  lengths = np.minimum(recordings.lengths[indices], max_frames)
  shape = (len(indices), int(lengths.max()), *recordings.frames.shape[1:])
  frames = np.zeros(shape, dtype)
  for row, index in enumerate(indices):
    whole, length = recordings.of(index), int(lengths[row])
    if length < len(whole):
      whole = whole[(np.arange(length) * len(whole)) // length]
    frames[row, :length] = _centred(whole, centre)
  return {'frames': frames, 'length': lengths.astype(np.int32)}


def _centred(frames: np.ndarray, centre: str) -> np.ndarray:
  """Returns frames [n, 2, 25, 3] around another origin; absent stays zero."""
  if centre == 'none':
    return frames
  seen = np.any(frames != 0, axis=3, keepdims=True)
  present = seen.any(axis=(2, 3))
  # A spine that was not seen is in the middle of the joints that were.
  middle = frames.sum(axis=2) / np.maximum(seen.sum(axis=2), 1)
  spine = ntu_files.CENTRE
  origin = np.where(seen[:, :, spine], frames[:, :, spine], middle)
  if centre != 'body':
    origin = origins(origin, present)[:, np.newaxis]
  if centre == 'sequence':
    # The first frame that shows somebody.
    origin = origin[[present.any(axis=1).argmax()]]
  moved = frames - origin[:, :, np.newaxis]
  return np.where(seen, moved, 0).astype(frames.dtype)


def origins(spines: np.ndarray, present: np.ndarray) -> np.ndarray:
  """Returns the middle of the main body's spine in each frame, [..., 3].

  Where the main body is not seen for a while, it is the other one's.

  Args:
    spines: [..., 2, 3], their middle.
    present: bool [..., 2], whether a body is seen.
  """
  return np.where(present[..., :1], spines[..., 0, :], spines[..., 1, :])


def offsets(
    num_recordings: int, num_samplings: int, num_steps: int, seed: int
) -> np.ndarray:
  """Returns where in each segment frames are taken, float32 [N, S, T].

  Args:
    num_recordings: N.
    num_samplings: S; 0 for one sampling of the middle of each segment.
    num_steps: T.
    seed: of `np.random.default_rng`.

  Returns:
    Numbers from 0, the segment's start, to below 1, its end.
  """
  if not num_samplings:
    return np.full((num_recordings, 1, num_steps), 0.5, np.float32)
  shape = (num_recordings, num_samplings, num_steps)
  return np.random.default_rng(seed).random(shape, np.float32)


def sample(frames: jax.Array, length: jax.Array, where: jax.Array) -> jax.Array:
  """Returns one frame of each segment, [B, S, T, 2, 25, 3].

  Segment t of a recording of n frames is from t n / T to (t + 1) n / T. With
  fewer than T frames some are taken twice.

  Args:
    frames: [B, L, 2, 25, 3].
    length: int [B], n.
    where: [B, S, T], as `offsets` makes them.
  """
  num_steps = where.shape[-1]
  segments = jnp.arange(num_steps) + where
  last = length[:, jnp.newaxis, jnp.newaxis]
  index = jnp.floor(segments * (last / num_steps)).astype(jnp.int32)
  index = jnp.clip(index, 0, last - 1)
  flat = index.reshape(len(index), -1, 1, 1, 1)
  chosen = jnp.take_along_axis(frames, flat, axis=1)
  return chosen.reshape(*index.shape, *frames.shape[2:])


def turn_and_scale(
    x: jax.Array, key: jax.Array, degrees: float, scale: float
) -> jax.Array:
  """Returns recordings, each turned and scaled at random as a whole.

  Args:
    x: [B, ..., 3].
    key: of the random numbers.
    degrees: the greatest angle, to either side, about each of x, y and z.
    scale: the greatest change of size: 0.1 for factors from 0.9 to 1.1.
  """
  turn_key, scale_key = jax.random.split(key)
  count = len(x)
  greatest = jnp.deg2rad(degrees)
  angles = jax.random.uniform(
      turn_key, (count, 3), minval=-greatest, maxval=greatest
  )
  factors = jax.random.uniform(
      scale_key, (count, 1, 1), minval=1 - scale, maxval=1 + scale
  )
  matrices = factors * _rotation(angles)
  flat = x.reshape(count, -1, 3)
  # On a GPU the default precision would round positions to 10 bits.
  turned = jnp.einsum(
      'bnj,bij->bni', flat, matrices, precision=jax.lax.Precision.HIGHEST
  )
  return turned.reshape(x.shape)


def _rotation(angles: jax.Array) -> jax.Array:
  """Returns matrices [B, 3, 3] that turn about x, then y, then z.

  Args:
    angles: in radians, [B, 3].
  """
  cos, sin = jnp.cos(angles).T, jnp.sin(angles).T
  zero, one = jnp.zeros_like(cos[0]), jnp.ones_like(cos[0])
  rows = lambda *entries: jnp.stack(entries, -1).reshape(-1, 3, 3)
  about_x = rows(one, zero, zero, zero, cos[0], -sin[0], zero, sin[0], cos[0])
  about_y = rows(cos[1], zero, sin[1], zero, one, zero, -sin[1], zero, cos[1])
  about_z = rows(cos[2], -sin[2], zero, sin[2], cos[2], zero, zero, zero, one)
  product = lambda a, b: jnp.einsum(
      'bij,bjk->bik', a, b, precision=jax.lax.Precision.HIGHEST
  )
  return product(about_z, product(about_y, about_x))


_FRAME = (ntu_files.BODIES, ntu_files.JOINTS, 3)
_KEYS = ('frames', 'length', 'offsets')
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
  """Returns inputs of `predict`, of `.skeleton` files.

  Args:
    paths: of one file or of B of them, whose names may be any.
    config: of the run, as `training.load` returns it.

  Returns:
    A dict of 'frames', 'length' and 'offsets', as `prepare` returns it.

  Raises:
    ValueError: a file is not whole, or a folder, or no path; there are none; or
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
    recordings.append(recording := ntu_files.read(path))
    if text := ntu_files.left_out(recording):
      # Output is for results alone.
      print(
          f'WARNING: data: {path}: not used are {text}',
          file=sys.stderr,
          flush=True,
      )
  return prepare(list(map(ntu_files.arrange, recordings)), config)


def prepare(
    recordings: Sequence[np.ndarray], config: ml_collections.ConfigDict
) -> dict[str, np.ndarray]:
  """Returns inputs of `predict`, of recordings as the camera sees them.

  Args:
    recordings: B arrays [frames, 2, 25, 3], each of as many frames as it has:
      x, y, z in metres; the main body first, and zeros where a body is absent.
    config: of the run, as `training.load` returns it.

  Returns:
    'frames' [B, L, 2, 25, 3], padded by zeros, thinned out and centred as
    `config.data` says; 'length' int32 [B]; 'offsets' float32 [B, S, T], the
    same `config.data.test_samplings` samplings for each recording.

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
  data, arrays = config.data, []
  for index, recording in enumerate(recordings):
    array = np.asarray(recording)
    if array.shape[1:] != _FRAME or not len(array):
      raise ValueError(
          'recordings must be arrays [frames, 2, 25, 3]; the shape of'
          f' recording {index} is {list(array.shape)}{_hint(array.shape)}'
      )
    _check_positions(array[np.newaxis], f'recording {index}')
    array = array.astype(np.float32)
    if (empty := ~array.any(axis=(1, 2, 3))).any():
      raise ValueError(
          f'frame {empty.argmax()} of recording {index} shows nobody: all is'
          ' zero; leave such frames out, as array[array.any(axis=(1, 2, 3))]'
          ' does'
      )
    arrays.append(array)
  lengths = np.array([len(array) for array in arrays], np.int32)
  whole = ntu_arrays.Recordings(
      [ntu_files.Name(1, 1, 1, 1, 1)] * len(arrays),
      np.concatenate(arrays),
      ntu_arrays.starts_of(lengths),
      lengths,
  )
  inputs = pad(
      whole,
      np.arange(len(arrays)),
      data.max_frames,
      data.centre,
      data.frames_dtype,
  )
  return {**inputs, 'offsets': _offsets(len(arrays), data)}


def check(given: Any, data: ml_collections.ConfigDict) -> dict[str, np.ndarray]:
  """Returns 'frames', 'length' int32 and 'offsets' float32, if they fit.

  Args:
    given: a dict of these; without 'offsets', those of `prepare`. A 'label', as
      in the splits of the task, is left out.
    data: `config.data` of the run.

  Raises:
    ValueError: an array does not fit; the message has the given shape, dtype
      or number, and names one that would work.
  """
  array_inputs.check(given, _KEYS[:2])
  for key in given:
    if key not in (*_KEYS, 'label'):
      raise ValueError(
          "inputs must have no keys but 'frames', 'length' and 'offsets'; got"
          f' {key!r}'
      )
  frames = np.asarray(given['frames'])
  if frames.shape[2:] != _FRAME or 0 in frames.shape:
    raise ValueError(
        'frames must be [B, L, 2, 25, 3], with none of them 0; the shape is'
        f' {list(frames.shape)}{_hint(frames.shape)}'
    )
  if frames.dtype not in (np.float16, np.float32):
    if frames.dtype.kind not in 'iuf' and frames.dtype.name != 'bfloat16':
      raise ValueError(f'frames must hold real numbers; got {frames.dtype}')
    frames = frames.astype(np.float32)
  batch, most = frames.shape[:2]
  length = array_inputs.counts(
      given['length'],
      'length',
      batch,
      most,
      of='the frames that there are',
      row='recording',
  )
  valid = np.arange(most) < length[:, np.newaxis]
  # Nothing reads frames after a recording's end.
  frames = np.where(valid[:, :, None, None, None], frames, 0)
  _check_positions(frames, 'frames')
  present = np.any(frames != 0, axis=(3, 4))
  if (empty := valid & ~present.any(2)).any():
    row, frame = np.argwhere(empty)[0]
    raise ValueError(
        f'frame {frame} of recording {row}, which has a length of'
        f' {length[row]}, shows nobody: all is zero; leave such frames out, and'
        ' do not count padding in the length'
    )
  _check_origin(frames, present, valid, data.centre)
  offsets = given.get('offsets')
  if offsets is None:
    offsets = _offsets(batch, data)
  else:
    offsets = _checked_offsets(offsets, batch, data.num_steps)
  return {'frames': frames, 'length': length, 'offsets': offsets}


def _hint(shape: tuple[int, ...]) -> str:
  """Returns how frames of another shape are given, if that is seen."""
  if shape[-2:] == _FRAME[1:]:
    if len(shape) > 2 and shape[-3] == 1:
      return (
          '; the second body of a recording of one is zeros, as by'
          ' np.concatenate([frames, np.zeros_like(frames)], axis=-3)'
      )
    if shape[-3:] == _FRAME and len(shape) == 4:
      return '; frames[None] makes a batch of one recording'
  return ''


def _check_positions(frames: np.ndarray, name: str) -> None:
  """Raises ValueError for a number that is no position: frames [B, L, ...]."""
  if frames.dtype.kind not in 'iuf':
    raise ValueError(f'{name} must hold real numbers; got {frames.dtype}')
  wrong = ~(np.abs(frames) < ntu_files.MOST_METRES)
  if wrong.any():
    place = tuple(np.argwhere(wrong)[0])
    row, frame, body, joint, axis = place
    of = f'recording {row}, ' if name == 'frames' else ''
    raise ValueError(
        f'{name} must be finite numbers of metres, within'
        f' {ntu_files.MOST_METRES:g}; {of}frame {frame}, body {body}, joint'
        f' {joint} has {"xyz"[axis]}={frames[place]:g}'
    )


def _offsets(batch: int, data: ml_collections.ConfigDict) -> np.ndarray:
  # The same for each, so that an answer does not depend on its batch.
  one = offsets(1, data.test_samplings, data.num_steps, data.sampling_seed)
  return np.repeat(one, batch, axis=0)


def _checked_offsets(given: Any, batch: int, num_steps: int) -> np.ndarray:
  """Returns offsets as float32 [B, S, T]."""
  offsets = np.asarray(given)
  rule = (
      f'offsets must be numbers from 0, below 1, [B, S, T], here [{batch}, S,'
      f' {num_steps}] with config.data.num_steps={num_steps}'
  )
  would = '; without offsets, those of the config are taken'
  shape = offsets.shape
  fits = len(shape) == 3 and shape[::2] == (batch, num_steps) and shape[1]
  if offsets.dtype.kind not in 'iuf' or not fits:
    raise ValueError(
        f'{rule}; got {settings.a(offsets.dtype.type)} of shape'
        f' {list(shape)}{would}'
    )
  rounded = offsets.astype(np.float32)
  wrong = ~((offsets >= 0) & (rounded < 1))
  if wrong.any():
    raise ValueError(f'{rule}; got {offsets[wrong][0]:.15g}{would}')
  return rounded


def _check_origin(
    frames: np.ndarray, present: np.ndarray, valid: np.ndarray, centre: str
) -> None:
  """Raises ValueError unless the origin is where the config has it.

  Args:
    frames: [B, L, 2, 25, 3].
    present: bool [B, L, 2], which body is there.
    valid: bool [B, L].
    centre: `config.data.centre`. Any origin might be the camera, of 'none'.
  """
  if centre == 'none':
    return
  if centre == 'body':
    one, other = np.moveaxis(frames[..., ntu_files.CENTRE, :], 2, 0)
    one_is_far = np.abs(one).max(-1, keepdims=True) > _NEAR
    spine = np.where(one_is_far, one, other).astype(np.float32)
  else:
    spine = frames[..., ntu_files.CENTRE, :].astype(np.float32)
    spine = origins(spine, present)
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
