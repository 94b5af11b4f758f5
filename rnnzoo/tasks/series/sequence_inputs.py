"""Inputs of a trained sequence model, checked before it answers.

Dimensions: B batch, T time, F columns.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rnnzoo.tasks import array_inputs

_KEYS = ('x', 'lengths')
_PAD = (
    'pad sequences of several lengths: x, lengths ='
    ' rnnzoo.tasks.series.sequence_arrays.pad(arrays), then'
    " predict({'x': x, 'lengths': lengths})"
)


def check(
    inputs: Any, columns: int, allow_nan: bool, has_field: bool = True
) -> Any:
  """Returns x float32 [B, T, F], or a mapping with it and lengths int32 [B].

  Where there are lengths, steps beyond a sequence's end are zero.

  Args:
    inputs: x, or a mapping with 'x' and maybe 'lengths'.
    columns: F of the model.
    allow_nan: whether x may hold NaN.
    has_field: whether the task has the field `config.data.missing`, by which a
      model is trained to take NaN.

  Raises:
    ValueError: they are something else.
  """
  if not isinstance(inputs, Mapping):
    x = _x(inputs, columns, has_field)
    _check_finite(x, allow_nan, has_field)
    return x
  for key in inputs:
    if key not in _KEYS:
      hint = ''
      if key in ('seq_lengths', 'length', 'seq_length', 'seq_len'):
        hint = f"; call {key!r} 'lengths'"
      raise ValueError(
          f"inputs must have no keys but 'x' and 'lengths'; got {key!r}{hint}"
      )
  if 'x' not in inputs:
    raise ValueError("inputs must have the key 'x', an array [B, T, F]")
  x = _x(inputs['x'], columns, has_field)
  if inputs.get('lengths') is None:
    _check_finite(x, allow_nan, has_field)
    return {'x': x}
  lengths = array_inputs.counts(
      inputs['lengths'],
      'lengths',
      *x.shape[:2],
      of='the steps of x',
      row='sequence',
  )
  valid = np.arange(x.shape[1]) < lengths[:, None]
  x = np.where(valid[..., None], x, np.float32(0))
  _check_finite(x, allow_nan, has_field)
  return {'x': x, 'lengths': lengths}


def _x(given: Any, columns: int, has_field: bool) -> np.ndarray:
  """Returns x as float32 [B, T, F]."""
  if isinstance(given, np.ma.MaskedArray):
    hint = ''
    if has_field:
      hint = (
          '; x.filled(nan) is for a model trained with'
          " config.data.missing='zero'"
      )
    raise ValueError(
        f'x must have no mask of numpy, which would be ignored{hint}'
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
  with np.errstate(over='ignore'):
    return x.astype(np.float32)


def _check_finite(x: np.ndarray, allow_nan: bool, has_field: bool) -> None:
  """Raises ValueError for an infinity or, unless it is allowed, NaN."""
  wrong = np.isinf(x) if allow_nan else ~np.isfinite(x)
  if not wrong.any():
    return
  row, step, column = np.argwhere(wrong)[0]
  hint = ''
  if has_field and np.isnan(x[row, step, column]):
    hint = "; a model trained with config.data.missing='zero' takes NaN"
  raise ValueError(
      f'x must be finite in float32; sequence {row}, step {step}, column'
      f' {column} is {x[row, step, column]}{hint}'
  )
