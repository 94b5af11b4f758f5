"""Sequences in .npz files: read and checked, with errors that name the place.

A file holds N sequences of F columns in one of two forms:

  x [N, T, F] or [N, T]     padded to T steps; `lengths` int [N] says how many
                            steps of each are valid, all T without it;
  steps [total, F]          all steps of the first sequence, then all of the
  or [total]                second, and so on; `lengths` [N] must sum to total.

and y, an answer for each sequence or step: for classes integers, booleans or
strings (bytes are read as UTF-8), for numbers anything real. In the two forms
it is

  a sequence                [N]           [N]           or, numbers, [N, D]
  a step                    [N, T]        [total]       or [N, T, D], [total, D]

A step without an answer has the label -100, or NaN.

`numpy.savez('mine.npz', x=x, y=y, lengths=lengths)` writes one. Arrays of
Python objects are not read: they can run any program.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import NamedTuple

import numpy as np

from rnnzoo.tasks import array_checks
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_checks

_NAMES = ('x', 'steps', 'y', 'lengths')


class Form(NamedTuple):
  """The rule for the arrays of a file."""

  kind: str  # 'classification' or 'regression'.
  every_step: bool = False  # Whether y has an answer for every step.
  # 'refuse', 'zero' for x that may hold NaN, or 'never' where no field of the
  # config allows it.
  missing: str = 'refuse'


def read(path: pathlib.Path, form: Form) -> sequence_arrays.Sequences:
  """Returns the sequences of a file; labels stay as they are."""
  return parse(load(path, _NAMES), form, str(path))


def parse(
    arrays: Mapping[str, np.ndarray], form: Form, name: str
) -> sequence_arrays.Sequences:
  """Returns the sequences of a file's arrays; its name is for errors."""
  there = ', '.join([*arrays][:8]) or 'nothing'
  if ('x' in arrays) == ('steps' in arrays):
    raise ValueError(
        f'{name} must hold either x [N, T, F] or steps [total, F]; it holds'
        f' {there}'
    )
  if 'y' not in arrays:
    raise ValueError(f'{name} must hold y, the answers; it holds {there}')
  steps = 'x' if 'x' in arrays else 'steps'
  read_steps = _padded_x if steps == 'x' else concatenated_x
  x, lengths = read_steps(arrays, name)
  y = _answers(arrays, form, x.shape[:2], lengths, name)
  x = checked(x, lengths, form.missing, f'{name}: {steps}')
  found = sequence_arrays.Sequences(x, lengths, y)
  valid, known = found.valid(), found.known(form.every_step)
  if form.every_step and not known.any(1).all():
    raise ValueError(
        f'{name}: y must have an answer for one step of each sequence at least;'
        f' sequence {known.any(1).argmin()} has none'
    )
  if form.kind == 'regression':
    are_numbers = valid if form.every_step else known
    array_checks.finite(y, are_numbers, f'{name}: y', allow_nan=form.every_step)
  if form.every_step:
    y = y.copy()
    y[~valid] = np.zeros((), y.dtype)
  if form.kind == 'classification':
    y = _labels(y, name)
  return found._replace(y=y)


def checked(
    x: np.ndarray, lengths: np.ndarray, missing: str, name: str
) -> np.ndarray:
  """Returns x [N, T, F] as `Sequences` have it; tells of possible padding.

  Lengths are int [N], `missing` is as in `Form`, and the name is for errors.
  """
  if sentence := sequence_checks.padding(x, lengths):
    print(f'WARNING: data: {name}: {sentence}', flush=True)
  valid = np.arange(x.shape[1]) < lengths[:, None]
  advice = "--config.data.missing='zero' allows NaN in x"
  array_checks.finite(
      x,
      valid,
      name,
      allow_nan=missing == 'zero',
      advice=advice if missing == 'refuse' else '',
  )
  # Nothing may be left of values in the padding.
  return x if valid.all() else np.where(valid[..., None], x, x.dtype.type(0))


def load(
    path: pathlib.Path, known: Sequence[str] | None
) -> dict[str, np.ndarray]:
  """Returns the arrays of a file that are read.

  `known` are names of arrays, others are told; None for all there are.
  """
  if not path.is_file():
    raise FileNotFoundError(f'{path} does not exist, or is no file')
  with path.open('rb') as content:
    head = content.read(8)
  if not head.startswith(b'PK'):
    # numpy would take it for a pickle, and say how to load that unsafely.
    raise ValueError(
        f'{path} is not a whole .npz file: it begins with {head!r};'
        ' numpy.savez(path, x=x, y=y) writes one'
    )
  arrays = {}
  try:
    with np.load(path, allow_pickle=False) as file:
      for name in file.files:
        if known is None or name in known:
          arrays[name] = np.asarray(file[name])
        else:
          print(
              f'WARNING: data: {path}: nothing reads its array {name!r}, only'
              f' {", ".join(known)}',
              flush=True,
          )
  except MemoryError:
    raise
  except Exception as error:  # A damaged zip file can raise nearly any.
    hint = '; give ragged sequences as steps [total, F], and lengths'
    raise ValueError(
        f'{path} is not a whole .npz file of numbers or text:'
        f' {error}{hint * ("Object arrays" in str(error))}'
    ) from error
  return arrays


def _padded_x(arrays, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns (x [N, T, F], lengths [N])."""
  x = _steps(arrays['x'], f'{name}: x', ('N', 'T', 'F'))
  count, most = x.shape[:2]
  lengths = arrays.get('lengths', np.full(count, most))
  return x, _lengths(lengths, name, count, most)


def concatenated_x(arrays, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns (x [N, T, F], lengths [N]) of 'steps' [total, F] and 'lengths'."""
  steps = _steps(arrays['steps'], f'{name}: steps', ('total', 'F'))
  if 'lengths' not in arrays:
    raise ValueError(f'{name}: steps need lengths, int [N]')
  lengths, total = arrays['lengths'], len(steps)
  lengths = _lengths(lengths, name, lengths.size, total)
  if lengths.sum() != total:
    raise ValueError(
        f'{name}: lengths must sum to the {total} rows of steps; they sum to'
        f' {lengths.sum()}'
    )
  x, _ = sequence_arrays.pad(np.split(steps, np.cumsum(lengths)[:-1]))
  return x, lengths


def _steps(array: np.ndarray, name: str, axes: Sequence[str]) -> np.ndarray:
  """Returns real numbers of these axes; the last is added where it is not."""
  return array_checks.numbers(array, name, axes, kinds='iufb', needs_last=False)


def _lengths(lengths, name: str, count: int, most: int) -> np.ndarray:
  return array_checks.integers(
      lengths, f'{name}: lengths', count, most, row='sequence'
  )


def _answers(
    arrays, form: Form, shape: tuple[int, ...], lengths: np.ndarray, name: str
) -> np.ndarray:
  """Returns y with the axes of `shape`, [N, T], or its first.

  Numbers have one axis more.
  """
  y = arrays['y']
  axes: tuple[int | str, ...] = shape if form.every_step else shape[:1]
  is_flat = form.every_step and 'steps' in arrays
  if is_flat:
    axes = (int(lengths.sum()),)
  kinds, noun = 'iufb', 'real numbers'
  why = f' for config.data.every_step={form.every_step}'
  if form.kind == 'regression':
    axes = (*axes, 'D')
  else:
    kinds, noun = 'iubUS', 'integers, booleans or strings'
    if y.dtype.kind == 'f':
      why += " (numbers to predict need --config.data.kind='regression')"
  y = array_checks.numbers(
      y,
      f'{name}: y',
      axes,
      kinds=kinds,
      noun=noun,
      why=why,
      needs_last=form.kind == 'classification',
  )
  if is_flat:
    y, _ = sequence_arrays.pad(np.split(y, np.cumsum(lengths)[:-1]))
  return y


def _labels(y: np.ndarray, name: str) -> np.ndarray:
  """Returns text as str, integers as int64 and booleans as they are."""
  if y.dtype.kind == 'S':
    try:
      return np.char.decode(y, 'utf-8')
    except UnicodeDecodeError as error:
      raise ValueError(
          f'{name}: y must hold UTF-8 where it holds bytes; got'
          f' {error.object!r}'
      ) from error
  if y.dtype.kind == 'u' and y.max() > np.iinfo(np.int64).max:
    raise ValueError(
        f'{name}: y must hold integers below 2**63; got {y.max()}, and such'
        ' labels can be given as text'
    )
  return y.astype(np.int64) if y.dtype.kind in 'iu' else y
