"""Classification sets of TFDS as sequences.

An image is a sequence of its rows or of its pixels; numbers [T, F] are as they
are, and [F] is a sequence of single numbers. More axes than two are flattened
into F. Sequences may end at different steps.
"""

from typing import Any

import numpy as np

from rnnzoo.tasks import tfds_sets
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_checks

READINGS = ('row', 'pixel')


def read(
    source: str, data_dir: str, reading: str, missing: str
) -> tuple[str, dict[str, sequence_arrays.Sequences]]:
  """Returns the name of a set, and its splits with labels as y.

  Args:
    source: 'tfds:<name>'.
    data_dir: the folder where TFDS keeps its sets.
    reading: the reading of images: 'row' or 'pixel'.
    missing: 'refuse', or 'zero' for inputs that may hold NaN.

  Raises:
    ValueError: the set cannot be read, its examples are not numbers with a
      class each, or `reading` is set and they are no images.
  """
  found = tfds_sets.read(source, data_dir)
  is_image = type(found.input).__name__ == 'Image'
  if reading != 'row' and not is_image:
    raise ValueError(
        f'config.data.sequence would be ignored with config.data.source='
        f"{source!r}, which has no images; it must be 'row' there, got"
        f' {reading!r}'
    )
  splits = {}
  for name, examples in found.splits.items():
    sequences = [
        _sequence(example, source, is_image and reading == 'pixel')
        for example in examples.inputs
    ]
    if len({sequence.shape[1] for sequence in sequences}) > 1:
      raise ValueError(
          f'config.data.source={source!r} has steps of different sizes in'
          f' {name!r}: {sorted({s.shape[1] for s in sequences})[:5]}; images of'
          ' different widths cannot be read by rows'
      )
    labels = _labels(examples.targets, found.target, f'{source!r}, {name!r}')
    x, lengths = sequence_arrays.pad(sequences)
    if not is_image:  # They have dark edges.
      place = f'config.data.source={source!r}, {name!r}: x'
      x = npz.checked(x, lengths, missing, place)
    splits[name] = sequence_arrays.Sequences(x, lengths, labels)
  for name, split in splits.items():
    sequence_checks.check_fit(
        f'config.data.source={source!r}, {name!r}',
        split,
        "'train'",
        splits['train'],
        every_step=False,
    )
  return found.name, splits


def _sequence(example: Any, source: str, by_pixel: bool) -> np.ndarray:
  """Returns an example as numbers [T, F]."""
  array = np.asarray(example)
  if array.dtype.kind not in 'biuf' or not array.ndim or not array.size:
    raise ValueError(
        f'config.data.source={source!r} must have images or arrays of numbers'
        f' as inputs; got {array.dtype} of shape {array.shape}'
    )
  if by_pixel:
    array = array.reshape(-1, array.shape[-1])
  return array.reshape(len(array), -1)


def _labels(targets: list[Any], feature: Any, name: str) -> np.ndarray:
  """Returns the labels of examples: names of classes, or integers."""
  labels = np.asarray(targets)
  if labels.dtype.kind not in 'iub' or labels.ndim != 1:
    raise ValueError(
        f'{name}: a target must be a class; got {labels.dtype} of shape'
        f' {labels.shape[1:]}'
    )
  if labels.min() < 0:
    raise ValueError(f'{name} has examples without a label')
  names = np.array(getattr(feature, 'names', None) or [])
  if not len(names) or all(one.isdecimal() for one in names):
    return labels
  return names[labels]
