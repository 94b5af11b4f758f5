"""Dtypes that hold two others, and those of state and sums.

The promotions that the library asks for itself. They work also where
`jax_numpy_dtype_promotion='strict'` refuses those that nobody asked for.
"""

from collections.abc import Callable
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Dtype = jax.typing.DTypeLike
FunctionT = TypeVar('FunctionT', bound=Callable[..., Any])


def both(a: jax.Array | Dtype, b: jax.Array | Dtype) -> Any:
  """Returns the dtype that two dtypes, or arrays, promote to."""
  with jax.numpy_dtype_promotion('standard'):
    return jnp.result_type(a, b)


def wide(dtype: Dtype) -> Any:
  """Returns float32, or `dtype` where that is wider."""
  return both(dtype, jnp.float32)


def promoted(function: FunctionT) -> FunctionT:
  """Returns a function whose arrays are promoted, whatever JAX is told."""

  @functools.wraps(function)
  def within(*args: Any, **kwargs: Any) -> Any:
    with jax.numpy_dtype_promotion('standard'):
      return function(*args, **kwargs)

  return within  # type: ignore[return-value]
