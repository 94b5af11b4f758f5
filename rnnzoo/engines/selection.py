"""Which path runs: the names of the paths, their order, and falling back.

Where a GPU is there and its kernels are passed over, a warning says why, once:
the paths that remain can be tens of times slower.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
from typing import Any
import warnings

from absl import logging
from jax import export

from pallas_kernels import targets
from rnnzoo.engines import derivatives

Implementation = str | Sequence[str] | None

IMPLEMENTATIONS = ('scan', 'associative_scan', 'pallas')

# pallas_kernels says why it cannot run; this says which path can.
_OTHER_PATHS = (
    "implementation='scan' runs everywhere, 'associative_scan' runs linear"
    ' cells, and None takes the fastest that can run.'
)


def first_that_can(
    paths: Mapping[str, Callable[..., Any]],
    implementation: Implementation,
    linear: bool,
    *operands: Any,
) -> Any:
  """Returns the result of the first implementation that can run.

  Args:
    paths: by name; each takes `operands`, or raises NotImplementedError.
    implementation: a name, a sequence of names, or None for the default order.
    linear: whether the recurrence is linear in its carry.
    *operands: of the path.
  """
  names = _names(implementation, linear)
  for name, following in itertools.pairwise(names):
    try:
      return paths[name](*operands)
    except NotImplementedError as error:
      message = f'implementation={name!r} is passed over: {error}'
      if name == 'pallas' and targets.default_device().platform == 'gpu':
        warn_once(f'{message} {following!r} is tried instead.')
      else:
        log_once(message)
  try:
    return paths[names[-1]](*operands)
  except NotImplementedError as error:
    if names[-1] != 'pallas':
      raise
    raise NotImplementedError(f'{error} {_OTHER_PATHS}') from error


def check_known(shape: Sequence[int]) -> None:
  """Raises NotImplementedError where a GPU kernel cannot be planned."""
  if any(map(export.is_symbolic_dim, shape)):
    raise NotImplementedError(
        "implementation='pallas' plans a kernel for sizes that are known, got"
        f" the symbolic shape {tuple(shape)}. implementation='scan' works."
    )


def for_kernel(arrays: Any) -> Any:
  """Returns the arrays for a GPU kernel, which has no forward mode.

  Outside of `jax.jit`, `jax.jvp` raises here, and the next path is tried. In
  it, forward and reverse mode look the same until the program is compiled.
  """
  reason = (
      "implementation='pallas' has derivatives in reverse mode only (jax.grad,"
      " jax.vjp). implementation='scan' has forward mode too (jax.jvp,"
      ' jax.linearize, jax.hessian), and so has'
      " 'associative_scan' for linear cells."
  )
  return derivatives.in_reverse_mode_only(reason, arrays)


def is_first(name: str, implementation: Implementation) -> bool:
  """Returns whether an implementation is tried before all others.

  Args:
    name: of the implementation.
    implementation: as for `first_that_can`.
  """
  return _names(implementation, False)[0] == name


def check_implementation(implementation: Implementation) -> None:
  """Raises ValueError unless `implementation` names known paths."""
  names = implementation
  if names is None:
    return
  if isinstance(names, str):
    names = (names,)
  if (
      not isinstance(names, Sequence)
      or not names
      or not all(isinstance(name, str) for name in names)
      or any(name not in IMPLEMENTATIONS for name in names)
  ):
    raise ValueError(
        f'implementation must be None, one of {IMPLEMENTATIONS} or a sequence'
        f' of these, got {implementation!r}.'
    )


def _names(implementation: Implementation, linear: bool) -> Sequence[str]:
  check_implementation(implementation)
  if implementation is None:
    backend = targets.default_device().platform
    # On a CPU, steps over time-major data in cache beat O(T log T) work.
    parallel = ('associative_scan',) if linear and backend != 'cpu' else ()
    kernels = ('pallas',) if backend == 'gpu' else ()
    return (*kernels, *parallel, 'scan')
  if isinstance(implementation, str):
    return (implementation,)
  return implementation


@functools.cache
def warn_once(message: str) -> None:
  """Warns the first time that a message is given: a GPU could be faster."""
  warnings.warn(f'rnnzoo: {message}', stacklevel=2)


@functools.cache
def log_once(message: str) -> None:
  """Logs a message the first time that it is given."""
  logging.info('%s', message)
