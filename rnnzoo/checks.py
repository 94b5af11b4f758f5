"""Checks of arguments; an error names the value given and one that works."""

from collections.abc import Sequence
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo import cell as cell_lib

Array = jax.Array


def kernel(
    cell: cell_lib.Cell, recurrent_kernel: Array | None, features: int
) -> None:
  """Raises ValueError unless the recurrent kernel fits the cell."""
  name = type(cell).__name__
  gates = cell.recurrent_gates
  if gates == 0:
    if recurrent_kernel is not None:
      raise ValueError(
          f'{name} has no recurrent gates: recurrent_kernel must be None, got'
          f' shape {recurrent_kernel.shape}.'
      )
    return
  shape = () if recurrent_kernel is None else np.shape(recurrent_kernel)
  if (
      len(shape) != 4
      or shape[0] != gates
      or shape[2] != shape[3]
      or shape[1] * shape[2] != features
  ):
    got = 'None' if recurrent_kernel is None else f'shape {shape}'
    raise ValueError(
        'recurrent_kernel must be [recurrent_gates, heads, head_dim, head_dim]'
        f' with {gates} recurrent gates for {name} and heads * head_dim ='
        f' {features}, got {got}.'
    )


def inputs(given: Any, axes: str, in_features: int, layer: str) -> None:
  """Raises ValueError unless `given` is an input that a layer can project.

  Args:
    given: x as the caller passed it.
    axes: its axes as text, for instance '[..., time, in_features]'.
    in_features: size of the last axis.
    layer: the layer's name.
  """
  if not hasattr(given, 'dtype'):
    raise ValueError(
        f'{layer} expects an array of shape {axes}, got a'
        f' {type(given).__name__}; jnp.asarray(x) would work.'
    )
  shape = np.shape(given)
  if len(shape) < axes.count(',') or shape[-1] != in_features:
    raise ValueError(
        f'{layer} expects x of shape {axes} with in_features = {in_features},'
        f' got shape {shape}.'
    )
  if not jnp.issubdtype(given.dtype, jnp.floating):
    raise ValueError(
        f'{layer} expects floating-point x, got {given.dtype};'
        ' x.astype(jnp.float32) would work.'
    )


def carry(
    names: Sequence[str], given: Any, expected: tuple[int, ...], label: str
) -> cell_lib.Carry:
  """Returns a carry as arrays, or raises ValueError.

  Args:
    names: `Cell.carry_names`.
    given: the carry as the caller passed it.
    expected: shape of each array.
    label: the argument's name.
  """
  if isinstance(given, (tuple, list)):
    shapes = [np.shape(c) for c in given]
    if shapes == [expected] * len(names):
      return tuple(map(jnp.asarray, given))
    got = f'{len(shapes)} of shapes {shapes}'
  else:
    got = f'a {type(given).__name__}'
    if hasattr(given, 'shape'):
      got = f'one array of shape {given.shape}'
  parts = ', '.join(names) + (',' if len(names) == 1 else '')
  raise ValueError(
      f'{label} must be a tuple ({parts}) of {len(names)} arrays of shape'
      f' {expected}, got {got}.'
  )


def flags(given: Any, expected: tuple[int, ...], label: str) -> Array | None:
  """Returns `given` as a bool array of this shape, or raises ValueError."""
  if given is None:
    return None
  given = jnp.asarray(given)
  dtype, shape = given.dtype, given.shape
  if dtype != jnp.bool_:
    raise ValueError(
        f'{label} must be a bool array of shape {expected}, got dtype {dtype};'
        f' {label}.astype(bool) would work.'
    )
  if shape != expected:
    raise ValueError(f'{label} must have shape {expected}, got {shape}.')
  return given


def lengths(given: Any, expected: tuple[int, ...]) -> Array | None:
  """Returns `given` as an integer array of this shape, or raises ValueError."""
  if given is None:
    return None
  given = jnp.asarray(given)
  dtype, shape = given.dtype, given.shape
  if not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(
        f'seq_lengths must be an integer array of shape {expected}, got dtype'
        f' {dtype}; pass the number of valid steps of each sequence.'
    )
  if shape != expected:
    raise ValueError(f'seq_lengths must have shape {expected}, got {shape}.')
  return given


def floating(dtype: Any, label: str) -> None:
  """Raises ValueError unless `dtype` is a floating-point one."""
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(
        f'{label} must be a floating-point dtype, got {jnp.dtype(dtype)}.'
    )


def params(cell: cell_lib.Cell, given: Any) -> None:
  """Raises ValueError unless the cell's own parameters are all there."""
  missing = [name for name in cell.param_names if name not in given]
  if missing:
    raise ValueError(
        f'params of {type(cell).__name__} must have {cell.param_names}, each'
        f' [..., features]; {missing} are missing.'
    )


def positive(value: object, label: str) -> None:
  """Raises ValueError unless `value` is an int of at least 1."""
  is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not is_int or value < 1:  # type: ignore[operator]
    raise ValueError(f'{label} must be a positive int, got {value!r}.')


def recurrent_gradient(
    cell: cell_lib.Cell, clip: Any, stop: Any
) -> float | None:
  """Returns `clip` as a float, or raises ValueError.

  Args:
    cell: the equations.
    clip: recurrent_gradient_clip as the caller passed it.
    stop: stop_recurrent_gradient as the caller passed it.
  """
  is_number = isinstance(clip, numbers.Real) and not isinstance(clip, bool)
  if clip is not None and not (is_number and clip > 0):
    raise ValueError(
        'recurrent_gradient_clip must be a number above 0, or None, got'
        f' {clip!r}.'
    )
  if not isinstance(stop, (bool, np.bool_)):
    raise ValueError(f'stop_recurrent_gradient must be a bool, got {stop!r}.')
  if cell.recurrent_gates == 0 and (clip is not None or stop):
    name = 'stop_recurrent_gradient' if stop else 'recurrent_gradient_clip'
    raise ValueError(
        f'{type(cell).__name__} has no recurrent gates, so there is no gradient'
        f' through their product for {name} to act on; got'
        f' {name}={stop if stop else clip!r}.'
    )
  return None if clip is None else float(clip)


def heads(features: int, num_heads: int, has_kernel: bool) -> None:
  """Raises ValueError unless the features can be divided into heads.

  Args:
    features: as a layer was given it.
    num_heads: as a layer was given it.
    has_kernel: whether there is a recurrent kernel to divide.
  """
  positive(features, 'features')
  positive(num_heads, 'num_heads')
  if features % num_heads:
    raise ValueError(
        'features must be divisible by num_heads, got'
        f' features={features} and num_heads={num_heads}.'
    )
  if num_heads > 1 and not has_kernel:
    raise ValueError(
        'A layer without a recurrent kernel has no heads: num_heads must be 1,'
        f' got {num_heads}.'
    )


def describe(carry: object) -> str:
  """Describes a value that should have been a tuple of carries."""
  if isinstance(carry, (tuple, list)):
    return f'{len(carry)} of them'
  return f'a {type(carry).__name__}'


def factories(given: Sequence[Any]) -> None:
  """Raises ValueError unless each is a layer class or a function making one."""
  for factory in given:
    if not callable(factory) or hasattr(factory, 'out_features'):
      raise ValueError(
          'layer must be a layer class such as rnnzoo.GRU, or a function with'
          f' its signature, got {type(factory).__name__}'
          f' {factory if isinstance(factory, str) else "instance"!r}.'
      )
