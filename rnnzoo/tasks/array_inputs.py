"""Arrays for a trained model, checked before it answers."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rnnzoo import settings

# Arrays up to this size may be padding for the most part.
_MANY_BYTES = 2**33
# The least share of data of larger ones.
_LEAST_SHARE = 0.1


def check(given: Any, names: Sequence[str] = ()) -> Any:
  """Returns inputs of a trained model as they are.

  Args:
    given: arrays [B, ...], as a user gave them.
    names: names of arrays that must be there; none for arrays without names.

  Raises:
    ValueError: the arrays are something else.
  """
  if names and not (isinstance(given, Mapping) and set(names) <= set(given)):
    raise ValueError(
        f'inputs must be a dict of {" and ".join(map(repr, names))}, as in the'
        f' splits of the task; got {kind(given)}'
    )
  for leaf in jax.tree.leaves(given):
    rule = 'inputs must be arrays of numbers, [B, ...]'
    if not hasattr(leaf, 'dtype'):
      raise ValueError(
          f'{rule}, got {settings.a(type(leaf))}; np.asarray makes an array of'
          ' a list'
      )
    if not leaf.ndim or getattr(leaf.dtype, 'kind', '') in ('O', 'S', 'U'):
      raise ValueError(f'{rule}, got {leaf.dtype} of shape {list(leaf.shape)}')
  return given


def unmasked(given: Any, name: str) -> np.ndarray:
  """Returns an array of numpy.

  Raises:
    ValueError: it has a mask of numpy, or rows of several lengths.
  """
  if isinstance(given, np.ma.MaskedArray):
    raise ValueError(
        f'{name} must have no mask of numpy, which would be ignored'
    )
  try:
    return np.asarray(given)
  except ValueError as error:
    raise ValueError(f'{name} must be one array; {error}') from error


def kind(given: Any) -> str:
  """Returns the type of something that is no dict, or the keys of a dict."""
  if isinstance(given, Mapping):
    return f'the keys {", ".join(map(repr, given)) or "none"}'
  return settings.a(type(given))


def counts(
    given: Any, name: str, batch: int, most: int, *, of: str, row: str
) -> np.ndarray:
  """Returns how much of each row is data, int32 [B].

  Args:
    given: the counts, as a user gave them.
    name: the array's name.
    batch: the batch size B.
    most: the largest count.
    of: words for `most`, as 'the steps of x'.
    row: the word for one row of the batch.

  Raises:
    ValueError: the counts are no integers [B] from 1 to `most`.
  """
  try:
    found = np.asarray(given)
  except ValueError as error:
    raise ValueError(f'{name} must be integers [B], here [{batch}]') from error
  if found.dtype.kind not in 'iu' or found.shape != (batch,):
    raise ValueError(
        f'{name} must be integers [B], here [{batch}]; got {found.dtype} of'
        f' shape {list(found.shape)}'
    )
  wrong = np.flatnonzero((found < 1) | (found > most))
  if len(wrong):
    raise ValueError(
        f'{name} must be from 1 to {most}, {of}; {row} {wrong[0]} has'
        f' {found[wrong[0]]}'
    )
  return found.astype(np.int32)


def check_padding(
    lengths: Sequence[int] | np.ndarray, step_bytes: int, remedy: str
) -> None:
  """Raises ValueError where more than 8 GiB would be padding for the most part.

  Args:
    lengths: steps of the sequences, which are padded to the longest.
    step_bytes: the size of a step.
    remedy: a way that would work, in words without a full stop.
  """
  lengths = np.asarray(lengths, np.int64)
  steps = len(lengths) * int(lengths.max())
  share = int(lengths.sum()) / steps
  if steps * step_bytes > _MANY_BYTES and share < _LEAST_SHARE:
    raise ValueError(
        f'{len(lengths):,} sequences, padded to the longest of'
        f' {lengths.max():,} steps (number {lengths.argmax():,}, from 0), would'
        f' have {steps * step_bytes:,} bytes, of which {share:.2%} hold data;'
        f' half of the sequences have at most {int(np.median(lengths)):,}'
        f' steps; {remedy}'
    )
