"""Which path runs: the names of the paths, their order, and falling back.

If a GPU is there and its kernels are passed over, a warning says why, once:
the paths that remain can be tens of times slower.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import functools
from typing import Any, ClassVar

from absl import logging
import jax
from jax import export

from pallas_kernels import devices
from rnnzoo import settings
from rnnzoo.engines import autodiff


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssociativeScan:
  """`implementation='associative_scan'` with settings of its own.

  It is accepted wherever a name is. A cell that is linear in its carry takes
  one pass and uses no setting. Every other cell is solved with Newton's
  method (`engines/time/newton.py`), whose defaults need no thought. A GPU may
  solve for the joints of parts of time first, unless `jacobian` or `window` is
  given (`engines/time/kernel_parts.py`).

  >>> import rnnzoo
  >>> from flax import nnx
  >>> path = rnnzoo.AssociativeScan(window=64)
  >>> layer = rnnzoo.GRU(3, 8, implementation=path, rngs=nnx.Rngs(0))

  Attributes:
    jacobian: 'exact' for the derivatives of all heads as matrices, which need
      memory for batch * heads * (S * head_dim)^2 numbers a step, where a carry
      has S arrays; 'diagonal' for a quasi-Newton method with S^2 numbers a
      feature; None for the first where it fits. A diagonal recurrent kernel
      has exact derivatives of that size.
    window: steps that are solved at once; None for as many as fit.
  """

  name: ClassVar[str] = 'associative_scan'
  jacobian: str | None = None
  window: int | None = None

  def __post_init__(self):
    if self.jacobian is not None:
      settings.choice(self.jacobian, ('exact', 'diagonal'), 'jacobian')
    if self.window is not None:
      settings.positive(self.window, 'window')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan:
  """`implementation='scan'` with settings of its own: memory against time.

  It is accepted wherever a name is. A gradient always keeps x and the carry
  after every step. The gates W x + b are formed again in the backward pass,
  for some steps at once.

  >>> import rnnzoo
  >>> from flax import nnx
  >>> path = rnnzoo.Scan(keep='carries', chunk=64)
  >>> layer = rnnzoo.GRU(3, 8, implementation=path, rngs=nnx.Rngs(0))

  Attributes:
    keep: 'gates' keeps the recurrent gates R h of every step as well;
      'carries' forms them again, which takes one more product in all; None
      keeps them where they have at most 2^22 numbers, or 2^24 on a CPU where
      32 steps of gates have more than 2^19. A cell that is linear in its
      carry, or has no R, has no such gates.
    chunk: steps whose input gates, and whose linearisation in the backward
      pass, exist at once; None for as many as suit the device. If this and
      `keep` are None, a CPU takes a sequence whole whose gates have at most
      2^20 numbers: less to compile, for up to 5 MiB more.
  """

  name: ClassVar[str] = 'scan'
  keep: str | None = None
  chunk: int | None = None

  def __post_init__(self):
    if self.keep is not None:
      settings.choice(self.keep, ('carries', 'gates'), 'keep')
    if self.chunk is not None:
      settings.positive(self.chunk, 'chunk')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pallas:
  """`implementation='pallas'` with settings of its own: memory against time.

  It is accepted wherever a name is. A gradient always keeps x, the parameters
  and the carry after every step.

  >>> import rnnzoo
  >>> from flax import nnx
  >>> path = (rnnzoo.Pallas(keep='carries'), 'scan')
  >>> layer = rnnzoo.GRU(3, 8, implementation=path, rngs=nnx.Rngs(0))

  Attributes:
    keep: 'gates', as `'pallas'` does, keeps the input gates W x of every step
      as well, batch * time * gates * features numbers in the dtype of x.
      Kernels in tiles keep the sums W x + R h in float16 instead, which
      saturates at 65,504 and loses digits below 6e-5. 'carries' forms the gates
      again in the backward pass: one more product of all steps for W x, and
      another one for R h in tiles. Input gates that are
      given instead of x, to `rnnzoo.unroll` or by `SLSTMBlock`, are there
      already and stay; so do the coefficients of `rnnzoo.linear_scan`, and
      of a linear layer whose time is over devices.
    wavefront: layers of a `Stack` run side by side where that is faster: a
      layer over each part of time while the one above it runs over the part
      before. False runs them in turn, with fewer kernels to compile for a
      gradient, and so does keep='carries'.
  """

  name: ClassVar[str] = 'pallas'
  keep: str = 'gates'
  wavefront: bool = True

  def __post_init__(self):
    settings.choice(self.keep, ('carries', 'gates'), 'keep')
    settings.boolean(self.wavefront, 'wavefront')


# A path by its name, or with settings.
Path = str | AssociativeScan | Scan | Pallas
Implementation = Path | Sequence[Path] | None

IMPLEMENTATIONS = ('scan', 'associative_scan', 'pallas')


def name_of(path: Path) -> str:
  """Returns the name of a path, which may have settings."""
  return path if isinstance(path, str) else path.name


def check_known(shape: Sequence[int]) -> None:
  """Raises NotImplementedError where a GPU kernel cannot be planned."""
  if any(map(export.is_symbolic_dim, shape)):
    raise NotImplementedError(
        "implementation='pallas' plans a kernel for sizes that are known, got"
        f" the symbolic shape {tuple(shape)}. implementation='scan' works."
    )


_REVERSE_MODE_ONLY = (
    "implementation='pallas' has derivatives in reverse mode only (jax.grad,"
    " jax.vjp). implementation='scan' has forward mode too (jax.jvp,"
    " jax.linearize, jax.hessian), and so has 'associative_scan'."
)


def for_kernel(arrays: Any) -> Any:
  """Returns the arrays for a GPU kernel, which has no forward mode.

  Outside of `jax.jit`, `jax.jvp` raises here, and the next path is tried. In
  it, forward and reverse mode look alike until the program is compiled.
  """
  # Each by itself: `jax.vmap` maps the tangents of all that go together.
  return jax.tree.map(
      functools.partial(autodiff.in_reverse_mode_only, _REVERSE_MODE_ONLY),
      arrays,
  )


@contextlib.contextmanager
def in_reverse_mode() -> Iterator[None]:
  """Around a kernel: errors about forward mode name the paths that have it."""
  try:
    yield
  except TypeError as error:
    if 'custom_vjp' not in str(error):
      raise
    raise NotImplementedError(_REVERSE_MODE_ONLY) from error


def is_kernel_first(implementation: Implementation) -> bool:
  """Returns whether 'pallas' is tried before all others."""
  return name_of(names(implementation, False)[0]) == 'pallas'


def checked(implementation: Implementation) -> Path | tuple[Path, ...] | None:
  """Returns known paths, to be kept; ValueError if they are not known."""
  if implementation is None:
    return None
  given: Any = implementation
  if isinstance(given, Path):
    given = (given,)
  known = lambda x: isinstance(x, Path) and name_of(x) in IMPLEMENTATIONS
  if not isinstance(given, Sequence) or not given or not all(map(known, given)):
    raise ValueError(
        f'implementation must be None, one of {IMPLEMENTATIONS}, an'
        ' rnnzoo.AssociativeScan, rnnzoo.Scan or rnnzoo.Pallas with settings,'
        f' or a sequence of these, got {implementation!r}.'
    )
  return implementation if isinstance(implementation, Path) else tuple(given)


def names(implementation: Implementation, linear: bool) -> tuple[Path, ...]:
  """Returns the paths to try in turn.

  Args:
    implementation: a path, a sequence of paths, or None for the default order.
    linear: whether the recurrence is linear in its carry.
  """
  given = checked(implementation)
  if given is None:
    backend = devices.platform()
    # On a CPU, steps over time-major data in cache beat O(T log T) work.
    parallel = ('associative_scan',) if linear and backend != 'cpu' else ()
    kernels = ('pallas',) if backend == 'gpu' else ()
    return (*kernels, *parallel, 'scan')
  return given if isinstance(given, tuple) else (given,)


@functools.cache
def warn_once(message: str) -> None:
  """Warns the first time that a message is given: a GPU could be faster."""
  settings.warn(f'rnnzoo: {message}')


@functools.cache
def log_once(message: str) -> None:
  """Logs a message the first time that it is given."""
  logging.info('%s', message)
