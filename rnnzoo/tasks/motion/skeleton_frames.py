"""Frames of skeletons: which ones a model sees, and from where.

A recording is cut into T segments of equal length, and a model sees one frame
of each: a random one in training, so that no two epochs see equal frames, and
in evaluation several fixed random choices, whose logits are averaged. Training
may also turn and scale the whole recording.

Dimensions: N recordings, B batch, L frames of the longest recording, T
segments, S samplings of one recording.

Reference: Li, Li, Cook, Zhu, Gao, Independently recurrent neural network
(IndRNN): building a longer and deeper RNN, 2018, section 5.4.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.scipy.spatial import transform
import ml_collections
import numpy as np

Array = jax.Array | np.ndarray

CENTRES = ('sequence', 'frame', 'body', 'none')

# The middle of the spine, among joints counted from 0.
SPINE = 1


def pad(
    recordings: Sequence[np.ndarray],
    data: ml_collections.ConfigDict,
    are_centred: bool = False,
) -> dict[str, np.ndarray]:
  """Returns recordings of one length, filled up with zeros.

  Args:
    recordings: N arrays [frames, 2, 25, 3], in metres.
    data: a config's `data`. A recording of more than `max_frames` is thinned
      out evenly; `centre` names the origin, `frames_dtype` the result's dtype.
    are_centred: whether the recordings have that origin already.

  Returns:
    'frames' [N, L, 2, 25, 3] and 'length' int32 [N].
  """
  lengths = np.minimum([len(whole) for whole in recordings], data.max_frames)
  shape = (len(recordings), lengths.max(), *recordings[0].shape[1:])
  frames = np.zeros(shape, data.frames_dtype)
  for row, (whole, length) in enumerate(zip(recordings, lengths, strict=True)):
    if length < len(whole):
      whole = whole[(np.arange(length) * len(whole)) // length]
    centre = 'none' if are_centred else data.centre
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
  origin = np.where(seen[:, :, SPINE], frames[:, :, SPINE], middle)
  if centre != 'body':
    # The second body serves where the main body is absent.
    main = np.where(present[:, :1], origin[:, 0], origin[:, 1])
    origin = main[:, np.newaxis]
  if centre == 'sequence':
    # The first frame that shows somebody.
    origin = origin[[present.any(axis=1).argmax()]]
  moved = frames - origin[:, :, np.newaxis]
  return np.where(seen, moved, 0).astype(frames.dtype)


def offsets(
    num_recordings: int, num_samplings: int, data: ml_collections.ConfigDict
) -> np.ndarray:
  """Returns where in each segment frames are taken, float32 [N, S, T].

  Args:
    num_recordings: the number of recordings, N.
    num_samplings: number S; 0 for one sampling of the middle of each segment.
    data: a config's `data`, with `num_steps`, T, and `sampling_seed`.

  Returns:
    Numbers from 0, the segment's start, to below 1, its end.
  """
  if not num_samplings:
    return np.full((num_recordings, 1, data.num_steps), 0.5, np.float32)
  shape = (num_recordings, num_samplings, data.num_steps)
  return np.random.default_rng(data.sampling_seed).random(shape, np.float32)


def sample(frames: Array, length: Array, where: Array) -> jax.Array:
  """Returns one frame of each segment, [B, S, T, 2, 25, 3].

  Segment t of a recording of n frames is from t n / T to (t + 1) n / T. With
  fewer than T frames some are taken twice.

  `frames` are padded recordings [B, L, 2, 25, 3] of `length` int [B]; `where`
  has places in segments [B, S, T], as `offsets` makes them.
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

  Positions are [B, ..., 3]. `degrees` is the greatest angle, to either side,
  about each of x, y and z, and `scale` the greatest change of size: 0.1 for
  factors from 0.9 to 1.1.
  """
  turn_key, scale_key = jax.random.split(key)
  draw = lambda key, shape, low, high: jax.random.uniform(
      key, (len(x), *shape), minval=low, maxval=high
  )
  greatest = jnp.deg2rad(degrees)
  matrices = _rotation(draw(turn_key, (3,), -greatest, greatest))
  matrices *= draw(scale_key, (1, 1), 1 - scale, 1 + scale)
  # On a GPU the default precision would round positions to 10 bits.
  return jnp.einsum(
      'b...j,bij->b...i', x, matrices, precision=jax.lax.Precision.HIGHEST
  )


def _rotation(angles: jax.Array) -> jax.Array:
  """Returns matrices [B, 3, 3] that turn by `angles` about x, y, then z."""
  return transform.Rotation.from_euler('xyz', angles).as_matrix()
