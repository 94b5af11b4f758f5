"""Problems for `benchmark_steps`: cells on given gates, and layers on x.

Gates are given and h is returned in their dtype, as inside a layer, and
gradients are by the gates, R, the cell's parameters and the initial carry. One
that is only checked also has a learned restart, resets, masks and lengths.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases as benchmark_cases
from rnnzoo.benchmark import steps as benchmark_steps
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import unrolling


@dataclasses.dataclass(frozen=True)
class Shape(benchmark_cases.Shape):
  """Sizes of a layer with heads."""

  num_heads: int = 1

  def __str__(self):
    size = self.features // self.num_heads
    return f'{super().__str__()} = {self.num_heads} x {size}'


def heads(heads: int, size: int, batch: int = 16, time: int = 1024) -> Shape:
  """Returns the shape of a layer with as many heads of a size."""
  return Shape(batch, time, heads * size, heads * size, heads)


def checks(
    table: str,
    layers: Sequence[str],
    implementations: Sequence[str] | None,
    dtypes: Sequence[str] | None,
) -> list[benchmark_steps.Problem]:
  """Returns the problems of a table, each without and with its gradient.

  Args:
    table: a line for each problem below the first, which says what is in it.
    layers: those that are wanted.
    implementations: of 'pallas' and 'scan'; the former if None.
    dtypes: those that are wanted; None for all.
  """
  found = []
  for line in table.strip().splitlines()[1:]:
    layer, size, batch, time, dtype, *options = line.split()
    if layer not in layers or (dtypes and dtype not in dtypes):
      continue
    count, head_dim = map(int, size.split('x'))
    shape = heads(count, head_dim, int(batch), int(time))
    make = on_input if 'layer' in options else on_gates
    ways = [
        way
        for way in ('pallas', 'scan')
        if way in (implementations or ('pallas',))
    ]
    problem = make(layer, shape, dtype, ways, [o for o in options if o != '-'])
    title = f'{layer} {size} B{batch} T{time} {dtype} {" ".join(options)}'
    found.append(dataclasses.replace(problem, layer=title))
  return found


def _drawn(rng, shape: Shape, make_layer):
  """Returns a layer with random parameters, for zero biases hide errors.

  Initialisers are compiled, which takes longer than all else here.

  Args:
    rng: where the parameters come from.
    shape: the layer's.
    make_layer: returns the layer, and is not run.
  """
  layer = nnx.eval_shape(make_layer)
  # W - Wᵀ has twice the variance of W, and the damping is to prevail.
  structure = getattr(layer, 'recurrent_structure', None)
  gain = 1 if structure is None else 3**-0.5

  def draw(x):
    if not x.shape:
      return jnp.ones((), x.dtype)  # A-GRU's ε.
    scale = 0.3
    if x.ndim == 4:
      scale = gain * x.shape[-1] ** -0.5
    elif x.ndim == 3:
      scale = shape.in_features**-0.5
    return jnp.asarray(scale * rng.standard_normal(x.shape), x.dtype)

  graphdef, state = nnx.split(layer)
  return nnx.merge(graphdef, jax.tree.map(draw, state))


def _options(shape: Shape) -> dict[str, Any]:
  """Returns options of a layer; one without heads has no option for them."""
  return {'num_heads': shape.num_heads} if shape.num_heads > 1 else {}


def on_gates(
    name: str,
    shape: Shape,
    dtype: str,
    implementations: Sequence[str],
    options: Sequence[str] = ('timed',),
) -> benchmark_steps.Problem:
  """A cell on given input gates."""
  rng = np.random.default_rng(0)
  make_layer = functools.partial(
      benchmark_cases.create, name, shape, **_options(shape)
  )
  layer = _drawn(rng, shape, make_layer)
  kernel = benchmark_cases.recurrent_kernel(layer)
  size = (shape.batch, shape.time, layer.cell.input_gates, shape.features)
  rows = (shape.batch, shape.features)
  reset, mask = _flags(rng, options, size[:2])

  def carry():
    return tuple(
        jnp.asarray(1 + c**2 if name == 'n' else c)  # sLSTM's normaliser.
        for name in layer.cell.carry_names
        for c in [0.4 * rng.standard_normal(rows).astype(np.float32)]
    )

  arrays = {
      'x_gates': _normal(0, size, dtype),
      'kernel': jnp.asarray(kernel, dtype),
      # One number would be a sum over everything, which may cancel.
      'params': {
          k: jnp.broadcast_to(v[...], shape.features)
          for k, v in layer.cell_params.items()
      },
      'carry': carry(),
  }
  weights = _normal(1, (*size[:2], shape.features), dtype)
  if options != ('timed',):
    arrays['restart'] = carry()
    last = carry()
    if 'm' in layer.cell.carry_names and dtype != 'float32':
      # The derivatives of sLSTM's c, n and m jump where its stabiliser changes
      # sides, which in a few of all elements rounding decides; h's do not.
      last = (last[0], *map(jnp.zeros_like, last[1:]))
    weights = {'h': weights, 'carry': last}
  make = functools.partial(
      _make_unroll, layer.cell, reset, mask, 'reverse' in options
  )
  return benchmark_steps.Problem(
      name,
      'without',
      dtype,
      shape.time,
      jax.block_until_ready((arrays, weights)),
      make,
      implementations,
  )


def _make_unroll(cell, reset, mask, reverse, implementation, dtype):
  """Unrolls a cell, with h in the dtype of the gates, as a layer does."""
  if implementation in baselines.LAX_SCANS:
    unroll = baselines.LAX_SCANS[implementation]
    return baselines.lax_scan(unroll)

  call = call_lib.Call(reverse=reverse, out_dtype=dtype)

  def run(arrays):
    operands = call_lib.Operands(
        params=arrays['params'],
        weights=(),
        x=arrays['x_gates'],
        recurrent_kernel=arrays['kernel'],
        carry=arrays['carry'],
        restart=arrays.get('restart'),
        reset=reset,
        mask=mask,
    )
    final, (h,) = unrolling.run(
        cell, call_lib.Given(), operands, call, implementation
    )
    h = h.astype(dtype)
    return {'h': h, 'carry': final} if 'restart' in arrays else h

  return run


def on_input(
    name: str,
    shape: Shape,
    dtype: str,
    implementations: Sequence[str],
    options: Sequence[str] = (),
) -> benchmark_steps.Problem:
  """A layer on x; one of a check is unrolled with all its options."""
  rng = np.random.default_rng(0)
  extra: dict[str, Any] = {'learn_initial_carry': True} if options else {}
  both = 'both' in options
  make_layer = functools.partial(
      benchmark_cases.create_both if both else benchmark_cases.create,
      name,
      shape,
      **_options(shape),
      **extra,
  )
  call = {}
  if options:
    reset, mask = _flags(rng, options, (shape.batch, shape.time))
    lengths = rng.integers(0, shape.time + 1, shape.batch)
    call = {
        'reset': reset,
        'mask': mask,
        'seq_lengths': jnp.asarray(lengths),
        'reverse': 'reverse' in options,
    }
  layer = _drawn(rng, shape, make_layer)
  arrays, make = benchmark_cases.on_input(layer, make_layer, shape, call)
  arrays['state'] = jax.tree.map(
      lambda a: jnp.asarray(benchmark_cases.representable(a, dtype)),
      arrays['state'],
  )
  arrays['x'] = jnp.asarray(arrays['x'], dtype)
  features = shape.features * (2 if both else 1)
  arguments = arrays, _normal(1, (*arrays['x'].shape[:2], features), dtype)

  def make_run(implementation, dtype):
    if implementation == baselines.CUDNN:
      return baselines.cudnn
    return make(implementation, dtype)

  return benchmark_steps.Problem(
      name,
      'with',
      dtype,
      shape.time,
      jax.block_until_ready(arguments),
      make_run,
      implementations,
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def _flags(rng, options, shape):
  """Returns reset and mask, bool [B, T], or None for those not asked for."""
  rate = 0.1 if shape[1] > 5 else 0.5  # Some, in few steps too.
  reset = jnp.asarray(rng.random(shape) < rate) if 'reset' in options else None
  mask = jnp.asarray(rng.random(shape) < 0.8) if 'mask' in options else None
  return reset, mask
