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

from collections.abc import Callable, Iterable, Iterator
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


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[dict[str, Any]]:
  """Checks the step of every case on all devices, then times it.

  Yields:
    One row for each case and implementation, with the labels of
    `measurement.measure`. `error` is the largest relative difference of an
    array's update; `collectives` counts those of the compiled program.
  """
  for case in selected:
    rows = [case.row(way, STEP) for way in case.implementations]
    with watchdog(f'{case.layer} on all devices'):
      _, failed = measurement.attempt(_measure, case, rows, timer, watchdog)
    yield from (row | failed for row in rows)


def _measure(case: cases.Case, rows, timer: timing.Timer, watchdog) -> None:
  """Adds errors, memory and times to the rows of a case."""
  step, parameters = training_step(case)
  shape, count, one = case.shape, jax.device_count(), jax.devices()[0]
  size = count * shape.batch, shape.time, shape.in_features
  x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
  _, whole = _build(step, parameters, x, one, one)
  expected = whole()
  calls: list[Callable[[], Any]] = []
  for row in rows:
    kind = row['program']
    watchdog.start(f'{case.layer}, {kind}')
    alone = kind == ONE
    given = x[: shape.batch] if alone else x
    places = (one, one) if alone else shardings(kind)
    program, call = _build(step, parameters, given, *places)
    calls.append(call)
    row |= {'compile_s': program.compile_s, **program.memory}
    row['devices'] = 1 if alone else count
    if not alone:
      row |= _compare(call(), expected, parameters, case)
      row['collectives'] = _collectives(program)
  if not timer.repeats:
    return
  begin = lambda index: watchdog.start(f'timing {case.layer} {index}')
  times = timing.interleave(calls, timer.repeats, begin, timer.pace)
  for row, found in zip(rows, times, strict=True):
    row |= dataclasses.asdict(found)
    row['us_per_step'] = 1e3 * found.ms / shape.time
    if row['program'] != ONE and rows[0]['program'] == ONE:
      row['weak_scaling'] = times[0].ms / found.ms


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


def _build(
    step, parameters, x, for_parameters, for_x
) -> tuple[timing.Program, Callable[[], Any]]:
  """Returns a step compiled for its devices, and a call of it."""
  arguments = (
      jax.device_put(parameters, for_parameters),
      jax.device_put(x, for_x),
  )
  program = timing.build(step, *arguments)
  return program, lambda: program.call(*arguments)


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


def _collectives(program: timing.Program) -> dict[str, int]:
  """Counts the collectives of a compiled step."""
  compiled: Any = program.call
  text = compiled.as_text()
  found = {
      name: text.count(f' {name}(') + text.count(f' {name}-start(')
      for name in ('all-reduce', *_OTHERS)
  }
  return {name: number for name, number in found.items() if number}
