"""Ranks and dtypes that are promoted, whatever JAX is told.

Equations of cells broadcast arrays of fewer axes, parameters [F], against
others, gates [B, F]. They also work if `jax_numpy_rank_promotion='raise'`
refuses this in the caller's code.
"""

from collections.abc import Callable
import contextlib
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

FunctionT = TypeVar('FunctionT', bound=Callable[..., Any])


def ranks_allowed() -> contextlib.AbstractContextManager[Any]:
  """Returns a context in which arrays are broadcast, whatever JAX is told."""
  config: Any = jax.config  # Its attributes have no types.
  # Elsewhere nothing is set: JAX compiles again for each such setting.
  if config.jax_numpy_rank_promotion == 'allow':
    return contextlib.nullcontext()
  return jax.numpy_rank_promotion('allow')


def of_ranks(function: FunctionT) -> FunctionT:
  """Returns a function that runs where ranks may be promoted."""

  @functools.wraps(function)
  def within(*args: Any, **kwargs: Any) -> Any:
    with ranks_allowed():
      return function(*args, **kwargs)

  return within  # type: ignore[return-value]


# Dtypes that hold two others, and dtypes of state and sums.
#
# The promotions that the library asks for itself. They work also where
# `jax_numpy_dtype_promotion='strict'` refuses promotions nobody asked for.


Dtype = jax.typing.DTypeLike


def both(a: jax.Array | Dtype, b: jax.Array | Dtype) -> Any:
  """Returns the dtype that two dtypes, or arrays, promote to."""
  with jax.numpy_dtype_promotion('standard'):
    return jnp.result_type(a, b)


def wide(dtype: Dtype) -> Any:
  """Returns float32, or `dtype` where that is wider."""
  return both(dtype, jnp.float32)


def of_dtypes(function: FunctionT) -> FunctionT:
  """Returns a function whose arrays are promoted, whatever JAX is told."""

  @functools.wraps(function)
  def within(*args: Any, **kwargs: Any) -> Any:
    with jax.numpy_dtype_promotion('standard'):
      return function(*args, **kwargs)

  return within  # type: ignore[return-value]
