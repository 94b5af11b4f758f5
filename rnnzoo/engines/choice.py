"""Takes a path: the first that can run, noted for `rnnzoo.dryrun`.

If a kernel is to run and another path could, `platforms.by_platform` keeps both
until the program is compiled.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import api
from pallas_kernels import auto_axes
from pallas_kernels import devices
from rnnzoo import cell as cell_lib
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import first_use
from rnnzoo.engines import platforms
from rnnzoo.engines import selection
from rnnzoo.engines import sharding

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
    shape: shape of the inputs on a device.
    passed_over: names of paths that could not run, each with the reason.
    over: pairs of 'batch', 'time', 'heads' or 'features', and the mesh axes
      that they are over. Axes that are whole on each device are left out, and
      so are Auto axes, which XLA decides.
    at_once: number of a stack's layers that run side by side.
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
  """Notes a choice for `noted`, as `Choice` has it.

  Args:
    path: the path.
    label: the cell.
    shape: shape of the inputs on a device.
    passed_over: paths passed over and why.
    has_heads: whether features that are over devices are heads.
    at_once: number of a stack's layers that run side by side.
  """
  notes = _notes.get()
  if notes is None:
    return
  parts = 'batch', 'time', 'heads' if has_heads else 'features'
  over = zip(parts, sharding.over_devices(), strict=True)
  choice = Choice(
      path=selection.name_of(path),
      cell=label,
      shape=tuple(shape),
      passed_over=tuple(passed_over),
      over=tuple((part, names) for part, names in over if names),
      at_once=at_once,
  )
  notes.append(choice)


def marked(x: jax.Array, implementation: selection.Implementation) -> jax.Array:
  """Returns x, marked where a program may be compiled for a wrong platform.

  `platforms.without_kernels` and `platforms.kernels_alone` say which. x is any
  input of a recurrence.
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
    names: names of paths, in the order in which they are tried.
    paths: functions of (*static, operands), one for each of
      `selection.IMPLEMENTATIONS`; they raise NotImplementedError where they
      cannot run. They take settings as well, as `options`.
    static: hashable arguments.
    label: name of the recurrence in notes.
    kind: 'linear', 'diagonal' or 'dense'.
    slower_kernel: why a kernel is not tried where others are left; '' if it is.
    kernel_or_none: whether only a kernel is wanted: where none can run, its
      error is raised. Programs for other platforms than GPUs still run another
      path.
  """

  names: tuple[selection.Path, ...]
  paths: tuple[Callable[..., Any], ...]
  static: tuple[Any, ...]
  label: str
  kind: str = 'linear'
  slower_kernel: str = ''
  kernel_or_none: bool = False

  def __call__(
      self, operands: Any, shape: tuple[int, ...] | None = None
  ) -> Any:
    """Returns the result of the first path that can run.

    Args:
      operands: the arrays.
      shape: shape of the inputs on a device, noted with the choice; None
        notes nothing.
    """
    passed_over: list[tuple[str, str]] = []
    for i, name in enumerate(self.names):
      rest = self.names[i + 1 :]
      is_kernel = selection.name_of(name) == 'pallas'
      is_choice = is_kernel and bool(rest)
      reason = self.slower_kernel
      if is_choice and (reason := reason or first_use.doubt(self.kind)):
        if self.kernel_or_none:
          raise NotImplementedError(reason)
        passed_over.append((str(name), reason))
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
        has_heads = self.kind != 'linear'
        note(name, self.label, shape, passed_over, has_heads=has_heads)
      return results

  def _by(self, name: selection.Path, rest: tuple[selection.Path, ...]):
    """Returns a path as a function of the operands.

    Args:
      name: name of the path.
      rest: paths left to try; where the path is a kernel, they run in programs
        for other platforms.
    """
    index = selection.IMPLEMENTATIONS.index(selection.name_of(name))
    options = {} if isinstance(name, str) else {'options': name}
    path = functools.partial(self.paths[index], *self.static, **options)
    is_kernel = selection.name_of(name) == 'pallas'
    if is_kernel and rest and not devices.is_interpreting():
      following = dataclasses.replace(self, names=rest)
      functions = platforms.Functions(on_gpu=path, elsewhere=following)
      return functools.partial(platforms.by_platform, functions)
    return path


# When another path is faster than a GPU kernel, by measurement.
#
# A kernel of the family 'dense' keeps R on the chip and takes a batch in
# pieces, in turn. A step of `lax.scan` multiplies all rows at once:
# with many rows of a large R arithmetic is the limit, and the library's product
# wins. Kernels in tiles, where they run, are faster than both. The times are in
# benchmarks/tuning_large_batches_h200.json.
#
# A linear recurrence of few features leaves most multiprocessors idle, however
# long it is: 32 share a sequence at most. XLA's associative scan uses them all.
# A single step is one kernel of XLA's, and so are a few. Times are in
# benchmarks/lengths_h200.json.


# Units of a head and rows of a batch from which 'scan' is faster, with one head
# and arrays of 16 bits. Measured: LSTM and GRU of 512 and 768 units.
_UNITS = 640
_ROWS = 1024

# Kernels for heads of more units, with so many gates or more, take 16 to 32
# rows at once, so that these are three pieces or four. By counting.
_LARGE_UNITS = 1536
_LARGE_GATES = 4
_ROWS_OF_LARGE = 64

# The fewest steps with which layers in depth run side by side, in so many
# parts; and the steps from which more parts are faster. Measured on one H100
# and again on an H200: benchmarks/stacks_h200.json has the largest heads too.
_STEPS_OF_WAVEFRONT, _UNITS_OF_WAVEFRONT = 384, 512
_PARTS = 4
_LONG_WAVEFRONT, _PARTS_OF_LONG = 1024, 8

# Steps of a linear recurrence from which 'associative_scan' is faster, with so
# many numbers a step or fewer, batch times features. Measured: 1 x 64.
_LONG = 65536
_FEW_NUMBERS = 64

# Steps up to which it is faster too, with so many numbers or fewer. Measured:
# 1 x 64 and 16 x 64, of 4 steps and of 16. Calls of 4 steps are bound by their
# launch: 'linear_scan' takes 11 to 27 % less, layers 13 % less to 14 % more.
_SHORT = 4
_NUMBERS_OF_SHORT = 1024


def slower_linear_kernel(rows: int, time: int, features: int) -> str:
  """Returns why `None` passes over a linear recurrence's kernel, or ''.

  Args:
    rows: rows of the batch; each of the sizes may be symbolic.
    time: the number of steps.
    features: F.
  """
  if not all(isinstance(size, int) for size in (rows, time, features)):
    return ''
  if time == 1:
    return 'a kernel gains nothing for a single step, as measured.'
  if time <= _SHORT and rows * features <= _NUMBERS_OF_SHORT:
    return (
        f"'associative_scan' is mostly faster than the kernel, as measured, up"
        f' to {_SHORT} steps of {_NUMBERS_OF_SHORT:,} numbers or fewer; these'
        f' are {time} of {rows * features}.'
    )
  if time >= _LONG and rows * features <= _FEW_NUMBERS:
    return (
        f"'associative_scan' is faster than the kernel, as measured, from"
        f' {_LONG:,} steps of {_FEW_NUMBERS} numbers or fewer; these are'
        f' {time:,} of {rows * features}.'
    )
  return ''


def parts_of_wavefront(time: int, recurrent_kernel: Any) -> int:
  """Returns in how many parts of time layers in depth run side by side.

  Args:
    time: T.
    recurrent_kernel: R of a layer, [G', N, D, D], or its type.

  Raises:
    NotImplementedError: running the layers in turn is faster, or nobody has
      measured it.
  """
  units = recurrent_kernel.shape[-1]
  wide = jnp.dtype(recurrent_kernel.dtype).itemsize > 2
  if time < _STEPS_OF_WAVEFRONT or units > _UNITS_OF_WAVEFRONT or wide:
    raise NotImplementedError(
        f'From {_STEPS_OF_WAVEFRONT} steps on layers run at the same time, in'
        f' 16 bits and with heads of up to {_UNITS_OF_WAVEFRONT} units, as'
        f' measured; these are {time} steps of {units} units in'
        f' {jnp.dtype(recurrent_kernel.dtype).name}.'
    )
  return _PARTS_OF_LONG if time >= _LONG_WAVEFRONT else _PARTS


def slower_kernel(
    cell: cell_lib.Cell, operands: call_lib.Operands, call: call_lib.Call
) -> str:
  """Returns why `None` passes over the kernels; '' where it does not.

  Args:
    cell: the equations.
    operands: operands of the recurrence on this device.
    call: its options.
  """
  kernel = operands.recurrent_kernel
  if kernel is None or jnp.dtype(kernel.dtype).itemsize != 2:
    return ''
  heads = kernel.shape[1] // (1 + call.both_directions)
  units = kernel.shape[-1]
  rows = operands.x.shape[1 if call.time_major else 0]
  most, reason = _ROWS, 'as measured'
  if units > _LARGE_UNITS and kernel.shape[0] >= _LARGE_GATES:
    most, reason = _ROWS_OF_LARGE, 'by counting'
  if heads > 1 or units < _UNITS or not isinstance(rows, int) or rows < most:
    return ''
  time = operands.x.shape[0 if call.time_major else 1]
  known = isinstance(time, int)
  if known and api.in_tiles(cell, (rows, time), kernel, call):
    return ''
  if auto_axes.may_be_split(operands):
    return ''  # A device may have few of the rows.
  return (
      f"'scan' is faster than the kernels, {reason}, from {most:,} rows of a"
      f' head with {units:,} units; these are {rows:,}.'
  )
