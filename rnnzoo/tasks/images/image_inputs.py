"""Images for a trained model, checked before it answers.

A model was trained on integers from 0, black, to `white`. Other numbers fit
these shapes, and would be answered wrongly without a word: floats from 0 to 1,
say, are nearly black images.

Dimensions: B batch, T time.
"""

from typing import Any

import numpy as np

from rnnzoo import settings
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
  dtype = getattr(given, 'dtype', settings.a(type(given)))
  if getattr(dtype, 'kind', '') not in ('i', 'u'):
    raise ValueError(
        f'{rule}; got {dtype}; np.round({white} * inputs).astype(np.uint8)'
        ' makes pixels of numbers from 0, black, to 1, white'
    )
  pixels = array_checks.one(given, rule)
  if pixels.shape[1:] not in (image, steps) or not len(pixels):
    raise ValueError(f'{rule}; got the shape {list(pixels.shape)}')
  if pixels.min() < 0 or pixels.max() > white:
    raise ValueError(f'{rule}; got {pixels.min()} to {pixels.max()}')
  return pixels.astype(np.uint8)
