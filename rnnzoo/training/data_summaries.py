"""What tells other data from data that were rounded otherwise."""

from collections.abc import Mapping, Sequence
import hashlib

import numpy as np

# Parts that are summed, and columns that are told apart.
_PARTS, _MOST_COLUMNS = 16, 64
# By how much rounding changes sums: of the column's, and of the greatest.
_OF_COLUMN, _OF_ALL = 1e-4, 1e-7


def summarise(array: np.ndarray) -> list[str]:
  """Returns an array's dtype and shape, and what `differences` compares.

  That is a digest or, for floats, a line for each column of the last axis: the
  sums of several parts with random signs, which another order changes as well.
  """
  kind = f'{array.dtype} {array.shape}'
  if array.dtype.kind != 'f' or not array.size:
    return [kind, hashlib.sha256(array.tobytes()).hexdigest()]
  is_table = array.ndim > 1 and array.shape[-1] <= _MOST_COLUMNS
  columns = array.reshape(len(array), -1, array.shape[-1] if is_table else 1)
  rng = np.random.RandomState(0)  # The same numbers with any numpy.
  signs = lambda count: rng.choice([-1.0, 1.0], count)
  steps = signs(columns.shape[1])
  sums = [
      np.einsum('n,t,ntc->c', signs(len(part)), steps, part)
      for part in np.array_split(columns, _PARTS)
  ]
  return [
      kind,
      *(' '.join(map('{:.9g}'.format, x)) for x in np.transpose(sums)),
  ]


def differences(
    there: Mapping[str, Sequence[str]], here: Mapping[str, Sequence[str]]
) -> list[str]:
  """Returns the names of arrays that differ by more than rounding."""
  return [
      name
      for name in sorted(there.keys() | here.keys())
      if not _are_alike(there.get(name, []), here.get(name, []))
  ]


def _are_alike(there: Sequence[str], here: Sequence[str]) -> bool:
  if there[:1] != here[:1] or 'float' not in there[0]:
    return there == here
  one, other = (
      np.array([line.split() for line in lines[1:]], float)
      for lines in (there, here)
  )
  sizes = np.abs(one).max(axis=1, keepdims=True)
  most = _OF_COLUMN * sizes + _OF_ALL * sizes.max()
  return bool(np.all(np.abs(one - other) <= most))
