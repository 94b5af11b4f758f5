"""Sequences as arrays: padded, with lengths, split, and their statistics.

Dimensions: N sequences, T time, F columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
import warnings

import numpy as np

SPLITS = ('train', 'validation', 'test')
# The label of a step without an answer. Among numbers it is NaN.
NO_LABEL = -100
# Deviations from zero beyond which float32 keeps few digits of a deviation.
FAR_FROM_ZERO = 1e4


class Sequences(NamedTuple):
  """Some sequences, and an answer for each or for each of their steps.

  Attributes:
    x: [N, T, F] in the dtype of the source; steps beyond a sequence's end are
      zero.
    lengths: steps of each sequence, int32 [N], from 1 to T.
    y: [N, ...], or for answers at every step [N, T, ...].
  """

  x: np.ndarray
  lengths: np.ndarray
  y: np.ndarray

  def rows(self, index: np.ndarray) -> 'Sequences':
    """Returns the sequences of the given indices."""
    return Sequences(*(array[index] for array in self))

  def valid(self) -> np.ndarray:
    """Returns which steps are no padding, bool [N, T]."""
    return np.arange(self.x.shape[1]) < self.lengths[:, None]

  def known(self, every_step: bool) -> np.ndarray:
    """Returns which answers there are: bool [N], or [N, T] of steps."""
    if not every_step:
      return np.ones(len(self.y), bool)
    if self.y.dtype.kind == 'f':
      is_there = ~np.isnan(self.y)
      return self.valid() & is_there.reshape(*is_there.shape[:2], -1).all(-1)
    if self.y.dtype.kind == 'i' and self.y.ndim == 2:
      return self.valid() & (self.y != NO_LABEL)
    return self.valid()


def pad(
    sequences: Sequence[np.ndarray], length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (arrays in one, [N, T, ...], padded by zeros, lengths int32 [N]).

  Args:
    sequences: N arrays [time, ...] of any lengths.
    length: T; None for the longest length.
  """
  lengths = np.array([len(sequence) for sequence in sequences], np.int32)
  time = int(lengths.max()) if length is None else length
  first = sequences[0]
  whole = np.zeros((len(sequences), time, *first.shape[1:]), first.dtype)
  for row, sequence in zip(whole, sequences, strict=True):
    row[: len(sequence)] = sequence
  return whole, lengths


def concatenate(parts: Iterable[Sequences], every_step: bool) -> Sequences:
  """Returns the sequences of parts of equal F, padded to the longest.

  With `every_step` y has an axis of time.
  """
  parts = list(parts)
  time = max(part.x.shape[1] for part in parts)

  def padded(array):
    whole = np.zeros((len(array), time, *array.shape[2:]), array.dtype)
    whole[:, : array.shape[1]] = array
    return whole

  return Sequences(
      np.concatenate([padded(part.x) for part in parts]),
      np.concatenate([part.lengths for part in parts]),
      np.concatenate(
          [padded(part.y) if every_step else part.y for part in parts]
      ),
  )


def standardization(
    values: np.ndarray, valid: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (mean, deviation), float64 [F], over valid steps, without NaN.

  The deviation is 1 for a column that is constant but for rounding, or whose
  deviation float32 cannot hold as a normal number. Values are [N, T, F] and
  `valid` bool [N, T]; where there are no steps, T is left out.
  """
  columns = statistics(values[valid])
  mean, deviation = (
      np.array([(column['mean'], column['deviation']) for column in columns])
      .reshape(-1, 2)
      .T
  )
  is_float = values.dtype.kind == 'f'
  rounding = np.finfo(values.dtype if is_float else np.float64).eps
  constant = deviation <= rounding * np.abs(mean)
  constant |= deviation < np.finfo(np.float32).tiny
  return mean, np.where(constant, 1.0, deviation)


def warn_of_rounding(
    x: np.ndarray, mean: np.ndarray, deviation: np.ndarray
) -> None:
  """Warns if x comes in float32 and a column is far from zero."""
  is_far = np.abs(mean) > FAR_FROM_ZERO * deviation
  if x.dtype == np.float32 and is_far.any():
    warnings.warn(
        f'column {is_far.argmax()} of x is so far from zero that float32 has'
        ' few digits left for what changes; float64 would keep them',
        stacklevel=2,
    )


def standardized(
    values: np.ndarray,
    valid: np.ndarray,
    mean: np.ndarray,
    deviation: np.ndarray,
) -> np.ndarray:
  """Returns (values - mean) / deviation as float32, 0 where it is not valid.

  It is computed in float64: a clock far from zero keeps its digits.
  """
  found = (values.astype(np.float64) - mean) / deviation
  return np.where(valid[..., None], found, 0).astype(np.float32)


def statistics(steps: np.ndarray) -> list[dict[str, Any]]:
  """Returns numbers about each column of steps [steps, F], for report.json."""
  known = np.ma.masked_invalid(steps.astype(np.float64))
  mean = np.ma.filled(known.mean(0), 0.0)
  found = {
      'mean': mean,
      'deviation': np.ma.filled((known - mean).std(0), 0.0),
      'min': np.ma.filled(known.min(0), 0.0),
      'max': np.ma.filled(known.max(0), 0.0),
      'missing': np.ma.getmaskarray(known).sum(0),
  }
  columns = zip(*(values.tolist() for values in found.values()), strict=True)
  return [dict(zip(found, column, strict=True)) for column in columns]


def complete_splits(
    splits: Mapping[str, Sequences],
    fractions: Mapping[str, float],
    seed: int,
    stratify: bool,
) -> dict[str, Sequences]:
  """Returns 'train', 'validation' and 'test', as far as they are to be there.

  Missing ones are split off from 'train'. `fractions` are shares of 'train' as
  it is given, by the names of the splits that are to be there. With `stratify`
  each split gets its share of each class in y [N].
  """
  found = dict(splits)
  total = len(splits['train'].x)
  fractions = {k: v for k, v in fractions.items() if k not in splits}
  for name, fraction in fractions.items():
    train = found['train']
    groups = train.y if stratify else np.zeros(len(train.x), np.int32)
    rest, part = split_off(groups, round(total * fraction), seed)
    found['train'], found[name] = train.rows(rest), train.rows(part)
  return {name: found[name] for name in SPLITS if name in found}


def split_off(
    groups: np.ndarray, size: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (indices of the rest, indices of a part), both sorted.

  Each group gives about an equal share to the part, and one with a single
  example keeps it in the rest, unless the part is more than a half.

  `groups` [N] has the group of each example. `seed` is of
  `np.random.RandomState`, whose stream never changes.
  """
  if not 0 < size < len(groups):
    raise ValueError(
        f'{len(groups)} training examples cannot be split into {size} and'
        f' {len(groups) - size}, for both parts need one; more examples, or'
        ' another fraction in config.data, would work'
    )
  order = np.random.RandomState(seed).permutation(len(groups))
  place = np.empty(len(groups))
  for group in np.unique(groups):
    members = order[groups[order] == group]
    # The example in the middle of each group has .5.
    place[members] = (np.arange(len(members)) + 0.5) / len(members)
  chosen = order[np.argsort(place[order], kind='stable')]
  return np.sort(chosen[size:]), np.sort(chosen[:size])
