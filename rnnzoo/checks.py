"""Checks of a caller's arrays: errors say which would work.

`settings.py` has the checks of a layer's settings.
"""

import numbers
from typing import Any

import jax
from jax import export
import jax.numpy as jnp
import numpy as np

from rnnzoo import cell as cell_lib
from rnnzoo import settings

Array = jax.Array


def input_gates(cell: cell_lib.Cell, x_gates: Any) -> Array:
  """Returns input gates as an array, or raises ValueError."""
  x_gates = array(x_gates, 'x_gates')
  real(x_gates, 'x_gates')
  if x_gates.ndim < 3 or x_gates.shape[-2] != cell.input_gates:
    raise ValueError(
        'x_gates must be [..., time, input_gates, features] with'
        f' {cell.input_gates} input gates for {type(cell).__name__}, got shape'
        f' {x_gates.shape}.'
    )
  return x_gates


def kernel(
    cell: cell_lib.Cell, recurrent_kernel: Any, features: int
) -> Array | None:
  """Returns the recurrent kernel as an array, or raises ValueError."""
  name = type(cell).__name__
  gates = cell.recurrent_gates
  if not features:
    raise ValueError('x_gates must have at least one feature, got none.')
  shape: Any = ()
  if recurrent_kernel is not None:
    recurrent_kernel = array(recurrent_kernel, 'recurrent_kernel')
    shape = recurrent_kernel.shape
    if gates == 0:
      raise ValueError(
          f'{name} has no recurrent gates: recurrent_kernel must be None, got'
          f' shape {shape}.'
      )
  elif gates == 0:
    return None
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
  real(recurrent_kernel, 'recurrent_kernel')
  return recurrent_kernel


def outputs(given: Any, carries: int) -> int:
  """Returns how many of the carry's arrays to return, or raises ValueError."""
  if given is None:
    return carries
  settings.positive(given, 'outputs')
  if given > carries:
    raise ValueError(
        f'outputs must be at most {carries}, the number of carries, got'
        f' {given}.'
    )
  return int(given)


def inputs(
    given: Any, axes: str, in_features: int, layer: str, name: str = 'x'
) -> None:
  """Raises ValueError unless a layer can project `given`.

  Args:
    given: x as the caller passed it.
    axes: its axes as text, for instance '[..., time, in_features]'.
    in_features: size of the last axis.
    layer: the layer's name.
    name: the argument's name.
  """
  no_values = jax.ShapeDtypeStruct, np.ma.MaskedArray
  if not hasattr(given, 'dtype') or isinstance(given, no_values):
    raise ValueError(
        f'{layer} expects {name} as an array of shape {axes}, with all of its'
        f' values, got {settings.a(type(given))}.'
    )
  shape = np.shape(given)
  if len(shape) < axes.count(',') or shape[-1] != in_features:
    raise ValueError(
        f'{layer} expects {name} of shape {axes} with in_features ='
        f' {in_features}, got shape {shape}.'
    )
  if not jnp.issubdtype(given.dtype, jnp.floating):
    raise ValueError(
        f'{layer} expects {name} of real floating-point numbers, got'
        f' {given.dtype}.'
    )
  _width(given.dtype, f'{layer} expects {name} of such a dtype: {name}')


def parameter(given: Any, expected: tuple[int, ...] | None, label: str) -> None:
  """Raises ValueError unless a layer's parameter is like that it made.

  A checkpoint, or the state of another layer, can put anything there.

  Args:
    given: the value of the parameter.
    expected: its shape; None for a parameter of the cell's own.
    label: the names of layer and parameter.
  """
  if isinstance(given, jax.ShapeDtypeStruct):
    raise ValueError(
        f'{label} has a shape but no values. In a layer of rnnzoo.linen, the'
        ' variables lack its entry; nnx.update(layer, state) fills a layer that'
        ' nnx.eval_shape made.'
    )
  if expected is not None and given.shape != expected:
    raise ValueError(
        f'{label} must have shape {expected}, as when the layer was made, got'
        f' {given.shape}; a state fits layers of the same class and sizes only.'
    )
  (number if expected is None else real)(given, label)


def carry(
    names: tuple[str, ...],
    given: Any,
    expected: tuple[int, ...],
    label: str,
) -> cell_lib.Carry:
  """Returns a carry as arrays, or raises ValueError.

  Args:
    names: `Cell.carry_names`.
    given: the caller's carry.
    expected: shape of each array.
    label: the argument's name.
  """
  if isinstance(given, (tuple, list)):
    fields = getattr(given, '_fields', names)
    if fields != names and sorted(fields) == sorted(names):
      raise ValueError(f'{label} must have the order {names}, got {fields}.')
    arrays = [array(c, label) for c in given]
    shapes = [c.shape for c in arrays]
    if shapes == [expected] * len(names):
      for name, c in zip(names, arrays, strict=True):
        number(c, f'{name} of {label}')
      return tuple(arrays)
    got = f'{len(shapes)} of shapes {shapes}'
  elif hasattr(given, 'shape'):
    got = f'one array of shape {given.shape}'
  else:
    got = settings.a(type(given))
  parts = ', '.join(names) + (',' if len(names) == 1 else '')
  raise ValueError(
      f'{label} must be a tuple ({parts}) of {len(names)} arrays of shape'
      f' {expected}, as initial_carry returns it, got {got}.'
  )


def flags(given: Any, expected: tuple[int, ...], label: str) -> Array | None:
  """Returns `given` as a bool array of this shape, or raises ValueError."""
  if given is None:
    return None
  given = array(given, label)
  if given.dtype != jnp.bool_ or given.shape != expected:
    is_close = given.shape == expected
    raise ValueError(
        f'{label} must be a bool array of shape {expected}, got {given.dtype}'
        f' of shape {given.shape}'
        f'{f"; {label}.astype(bool) would be one" * is_close}.'
    )
  return given


def tokens(
    given: Any,
    num_tokens: int,
    label: str = 'tokens',
    axes: str = '[..., time]',
) -> Array:
  """Returns `given` as an integer array, or raises ValueError.

  Values can be checked where they are known, outside of `jax.jit`.

  Args:
    given: the caller's tokens.
    num_tokens: tokens are from 0 to this, excluded.
    label: the argument's name.
    axes: '[..., time]', or '[...]' for a single step.
  """
  given = array(given, label)
  is_integer = jnp.issubdtype(given.dtype, jnp.integer)
  if not is_integer or given.ndim < axes.count(','):
    raise ValueError(
        f'{label} must be integers {axes}, got'
        f' {given.dtype} of shape {given.shape}.'
    )
  _values_within(given, label, 0, num_tokens - 1)
  return given


def share(given: Any, label: str, shape: tuple[int, ...]) -> Any:
  """Returns a number or an array from 0 to 1 that broadcasts to a shape."""
  if not isinstance(given, (np.ndarray, Array)):
    settings.within(given, label, least=0, most=1)
    return float(given)
  given = array(given, label)
  real(given, label)
  sizes = zip(reversed(given.shape), reversed(shape), strict=False)
  if given.ndim > len(shape) or any(n not in (1, most) for n, most in sizes):
    raise ValueError(
        f'{label} must be a number or broadcast to {shape}, got shape'
        f' {given.shape}.'
    )
  _values_within(given, label, 0, 1)
  return given


def _values_within(
    given: Array, label: str, least: int, most: int, text: str = ''
) -> None:
  """Raises ValueError unless the values that are known are within bounds."""
  if not isinstance(given, jax.core.Tracer) and given.size:
    # In numpy: within jit, jnp's functions of known values are traced too.
    values = np.asarray(given)
    low, high = values.min(), values.max()
    if not (low >= least and high <= most):  # Neither holds of NaN.
      raise ValueError(
          f'{label} must be from {least} to {text}{most}, got values from'
          f' {low} to {high}.'
      )


def known(given: Any, label: str) -> None:
  """Raises ValueError if an array of a tree is traced and so has no values."""
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given)):
    raise ValueError(
        f'{label} must have values, and an array inside of jax.jit, jax.grad or'
        ' jax.vmap has none; a call outside would work.'
    )


def lengths(given: Any, expected: tuple[int, ...], time: int) -> Array | None:
  """Returns `given` as an int32 array of this shape, or raises ValueError.

  Values can be checked where they are known, outside of `jax.jit`. Inside, one
  above T counts as T and one below 0 as 0.

  Args:
    given: the caller's seq_lengths.
    expected: its shape.
    time: T, the number of steps.
  """
  if given is None:
    return None
  given = array(given, 'seq_lengths')
  if not jnp.issubdtype(given.dtype, jnp.integer) or given.shape != expected:
    raise ValueError(
        f'seq_lengths must be an integer array of shape {expected}, got'
        f' {given.dtype} of shape {given.shape}.'
    )
  _values_within(given, 'seq_lengths', 0, time, 'the number of steps, ')
  return _as_int32(given)


def _as_int32(x: Array) -> Array:
  """Returns integers as int32, and those beyond its range as its ends."""
  if x.dtype.itemsize >= 4 and x.dtype != jnp.int32:
    least = max(jnp.iinfo(x.dtype).min, -(2**31))
    x = jnp.clip(x, x.dtype.type(least), x.dtype.type(2**31 - 1))
  return x.astype(jnp.int32)


def last_step(seq_lengths: Any, time: int) -> Array:
  """Returns the index of each sequence's last valid step, 0 without one."""
  return jnp.clip(_as_int32(jnp.asarray(seq_lengths)), 1, time) - 1


def floating(dtype: Any, label: str) -> None:
  """Raises ValueError unless `dtype` is a floating-point one that JAX has."""
  try:
    known = jnp.dtype(dtype)
  except (TypeError, ValueError):
    known = None
  if known is None or not jnp.issubdtype(known, jnp.floating):
    got = repr(dtype) if known is None else known
    raise ValueError(
        f'{label} must be a floating-point dtype such as jnp.float32 or'
        f' jnp.bfloat16, got {got}.'
    )
  _width(known, label)
  config: Any = jax.config  # Its attributes have no types.
  if known.itemsize == 8 and not config.jax_enable_x64:
    raise ValueError(
        f'{label}={known} would run in float32: JAX has 64 bits only after'
        " jax.config.update('jax_enable_x64', True)."
    )


def array(given: Any, label: str) -> Array:
  """Returns `given` as an array, or raises ValueError."""
  fits = True
  try:
    result = jnp.asarray(given)
    if isinstance(given, np.ndarray) and given.dtype.kind in 'iu':
      info = jnp.iinfo(result.dtype)
      fits = bool(np.all((info.min <= given) & (given <= info.max)))
  except OverflowError:
    fits = False
  except (TypeError, ValueError) as error:
    raise ValueError(
        f'{label} must be an array, got {settings.a(type(given))}.'
    ) from error
  if not fits:
    raise ValueError(
        f'{label} has integers that JAX cannot hold, got {given!r:.80}; it has'
        " 64 bits only after jax.config.update('jax_enable_x64', True)."
    )
  return result


def number(given: Any, label: str, *, or_complex: bool = False) -> None:
  """Raises ValueError unless an array holds real, or complex, numbers."""
  is_complex = jnp.issubdtype(given.dtype, jnp.complexfloating)
  if not jnp.issubdtype(given.dtype, jnp.number) or is_complex > or_complex:
    kind = 'numbers' if or_complex else 'real numbers'
    raise ValueError(f'{label} must be {kind}, got {given.dtype}.')
  if jnp.issubdtype(given.dtype, jnp.floating):
    _width(given.dtype, label)


def real(given: Any, label: str) -> None:
  """Raises ValueError unless an array holds real floating-point numbers."""
  number(given, label)
  if not jnp.issubdtype(given.dtype, jnp.floating):
    raise ValueError(f'{label} must be floating-point, got {given.dtype}.')


def _width(dtype: Any, label: str) -> None:
  """Raises ValueError for floating-point numbers that JAX cannot promote."""
  if not 2 <= jnp.dtype(dtype).itemsize <= 8:
    raise ValueError(
        f'{label} must have 16 to 64 bits, got {dtype}; .astype(jnp.bfloat16)'
        ' or .astype(jnp.float32) would work.'
    )


def shape(given: Any, label: str) -> tuple[int, ...]:
  """Returns `given` as a shape, or raises ValueError."""

  def is_size(n):
    if export.is_symbolic_dim(n):
      return True
    is_int = isinstance(n, numbers.Integral) and not isinstance(n, bool)
    return is_int and n >= 0

  if not isinstance(given, (tuple, list)) or not all(map(is_size, given)):
    raise ValueError(
        f'{label} must be a tuple of sizes, such as (8,), got {given!r}.'
    )
  return tuple(given)


def params(cell: cell_lib.Cell, given: Any, features: int) -> cell_lib.Params:
  """Returns the cell's own parameters as arrays, or raises ValueError."""
  arrays = {}
  for name, value in given.items():
    label = f'{name} in params of {type(cell).__name__}'
    arrays[name] = array(value, label)
    number(arrays[name], label)
    if arrays[name].shape[-1:] not in ((), (1,), (features,)):
      raise ValueError(
          f'{label} must be [..., features] with {features} features, got shape'
          f' {arrays[name].shape}.'
      )
  return arrays


def recurrent_gradient(
    cell: cell_lib.Cell, clip: Any, stop: Any
) -> float | None:
  """Returns the caller's recurrent_gradient_clip as a float."""
  if clip is not None:
    settings.within(clip, 'recurrent_gradient_clip', above=0)
  settings.boolean(stop, 'stop_recurrent_gradient')
  if cell.recurrent_gates == 0 and (clip is not None or stop):
    name = 'stop_recurrent_gradient' if stop else 'recurrent_gradient_clip'
    raise ValueError(
        f'{type(cell).__name__} has no recurrent gates, so there is no gradient'
        f' through their product for {name} to act on; got'
        f' {name}={stop if stop else clip!r}.'
    )
  return None if clip is None else float(clip)


def describe(carry: object) -> str:
  """Describes an argument that should be a tuple of carries."""
  if isinstance(carry, (tuple, list)):
    return f'{len(carry)} of them'
  if isinstance(carry, type):
    return f'the class {carry.__name__}, not an instance of it'
  return settings.a(type(carry))
