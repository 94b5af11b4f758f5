"""Takes a path: the first that can run, noted for `rnnzoo.dryrun`.

Where a kernel is to run and another path could, `platforms.by_platform` keeps
both until the program is compiled.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import dataclasses
import functools
from typing import Any

import jax

from pallas_kernels import devices
from rnnzoo.engines import partitioning
from rnnzoo.engines import platforms
from rnnzoo.engines import selection

# pallas_kernels says why it cannot run; this says which path can.
_OTHER_PATHS = (
    "implementation='scan' runs everywhere, 'associative_scan' where the number"
    ' of steps is known, and None takes the fastest that can run.'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """The path that a recurrence took while it was traced.

  Attributes:
    path: its name.
    cell: the cell's class, or 'linear_scan'.
    shape: of the inputs on a device.
    passed_over: names of paths that could not run, each with the reason.
    over: pairs of 'batch', 'time', 'heads' or 'features', and the mesh axes
      that they are over. Those that are whole on each device are left out, and
      so are Auto axes, of which XLA decides.
    at_once: so many layers of a stack run at the same time.
  """

  path: str
  cell: str
  shape: tuple[int, ...]
  passed_over: tuple[tuple[str, str], ...]
  over: tuple[tuple[str, tuple[str, ...]], ...] = ()
  at_once: int = 1


_notes: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    'notes', default=None
)


@contextlib.contextmanager
def noted() -> Iterator[list[Choice]]:
  """Gives a list to which each choice inside is added."""
  choices: list[Choice] = []
  token = _notes.set(choices)
  try:
    yield choices
  finally:
    _notes.reset(token)


def note(
    path: selection.Path,
    label: str,
    shape: tuple[int, ...],
    passed_over: Sequence[tuple[str, str]] = (),
    *,
    has_heads: bool,
    at_once: int = 1,
) -> None:
  """Notes a choice for `noted`.

  Args:
    path: the path.
    label: as for `Choice.cell`.
    shape: of the inputs on a device.
    passed_over: as for `Choice`.
    has_heads: whether features that are over devices are heads.
    at_once: as for `Choice`.
  """
  notes = _notes.get()
  if notes is None:
    return
  over = partitioning.over_devices()
  parts = 'batch', 'time', 'heads' if has_heads else 'features'
  notes.append(
      Choice(
          path=selection.name_of(path),
          cell=label,
          shape=tuple(shape),
          passed_over=tuple(passed_over),
          over=tuple(
              (part, names)
              for part, names in zip(parts, over, strict=True)
              if names
          ),
          at_once=at_once,
      )
  )


def marked(x: jax.Array, implementation: selection.Implementation) -> jax.Array:
  """Returns x, marked where a program may be compiled for a wrong platform.

  `platforms.without_kernels` and `platforms.kernels_alone` say which.

  Args:
    x: inputs of a recurrence.
    implementation: as for `rnnzoo.unroll`.
  """
  if implementation is None:
    on_cpu = devices.platform() == 'cpu'
    return platforms.without_kernels(x) if on_cpu else x
  names = selection.names(implementation, linear=False)
  if [selection.name_of(name) for name in names] == ['pallas']:
    return platforms.kernels_alone(x)
  return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A recurrence but for its arrays, and the paths it may take.

  Attributes:
    names: of paths, in the order in which they are tried.
    paths: functions of (*static, operands), one for each of
      `selection.IMPLEMENTATIONS`; they raise NotImplementedError where they
      cannot run. They take settings as well, as `options`.
    static: hashable arguments.
    label: of the recurrence in notes.
    has_heads: whether features that are over devices are heads.
    slower_kernel: why a kernel is not tried where others are left; '' if it is.
    kernel_or_none: whether only a kernel is wanted: where none can run, its
      error is raised. Programs for other platforms than GPUs run another path
      all the same.
  """

  names: tuple[selection.Path, ...]
  paths: tuple[Callable[..., Any], ...]
  static: tuple[Any, ...]
  label: str
  has_heads: bool = False
  slower_kernel: str = ''
  kernel_or_none: bool = False

  def __call__(self, operands: Any) -> Any:
    """Returns the result of the first path that can run."""
    return self.take(operands)

  def take(self, operands: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Likewise; the choice is noted where the shape of the inputs is given."""
    passed_over: list[tuple[str, str]] = []
    for i, name in enumerate(self.names):
      rest = self.names[i + 1 :]
      is_kernel = selection.name_of(name) == 'pallas'
      if is_kernel and rest and self.slower_kernel:
        if self.kernel_or_none:
          raise NotImplementedError(self.slower_kernel)
        passed_over.append((str(name), self.slower_kernel))
        continue
      try:
        results = self._by(name, rest)(operands)
      except NotImplementedError as error:
        if not rest and is_kernel:
          raise NotImplementedError(f'{error} {_OTHER_PATHS}') from error
        if not rest or self.kernel_or_none:
          raise
        passed_over.append((str(name), str(error)))
        message = f'implementation={name!r} is passed over: {error}'
        if is_kernel and devices.platform() == 'gpu':
          selection.warn_once(f'{message} {rest[0]!r} is tried instead.')
        else:
          selection.log_once(message)
        continue
      if shape is not None:
        note(name, self.label, shape, passed_over, has_heads=self.has_heads)
      return results

  def _by(self, name: selection.Path, rest: tuple[selection.Path, ...]):
    """Returns a path as a function of the operands.

    Args:
      name: of the path.
      rest: those left to try; where the path is a kernel, they run in programs
        for other platforms.
    """
    path = functools.partial(self._path_of(name), *self.static)
    is_kernel = selection.name_of(name) == 'pallas'
    if is_kernel and rest and not devices.is_interpreting():
      following = dataclasses.replace(self, names=rest)
      functions = platforms.Functions(on_gpu=path, elsewhere=following)
      return functools.partial(platforms.by_platform, functions)
    return path

  def _path_of(self, name: selection.Path) -> Callable[..., Any]:
    """Returns a path as a function of (*static, operands)."""
    index = selection.IMPLEMENTATIONS.index(selection.name_of(name))
    path = self.paths[index]
    if isinstance(name, str):
      return path
    return functools.partial(path, options=name)
