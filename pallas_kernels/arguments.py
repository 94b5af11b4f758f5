"""Checks of the arguments of the two public functions.

A kernel reads device memory at computed addresses, so a wrong shape would not
fail: it would read other data. `ValueError` says that the caller is wrong,
`NotImplementedError` that the kernels cannot run this call.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

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
    name: of the argument.
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
    name: of x.
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


def carry(name: str, xs: Any, names: Sequence[str], batch: int, features: int):
  """Raises ValueError unless xs has one [batch, features] for each name."""
  if not isinstance(xs, (tuple, list)) or len(xs) != len(names):
    count = len(xs) if isinstance(xs, (tuple, list)) else type(xs).__name__
    raise ValueError(
        f'{name} must be a tuple of one array for each of {tuple(names)}, got'
        f' {count}.'
    )
  for x in xs:
    shape(name, x, '[batch, features]', (batch, features))
