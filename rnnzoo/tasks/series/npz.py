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

from collections.abc import Callable, Mapping, Sequence
import math
import os
import pathlib
from typing import Any, NamedTuple

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
  """Returns the sequences of a file; labels stay as they are.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it holds no such arrays; the message names file, array and, if
      it is one, row.
  """
  name = str(path)
  arrays = load(
      path,
      _NAMES,
      lambda arrays: _check_sizes(arrays, form, name),
      lambda names: _check_names(names, name),
  )
  return parse(arrays, form, name)


def _hint(name: str) -> str:
  """Returns the name that an array which nothing reads may be meant for."""
  words = set(name.lower().replace('_', ' ').replace('-', ' ').split())
  if words & {'mask', 'masks', 'valid', 'padding'}:
    return (
        "; how many steps of each sequence are valid is the array 'lengths',"
        ' int [N], such as mask.sum(axis=1), and y at a step without an answer'
        ' is NaN or the label -100'
    )
  if words & {'length', 'lengths', 'len', 'lens'}:
    return "; call it 'lengths' if it says how many steps are valid"
  return ''


def parse(
    arrays: Mapping[str, np.ndarray], form: Form, name: str
) -> sequence_arrays.Sequences:
  """Returns the sequences of a file's arrays; its name is for errors."""
  _check_names(list(arrays), name)
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
    y = sequence_arrays.narrow(y, known)
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
  remedy = "save x, y and, for the task 'sequences', "
  told, unheld = sequence_checks.padding(x, lengths, remedy)
  valid = np.arange(x.shape[1]) < lengths[:, None]
  advice = "--config.data.missing='zero' allows NaN in x"
  advice = advice if missing == 'refuse' else ''
  array_checks.finite(
      x,
      valid,
      name,
      allow_nan=missing == 'zero',
      advice=advice,
      remedy=unheld,
  )
  for sentence in told:
    print(f'WARNING: data: {name}: {sentence}', flush=True)
  # Nothing may be left of values in the padding.
  x = x if valid.all() else np.where(valid[..., None], x, x.dtype.type(0))
  return sequence_arrays.narrow(x, valid)


def load(
    path: pathlib.Path,
    known: Sequence[str] | None,
    check: Callable[[dict[str, np.ndarray]], Any] = lambda _: None,
    names: Callable[[list[str]], None] = lambda _: None,
) -> dict[str, np.ndarray]:
  """Returns the arrays of a file that are read.

  Args:
    path: the file.
    known: names of arrays, others are told; None for all there are.
    check: function that raises where arrays do not fit together. Its arrays are
      first stand-ins of their shapes: a small file may hold very much.
    names: function that raises where an array is missing.
  """
  if not path.is_file():
    raise FileNotFoundError(f'{path} does not exist, or is no file')
  with path.open('rb') as content:
    head = content.read(8)
  if head.startswith(b'\x93NUMPY'):
    raise ValueError(
        f'{path} is not an .npz file: it holds a single array; write it by'
        ' numpy.savez, with names'
    )
  if head and not head.startswith((b'PK\3\4', b'PK\5\6')):
    # numpy would take it for a pickle, and say how to load that unsafely.
    raise ValueError(
        f'{path} is not a whole .npz file: it begins with {head!r};'
        ' numpy.savez(path, x=x, y=y) writes one'
    )
  try:
    file = np.load(path, allow_pickle=False)
  except MemoryError:
    raise
  except Exception as error:  # A damaged zip file can raise nearly any.
    raise ValueError(f'{path} is not a whole .npz file: {error}') from error
  names(file.files)
  known = file.files if known is None else known
  for name in file.files:
    if name not in known:
      print(
          f'WARNING: data: {path}: nothing reads its array'
          f' {name!r}{_hint(name)}',
          flush=True,
      )
  arrays = {}
  with file:
    for read in (_stand_in, lambda file, name: file[f'{name}.npy']):
      for name in [name for name in file.files if name in known]:
        try:
          arrays[name] = read(file, name)
        except MemoryError:
          raise
        except Exception as error:
          raise ValueError(f'{path}: {name} cannot be read: {error}') from error
      _check_memory(arrays, str(path))
      check(arrays)
  return arrays


def _check_names(names: Sequence[str], name: str) -> None:
  """Raises ValueError if one of the arrays that must be there is not."""
  there = ', '.join(names[:8]) + ', ...' * (len(names) > 8) or 'nothing'
  if ('x' in names) == ('steps' in names):
    raise ValueError(
        f'{name} must hold either x [N, T, F] or steps [total, F]; it holds'
        f' {there}'
    )
  if 'y' not in names:
    raise ValueError(f'{name} must hold y, the answers; it holds {there}')


def _stand_in(file: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
  """Returns ones in the shape of an array, which take no memory."""
  whole: Any = file.zip
  if name in whole.namelist():
    raise ValueError(f'its entry must be {name}.npy, as numpy.savez writes it')
  entry = whole.getinfo(f'{name}.npy')
  with whole.open(entry) as content:
    read = np.lib.format.read_array_header_1_0
    if np.lib.format.read_magic(content) != (1, 0):
      read = np.lib.format.read_array_header_2_0
    shape, _, dtype = read(content)
    size = entry.file_size - content.tell()
  if dtype.hasobject:
    raise ValueError(
        'it is an array of Python objects, which are not read; give ragged'
        ' sequences as steps [total, F] and lengths'
    )
  if math.prod(shape) * dtype.itemsize != size:
    raise ValueError(f'it is damaged: {size:,} bytes are no {dtype} {shape}')
  return np.broadcast_to(np.ones((), dtype), shape)


def _check_memory(arrays: Mapping[str, np.ndarray], name: str) -> None:
  """Raises ValueError if arrays do not fit into the memory."""
  needed = sum(array.nbytes for array in arrays.values())
  there = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  if needed > there:
    raise ValueError(
        f'{name} holds arrays of {needed:,} bytes, but the memory here has'
        f' {there:,}; give several smaller files, or float32'
    )


def _check_sizes(arrays: Mapping[str, np.ndarray], form: Form, name: str):
  """Raises ValueError if arrays do not fit together."""
  if {'x', 'y'} <= set(arrays) and 'steps' not in arrays:
    x, lengths = _padded_x(arrays, name)
    _answers(arrays, form, x.shape[:2], lengths, name)
  elif {'steps', 'y', 'lengths'} <= set(arrays) and not form.every_step:
    _answers(arrays, form, arrays['lengths'].shape, arrays['lengths'], name)


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
  try:
    x, _ = sequence_arrays.pad(np.split(steps, np.cumsum(lengths)[:-1]))
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from error
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
          " (numpy.char.decode(y, 'latin-1'), say, makes text of other bytes)"
      ) from error
  if y.dtype.kind == 'U':
    try:
      np.char.encode(y, 'utf-8')
    except UnicodeEncodeError as error:
      raise ValueError(
          f'{name}: y must hold text that UTF-8 can hold; got {error.object!r}'
          " (numpy.char.encode(y, 'utf-8', 'replace') makes such)"
      ) from error
  if y.dtype.kind == 'u' and y.max() > np.iinfo(np.int64).max:
    raise ValueError(
        f'{name}: y must hold integers below 2**63; got {y.max()}, and such'
        ' labels can be given as text'
    )
  return y.astype(np.int64) if y.dtype.kind in 'iu' else y
