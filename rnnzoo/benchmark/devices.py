"""The suite 'devices': a training step on one device, and on all of them.

Each device has a batch of its own size, whatever their number (weak scaling):
data parallelism, parameters replicated. The step is one program under plain
`jit`: forward, backward, the sum of the parameters' gradients over the devices,
SGD. Gradients are summed in the dtype of the parameters, `param_dtype`.
`weak_scaling` is the time of one device over that of all, which takes turns
with it.

The new parameters of all devices are compared with those that one device gets
from the whole batch, before anything is timed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from rnnzoo.benchmark import cases
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing

STACKS = ('2 x LSTM', '4 x GRU', '4 x MinGRU')

# The rows of a case: the device alone, and the kinds of the mesh's axis.
ONE = 'one device'
STEP = 'training step'
KINDS = ('Explicit', 'Auto')

# So large that an update is not lost where a parameter is rounded to 16 bits.
_RATE = 16.0
_OTHERS = ('all-gather', 'all-to-all', 'collective-permute', 'reduce-scatter')

# Largest relative difference of an update of the parameters. A sum over the
# batch is rounded in another order; in 16 bits so are the terms.
_LIMITS = {'float32': 1e-3, 'bfloat16': 2e-2, 'float16': 2e-2}


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
  """A training step, with the arrays that it is called on.

  Attributes:
    program: the compiled function.
    arguments: parameters and x, on their devices.
  """

  program: timing.Program
  arguments: tuple[Any, Any]

  def __call__(self) -> Any:
    return self.program.call(*self.arguments)


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[dict[str, Any]]:
  """Checks the step of every case on all devices, then times it.

  A timer with several threads compiles the steps of all cases first.

  Args:
    selected: the cases; `shape.batch` is that of each device.
    timer: how to time.
    watchdog: watches over every step.

  Yields:
    One row for each case and implementation, with the labels of
    `measurement.measure`. `error` is the largest relative difference of an
    array's update; `collectives` counts those of the compiled program;
    `param_dtype` is the dtype of the parameters.
  """
  with futures.ThreadPoolExecutor(timer.threads) as pool:
    quick = not timer.repeats
    begun: Iterable[tuple[cases.Case, Any, dict[str, Any]]] = (
        (case, *measurement.attempt(_begin, case, pool, quick))
        for case in selected
    )
    if timer.threads > 1:
      begun = list(begun)
      steps = [step for _, each, _ in begun if each for step in each.steps()]
      with watchdog('compiling all steps'):
        futures.wait(steps)
    for case, prepared, failed in begun:
      rows: Any = None
      if not failed:
        rows, failed = measurement.attempt(_measure, prepared, timer, watchdog)
      yield from rows or [row | failed for row in _rows(case)]


def _rows(case: cases.Case) -> list[dict[str, Any]]:
  return [case.row(way, STEP) for way in case.implementations]


@dataclasses.dataclass(frozen=True, eq=False)
class _Prepared:
  """A case whose steps are being compiled.

  Attributes:
    case: the case.
    parameters: those that a step begins with.
    whole: the step on one device, with the batch of all.
    ways: the step in each of the case's ways.
  """

  case: cases.Case
  parameters: Any
  whole: futures.Future[_Step]
  ways: Mapping[str, futures.Future[_Step]]

  def steps(self) -> list[futures.Future[_Step]]:
    return [self.whole, *self.ways.values()]


def _begin(case: cases.Case, pool: futures.Executor, quick: bool) -> _Prepared:
  step, parameters = training_step(case)
  rng = np.random.default_rng(0)
  shape = case.shape
  size = (jax.device_count() * shape.batch, shape.time, shape.in_features)
  x = rng.standard_normal(size).astype(np.float32)
  one = jax.devices()[0]

  def build(x, *places) -> futures.Future[_Step]:
    return pool.submit(_build, step, parameters, x, *places, quick=quick)

  def begin(way: str) -> futures.Future[_Step]:
    if way == ONE:
      return build(x[: shape.batch], one, one)
    return build(x, *shardings(way))

  return _Prepared(
      case,
      parameters,
      build(x, one, one),
      {way: begin(way) for way in case.implementations},
  )


def _measure(prepared: _Prepared, timer, watchdog) -> list[dict[str, Any]]:
  case, shape = prepared.case, prepared.case.shape
  rows = _rows(case)
  with watchdog(f'{case.layer} on one device'):
    whole = prepared.whole.result()()
  steps: list[_Step] = []
  for row in rows:
    kind = row['program']
    with watchdog(f'{case.layer}, {kind}'):
      own = prepared.ways[kind].result()
      if kind != ONE:
        row |= _compare(own(), whole, prepared.parameters, case)
        row['collectives'] = _collectives(own)
      row |= {'compile_s': own.program.compile_s, **own.program.memory}
    row['devices'] = 1 if kind == ONE else jax.device_count()
    steps.append(own)
  if not timer.repeats:
    return rows
  with watchdog('timing'):
    times = timing.interleave(
        steps,
        timer.repeats,
        lambda index: watchdog.start(f'timing {case.layer} {index}'),
        timer.pace,
    )
  for row, found in zip(rows, times, strict=True):
    row |= dataclasses.asdict(found)
    row['us_per_step'] = 1e3 * found.ms / shape.time
    if row['program'] != ONE and rows[0]['program'] == ONE:
      row['weak_scaling'] = times[0].ms / found.ms
  return rows


def training_step(case: cases.Case) -> tuple[Callable[..., Any], Any]:
  """Returns a function (parameters, x) -> new parameters, and parameters."""
  shape = case.shape
  stack = problems.layer_class(case.layer)(
      shape.in_features,
      shape.features,
      dtype=jnp.dtype(case.dtype),
      param_dtype=jnp.dtype(case.param_dtype),
      rngs=nnx.Rngs(0),
      **shape.options,
  )
  graphdef, parameters = nnx.split(stack)

  def loss(parameters, x):
    y = nnx.merge(graphdef, parameters)(x.astype(case.dtype))
    return jnp.sum(y.astype(jnp.float32) ** 2)

  def step(parameters, x):
    gradient = jax.grad(loss)(parameters, x)
    return jax.tree.map(lambda p, g: p - _RATE * g, parameters, gradient)

  return step, parameters


def shardings(kind: str) -> tuple[NamedSharding, NamedSharding]:
  """Returns the shardings of parameters and of a batch."""
  mesh = jax.make_mesh(
      (jax.device_count(),), ('data',), axis_types=(AxisType[kind],)
  )
  return (
      NamedSharding(mesh, PartitionSpec()),
      NamedSharding(mesh, PartitionSpec('data')),
  )


def _build(step, parameters, x, for_parameters, for_x, *, quick) -> _Step:
  arguments = (
      jax.device_put(parameters, for_parameters),
      jax.device_put(x, for_x),
  )
  return _Step(timing.lower(step, *arguments, quick=quick)(), arguments)


def _compare(got, want, start, case: cases.Case) -> dict[str, Any]:
  """Returns the fields of a row that say whether an update is right."""
  differences = []
  for new, expected, old in zip(
      *map(jax.tree.leaves, (got, want, start)), strict=True
  ):
    new, expected, old = (
        np.asarray(a, np.float64) for a in (new, expected, old)
    )
    size = np.linalg.norm(expected - old)
    if size:
      differences.append(float(np.linalg.norm(new - expected) / size))
  error = max(differences)
  fields: dict[str, Any] = {'error': error}
  limit = max(_LIMITS[case.dtype], _LIMITS[case.param_dtype])
  if not error <= limit:
    fields['status'] = 'failed'
    fields['reason'] = (
        f'an update differs by {error:.1e} from that of one device, more than'
        f' {limit:.0e}'
    )
  return fields


def _collectives(step: _Step) -> dict[str, int]:
  """Counts the collectives of a compiled step."""
  compiled: Any = step.program.call
  text = compiled.as_text()
  found = {
      name: text.count(f' {name}(') + text.count(f' {name}-start(')
      for name in ('all-reduce', *_OTHERS)
  }
  return {name: number for name, number in found.items() if number}
