"""Checks, once for each cell, that it keeps the contract of `rnnzoo.cell`.

A cell that breaks it would fail deep inside an engine, or run and be wrong on
one path only. Its equations are traced with abstract arrays instead, which
takes milliseconds, and the message says which rule is broken.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo import settings

# Sizes that nothing else in a cell has: an axis is told by its size.
_BATCH, _FEATURES = 1009, 1013

# These mix elements of an axis and keep its size; others that mix, reductions
# for instance, change it.
_MIXING = frozenset(
    {
        'cummax',
        'cummin',
        'cumlogsumexp',
        'cumprod',
        'cumsum',
        'conv_general_dilated',
        'dot_general',
        'fft',
        'gather',
        'rev',
        'scatter',
        'scatter_add',
        'scatter-add',
        'sort',
        'top_k',
    }
)


def check(
    cell: Any,
    params: Mapping[str, Any] | None = None,
) -> None:
  """Raises ValueError unless a cell keeps the contract.

  Args:
    cell: the caller's cell.
    params: its own parameters by name, arrays [..., features] or numbers.
  """
  if isinstance(cell, type) or not isinstance(cell, cell_lib.Cell):
    got = f'the class {cell.__name__}' if isinstance(cell, type) else repr(cell)
    raise ValueError(
        'cell must be an instance of a class derived from rnnzoo.Cell, such as'
        f' rnnzoo.LSTMCell(), got {got}.'
    )
  if not isinstance(params, Mapping | None):
    raise ValueError(
        f'The params (cell_params) of {type(cell).__name__} must be given by'
        ' name, as a dict of arrays [..., features], got'
        f' {settings.a(type(params))}.'
    )
  _check_static(cell)
  params = params or {}
  missing = [name for name in cell.param_names if name not in params]
  if missing:
    raise ValueError(
        f'params of {type(cell).__name__} must have {cell.param_names}, each'
        f' [..., features]; {missing} are missing.'
    )
  shapes = {name: np.shape(p) for name, p in params.items()}
  _check_equations(cell, tuple(sorted(shapes.items())))


def _check_static(cell: cell_lib.Cell) -> None:
  name = type(cell).__name__
  for attribute, least in (('input_gates', 1), ('recurrent_gates', 0)):
    value: Any = getattr(cell, attribute, None)
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not is_count or value < least:
      raise ValueError(
          f'{name}.{attribute} must be an int of at least {least}, got'
          f' {value!r}.'
      )
  for attribute, least in (('carry_names', 1), ('param_names', 0)):
    value = getattr(cell, attribute, None)
    is_names = isinstance(value, tuple) and len(set(value)) == len(value)
    if not is_names or len(value) < least or {*map(type, value)} - {str}:
      raise ValueError(
          f"{name}.{attribute} must be a tuple of names, such as ('h',), got"
          f' {value!r}.'
      )
  fields = getattr(cell.carry_type, '_fields', None)
  if cell.carry_type is not None and fields != cell.carry_names:
    raise ValueError(
        f'{name}.carry_type must be None or a NamedTuple with the fields'
        f' {cell.carry_names}, got one with {fields}.'
    )
  _check_kind(cell, name)
  settings = getattr(type(cell), '__dataclass_params__', None)
  is_frozen = settings.frozen if settings else not vars(cell)
  if not is_frozen:
    raise ValueError(
        f'{name} must be frozen, as a static argument of compiled functions:'
        ' decorate it with @dataclasses.dataclass(frozen=True).'
    )
  try:
    hash(cell)
  except TypeError as error:
    raise ValueError(
        f'{name} must be hashable, as a static argument of compiled functions;'
        f' its fields {list(vars(cell))} are not: {error}.'
    ) from error


def _check_kind(cell: cell_lib.Cell, name: str) -> None:
  """Raises ValueError for a linear or two-stage cell that is none."""
  if isinstance(cell, cell_lib.LinearCell):
    if cell.recurrent_gates or len(cell.carry_names) > 2:
      raise ValueError(
          f'{name} is a LinearCell, which has no recurrent gates and one carry'
          f' or two; got recurrent_gates = {cell.recurrent_gates} and'
          f' carry_names = {cell.carry_names}.'
      )
    if not isinstance(cell.reads_starts, bool):
      raise ValueError(
          f'{name}.reads_starts must be True or False, got'
          f' {cell.reads_starts!r}.'
      )
    if type(cell).update is not cell_lib.LinearCell.update:
      raise ValueError(
          f'{name} is a LinearCell with an update of its own, which no path'
          ' over a sequence runs: they run `coefficients`. Leave `update` out.'
          ' The output is h itself; a readout such as o * tanh(h) belongs in a'
          ' layer above, and a step that is not affine in h in a Cell.'
      )
  if isinstance(cell, cell_lib.TwoStageCell) and cell.recurrent_gates < 2:
    raise ValueError(
        f'{name} is a TwoStageCell, which needs at least 2 recurrent gates: the'
        ' last one multiplies the operand, and those before it make the'
        f' operand; got recurrent_gates = {cell.recurrent_gates}.'
    )


@functools.cache
@promotion.of_ranks
def _check_equations(
    cell: cell_lib.Cell,
    param_shapes: tuple[tuple[str, tuple[int, ...]], ...],
) -> None:
  lanes = jax.ShapeDtypeStruct((_BATCH, _FEATURES), jnp.float32)

  def param(shape):
    if shape and shape[-1] != 1:
      shape = (*shape[:-1], _FEATURES)
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  params = {k: param(shape) for k, shape in param_shapes}
  x_gates = (lanes,) * cell.input_gates
  h_gates = (lanes,) * cell.recurrent_gates
  carry = (lanes,) * len(cell.carry_names)
  if isinstance(cell, cell_lib.TwoStageCell):
    early = h_gates[:-1]
    given = f'the first {len(early)} of {len(h_gates)} recurrent gates'
    arguments: Any = params, x_gates, early, carry
    (operand,) = _trace(cell, 'operand', arguments, given, None)
    _check_shape(cell, 'operand', 'the operand', operand, broadcast=False)
  if isinstance(cell, cell_lib.LinearCell):
    if cell.reads_starts:
      starts = jax.ShapeDtypeStruct((_BATCH, 1), jnp.float32)
      x_gates = (*x_gates, starts)
    arguments, given = (params, x_gates), f'{len(x_gates)} input gates'
    outputs = _trace(cell, 'coefficients', arguments, given, ('a', 'b'))
    _check_coefficients(cell, *outputs)
  given = (
      f'{len(x_gates)} input gates, {len(h_gates)} recurrent gates and'
      f' {len(carry)} carries'
  )
  names = cell.carry_names
  arguments = (params, x_gates, h_gates, carry)
  outputs = _trace(cell, 'update', arguments, given, names)
  for label, output in zip(names, outputs, strict=True):
    _check_shape(cell, 'update', label, output, broadcast=False)


def _check_coefficients(cell: cell_lib.LinearCell, a: Any, b: Any) -> None:
  """Raises ValueError unless (a, b) have a form that fits the carries."""
  forms: tuple[Any, ...] = ((None, None),)
  wanted = 'an array for a and one for b'
  if len(cell.carry_names) == 2:
    pair = None, None
    forms = (pair, pair), ((pair, pair), pair)
    wanted = 'pairs (re, im) for a and b, or a = ((p, q), (r, s)) and a pair b'
  if (_form(a), _form(b)) not in forms:
    raise ValueError(
        f'{type(cell).__name__}.coefficients must return {wanted} for the'
        f' carries {cell.carry_names}, got {_structure(a)} and {_structure(b)}.'
    )
  for label, tree in (('a', a), ('b', b)):
    for output in jax.tree.leaves(tree):
      _check_shape(cell, 'coefficients', label, output, broadcast=True)


def _form(x: Any) -> Any:
  """Returns a tree of tuples with None in place of each array."""
  return tuple(map(_form, x)) if isinstance(x, tuple) else None


def _structure(tree: Any) -> str:
  return str(jax.tree.map(lambda x: 'array', tree)).replace("'", '')


def _trace(cell, method, arguments, given, names):
  """Returns the abstract results of a method, or raises ValueError."""
  where = f'{type(cell).__name__}.{method}'
  trace = jax.make_jaxpr(getattr(cell, method), return_shape=True)
  try:
    jaxpr, outputs = trace(*arguments)
  except MemoryError:  # It says nothing about the cell.
    raise
  except Exception as error:
    reason = f'{type(error).__name__}: {error}'
    # JAX's sentences speak of tracers, at length.
    if isinstance(error, jax.errors.TracerArrayConversionError):
      reason = 'it calls numpy; jax.numpy would work'
    elif isinstance(error, jax.errors.ConcretizationTypeError):
      reason = 'it asks for a value, as `if` does; jnp.where would work'
    raise ValueError(
        f'{where} cannot be traced with {given} of shape [batch, features] and'
        f' the parameters {sorted(arguments[0])}: {reason}'
    ) from error
  if names and (type(outputs) is not tuple or len(outputs) != len(names)):
    raise ValueError(
        f'{where} must return a tuple of {len(names)} arrays, {names}, got'
        f' {_structure(outputs)}.'
    )
  _check_pointwise(jaxpr.jaxpr, where)
  return outputs if names else (outputs,)


def _check_shape(cell, method, label, output, broadcast: bool) -> None:
  """Raises ValueError unless a result is [batch, features] and real."""
  where = f'{type(cell).__name__}.{method}'
  if not hasattr(output, 'shape'):
    got = settings.a(type(output))
    raise ValueError(f'{where} must return an array for {label}, got {got}.')
  shape, full = output.shape, (_BATCH, _FEATURES)
  fits = shape == full
  if broadcast:
    pairs = zip(shape[::-1], full[::-1], strict=False)
    fits = len(shape) <= 2 and all(a in (1, b) for a, b in pairs)
  if not fits:
    known = {_BATCH: 'batch', _FEATURES: 'features'}
    axes = ', '.join(str(known.get(size, size)) for size in shape)
    raise ValueError(
        f'{where} must return {label} of shape [batch, features], got [{axes}].'
    )
  if not jnp.issubdtype(output.dtype, jnp.floating):
    raise ValueError(
        f'{where} must return real floating-point numbers for {label}, got'
        f' {output.dtype}.'
    )


def _check_pointwise(jaxpr: Any, where: str) -> None:
  """Raises ValueError where an operation mixes batch elements or features."""
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    inner = list(_inner(eqn.params))
    for sub in inner:
      _check_pointwise(sub, where)
    if inner:
      continue
    for axis, size in ((-1, _FEATURES), (-2, _BATCH)):
      has = lambda x, axis=axis, size=size: size in x.aval.shape[axis:][:1]
      if any(map(has, eqn.invars)) and (
          name in _MIXING or not all(map(has, eqn.outvars))
      ):
        what = 'features' if size == _FEATURES else 'batch elements'
        raise ValueError(
            f'{where} must be pointwise in batch and feature, and {name!r}'
            f' mixes {what}. Products belong to the recurrent kernel; a norm'
            " goes between layers, as rnnzoo.Stack's."
        )


def _inner(params: Mapping[str, Any]):
  """Yields the jaxprs that an operation calls."""
  for value in params.values():
    for x in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(x, core.ClosedJaxpr):
        yield x.jaxpr
      elif isinstance(x, core.Jaxpr):
        yield x
