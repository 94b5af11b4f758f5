"""Generic GPU engines for recurrences, written in Pallas.

An engine knows no cell and no neural-network library: it takes arrays and,
where the recurrence is not linear, a pointwise update function. So this package
imports jax only.

Two names are public:

* `linear_scan`: h_t = a_t h_{t-1} + b_t.
* `recurrence`: carry_t = update(x_t, R h_{t-1}, carry_{t-1}).

The kernels are not written yet. Both functions raise `NotImplementedError`, the
error by which a caller learns that it has to run the same computation on
another path.
"""

from typing import Any, NoReturn

import jax

__all__ = ['linear_scan', 'recurrence']


def linear_scan(
    a: jax.Array, b: jax.Array, *args: Any, **kwargs: Any
) -> NoReturn:
  """Computes h_t = a_t h_{t-1} + b_t on the GPU.

  Args:
    a: Coefficients, [batch, time, features].
    b: Terms free of h, [batch, time, features].
    *args: Further arguments, not settled yet.
    **kwargs: Further arguments, not settled yet.

  Raises:
    NotImplementedError: Always. The kernel is not written yet.
  """
  del a, b, args, kwargs
  raise NotImplementedError(_message('linear_scan'))


def recurrence(update: Any, *args: Any, **kwargs: Any) -> NoReturn:
  """Computes carry_t = update(x_t, R h_{t-1}, carry_{t-1}) on the GPU.

  Args:
    update: One step of the recurrence, pointwise in batch and feature.
    *args: Further arguments, not settled yet.
    **kwargs: Further arguments, not settled yet.

  Raises:
    NotImplementedError: Always. The kernel is not written yet.
  """
  del update, args, kwargs
  raise NotImplementedError(_message('recurrence'))


def _message(name: str) -> str:
  return (
      f'pallas_kernels.{name}: the GPU kernels are not written yet. Use'
      " implementation='scan', which runs every cell, or"
      " implementation='associative_scan', which runs the linear ones."
  )
