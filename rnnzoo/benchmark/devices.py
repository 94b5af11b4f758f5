"""The suites 'devices' and 'time_devices': a program on one device and on all.

'devices' has a training step of a stack. Each device has a batch of its own
size, whatever their number (weak scaling): data parallelism, parameters
replicated. The step is one program under plain `jit`: forward, backward, the
sum of the parameters' gradients over the devices, SGD. Gradients are summed in
the dtype of the parameters, `param_dtype`.

'time_devices' has a linear recurrence with time over all devices.

Before anything is timed, the results of all devices are compared with one
device's results for all. Then one device and all devices take turns.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from jax.sharding import SingleDeviceSharding
import numpy as np

import rnnzoo
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import checks
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing

STACKS = ('2 x LSTM', '4 x GRU', '4 x MinGRU')

# Name: whether gates forget next to nothing, and whether one step in a thousand
# resets.
RECURRENCES = {
    'linear_scan': (False, False),
    'linear_scan_resets': (False, True),
    'linear_scan_slow': (True, False),
    'linear_scan_slow_resets': (True, True),
}

# The rows of a case: the device alone, and the kinds of the mesh's axis.
ONE = 'one device'
KINDS = ('Explicit', 'Auto')
OVER_TIME = 'time over devices'

STEP = 'training step'

# So large that an update is not lost where a parameter is rounded to 16 bits.
_RATE = 16.0

# Largest relative difference of an update of the parameters. A sum over the
# batch is rounded in another order; in 16 bits so are the terms.
_LIMITS = {'float32': 1e-3, 'bfloat16': 2e-2, 'float16': 2e-2}


class _Program(NamedTuple):
  """A function of arrays.

  Attributes:
    whole: the arrays for all devices.
    part: the arrays for one device alone.
    shardings: function from a kind of axis to shardings of the arrays.
    limit: largest relative difference of a result.
    before: subtracted from results before they are compared.
  """

  run: Callable[..., Any]
  whole: tuple[Any, ...]
  part: tuple[Any, ...]
  shardings: Callable[[str], Any]
  limit: float
  before: Any = None


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[dict[str, Any]]:
  """Compares all devices with one, then times both.

  Yields:
    One row for each case, way and direction, with the labels of
    `measurement.measure`. `error` is the largest relative difference of a
    result, or of an update;
    `weak_scaling` and `times` are the time of one device over the time of all.
  """
  for case in selected:
    for direction in case.directions:
      rows = [case.row(way, direction) for way in case.implementations]
      yield from measurement.side_by_side(_measure, case, rows, timer, watchdog)


def _measure(case: cases.Case, rows, timer: timing.Timer, watchdog) -> None:
  """Adds errors, memory and times to the rows of a case and direction."""
  over_time = case.layer in RECURRENCES
  new = _recurrence if over_time else _training
  program = new(case, rows[0]['direction'])
  one = _first_device()
  whole = part = _build(program.run, program.whole, one)
  if program.part is not program.whole:
    part = _build(program.run, program.part, one)
  expected = whole[1]()
  calls: list[Callable[[], Any]] = []
  for row in rows:
    way, alone = row['program'], row['program'] == ONE
    watchdog.start(f'{case.layer}, {way}')
    if alone:
      built, call = part
    else:
      places = program.shardings(way)
      built, call = _build(program.run, program.whole, places)
      row |= _compare(call(), expected, program)
    calls.append(call)
    row |= {'compile_s': built.compile_s, **built.memory}
    if over_time:
      kinds = ('mib', 'argument_mib', 'output_mib')
      row['mib'] = sum(built.memory[kind] or 0 for kind in kinds)
    row['devices'] = 1 if alone else jax.device_count()
  if not timer.repeats:
    return
  measurement.take_turns(case, rows, calls, timer, watchdog)
  if rows[0]['program'] == ONE:
    name = 'times' if over_time else 'weak_scaling'
    for row in rows:
      row[name] = rows[0]['ms'] / row['ms']


def _first_device() -> SingleDeviceSharding:
  # An array that is put on a device alone keeps the axes of its mesh.
  return SingleDeviceSharding(jax.devices()[0])


def _build(run, arrays, places) -> tuple[timing.Program, Callable[[], Any]]:
  """Returns a function compiled for its devices, and a call of it."""
  own = jax.device_put(arrays, places)
  built = timing.build(run, *own)
  return built, lambda: built.call(*own)


def _compare(got, expected, program: _Program) -> dict[str, Any]:
  """Returns the fields of a row that say whether results are right."""
  before = program.before
  if before is None:
    before = jax.tree.map(jnp.zeros_like, expected)
  trees = jax.device_put((got, expected, before), _first_device())
  wide = lambda x, start: x.astype(jnp.float32) - start.astype(jnp.float32)
  errors = jax.tree.map(
      lambda x, y, start: float(
          problems.relative_error(wide(x, start), wide(y, start))
      ),
      *trees,
  )
  error = float(np.max(jax.tree.leaves(errors)))  # Unlike max(), keeps NaN.
  name = 'a result of all devices differs from one device'
  return measurement.judged(error, program.limit, name)


def _training(case: cases.Case, unused_direction: str) -> _Program:
  """A training step; each device has `shape.batch` sequences."""
  dtypes = {'dtype': case.dtype, 'param_dtype': case.param_dtype}
  stack = problems.new_layer(case, **jax.tree.map(jnp.dtype, dtypes))
  graphdef, parameters = nnx.split(stack)

  def loss(parameters, x):
    y = nnx.merge(graphdef, parameters)(x.astype(case.dtype))
    return jnp.sum(y.astype(jnp.float32) ** 2)

  def step(parameters, x):
    gradient = jax.grad(loss)(parameters, x)
    return jax.tree.map(lambda p, g: p - _RATE * g, parameters, gradient)

  def shardings(kind):
    mesh = jax.make_mesh(
        (jax.device_count(),), ('data',), axis_types=(AxisType[kind],)
    )
    specs = PartitionSpec(), PartitionSpec('data')
    return tuple(NamedSharding(mesh, spec) for spec in specs)

  batch, *rest = case.shape.x
  size = (jax.device_count() * batch, *rest)
  x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
  limit = max(_LIMITS[case.dtype], _LIMITS[case.param_dtype])
  return _Program(
      *(step, (parameters, x), (parameters, x[:batch]), shardings),
      *(limit, parameters),
  )


def _recurrence(case: cases.Case, direction: str) -> _Program:
  """A linear recurrence of `shape.time` steps in all."""
  shape = case.shape
  size = (shape.batch, shape.time, shape.features)
  slow, resets = RECURRENCES[case.layer]
  a, b, d_h = (problems.normal(seed, size, case.dtype) for seed in range(3))
  if slow:  # Nothing is forgotten soon: all steps are read twice.
    a = jnp.where(a > 0, 1 - 2.0**-8, 1).astype(case.dtype)
  else:
    a = jax.nn.sigmoid(a)
  reset = np.random.default_rng(0).random(size[:2]) < 1e-3

  def run(a, b, d_h, *reset):
    forward = lambda a, b: rnnzoo.linear_scan(a, b, reset=(*reset, None)[0])
    if direction == cases.DIRECTIONS[0]:
      return forward(a, b)
    return jax.vjp(forward, a, b)[1](d_h)

  def over_time(unused_kind):
    mesh = jax.make_mesh((jax.device_count(),), ('time',))
    return NamedSharding(mesh, PartitionSpec(None, 'time'))

  arrays = (a, b, d_h, reset) if resets else (a, b, d_h)
  limit = checks.rounding(case.dtype, shape.time)
  return _Program(run, arrays, arrays, over_time, limit)
