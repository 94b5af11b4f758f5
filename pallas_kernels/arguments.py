"""Checks of the arguments of the two public functions.

A kernel reads device memory at computed addresses, so a wrong shape would not
fail: it would read other data. `ValueError` says that the caller is wrong,
`NotImplementedError` that the kernels cannot run this call.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import call as call_lib

Array = jax.Array

_DTYPES = ('float32', 'bfloat16', 'float16')

# CUDA's limit of the second and third axis of a grid.
_MAX_GRID = 65535


def dtypes(name: str, given: Sequence[Any]) -> None:
  """Raises NotImplementedError unless kernels can read and write dtypes."""
  names = sorted({jnp.dtype(dtype).name for dtype in given})
  if not set(names) <= set(_DTYPES):
    raise NotImplementedError(
        f'{name} on the GPU takes and returns {_DTYPES}, got {names}.'
    )


def sizes(name: str, batch: int, time: int, features: int) -> None:
  """Raises NotImplementedError where a grid would be empty or too large."""
  if not batch or not time or not features:
    raise NotImplementedError(
        f'{name} on the GPU needs batch, time and features above 0, got'
        f' {(batch, time, features)}.'
    )
  if batch > _MAX_GRID or features > 128 * _MAX_GRID:
    raise NotImplementedError(
        f'{name} on the GPU takes up to {_MAX_GRID} sequences of'
        f' {128 * _MAX_GRID} features, got {batch} of {features}: split the'
        ' batch.'
    )


def unsharded(name: str, arrays: Any) -> None:
  """Raises NotImplementedError for arrays that are typed as sharded."""
  for x in jax.tree.leaves(arrays):
    spec = jax.typeof(x).sharding.spec
    if any(axis is not None for axis in spec):
      raise NotImplementedError(
          f'{name} on the GPU cannot be partitioned, and an array is sharded as'
          f' {spec}: call it inside jax.shard_map.'
      )


def shape(name: str, x: Array, axes: str, expected: Sequence[int]) -> None:
  """Raises ValueError unless x has a shape.

  Args:
    name: the argument's name.
    x: the argument.
    axes: names of the axes, for instance '[batch, features]'.
    expected: the shape it should have.
  """
  if tuple(x.shape) != tuple(expected):
    raise ValueError(
        f'{name} must be {axes} = {tuple(expected)}, got {tuple(x.shape)}.'
    )


def flags(
    name: str, x: Array | None, batch: int, time: int, groups: int = 1
) -> None:
  """Raises ValueError unless x is None or bool [batch, time].

  Args:
    name: x's name.
    x: the flags.
    batch: B.
    time: T.
    groups: number of such arrays, stacked; one has no axis for it.
  """
  if x is None:
    return
  if groups > 1:
    shape(name, x, f'[{groups}, batch, time]', (groups, batch, time))
  else:
    shape(name, x, '[batch, time]', (batch, time))
  if x.dtype != jnp.bool_:
    raise ValueError(f'{name} must be bool, got {x.dtype}.')


def check_carry(
    name: str, xs: Any, names: Sequence[str], batch: int, features: int
):
  """Raises ValueError unless xs has one [batch, features] for each name."""
  if not isinstance(xs, (tuple, list)) or len(xs) != len(names):
    count = len(xs) if isinstance(xs, (tuple, list)) else type(xs).__name__
    raise ValueError(
        f'{name} must be a tuple of one array for each of {tuple(names)}, got'
        f' {count}.'
    )
  for x in xs:
    shape(name, x, '[batch, features]', (batch, features))


# Checks of the arguments of `recurrence`: they have to fit the cell.


def checked_shape(
    cell: Any,
    call: call_lib.Call,
    weights: Any,
    arrays: Sequence[Array],
    carry: Any,
    restart: Any,
    reset: Array | None,
    mask: Array | None,
) -> tuple[int, int, int]:
  """Returns B, T and F; raises where an argument does not fit the cell.

  Args:
    cell: the equations.
    call: static options.
    weights: the arguments params, input_kernel, bias and recurrent_kernel.
    arrays: x_gates, as a sequence.
    carry: the carry before the first step, or None.
    restart: the carry after a reset, or None.
    reset: flags of steps that restart, or None.
    mask: flags of steps that are not held, or None.
  """
  batch, time, features = _checked_sizes(cell, call, weights, arrays)
  for name, given in (('carry', carry), ('restart', restart)):
    if given is not None:
      check_carry(name, given, cell.carry_names, batch, features)
  flags('reset', reset, batch, time, call.groups)
  flags('mask', mask, batch, time, call.levels)
  *_, recurrent_kernel = weights
  _check_call(cell, call, recurrent_kernel)
  return batch, time, features


def is_dense(cell: Any, recurrent_kernel: Any) -> bool:
  """Returns whether the recurrent kernel mixes the units of a head."""
  if not cell.recurrent_gates:
    return False
  return recurrent_kernel.shape[-1] != 1 or hasattr(cell, 'operand')


def _check_call(cell: Any, call: call_lib.Call, recurrent_kernel: Any) -> None:
  """Raises an error for options that the cell's kernels do not have."""
  dense = is_dense(cell, recurrent_kernel)
  # A diagonal kernel may keep the carry to itself.
  least = 0 if cell.recurrent_gates and not dense else 1
  if not least <= call.outputs <= len(cell.carry_names):
    raise ValueError(
        f'outputs must be {least} to {len(cell.carry_names)} for'
        f' {type(cell).__name__}, got {call.outputs}.'
    )
  if dense:
    heads = recurrent_kernel.shape[1]
    if call.both_directions and heads % 2:
      raise ValueError(
          f'both_directions needs an even number of heads, got {heads}.'
      )
    if heads % call.levels:
      raise ValueError(
          f'The number of heads must be a multiple of levels = {call.levels},'
          f' got {heads}.'
      )
  elif (
      call.recurrent_gradient_clip is not None
      or call.stop_recurrent_gradient
      or call.groups > 1
  ):
    raise NotImplementedError(
        'GPU kernels have recurrent_gradient_clip, stop_recurrent_gradient,'
        ' both_directions and levels for recurrent kernels that are not'
        ' diagonal only.'
    )


def _checked_sizes(
    cell: Any, call: call_lib.Call, weights, arrays
) -> tuple[int, int, int]:
  """Returns B, T and F; raises where weights or inputs do not fit the cell."""
  _, input_kernel, bias, recurrent_kernel = weights
  features = arrays[0].shape[-1]
  if input_kernel is not None:
    _check_input_kernel(cell, arrays, input_kernel)
    features = input_kernel.shape[-1]
  lead = arrays[0].shape[:2]
  batch, time = lead[::-1] if call.time_major else lead
  sizes('recurrence', batch, time, features)
  if input_kernel is None:
    _check_gates(cell, arrays)
  if bias is not None:
    expected = (cell.input_gates, features)
    shape('bias', bias, '[gates, features]', expected)
  if cell.recurrent_gates:
    _check_kernel(cell, recurrent_kernel, features)
  elif not hasattr(cell, 'coefficients'):
    raise NotImplementedError(
        f'GPU kernels cannot run {type(cell).__name__}: it has no recurrent'
        ' gates and no coefficients.'
    )
  return batch, time, features


def _check_input_kernel(cell: Any, arrays, input_kernel: Array):
  """Raises ValueError unless x_gates are inputs of an input kernel."""
  if len(arrays) > 1 or arrays[0].ndim != 3:
    raise ValueError(
        'x_gates must be [batch, time, in_features] with an input_kernel, got'
        f' {[tuple(x.shape) for x in arrays]}.'
    )
  axes = '[gates, in_features, features]'
  given = input_kernel.shape[-1:]
  expected = (cell.input_gates, arrays[0].shape[-1], *given)
  shape('input_kernel', input_kernel, axes, expected)


def _check_gates(cell: Any, arrays: Sequence[Array]):
  """Raises ValueError unless the input gates are all there."""
  for x in arrays:
    if x.ndim not in (3, 4):
      raise ValueError(
          'x_gates must be [batch, time, gates, features] or arrays [batch,'
          f' time, features], got an array of shape {x.shape}.'
      )
    ends = (*arrays[0].shape[:2], *x.shape[2:-1], arrays[0].shape[-1])
    shape('x_gates', x, 'alike in batch, time and features', ends)
  gates = sum(x.shape[2] if x.ndim == 4 else 1 for x in arrays)
  if gates != cell.input_gates:
    raise ValueError(
        f'x_gates must hold {cell.input_gates} gates for'
        f' {type(cell).__name__}, got {gates}.'
    )


def _check_kernel(cell: Any, recurrent_kernel: Array | None, features: int):
  """Raises ValueError unless the recurrent kernel is there."""
  axes = '[gates, heads, head_dim, head_dim]'
  if recurrent_kernel is None:
    raise ValueError(
        f'{type(cell).__name__} needs a recurrent_kernel {axes}, got None.'
    )
  size = recurrent_kernel.shape[-1]
  expected = (cell.recurrent_gates, features // max(size, 1), size, size)
  shape('recurrent_kernel', recurrent_kernel, axes, expected)
