"""Problems: the arrays and functions of a case.

A layer on x is called as users call it. A cell on given input gates is unrolled
as inside a layer, with h in the dtype of the gates. Gradients are by all arrays
that the function is given.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import paths

# Arrays of steps, by name.
SEQUENCES = ('x', 'x_gates', 'a', 'b')


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
  """Returns normal numbers."""
  return jax.random.normal(jax.random.key(seed), shape, dtype)


@jax.jit
def later(x: jax.Array, steps: int) -> jax.Array:
  """Returns x [batch, time, ...] some steps later, the last ones first."""
  # One step has no others: its rows change places.
  return jnp.roll(x, steps, 1 if x.ndim > 2 else 0)


@jax.jit
def relative_error(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns ||a - b|| / ||b||, or ||a|| where b is zero."""
  norm = jnp.linalg.vector_norm
  size = norm(b)
  return norm(a.astype(b.dtype) - b) / jnp.where(size == 0, 1, size)


# Maps arrays to results.
Run = Callable[[Any], Any]

# Paths with settings, by the names that results have for them.
PATHS: Mapping[str, Any] = {
    "Scan(keep='gates')": rnnzoo.Scan(keep='gates'),
    "Scan(keep='carries')": rnnzoo.Scan(keep='carries'),
    "Scan(keep='carries', chunk=4000)": rnnzoo.Scan(keep='carries', chunk=4000),
    "Pallas(keep='gates')": rnnzoo.Pallas(keep='gates'),
    "Pallas(keep='carries')": rnnzoo.Pallas(keep='carries'),
    'in turn': rnnzoo.Pallas(wavefront=False),
    'at once': rnnzoo.Pallas(),
}

# The end of the name of a layer that takes one step after another.
STEP = ' step'

# A linear recurrence of complex numbers, with a free of time.
COMPLEX = 'linear_scan_complex'

# Shares of the steps that reset, by the name of a linear recurrence.
RESETS = {
    f'linear_scan_{x}%_resets': float(x) / 100 for x in ('0.1', '3', '30')
}

# Factors of random input gates: with small gates a cell forgets little.
_INPUTS = {'IndRNN_tanh_small': 0.01, 'IndRNN_relu_small': 0.01}

# A-GRU's default γ is chaotic over hundreds of steps: rounding errors then grow
# without bound, and no two correct results agree. The default scale of
# IRevRNN's inner steps would hide their errors. Times depend on neither.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    'AGRU': {'gamma': 2.0},
    'IRevRNN': {'inner_scale': 1e-2},
    'IndRNN_tanh': {'activation': 'tanh'},
    'IndRNN_tanh_small': {'activation': 'tanh'},
    'SLSTM': {'num_heads': 1},  # A shape of more says so.
}


def layer_class(name: str) -> Any:
  """Returns a class or function that makes a case's layer.

  Args:
    name: a layer's name in results, maybe with options after _, as IndRNN_tanh;
      or a stack of layers, as '4 x LSTM'; 'bi LSTM' has both directions.
  """
  name = name.removesuffix(STEP)
  if found := re.fullmatch(r'(\d+) x (.+)', name):
    make = layer_class(found[2])
    return functools.partial(rnnzoo.Stack, make, num_layers=int(found[1]))
  if name.startswith('bi '):
    return functools.partial(rnnzoo.Bidirectional, layer_class(name[3:]))
  return rnnzoo.LAYERS[name.split('_')[0]]


def new_layer(case: cases.Case, **options: Any) -> Any:
  """Returns a case's layer; in a check on x it learns its carry."""
  shape, layer = case.shape, layer_class(case.layer)
  if 'both' in case.options:
    layer = functools.partial(rnnzoo.Bidirectional, layer)
  if case.checked and case.projection == 'with':
    options['learn_initial_carry'] = True
  options = {'rngs': nnx.Rngs(0), **options, **shape.options}
  return layer(shape.in_features, shape.features, **options)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
  """A case with its arrays on the device.

  Attributes:
    arguments: arrays by name, and weights: cotangents of the results.
    make: (implementation, dtype) -> a function of the arrays.
    traffic: the bytes that must be read and written at least, forward and with
      backward; () where memory bandwidth is not the limit.
    options: options of XLA for programs that are timed.
  """

  case: cases.Case
  arguments: tuple[Any, Any]
  make: Callable[[str, str], Run]
  traffic: tuple[int, ...] = ()
  options: dict[str, Any] | None = None

  def function(
      self, implementation: str, direction: str, dtype: str | None = None
  ) -> Callable[..., Any]:
    """Returns a function of the arguments; in the case's dtype if None."""
    run = self.make(implementation, dtype or self.case.dtype)

    def function(arrays, weights):
      if direction == 'forward':
        return {'y': run(arrays)}
      y, pull = jax.vjp(run, arrays)
      weights = jax.tree.map(lambda w, y: w.astype(y.dtype), weights, y)
      return {'y': y, 'gradient': pull(weights)[0]}

    return function


def build(case: cases.Case) -> Problem:
  """Draws a case's arrays."""
  make = _on_input if case.projection == 'with' else _on_gates
  if case.layer.startswith('linear_scan'):
    make = _linear_scan
  if case.layer.endswith(STEP):
    make = _steps
  if case.layer == 'ScannedRNN':
    make = _scanned
  problem = make(case)
  jax.block_until_ready(problem.arguments)
  return problem


def _create(case: cases.Case, rng) -> Any:
  """Returns the case's layer, with random parameters if they are to be drawn.

  Initialisers are compiled, which takes longer than drawing; and zero biases
  would hide errors.
  """
  if not case.drawn:
    return _make_layer(case)
  layer = nnx.eval_shape(functools.partial(_make_layer, case))
  # W - Wᵀ has twice the variance of W, and the damping is to prevail.
  structure = getattr(layer, 'recurrent_structure', None)
  gain = 1 if structure is None else 3**-0.5

  def draw(x):
    if not x.shape:
      return jnp.ones((), x.dtype)  # A-GRU's ε.
    scales = {3: case.shape.in_features**-0.5, 4: gain * x.shape[-1] ** -0.5}
    draws = scales.get(x.ndim, 0.3) * rng.standard_normal(x.shape)
    return jnp.asarray(draws, x.dtype)

  graphdef, state = nnx.split(layer)
  return nnx.merge(graphdef, jax.tree.map(draw, state))


def _make_layer(case: cases.Case, **options) -> Any:
  """Returns the case's layer with `_OPTIONS`."""
  return new_layer(case, **_OPTIONS.get(case.layer, {}), **options)


def _flags(case: cases.Case, rng) -> dict[str, Any]:
  """Returns reset and mask, bool [B, T], or None for those not asked for.

  They are constants of a program.
  """
  size = (case.shape.batch, case.shape.time)
  rate = 0.1 if size[1] > 5 else 0.5  # Some, in few steps too.
  draw = lambda share: rng.random(size) < share
  return {
      'reset': draw(rate) if 'reset' in case.options else None,
      'mask': draw(0.8) if 'mask' in case.options else None,
  }


@functools.partial(jax.jit, static_argnums=1)
def _rounded(arrays: Any, dtype: str) -> Any:
  """Returns arrays rounded to a dtype and stored in float32."""
  return jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), arrays)


def _on_input(case: cases.Case) -> Problem:
  """A layer on x; a check calls the layer with all arguments."""
  shape, rng = case.shape, np.random.default_rng(0)
  flags, reverse = _flags(case, rng), 'reverse' in case.options
  if case.checked:
    lengths = rng.integers(0, shape.time + 1, shape.batch)
    lengths[0] = shape.time  # Outputs of nothing but padding are all zero.
    flags['seq_lengths'] = lengths
  layer = _create(case, rng)

  def make(implementation, dtype):
    if implementation == baselines.CUDNN:
      return baselines.cudnn
    path = PATHS.get(implementation, implementation)
    options = {'dtype': jnp.dtype(dtype), 'implementation': path}
    new = nnx.eval_shape(lambda: _make_layer(case, **options))
    merge: Any = functools.partial(nnx.merge, nnx.graphdef(new))
    return lambda arrays: merge(arrays['state'])(
        arrays['x'], reverse=reverse, **jax.tree.map(jnp.asarray, flags)
    )

  # Rounded, so that the reference sees equal numbers.
  state = _rounded(nnx.to_pure_dict(nnx.state(layer)), case.dtype)
  lead = shape.batch, shape.time
  arrays = {'x': normal(0, shape.x, case.dtype), 'state': state}
  features = shape.features * (2 if 'both' in case.options else 1)
  weights = normal(1, (*lead, features), case.dtype)
  return Problem(case, (arrays, weights), make)


def _on_gates(case: cases.Case) -> Problem:
  """A cell on input gates; a check also returns the final carry."""
  shape, rng = case.shape, np.random.default_rng(0)
  layer = _create(case, rng)
  cell = layer.cell
  size = (shape.batch, shape.time, cell.input_gates, shape.features)
  carry_size = (shape.batch, shape.features)
  flags = _flags(case, rng)

  def carry():
    return tuple(
        jnp.asarray(1 + c**2 if name == 'n' else c)  # sLSTM's normaliser.
        for name in cell.carry_names
        for c in [0.4 * rng.standard_normal(carry_size).astype(np.float32)]
    )

  # The gradient by one number would be a sum over everything, which may cancel.
  by_feature = lambda v: v if v.ndim else jnp.broadcast_to(v, shape.features)
  kernel = layer._recurrent_kernel(case.dtype)
  arrays: dict[str, Any] = {
      'x_gates': _INPUTS.get(case.layer, 1) * normal(0, size, case.dtype),
      'kernel': kernel,
      'params': {k: by_feature(v[...]) for k, v in layer.cell_params.items()},
  }
  if case.drawn:
    arrays['carry'] = carry()
  weights: Any = normal(1, (*size[:2], shape.features), case.dtype)
  if case.checked:
    arrays['restart'] = carry()
    last = carry()
    if 'm' in cell.carry_names and case.dtype != 'float32':
      # The derivatives of sLSTM's c, n and m jump where its stabiliser changes
      # sides, which rounding decides in a few elements. dh does not jump.
      last = (last[0], *map(jnp.zeros_like, last[1:]))
    weights = {'h': weights, 'carry': last}
  make = functools.partial(_make_unroll, case, cell, flags)
  traffic: tuple[int, ...] = ()
  if kernel is None or kernel.shape[-1] == 1:
    # Forward reads the input gates and writes h. Backward reads both again, and
    # dh, and writes dx_gates; the rest of the carry is kept for it.
    gates = arrays['x_gates'].nbytes
    h = gates // cell.input_gates
    both = 3 * gates + 3 * h + 2 * (len(cell.carry_names) - 1) * h
    traffic = gates + h, both
  return Problem(case, (arrays, weights), make, traffic)


def _make_unroll(case, cell, flags, implementation, dtype) -> Run:
  """Returns a function that unrolls a cell, as a layer does."""
  if implementation == baselines.LAX_SCAN:
    return baselines.lax_scan
  call = call_lib.Call(reverse='reverse' in case.options, out_dtype=dtype)

  def run(arrays):
    operands = call_lib.Operands(
        params=arrays['params'],
        weights=(),
        x=arrays['x_gates'],
        recurrent_kernel=arrays['kernel'],
        carry=arrays.get('carry'),
        restart=arrays.get('restart'),
        **jax.tree.map(jnp.asarray, flags),
    )
    final, (h,) = paths.run(
        cell, call_lib.Given(), operands, call, implementation
    )
    h = h.astype(dtype)
    return {'h': h, 'carry': final} if 'restart' in arrays else h

  return run


def _linear_scan(case: cases.Case) -> Problem:
  """`rnnzoo.linear_scan` of a in (0, 1), or on a ring [F], and b [B, T, F]."""
  shape, dtype = case.shape, case.dtype
  size = (shape.batch, shape.time, shape.features)
  is_complex = case.layer == COMPLEX
  if is_complex:
    dtype = 'complex64'
    radius, angle = jax.random.uniform(jax.random.key(0), (2, size[-1]))
    a = (0.9 + 0.099 * radius) * jnp.exp(2j * np.pi * angle)
  else:
    a = jax.nn.sigmoid(normal(0, size, dtype))
  b = normal(1, size, dtype)
  share = RESETS.get(case.layer)
  reset = share and np.random.default_rng(0).random(size[:2]) < share

  def make(implementation, unused_dtype):
    if implementation == baselines.LAX_ASSOCIATIVE:
      return baselines.lax_associative_scan
    return lambda arrays: rnnzoo.linear_scan(
        arrays['a'],
        arrays['b'],
        reset=None if reset is None else jnp.asarray(reset),
        implementation=implementation,
    )

  reads = (2, 5) if is_complex else (3, 8)
  traffic = tuple(count * b.nbytes for count in reads)
  arguments = {'a': a, 'b': b}, normal(2, size, dtype)
  return Problem(case, arguments, make, traffic)


def _scanned(case: cases.Case) -> Problem:
  """A GRU by `rnnzoo.ScannedRNN`: time-major, 3 % of the steps reset."""
  shape = case.shape
  lead = shape.time, shape.batch
  reset = np.random.default_rng(0).random(lead) < 0.03
  make_layer = lambda **options: rnnzoo.ScannedRNN(
      shape.in_features, shape.features, rngs=nnx.Rngs(0), **options
  )
  state = nnx.to_pure_dict(nnx.state(make_layer()))['layer']
  arrays = {
      'x': normal(0, (*lead, shape.in_features), 'float32'),
      'state': _rounded(state, case.dtype),
  }

  def make(implementation, dtype):
    if implementation == baselines.FLAX:
      return lambda arrays: baselines.flax_scanned(arrays, jnp.asarray(reset))
    options = {'dtype': jnp.dtype(dtype), 'implementation': implementation}
    make_gru = functools.partial(rnnzoo.GRU, **options)
    graph: Any = nnx.graphdef(
        nnx.eval_shape(lambda: make_layer(layer=make_gru))
    )

    def run(arrays):
      h = jnp.zeros((shape.batch, shape.features), jnp.float32)
      rnn = nnx.merge(graph, {'layer': arrays['state']})
      return rnn(h, (arrays['x'], jnp.asarray(reset)))[1]

    return run

  weights = normal(1, (*lead, shape.features), 'float32')
  return Problem(case, (arrays, weights), make)


def _steps(case: cases.Case) -> Problem:
  """Steps in a loop: y of a step is x of the next one.

  A step is one CUDA graph. By itself XLA makes none of fewer than five kernels,
  and launches them in turn, which takes longer than they do.
  """
  shape, stack = case.shape, new_layer(case)
  arrays = {
      'x': normal(0, (shape.batch, shape.in_features), case.dtype),
      'state': nnx.to_pure_dict(nnx.state(stack)),
  }
  if baselines.FLAX in case.implementations:
    flax = baselines.FlaxCells(stack, jnp.dtype(case.dtype))
    # A cell counts its random numbers, which are no parameters.
    parts: Any = nnx.split(flax, nnx.Param, ...)
    flax_graph, flax_state, rest = parts
    arrays['flax'] = nnx.to_pure_dict(flax_state)

  def make(implementation, dtype):
    by_flax = implementation == baselines.FLAX
    new = nnx.eval_shape(lambda: new_layer(case, dtype=jnp.dtype(dtype)))
    graph: Any = flax_graph if by_flax else nnx.graphdef(new)

    def loop(arrays):
      states = (arrays['flax'], rest) if by_flax else (arrays['state'],)
      merge = lambda: nnx.merge(graph, *states, copy=True)

      def body(past):
        count, carry, x = past
        carry, x = merge().step(carry, x)
        return count + 1, carry, x

      carry = merge().initial_carry((shape.batch,))
      more = lambda past: past[0] < shape.time
      start = np.int32(0), carry, arrays['x']
      return jax.lax.while_loop(more, body, start)[2]

    return loop

  weights = normal(1, (shape.batch, shape.features), case.dtype)
  graphs = {'xla_gpu_graph_min_graph_size': 1}
  return Problem(case, (arrays, weights), make, options=graphs)
