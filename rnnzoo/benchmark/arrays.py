"""Draws arrays, shifts them in time and compares them.

Each operation is compiled once for a shape: when it is called first, or ahead,
by any thread, so that the one that times has nothing to compile.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Arrays of steps, by name.
SEQUENCES = ('x', 'x_gates', 'a', 'b')

Shape = tuple[int, ...]


def normal(seed: int, shape: Shape, dtype: str) -> jax.Array:
  """Returns normal numbers."""
  return _normal(shape, jnp.dtype(dtype))(np.uint32(seed))


def later(x: jax.Array, steps: int) -> jax.Array:
  """Returns x [batch, time, ...] some steps later, the last ones first."""
  return _later(x.shape, x.dtype)(x, np.int32(steps))


def relative_error(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns ||a - b|| / ||b||, or ||a|| where b is zero."""
  return _relative_error(a.shape, a.dtype, b.dtype)(a, b)


def operations(arguments: Any, exact_dtype: str) -> set[tuple[Any, ...]]:
  """Returns the operations that a case needs, for `compile_ahead`.

  Args:
    arguments: shapes and dtypes of arrays by name, and of weights.
    exact_dtype: dtype of the results that others are compared with.
  """
  arrays, weights = arguments
  sequences = [x for name, x in arrays.items() if name in SEQUENCES]
  drawn = [*sequences, *jax.tree.leaves(weights)]
  compared = jax.tree.leaves(arguments)
  exact = jnp.dtype(exact_dtype)
  return {
      *((_normal, x.shape, x.dtype) for x in drawn),
      *((_later, x.shape, x.dtype) for x in drawn),
      *((_relative_error, x.shape, x.dtype, exact) for x in compared),
  }


def compile_ahead(operation: Callable[..., Any], *facts: Any) -> None:
  """Compiles one of `operations`."""
  with jax.enable_x64(operation is _relative_error):
    operation(*facts)


def _compiled(f: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
  return jax.jit(f).lower(*arguments).compile()


@functools.cache
def _normal(shape: Shape, dtype: np.dtype) -> Callable[..., Any]:
  draw = lambda seed: jax.random.normal(jax.random.key(seed), shape, dtype)
  return _compiled(draw, np.uint32(0))


@functools.cache
def _later(shape: Shape, dtype: np.dtype) -> Callable[..., Any]:
  # Steps of a matrix are its rows, as for the product of a projection alone.
  axis = 1 if len(shape) > 2 else 0
  roll = lambda x, steps: jnp.roll(x, steps, axis)
  return _compiled(roll, jax.ShapeDtypeStruct(shape, dtype), np.int32(0))


@functools.cache
def _relative_error(
    shape: Shape, dtype: np.dtype, exact_dtype: np.dtype
) -> Callable[..., Any]:
  norm = jnp.linalg.vector_norm

  def error(a, b):
    size = norm(b)
    return norm(a.astype(b.dtype) - b) / jnp.where(size == 0, 1, size)

  both = (jax.ShapeDtypeStruct(shape, each) for each in (dtype, exact_dtype))
  return _compiled(error, *both)
