"""Sequences as arrays: padded, with lengths, split, and their statistics.

Dimensions: N sequences, T time, F columns.
"""

from collections.abc import Iterable, Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np

from rnnzoo.tasks import array_checks

SPLITS = ('train', 'validation', 'test')
# float32 has a millionth of a deviation so many deviations from zero.
_FAR_FROM_ZERO = 16
# The label of a step without an answer. Among numbers it is NaN.
NO_LABEL = -100


class Sequences(NamedTuple):
  """Some sequences, and an answer for each or for each of their steps.

  Attributes:
    x: [N, T, F]; steps beyond a sequence's end are zero. float32, or the dtype
      of the source where float32 would take something away; see `narrow`.
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
  step_bytes = math.prod(first.shape[1:]) * first.dtype.itemsize
  array_checks.check_padding(lengths, step_bytes, 'cut or split the longest')
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
    values: np.ndarray, valid: np.ndarray, shift: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (mean less shift [F], deviation [F]) over valid steps, without NaN.

  The deviation is 1 for a column that is constant, or whose deviation float32
  cannot hold as a normal number. Values are [N, T, F], `valid` is bool [N, T],
  and `shift` is by `shift_of`; where there are no steps, T is left out.
  """
  steps = values[valid]
  origin = np.nan_to_num(np.fmax.reduce(steps).astype(np.float64))
  steps = differences(steps, origin)
  known = ~np.isnan(steps)
  counts = np.maximum(known.sum(0), 1)
  mean = np.where(known, steps, 0.0).sum(0) / counts
  squares = np.where(known, (steps - mean) ** 2, 0.0).sum(0) / counts
  offset, deviation = mean, np.sqrt(squares)
  # The rounding errors of a constant are no deviation. Integers have none.
  is_float = values.dtype.kind == 'f'
  epsilon = np.finfo(values.dtype).eps if is_float else 0.0
  constant = deviation <= epsilon * np.abs(origin + offset)
  constant |= deviation < np.finfo(np.float32).tiny
  # Far from zero the sum of all three would be rounded.
  return origin - shift + offset, np.where(constant, 1.0, deviation)


def standardized(x: Any, mean: np.ndarray, deviation: np.ndarray) -> Any:
  """Returns (x - mean) / deviation in float32, of arrays of numpy or JAX."""
  # By a power of two, which is exact: float32 has no 1 / 1e38.
  scale = np.exp2(-np.clip(np.frexp(deviation)[1], -126, 126))
  mean, deviation = np.float64(mean) * scale, np.float64(deviation) * scale
  centred = x * scale.astype(np.float32) - mean.astype(np.float32)
  return centred / deviation.astype(np.float32)


def statistics(steps: np.ndarray) -> list[dict[str, Any]]:
  """Returns numbers about each column of steps [steps, F], for report.json."""
  found = []
  for column in steps.T:
    known = column[~np.isnan(column)]
    missing = len(column) - len(known)
    known = known if len(known) else np.zeros(1)
    offsets = differences(known, known.max().astype(np.float64))
    found.append(
        {
            'mean': float(known.max() + offsets.mean()),
            'deviation': float(offsets.std()),
            'min': known.min().item(),
            'max': known.max().item(),
            'missing': missing,
        }
    )
  return found


def differences(values: np.ndarray, origin: np.ndarray) -> np.ndarray:
  """Returns values [..., F] - origin [F] in float64."""
  # float64 has 53 bits, too few for clocks in nanoseconds.
  kind = np.longdouble if values.dtype.kind in 'iu' else np.float64
  return (values.astype(kind) - origin).astype(np.float64)


def narrow(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """Returns values as float32 if nothing is lost, and `shift_of` is 0."""
  found = values.astype(np.float32, copy=False)
  is_same = ((found == values) | (values != values))[valid].all()
  return found if is_same and not shift_of(values, valid).any() else values


def shift_of(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
  """Returns a shift to subtract of each column before float32 rounds it, [F].

  It is 0, but for columns so far from zero that float32 has few digits left of
  their changes.

  Values, within float32's range, and `valid` are as in `standardization`.
  """
  if np.can_cast(values.dtype, np.float32):
    return np.zeros(values.shape[-1])
  mean, deviation = standardization(values, valid)
  steps = values[valid]
  changes = np.fmax.reduce(steps) != np.fmin.reduce(steps)
  far = changes & (np.abs(mean) > _FAR_FROM_ZERO * deviation)
  centre = np.rint(mean) if values.dtype.kind in 'iu' else mean
  return np.where(far, centre, 0.0)


def centre(
    values: np.ndarray, shift: np.ndarray, valid: np.ndarray
) -> np.ndarray:
  """Returns values - shift as float32, and zeros where it is not `valid`."""
  if not shift.any():
    return values.astype(np.float32, copy=False)
  found = differences(values, shift).astype(np.float32)
  return np.where(valid[..., None], found, np.float32(0))


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
  if empty := _empty_split(total, fractions):
    named = ' and '.join(
        f'config.data.{k}_fraction={part}' for k, part in fractions.items()
    )
    raise ValueError(
        f'{total} training sequences cannot be split: {empty} would be empty'
        f' by {named}; give more sequences, or other fractions'
    )
  for name, fraction in fractions.items():
    train = found['train']
    groups = train.y if stratify else np.zeros(len(train.x), np.int32)
    rest, part = split_off(groups, round(total * fraction), seed)
    found['train'], found[name] = train.rows(rest), train.rows(part)
  return {name: found[name] for name in SPLITS if name in found}


def _empty_split(total: int, fractions: Mapping[str, float]) -> str:
  """Returns the first split that gets no sequence of `total`, or ''."""
  sizes = {name: round(total * part) for name, part in fractions.items()}
  sizes['train'] = total - sum(sizes.values())
  return next((name for name, size in sizes.items() if size < 1), '')


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
        f'{len(groups)} training sequences cannot be split into {size} and the'
        ' rest; give more sequences, or another fraction in config.data'
    )
  order = np.random.RandomState(seed).permutation(len(groups))
  place = np.empty(len(groups))
  for group in np.unique(groups):
    members = order[groups[order] == group]
    # The example in the middle of each group has .5.
    place[members] = (np.arange(len(members)) + 0.5) / len(members)
  chosen = order[np.argsort(place[order], kind='stable')]
  return np.sort(chosen[size:]), np.sort(chosen[:size])
