"""Checks of arrays that a user gives, in a call or in a file.

A function returns the array as numpy has it, or raises a ValueError which says
what would work. All checks of shapes, dtypes, lengths and numbers that are not
finite are here; a task adds hints of its own.

Dimensions: B batch, N sequences, T time, F columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rnnzoo import settings
from rnnzoo.tasks import fields


def check(given: Any) -> Any:
  """Returns inputs of a trained model, arrays [B, ...], as a user gave them."""
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


def by_name(
    given: Any, names: Sequence[str], needed: Sequence[str] = ()
) -> Mapping[str, Any]:
  """Returns a mapping that has the needed names, and only some of `names`.

  One array has the first name.
  """
  given = given if isinstance(given, Mapping) else {names[0]: given}
  for name in given:
    if name not in names:
      hint = fields.did_you_mean(name, names)
      raise ValueError(
          f'inputs must have no keys but {", ".join(map(repr, names[:-1]))} and'
          f' {names[-1]!r}; got {name!r}{hint and f"; {hint}"}'
      )
  if not set(needed) <= given.keys():
    raise ValueError(
        f'inputs must be a dict of {" and ".join(map(repr, needed))}, as in the'
        f' splits of the task; got {", ".join(map(repr, given)) or "no keys"}'
    )
  return given


def one(given: Any, rule: str) -> np.ndarray:
  """Returns an array of numpy, of no mask and of rows of one length.

  `rule` is the beginning of the message, such as 'x must be numbers'.
  """
  if isinstance(given, np.ma.MaskedArray):
    raise ValueError(f'{rule}, without a mask of numpy, which would be ignored')
  if isinstance(given, jax.core.Tracer):
    raise ValueError(f'{rule}, outside of jax.jit and jax.vmap')
  try:
    return np.asarray(given)
  except ValueError as error:
    raise ValueError(
        f'{rule}; got rows of several lengths; of sequences,'
        ' rnnzoo.tasks.series.sequence_arrays.pad makes one array, and lengths'
    ) from error


def numbers(
    given: Any,
    name: str,
    axes: Sequence[int | str],
    *,
    kinds: str = 'iuf',
    noun: str = 'real numbers',
    why: str = '',
    needs_last: bool = True,
) -> np.ndarray:
  """Returns real numbers, in their dtype, bfloat16 as float32.

  Args:
    given: the array, as a user gave it.
    name: its name.
    axes: the size of each axis; a letter stands for any size from 1.
    kinds: kinds of dtypes, as numpy names them; 'b' for booleans.
    noun: words for values of these kinds.
    why: words behind the axes.
    needs_last: whether the last axis must be there; else it is added.
  """
  words = f'[{", ".join(map(str, axes))}]'
  if not needs_last:
    words += f' or [{", ".join(map(str, axes[:-1]))}]'
  rule = f'{name} must be {noun} {words}{why}'
  array = one(given, rule)
  shape = list(array.shape)
  if array.dtype.name == 'bfloat16':  # Numpy knows no kind of it.
    array = array.astype(np.float32)
  if array.ndim == len(axes) - 1 and not needs_last:
    array = array[..., None]
  if array.dtype.kind not in kinds or not _fits(array.shape, axes):
    hint = ''
    if name.isidentifier() and _fits(array.shape, axes[1:]):
      hint = f'; {name}[None] makes a batch of one'
    elif name.isidentifier() and _fits((*array.shape, 1), axes):
      hint = f'; {name}[..., None] gives it its one column'
    raise ValueError(
        f'{rule}, no axis of size 0; got {array.dtype} of shape {shape}{hint}'
    )
  return array


def _fits(shape: Sequence[int], axes: Sequence[int | str]) -> bool:
  """Returns whether a shape has these sizes, or any where there is a letter."""
  return len(shape) == len(axes) and all(
      size == axis if isinstance(axis, int) else size > 0
      for size, axis in zip(shape, axes, strict=True)
  )


def integers(
    given: Any,
    name: str,
    count: int,
    most: int,
    *,
    least: int = 1,
    of: str = '',
    row: str = 'row',
) -> np.ndarray:
  """Returns integers, such as the lengths of sequences, as int32 [B].

  Args:
    given: the integers, as a user gave them.
    name: the array's name.
    count: the number of integers, B.
    most: the largest integer.
    least: the smallest integer.
    of: words for `most`, as ', the steps of x'.
    row: the word for one row of the batch.
  """
  noun = f'integers, one a {row},'
  found = numbers(given, name, (count,), kinds='iu', noun=noun)
  wrong = np.flatnonzero((found < least) | (found > most))
  if len(wrong):
    raise ValueError(
        f'{name} must be from {least} to {most}{of}; {row} {wrong[0]} has'
        f' {found[wrong[0]]}'
    )
  return found.astype(np.int32)


def finite(
    values: np.ndarray,
    valid: np.ndarray,
    name: str,
    *,
    allow_nan: bool = False,
    advice: str = '',
) -> None:
  """Raises ValueError for a value that float32 cannot hold in a valid step.

  Args:
    values: numbers [N, T, F], or [N, F] where there are no steps.
    valid: whether a step counts, bool [N, T], or [N].
    name: name of the file and array.
    allow_nan: whether NaN is allowed.
    advice: a hint on NaN; '' for nothing.
  """
  with np.errstate(over='ignore'):
    values = values.astype(np.float32)
  wrong = np.isinf(values) if allow_nan else ~np.isfinite(values)
  wrong &= valid[..., None]
  if not wrong.any():
    return
  place = tuple(np.argwhere(wrong)[0])
  advice = f'; {advice}' if advice and np.isnan(values[place]) else ''
  steps = ('step',) * (len(place) - 2)
  axes = zip(('sequence', *steps, 'column'), place, strict=True)
  words = [f'{axis} {i}' for axis, i in axes]
  raise ValueError(
      f'{name} must be finite in float32; {", ".join(words)} is'
      f' {values[place]} ({int(wrong.sum())} such values){advice}'
  )


def tokens(given: Any, num_tokens: int, least: int = 1) -> np.ndarray:
  """Returns tokens as int32 [B, T].

  `num_tokens` is the upper bound of tokens, excluded, and `least` the least T.
  """
  noun = f'tokens, integers from 0 to {num_tokens - 1},'
  if isinstance(given, Mapping):
    raise ValueError(f'inputs must be {noun} in one array; got a mapping')
  found = numbers(given, 'inputs', ('B', 'T'), kinds='iu', noun=noun)
  if found.shape[1] < least:
    raise ValueError(
        f'inputs must have {least} steps or more; got {found.shape[1]}'
    )
  low, high = int(found.min()), int(found.max())
  if low < 0 or high >= num_tokens:
    raise ValueError(f'inputs must be {noun} got {low} to {high}')
  return found.astype(np.int32)


def tokens_with_length(given: Any, num_tokens: int) -> dict[str, np.ndarray]:
  """Returns {'tokens': int32 [B, T], 'length': int32 [B]}.

  `given` is such a mapping, or tokens alone, all of which count.
  """
  names = ('tokens', 'length')
  needed = names if isinstance(given, Mapping) else ()
  given = by_name(given, names, needed)
  found = tokens(given['tokens'], num_tokens)
  length = given.get('length', np.full(len(found), found.shape[1]))
  of = ', the steps of tokens'
  length = integers(length, 'length', *found.shape, of=of)
  return {'tokens': found, 'length': length}
