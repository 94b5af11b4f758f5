"""What the suite 'linear' measures: recurrences that memory bandwidth bounds.

  python -m rnnzoo.benchmark --suite=linear
  python -m rnnzoo.benchmark --suite=linear --shapes=one_long,thin
  python -m rnnzoo.benchmark --suite=linear --implementations=pallas
  python -m rnnzoo.benchmark --suite=linear --check_only

These recurrences have no product R h, so the limit is the time to read the
input gates and to write h. Gates are given and results are in their dtype, as
inside a layer. What is 'linear_scan' is `rnnzoo.linear_scan` on (a, b); the
others are cells. MinGRU is measured as a layer too, beside its 'projection',
the matrix products alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import itertools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
import rnnzoo
from rnnzoo.benchmark import cases as benchmark_cases
from rnnzoo.benchmark import timing as benchmark_timing

Case = benchmark_cases.Case
Shape = benchmark_cases.Shape

LAYERS = ('linear_scan', 'MinGRU', 'MinLSTM', 'IndRNN', 'IRevRNN')

SHAPES: Mapping[str, Shape] = {
    'small': benchmark_cases.SHAPES['small'],
    'wide': Shape(batch=8, time=4096, in_features=2048, features=2048),
    'thin': Shape(batch=16, time=1024, in_features=768, features=768),
    'one_long': Shape(batch=1, time=65536, in_features=1024, features=1024),
    'diagonal': Shape(batch=32, time=2048, in_features=1024, features=1024),
}

# What is measured on gates at each shape.
_ON_GATES: Mapping[str, Sequence[str]] = {
    'small': LAYERS,
    'wide': ('linear_scan', 'MinGRU', 'MinLSTM'),
    'thin': ('linear_scan',),
    'one_long': ('linear_scan',),
    'diagonal': ('IndRNN', 'IRevRNN'),
}

# Where the memory of IRevRNN's gradient is looked at.
DIAGONAL = ('small', 'diagonal')

# Where MinGRU is measured as a layer, and in which (dtype, direction).
_AS_LAYER = ('small', 'thin')
_LAYER_CASES = (
    ('bfloat16', 'forward'),
    ('bfloat16', 'forward+backward'),
    ('float32', 'forward+backward'),
)

# The default scale of a and b, 1e-4, would hide errors of the inner steps.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {'IRevRNN': {'inner_scale': 1e-2}}

# What is checked with `--check_only`, whole layers. Those of few sequences that
# are long run in segments, where blocks, features and flags have other ends.
CHECKS = """
layer            heads x size  batch   time  dtype     options
MinGRU           1x24              3    127  float32   layer reset mask
MinGRU           1x768            16    127  bfloat16  layer reset
MinGRU           1x200            64    300  bfloat16  layer reset mask reverse
MinGRU           1x40              3      1  float16   layer reset
MinGRU           1x130             1   4097  float32   layer reset mask
MinGRU           1x256             2   1023  float32   layer reset reverse
MinGRU           1x128            39    512  float32   layer reset mask
MinGRU           1x128             1   1000  bfloat16  layer mask reverse
MinGRU           1x1024            1   4096  bfloat16  layer reset
MinGRU           1x8               1  20000  float16   layer reset mask reverse
MinLSTM          1x2048            8    127  float16   layer mask
MinLSTM          1x128             1   4097  float32   layer reset mask
MinLSTM          1x200             2   2048  bfloat16  layer reverse
MinLSTM          1x1024            1    600  float32   layer reset
IRevRNN          1x130             3    127  float32   layer reset mask reverse
IRevRNN          1x40              3    127  bfloat16  layer reset
"""

# Largest ||y - expected|| / ||expected|| that rounding explains, for what is
# smooth and for gradients through a relu. State and sums are float32. Results
# in bfloat16 are rounded by up to 2^-9, and gradients are of a rounded h; XLA's
# path of a diagonal cell rounds h anew at each step, and a memory of hundreds
# of steps adds that up. Where a derivative jumps, the share of elements that
# fall on the other side is about the rounding error, and the error its root.
TOLERANCES: Mapping[tuple[str, bool], float] = {
    ('float32', False): 2e-5,
    ('float32', True): 2e-3,
    ('bfloat16', False): 1e-2,
    ('bfloat16', True): 0.15,
}

# As many features are compared with the reference, from all over their range.
_CHECKED_FEATURES = 48


def cases(
    layers: Sequence[str],
    implementations: Sequence[str],
    name: str,
    dtype: str,
) -> Iterator[list[Case]]:
  """Yields lists of cases; those in one list have the same arguments.

  Args:
    layers: names in `LAYERS`.
    implementations: by which paths.
    name: of a shape in `SHAPES`.
    dtype: of the arrays.
  """
  shape = SHAPES[name]
  for layer in _ON_GATES[name]:
    if layer in layers:
      yield _on_gates(layer, implementations, shape, dtype)
  if name in _AS_LAYER and 'MinGRU' in layers:
    directions = [way for kind, way in _LAYER_CASES if kind == dtype]
    whole = itertools.takewhile(
        lambda case: case.projection == 'with',
        benchmark_cases.cells(['MinGRU'], implementations, shape, dtype),
    )
    yield [case for case in whole if case.direction in directions]
    yield _projection(shape, dtype, directions)


def _on_gates(name, implementations, shape: Shape, dtype: str) -> list[Case]:
  """One op on given gates, both directions."""
  arrays, make, carries = _problem(name, shape, dtype)
  size = (shape.batch, shape.time, shape.features)
  weights = jax.random.normal(jax.random.key(1), size, dtype)
  arguments = (jax.block_until_ready(arrays), weights)
  count = min(shape.features, _CHECKED_FEATURES)
  index = np.linspace(0, shape.features - 1, count, dtype=int)
  part = functools.partial(_take, index)
  expected = functools.cache(
      functools.partial(_reference, make('scan', 'float64'), part, arguments)
  )
  made = []
  for implementation in implementations:
    run = make(implementation, dtype)
    for direction in benchmark_cases.DIRECTIONS:
      forward = direction == 'forward'
      kinked = not forward and name in benchmark_cases.KINKED
      if name == 'linear_scan':
        moved = (3 if forward else 8) * weights.nbytes
      else:
        gates = arrays['x_gates']
        moved = benchmark_cases.bytes_moved(gates, carries, forward)
      made.append(
          Case(
              layer=name,
              implementation=implementation,
              projection='without',
              direction=direction,
              function=_function(run, direction),
              arguments=arguments,
              expected=expected,
              tolerance=TOLERANCES[dtype, kinked],
              bytes_moved=moved,
              part=part,
          )
      )
  return made


def _function(run, direction: str) -> Callable[..., Any]:
  if direction == 'forward':
    return benchmark_cases.forward_only(run)
  return benchmark_cases.with_gradient(run)


def _problem(name: str, shape: Shape, dtype: str):
  """Returns arrays, make(implementation, dtype) -> run, size of the carry."""
  if name == 'linear_scan':
    return _scan_arrays(shape, dtype), _make_scan, 1
  layer = _layer(name, shape)
  arrays = _gates_arrays(layer, shape, dtype)
  make = functools.partial(_make_unroll, layer.cell)
  return arrays, make, len(layer.cell.carry_names)


def _layer(name: str, shape: Shape, **options) -> rnnzoo.RecurrentLayer:
  layer: Any = rnnzoo.LAYERS[name]  # The base class has another signature.
  options = {**_OPTIONS.get(name, {}), **options}
  return layer(1, shape.features, rngs=nnx.Rngs(0), **options)


def _scan_arrays(shape: Shape, dtype: str):
  """Returns a in (0, 1) and b, each [B, T, F]."""
  size = (shape.batch, shape.time, shape.features)

  @jax.jit
  def draw(key):
    a, b = (jax.random.normal(k, size) for k in jax.random.split(key))
    return {'a': jax.nn.sigmoid(a).astype(dtype), 'b': b.astype(dtype)}

  return draw(jax.random.key(0))


def _make_scan(implementation, dtype):
  del dtype  # That of a and b.
  return lambda arrays: rnnzoo.linear_scan(
      arrays['a'], arrays['b'], implementation=implementation
  )


def _gates_arrays(layer, shape: Shape, dtype: str):
  """Input gates [B, T, G, F], the recurrent kernel, the cell's parameters."""
  gates = layer.cell.input_gates
  size = (shape.batch, shape.time, gates, shape.features)
  kernel = layer.recurrent_kernel
  return {
      'x_gates': jax.random.normal(jax.random.key(0), size, dtype),
      'kernel': None if kernel is None else kernel[...].astype(dtype),
      'params': {k: v[...] for k, v in layer.cell_params.items()},
  }


def _make_unroll(cell, implementation, dtype):
  """A cell on given gates, with h in their dtype, as inside a layer."""

  def run(arrays):
    params, x_gates, kernel = (
        arrays[key] for key in ('params', 'x_gates', 'kernel')
    )
    if implementation == 'pallas':
      _, (h,) = pallas_kernels.recurrence(cell, params, x_gates, kernel, None)
      return h
    zero = jnp.zeros((x_gates.shape[0], x_gates.shape[-1]), jnp.float32)
    carry = (zero,) * len(cell.carry_names)
    _, h = rnnzoo.unroll(
        cell, params, x_gates, kernel, carry, implementation=implementation
    )
    return h.astype(dtype)

  return run


def _projection(shape: Shape, dtype: str, directions) -> list[Case]:
  """The products of the MinGRU layer's projection, and nothing else."""
  rows, wide = shape.batch * shape.time, 2 * shape.features

  @jax.jit
  def draw(key):
    x, kernel, weights = jax.random.split(key, 3)
    return {
        'x': jax.random.normal(x, (rows, shape.in_features), dtype),
        'kernel': jax.random.normal(kernel, (shape.in_features, wide), dtype),
    }, jax.random.normal(weights, (rows, wide), dtype)

  arguments = draw(jax.random.key(2))
  run = lambda arrays: jnp.dot(arrays['x'], arrays['kernel'])
  both = benchmark_cases.with_gradient(run)
  expected = functools.cache(
      functools.partial(benchmark_cases.in_float64, both, arguments)
  )
  return [
      Case(
          layer='projection',
          implementation='dot',
          projection='with',
          direction=direction,
          function=_function(run, direction),
          arguments=arguments,
          expected=expected,
          tolerance=benchmark_cases.tolerance(dtype, shape.in_features),
      )
      for direction in dict.fromkeys(('forward', *directions))
  ]


# What a result is compared with.


def _take(index: np.ndarray, tree):
  """Some features of arguments or results; features do not mix."""

  def take(path, x):
    # The diagonal recurrent kernel is [1, F, 1, 1].
    diagonal = any(getattr(k, 'key', None) == 'kernel' for k in path)
    return jnp.take(x, index, axis=1 if diagonal else -1)

  return jax.tree_util.tree_map_with_path(take, tree)


def _reference(run, part, arguments):
  """Returns results and gradients of some features, in float64 on a CPU."""
  arguments = jax.tree.map(np.asarray, part(arguments))
  try:
    device = jax.devices('cpu')[0]
  except RuntimeError:  # JAX_PLATFORMS leaves it out.
    device = jax.devices()[0]
  with jax.default_device(device):
    both = benchmark_cases.with_gradient(run)
    return benchmark_cases.in_float64(both, arguments)


# Memory.


def memory(
    name: str, dtype: str, implementations: Sequence[str]
) -> list[dict[str, Any]]:
  """Returns what XLA reserves for IRevRNN's gradient, besides its arguments.

  Between the passes nothing of the inner steps is kept, so it should not grow
  with their number.

  Args:
    name: of a shape in `SHAPES`.
    dtype: of the arrays.
    implementations: by which paths; those that are parallel in time cannot.
  """
  shape = SHAPES[name]
  rows = []
  for inner_steps in (1, 8):
    layer = _layer('IRevRNN', shape, inner_steps=inner_steps)
    draw = functools.partial(_gates_arrays, layer, shape, dtype)
    size = (shape.batch, shape.time, shape.features)
    weights = jax.ShapeDtypeStruct(size, dtype)
    for implementation in implementations:
      if implementation == 'associative_scan':
        continue
      run = _make_unroll(layer.cell, implementation, dtype)
      row: dict[str, Any] = {
          'layer': 'IRevRNN',
          'inner_steps': inner_steps,
          'shape': name,
          'dtype': dtype,
          'implementation': implementation,
          'status': 'ok',
          'reason': '',
      }
      rows.append(row)
      try:
        gradient = _gradient_only(run)
        program = benchmark_timing.build(
            gradient, jax.eval_shape(draw), weights
        )
        row |= {'compile_s': program.compile_s, **program.memory}
      except NotImplementedError as error:
        row |= {'status': 'cannot', 'reason': str(error)}
      except Exception as error:  # As in `benchmark_rotation.measure`.
        row |= {'status': 'failed', 'reason': f'{error!r}'[:1000]}
  return rows


def _gradient_only(run):
  """Nothing that the forward pass keeps is then a result."""

  def function(arrays, weights):
    _, pull = jax.vjp(run, arrays)
    return pull(weights)

  return function
