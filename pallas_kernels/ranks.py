"""Functions that broadcast arrays of fewer axes against others.

Equations of cells do, between parameters [F] and gates [B, F]. They work also
where `jax_numpy_rank_promotion='raise'` refuses it in the caller's code.
"""

from collections.abc import Callable
import contextlib
import functools
from typing import Any, TypeVar

import jax

FunctionT = TypeVar('FunctionT', bound=Callable[..., Any])


def allowed() -> contextlib.AbstractContextManager[Any]:
  """Returns a context in which arrays are broadcast, whatever JAX is told."""
  config: Any = jax.config  # Its attributes have no types.
  # Elsewhere nothing is set: JAX compiles again for each such setting.
  if config.jax_numpy_rank_promotion == 'allow':
    return contextlib.nullcontext()
  return jax.numpy_rank_promotion('allow')


def promoted(function: FunctionT) -> FunctionT:
  """Returns a function that runs where ranks are `allowed`."""

  @functools.wraps(function)
  def within(*args: Any, **kwargs: Any) -> Any:
    with allowed():
      return function(*args, **kwargs)

  return within  # type: ignore[return-value]
