"""Images for a trained model, checked before it answers.

A model was trained on integers from 0, black, to `white`. Other numbers fit
these shapes, and would be answered wrongly without a word: floats from 0 to 1,
say, are nearly black images.

Dimensions: B batch, T time.
"""

import math
from typing import Any

import numpy as np

from rnnzoo.tasks import array_checks


def check(
    given: Any, image: tuple[int, ...], steps: tuple[int, int], white: int
) -> np.ndarray:
  """Returns images or their sequences as uint8, in the shape that they have.

  They are integers from 0 to `white`: images [B, *image] with an image of
  [height, width] or [height, width, channels], or sequences [B, *steps] of [T,
  in].
  """
  shapes = ' or '.join(
      dict.fromkeys(
          f'[B, {", ".join(map(str, shape))}]' for shape in (image, steps)
      )
  )
  rule = f'inputs must be integers from 0 to {white}, {shapes}'
  array_checks.check(given)
  if not hasattr(given, 'shape'):
    raise ValueError(f'{rule}, in one array; got {type(given).__name__}')
  if getattr(given.dtype, 'kind', '') not in ('i', 'u'):
    raise ValueError(f'{rule}; got {given.dtype}{_hint(given, white)}')
  pixels = array_checks.one(given, rule)
  if pixels.shape[1:] not in (image, steps) or not len(pixels):
    hint = ''
    if pixels.shape in (image, steps):
      hint = '; inputs[None] makes a batch of one image'
    elif pixels.shape[1:] == (*image, 1):
      hint = '; inputs[..., 0] takes its last axis away'
    elif pixels.size and pixels.size == len(pixels) * math.prod(image):
      hint = (
          f'; inputs.reshape{(-1, *image)} makes images of pixels that are in'
          ' the order of their rows'
      )
    raise ValueError(f'{rule}; got the shape {list(pixels.shape)}{hint}')
  wrong = (pixels < 0) | (pixels > white)
  if wrong.any():
    place = tuple(np.argwhere(wrong)[0])
    raise ValueError(f'{rule}; image {place[0]} has a pixel of {pixels[place]}')
  return pixels.astype(np.uint8)


def _hint(given: Any, white: int) -> str:
  """Returns how numbers that are no integers become pixels, if that is seen."""
  if given.dtype == bool:
    return f'; np.uint8({white}) * inputs makes black and white'
  # bfloat16 is no kind that numpy knows: 'V'.
  is_float = getattr(given.dtype, 'kind', '') == 'f'
  if not given.size or not (is_float or given.dtype.name == 'bfloat16'):
    return ''
  values = np.asarray(given).astype(np.float64)
  if not np.isfinite(values).all():
    wrong = values[~np.isfinite(values)][0]
    return f' with {wrong}'
  least, most = float(values.min()), float(values.max())
  hint = '; undo what moved or scaled the pixels'
  if least >= 0 and most <= 1:
    hint = (
        f'; np.round({white} * inputs).astype(np.uint8) makes pixels of numbers'
        ' from 0, black, to 1, white'
    )
  elif least >= 0 and most <= white and (values == np.round(values)).all():
    hint = '; inputs.astype(np.uint8) would work'
  return f' from {least:.4g} to {most:.4g}{hint}'
