"""Inputs of a trained sequence model, checked before it answers.

Dimensions: B batch, T time, F columns.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rnnzoo import settings
from rnnzoo.tasks import array_inputs
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_checks

_PAD = (
    'pad sequences of several lengths: x, lengths ='
    ' rnnzoo.tasks.series.sequence_arrays.pad(arrays), then'
    " predict({'x': x, 'lengths': lengths})"
)


def check(
    inputs: Any,
    columns: int,
    allow_nan: bool,
    has_field: bool = True,
    *,
    shift: np.ndarray | None = None,
    are_ragged: bool = False,
) -> Any:
  """Returns x float32 [B, T, F], or a mapping with it and lengths int32 [B].

  With lengths, steps beyond a sequence's end are zero. With a shift, x - shift
  stands in a mapping as 'centred', and x does not.

  Args:
    inputs: x, or a mapping with 'x' and maybe 'lengths'.
    columns: the number of columns, F, of the model.
    allow_nan: whether x may hold NaN.
    has_field: whether the task has the field `config.data.missing`, by which a
      model is trained to take NaN.
    shift: numbers taken off columns before float32 rounds them, [F]; None for
      nothing.
    are_ragged: whether training had sequences of several lengths.

  Raises:
    ValueError: the inputs are something else.
  """
  given = inputs if isinstance(inputs, Mapping) else {'x': inputs}
  if others := [key for key in given if key not in ('x', 'lengths')]:
    hint = ''
    if others[0] in ('seq_lengths', 'length', 'seq_length', 'seq_len'):
      hint = f"; call {others[0]!r} 'lengths'"
    raise ValueError(
        "inputs must have no keys but 'x' and 'lengths'; got"
        f' {others[0]!r}{hint}'
    )
  if 'x' not in given:
    raise ValueError("inputs must have the key 'x', an array [B, T, F]")
  x = _x(given['x'], columns, has_field)
  found, lengths = {}, np.full(len(x), x.shape[1], np.int32)
  if given.get('lengths') is not None:
    lengths = found['lengths'] = array_inputs.counts(
        given['lengths'],
        'lengths',
        *x.shape[:2],
        of='the steps of x',
        row='sequence',
    )
  valid = np.arange(x.shape[1]) < lengths[:, None]
  remedy = "give {'x': x, 'lengths': lengths}, with "
  told, unheld = sequence_checks.padding(x, lengths, remedy)
  advice = "a model trained with config.data.missing='zero' takes NaN"
  advice *= has_field
  npz.check_values(x, valid, 'x', allow_nan, advice, unheld, is_counted=False)
  x = np.where(valid[..., None], x, x.dtype.type(0))
  shift = np.zeros(columns) if shift is None else shift
  centred = sequence_arrays.centre(x, shift, valid)
  if x.dtype.kind not in 'iu':
    warn_of_digits(x.dtype, shift)
  lost = sequence_arrays.lost_steps(x[valid], centred[valid])
  for sentence in (told if are_ragged else []) + sequence_checks.rounding(
      *lost
  ):
    settings.warn(f'x: {sentence}')
  if shift.any():
    return {'centred': centred, **found}
  return {'x': centred, **found} if isinstance(inputs, Mapping) else centred


def warn_of_digits(dtype: Any, shift: np.ndarray) -> None:
  """Warns of x that float32 rounded before `shift` [F] was taken away."""
  is_narrow = np.dtype(dtype).itemsize <= 4
  for column in np.flatnonzero(abs(shift) > (0 if is_narrow else 2**53)):
    settings.warn(
        f'x is {np.dtype(dtype).name}, which has few digits left of column'
        f' {column}, {shift[column]:g} from zero; give numpy arrays of'
        f' {"float64 or " * is_narrow}int64, and not inside jax.jit'
    )


def _x(given: Any, columns: int, has_field: bool) -> np.ndarray:
  """Returns x [B, T, F], in the dtype that was given."""
  if isinstance(given, np.ma.MaskedArray):
    hint = (
        "; x.filled(nan) is for a model trained with config.data.missing='zero'"
    )
    raise ValueError(
        'x must have no mask of numpy, which would be ignored'
        + hint * has_field
    )
  try:
    x = np.asarray(given)
  except ValueError as error:
    raise ValueError(
        f'x must be one array [B, T, {columns}], not a list of arrays of'
        f' several shapes; {_PAD}'
    ) from error
  if x.dtype == object:
    raise ValueError(
        f'x must be an array [B, T, {columns}] of numbers, not of Python'
        f' objects; {_PAD}'
    )
  # bfloat16 is no kind that numpy knows: 'V'.
  if x.dtype.kind not in 'iufb' and x.dtype.name != 'bfloat16':
    raise ValueError(f'x must hold real numbers; got {x.dtype}')
  if x.ndim != 3 or 0 in x.shape:
    hint = ''
    if x.ndim == 2 and x.shape[1] == columns:
      hint = '; x[None] makes a batch of one sequence'
    elif x.ndim == 2 and columns == 1:
      hint = '; x[..., None] gives it its one column'
    raise ValueError(
        f'x must be [B, T, {columns}], with none of them 0; its shape is'
        f' {list(x.shape)}{hint}'
    )
  if x.shape[2] != columns:
    raise ValueError(
        f'x must have {columns} columns, as the model was trained on; it has'
        f' {x.shape[2]}, its shape [B, T, F] being {list(x.shape)}'
    )
  return x.astype(np.float32) if x.dtype.kind == 'V' else x
