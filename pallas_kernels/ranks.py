"""Functions that broadcast arrays of fewer axes against others.

Equations of cells do, between parameters [F] and gates [B, F]. They work also
where `jax_numpy_rank_promotion='raise'` refuses it in the caller's code.
"""

from collections.abc import Callable
import functools
from typing import Any, TypeVar

import jax

FunctionT = TypeVar('FunctionT', bound=Callable[..., Any])


def promoted(function: FunctionT) -> FunctionT:
  """Returns a function whose arrays are broadcast, whatever JAX is told."""

  @functools.wraps(function)
  def within(*args: Any, **kwargs: Any) -> Any:
    config: Any = jax.config  # Its attributes have no types.
    # Elsewhere nothing is set: JAX compiles again for each such setting.
    if config.jax_numpy_rank_promotion == 'allow':
      return function(*args, **kwargs)
    with jax.numpy_rank_promotion('allow'):
      return function(*args, **kwargs)

  return within  # type: ignore[return-value]
