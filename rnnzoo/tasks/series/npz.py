"""Sequences in .npz files: read and checked, with errors that name the place.

A file holds N sequences of F columns, padded to T steps:

  x         [N, T, F] or [N, T], anything real;
  lengths   int [N], how many steps of each are valid; all T without it;
  y         an answer for each sequence, [N], or for each step, [N, T]: for
            classes integers, booleans or strings, for numbers anything real,
            which may have an axis more, [N, D] or [N, T, D].

A step without an answer has the label -100, or NaN.

`numpy.savez('mine.npz', x=x, y=y, lengths=lengths)` writes one, and
`sequence_arrays.pad` makes x and lengths of sequences of several lengths.
Arrays of Python objects are not read: they can run any program.
"""

from collections.abc import Mapping, Sequence
import pathlib
from typing import NamedTuple

import numpy as np

from rnnzoo.tasks import array_checks
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_checks

_NAMES = ('x', 'y', 'lengths')


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
  if 'x' not in arrays or 'y' not in arrays:
    raise ValueError(
        f'{name} must hold x [N, T, F], with lengths [N] for sequences of'
        ' several lengths, and y, the answers; it holds'
        f' {", ".join([*arrays][:8]) or "nothing"}'
    )
  x = array_checks.numbers(
      arrays['x'],
      f'{name}: x',
      ('N', 'T', 'F'),
      kinds='iufb',
      needs_last=False,
  )
  lengths = array_checks.integers(
      arrays.get('lengths', np.full(*x.shape[:2])),
      f'{name}: lengths',
      *x.shape[:2],
      row='sequence',
  )
  y = _answers(arrays['y'], form, x.shape[:2], name)
  x = checked(x, lengths, form.missing, f'{name}: x')
  found = sequence_arrays.Sequences(x, lengths, y)
  valid, known = found.valid(), found.known(form.every_step)
  if form.every_step and not known.any(1).all():
    raise ValueError(
        f'{name}: y must have an answer for one step of each sequence at least;'
        f' sequence {known.any(1).argmin()} has none'
    )
  if not form.every_step and y.dtype.kind == 'i':
    if count := np.sum(y == sequence_arrays.NO_LABEL):
      raise ValueError(
          f'{name}: y must have an answer for each sequence, got -100, which is'
          f' no label, for {count} of them; leaving these out would work'
      )
  if form.kind == 'regression':
    are_numbers = valid if form.every_step else known
    array_checks.finite(y, are_numbers, f'{name}: y', allow_nan=form.every_step)
  if form.every_step:
    y = y.copy()
    y[~valid] = np.zeros((), y.dtype)
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
    raise ValueError(
        f'{path} is not a whole .npz file of numbers or text, padded to one'
        f' length: {error}'
    ) from error
  return arrays


def _answers(
    y: np.ndarray, form: Form, shape: tuple[int, ...], name: str
) -> np.ndarray:
  """Returns y with the axes of `shape`, [N, T], or its first.

  Numbers have one axis more, and integers become int64.
  """
  axes: tuple[int | str, ...] = shape if form.every_step else shape[:1]
  is_class = form.kind == 'classification'
  why = f' for config.data.every_step={form.every_step}'
  if is_class and y.dtype.kind == 'f':
    why += " (numbers to predict need --config.data.kind='regression')"
  y = array_checks.numbers(
      y,
      f'{name}: y',
      axes if is_class else (*axes, 'D'),
      kinds='iubU' if is_class else 'iufb',
      noun='integers, booleans or text' if is_class else 'real numbers',
      why=why,
      needs_last=is_class,
  )
  if not is_class or y.dtype.kind not in 'iu':
    return y
  if y.max() > np.iinfo(np.int64).max:
    raise ValueError(
        f'{name}: y must hold integers below 2**63; got {y.max()}, and such'
        ' labels can be given as text'
    )
  return y.astype(np.int64)
