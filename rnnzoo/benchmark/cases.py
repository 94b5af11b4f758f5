"""What a benchmark can measure: shapes, suites, and the right answers.

A suite makes cases. A case is something to compile and time, with what it
should compute. `cells` is one; `benchmark_linear` has another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of a layer's input [batch, time, in_features] and of its output."""

  batch: int
  time: int
  in_features: int
  features: int

  def __str__(self):
    return (
        f'batch {self.batch}, time {self.time}, in_features'
        f' {self.in_features}, features {self.features}'
    )


SHAPES: Mapping[str, Shape] = {
    'small': Shape(batch=4, time=12, in_features=3, features=8),
    'row_mnist': Shape(batch=128, time=28, in_features=28, features=128),
    'pixel_mnist': Shape(batch=16, time=784, in_features=1, features=128),
    'long': Shape(batch=16, time=4096, in_features=64, features=256),
}

DTYPES = ('float32', 'bfloat16')

# A-GRU's default γ is chaotic over hundreds of steps: rounding errors then grow
# without bound, and no two correct results agree. Times do not depend on it.
OPTIONS: Mapping[str, Mapping[str, Any]] = {'AGRU': {'gamma': 2.0}}

# Layers whose derivative jumps, by a relu.
KINKED = ('IndRNN', 'IRevRNN')

DIRECTIONS = ('forward', 'forward+backward')


@dataclasses.dataclass(frozen=True)
class Case:
  """One row to be.

  Attributes:
    layer: what is measured.
    implementation: by which path.
    projection: 'with' the input projection or 'without'.
    direction: 'forward' or 'forward+backward'.
    function: maps `arguments` to arrays.
    arguments: arrays on the device.
    expected: returns the same arrays in float64; shared by several cases, so it
      remembers its result.
    tolerance: largest ||y - expected|| / ||expected|| of any array.
    bytes_moved: what must be read and written at least, where that is the limit
      of the recurrence; None otherwise.
    part: takes the part of results that `expected` returns.
  """

  layer: str
  implementation: str
  projection: str
  direction: str
  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  expected: Callable[[], Any]
  tolerance: float
  bytes_moved: int | None = None
  part: Callable[[Any], Any] = lambda tree: tree


def cells(
    layers: Sequence[str],
    implementations: Sequence[str],
    shape: Shape,
    dtype: str,
) -> Iterator[Case]:
  """Every layer on every implementation, both directions, both projections.

  One case at a time, so that references need not all be in memory.
  """
  for name in layers:
    make_layer = functools.partial(create, name, shape)
    layer = make_layer()
    for projection, problem in (('with', on_input), ('without', _unroll)):
      arrays, make = problem(layer, make_layer, shape)
      arrays = jax.tree.map(lambda a: representable(a, dtype), arrays)
      weights = _normal((shape.batch, shape.time, shape.features), seed=1)
      arguments = (
          jax.device_put(_low_precision(arrays, dtype)),
          jax.device_put(representable(weights, dtype)),
      )
      both = with_gradient(make('scan', 'float64'))
      expected = functools.cache(functools.partial(in_float64, both, arguments))
      for implementation in implementations:
        run = make(implementation, dtype)
        for direction in DIRECTIONS:
          forward = direction == 'forward'
          moved = None
          if projection == 'without' and _bound_by_bytes(layer):
            carries = len(layer.cell.carry_names)
            moved = bytes_moved(arguments[0]['x_gates'], carries, forward)
          yield Case(
              layer=name,
              implementation=implementation,
              projection=projection,
              direction=direction,
              function=forward_only(run) if forward else with_gradient(run),
              arguments=arguments,
              expected=expected,
              tolerance=tolerance(
                  dtype, shape.time, not forward and name in KINKED
              ),
              bytes_moved=moved,
          )


# Problems: arrays in float32, and make(implementation, dtype) -> run(arrays).


def create(name: str, shape: Shape, **options) -> rnnzoo.RecurrentLayer:
  """Returns a layer by name, with `OPTIONS`."""
  layer: Any = rnnzoo.LAYERS[name]  # The base class has another signature.
  return layer(
      shape.in_features,
      shape.features,
      rngs=nnx.Rngs(0),
      **OPTIONS.get(name, {}),
      **options,
  )


def create_both(name: str, shape: Shape, **options) -> rnnzoo.Bidirectional:
  """Returns two of these, one in each direction."""
  return rnnzoo.Bidirectional(
      rnnzoo.LAYERS[name],
      shape.in_features,
      shape.features,
      rngs=nnx.Rngs(0),
      **OPTIONS.get(name, {}),
      **options,
  )


def on_input(layer, make_layer, shape: Shape, call=None):
  """The layer on x; `call` are further arguments of the call."""
  call = call or {}

  def make(implementation, dtype):
    build = functools.partial(
        make_layer, dtype=jnp.dtype(dtype), implementation=implementation
    )
    graphdef = nnx.graphdef(nnx.eval_shape(build))
    return lambda arrays: nnx.merge(graphdef, arrays['state'])(
        arrays['x'], **call
    )

  x = _normal((shape.batch, shape.time, shape.in_features), seed=0)
  return {'x': x, 'state': nnx.state(layer)}, make


def _unroll(layer, make_layer, shape: Shape):
  """`rnnzoo.unroll` of the layer's cell on given input gates."""
  del make_layer
  cell, kernel = layer.cell, recurrent_kernel(layer)
  gates = (shape.batch, shape.time, cell.input_gates, shape.features)

  def make(implementation, dtype):
    zero = jnp.zeros((shape.batch, shape.features), jnp.float32)

    def run(arrays):
      _, h = rnnzoo.unroll(
          cell,
          arrays['params'],
          arrays['x_gates'],
          arrays['kernel'],
          (zero,) * len(cell.carry_names),
          implementation=implementation,
      )
      return jnp.asarray(h, dtype)

    return run

  arrays = {
      'x_gates': _normal(gates, seed=0),
      'kernel': kernel,
      'params': {k: v[...] for k, v in layer.cell_params.items()},
  }
  return arrays, make


def recurrent_kernel(layer: rnnzoo.RecurrentLayer) -> jax.Array | None:
  """Returns the recurrent kernel that a layer uses."""
  if layer.recurrent_kernel is None:
    return None
  kernel = layer.recurrent_kernel[...]
  if layer.recurrent_structure is None:
    return kernel
  return layer.recurrent_structure(kernel)


def forward_only(run: Callable[[Any], Any]) -> Callable[..., Any]:
  """Returns a case's function: `run` of the arrays."""
  return lambda arrays, weights: {'y': run(arrays)}


def with_gradient(run: Callable[[Any], Any]) -> Callable[..., Any]:
  """Returns a case's function: `run`, and its gradient for given weights.

  Args:
    run: maps arrays to an array or a tree of them, and the weights are alike.
  """

  def function(arrays, weights):
    y, pull = jax.vjp(run, arrays)
    (gradient,) = pull(jax.tree.map(lambda w, y: w.astype(y.dtype), weights, y))
    return {'y': y, 'gradient': gradient}

  return function


# What a result is compared with.


def in_float64(function: Callable[..., Any], arguments: Any) -> Any:
  """Returns what a case's function computes in float64."""
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), arguments)
    return jax.tree.map(np.asarray, jax.jit(function)(*wide))


def relative_error(got: Any, expected: Mapping[str, Any]) -> float:
  """Returns the largest ||got - expected|| / ||expected|| of any array.

  Args:
    got: some of the trees of arrays in `expected`, by name.
    expected: trees of float64 arrays by name.
  """
  errors = [0.0]
  for name, tree in got.items():
    pairs = zip(
        jax.tree.leaves(tree), jax.tree.leaves(expected[name]), strict=True
    )
    for a, b in pairs:
      error = np.linalg.norm(np.asarray(a, np.float64) - b)
      errors.append(float(error / (np.linalg.norm(b) or 1.0)))
  return float(np.max(errors))  # Unlike max(), keeps NaN.


def tolerance(dtype: str, time: int, kinked: bool = False) -> float:
  """Returns the largest relative error that rounding explains.

  A wrong equation is off by much more, and the tests are stricter. State and
  sums are float32: some ten roundings a step, each of at most 2^-24, add up
  like a random walk where a cell keeps its memory, and gradients cancel: 50
  2^-23 sqrt(T). Operands of products may have fewer digits, and h is rounded
  anew at each step: 4 of their units, u. Where a derivative jumps, a share of
  about u of all elements falls on the other side, and the relative error of a
  gradient is the root of that share.

  Args:
    dtype: of inputs and weights.
    time: T.
    kinked: whether it is for gradients of a layer whose derivative jumps.
  """
  state = 50 * 2.0**-23 * time**0.5
  unit = float(jnp.finfo(dtype).eps)
  # For float32 operands, JAX's default precision is TF32 on a GPU and bfloat16
  # on a TPU.
  if dtype == 'float32':
    unit = 2.0 ** -{'cpu': 23, 'gpu': 10}.get(jax.default_backend(), 7)
  return state + ((4 * unit) ** 0.5 if kinked else 4 * unit)


def representable(array, dtype: str) -> np.ndarray:
  """Rounds to `dtype`, so that the reference sees the same numbers."""
  return np.asarray(array).astype(jnp.dtype(dtype)).astype(np.float32)


def _low_precision(arrays, dtype: str):
  """Stores in `dtype` what is computed in it; parameters stay float32."""
  return {
      name: a.astype(jnp.dtype(dtype))
      if name in ('x', 'x_gates', 'kernel') and a is not None
      else a
      for name, a in arrays.items()
  }


def _normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.standard_normal(shape).astype(np.float32)


def _bound_by_bytes(layer: rnnzoo.RecurrentLayer) -> bool:
  """Whether no product R h is there: a linear cell, or a diagonal kernel."""
  kernel = layer.recurrent_kernel
  return kernel is None or kernel.shape[-1] == 1


def bytes_moved(x_gates: jax.Array, carries: int, forward: bool) -> int:
  """Returns the bytes of the tensors that must be read and written once.

  Forward reads the input gates and writes h. Backward reads both again, and dh,
  and writes d x_gates; what the carry holds besides h is kept for it.

  Args:
    x_gates: [B, T, G, F].
    carries: number of arrays in the carry.
    forward: whether there is no backward.
  """
  gates = x_gates.nbytes
  h = gates // x_gates.shape[2]
  if forward:
    return gates + h
  return 3 * gates + 3 * h + 2 * (carries - 1) * h
