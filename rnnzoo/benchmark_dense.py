"""What the suite 'dense' measures: cells whose steps multiply by R.

  python -m rnnzoo.benchmark --suite=dense
  python -m rnnzoo.benchmark --suite=dense --layers=LSTM --shapes=12x64,1x768
  python -m rnnzoo.benchmark --suite=dense --check_only

These recurrences have a product R h in every step, so the limit is the latency
of a step, times T. Gates are given and h is returned in their dtype, as inside
a layer, and gradients are by the gates, R, the cell's parameters and the
initial carry; layers on x are measured at a few shapes. '12x64' is 12 heads of
64 features. By default the kernels are measured everywhere, and what they are
compared with (`benchmark_baselines`) at a few shapes.

With `--check_only` nothing is timed, and what is checked is the table `CHECKS`
of sizes that are off every grid, unless shapes are named.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo import benchmark_baselines
from rnnzoo import benchmark_cases
from rnnzoo import benchmark_steps
from rnnzoo import unrolling

LAYERS = ('LSTM', 'GRU', 'SLSTM', 'Elman', 'AntisymmetricRNN', 'AGRU')

IMPLEMENTATIONS = ('pallas', 'scan', *benchmark_baselines.NAMES)

DTYPES = ('bfloat16', 'float32', 'float16')


@dataclasses.dataclass(frozen=True)
class Shape(benchmark_cases.Shape):
  """Sizes of a layer with heads."""

  num_heads: int = 1

  def __str__(self):
    size = self.features // self.num_heads
    return f'{super().__str__()} = {self.num_heads} x {size}'


def _heads(heads: int, size: int, batch: int = 16, time: int = 1024) -> Shape:
  return Shape(batch, time, heads * size, heads * size, heads)


SHAPES: Mapping[str, Shape] = {
    'small': _heads(2, 8, batch=4, time=12),
    '48x16': _heads(48, 16),
    '32x24': _heads(32, 24),
    '12x64': _heads(12, 64),
    '6x128': _heads(6, 128),
    '3x256': _heads(3, 256),
    '1x512': _heads(1, 512),
    '1x768': _heads(1, 768),
    '1x1024': _heads(1, 1024),
    '12x64_batch1': _heads(12, 64, batch=1),
    '12x64_batch8': _heads(12, 64, batch=8),
    '12x64_batch64': _heads(12, 64, batch=64),
    '12x64_batch256': _heads(12, 64, batch=256),
    '1x768_batch1': _heads(1, 768, batch=1),
    '1x768_batch8': _heads(1, 768, batch=8),
    '1x768_batch64': _heads(1, 768, batch=64),
    '1x768_batch256': _heads(1, 768, batch=256),
    'row_mnist': Shape(128, 28, 28, 128),
    'pixel_mnist': Shape(128, 784, 1, 128),
}

# Where layers with their projection are measured, and all peers.
_REFERENCE_SHAPES = ('small', '12x64', '1x768')

# Sizes off the grid, each checked in all that is returned and all gradients.
# A random initial carry is always given. `reset` and `mask` are random, a reset
# restarts from a random carry; `layer` is a whole layer on x, whose sequences
# have different lengths and whose initial carry is learned; with `both` there
# are two, which run in opposite directions in one kernel.
CHECKS = """
layer            heads x size  batch  time  dtype     options
LSTM             1x24              3   127  bfloat16  reset
LSTM             3x40              3   127  bfloat16  reset mask reverse
LSTM             2x96              3   127  float16   mask
LSTM             1x200             3   127  bfloat16  reset reverse
LSTM             48x16            16   127  bfloat16  reset
LSTM             12x64            16   127  bfloat16  reset mask
LSTM             6x128            16   127  bfloat16  reverse
LSTM             3x256            16   127  bfloat16  reset
LSTM             1x512            16   127  bfloat16  mask
LSTM             1x1024           16   127  bfloat16  reset
LSTM             12x64             3  1023  bfloat16  reset mask
LSTM             1x768             3  1023  bfloat16  reset mask reverse
LSTM             12x64            69   127  bfloat16  reset
LSTM             1x288             5   127  bfloat16  mask
LSTM             1x600           256    28  bfloat16  reset
LSTM             1x720             5   127  bfloat16  reset mask
LSTM             1x768            61   127  bfloat16  reset mask
LSTM             1x768           129    28  bfloat16  reset
LSTM             1x768             3   127  float32   reset
LSTM             1x1000           41   127  bfloat16  mask
LSTM             2x40              3     1  bfloat16  reset
LSTM             1x768             3     1  bfloat16  -
LSTM             1x128           128    28  float32   reset mask
LSTM             4x24              3   127  float32   reverse
LSTM             2x64              3   127  bfloat16  layer reset reverse
LSTM             2x64              3   127  float32   layer both reset mask
LSTM             1x768             3   127  bfloat16  layer both reset
GRU              1x24              3   127  bfloat16  mask reverse
GRU              3x40              3   127  bfloat16  reset mask
GRU              1x96              3   127  float16   reset
GRU              2x200             3   127  bfloat16  -
GRU              12x64            16   127  bfloat16  reset
GRU              1x768            16   127  bfloat16  reset mask
GRU              1x768            90    28  bfloat16  mask
GRU              4x96              3     1  float32   reset mask
GRU              1x768            64    28  float32   reset
GRU              1x128           128    28  float32   reverse
GRU              2x40              3   127  float32   layer reset
GRU              1x128             3   127  float32   layer both reset reverse
SLSTM            2x24              3   127  bfloat16  reset reverse
SLSTM            1x40              3   127  float16   reset mask
SLSTM            3x96              3   127  bfloat16  mask
SLSTM            1x200             3   127  float32   reset
SLSTM            12x64            16   127  bfloat16  reset mask
SLSTM            1x768            16   127  bfloat16  reset
SLSTM            4x64              3     1  bfloat16  -
Elman            1x24              3   127  bfloat16  reset mask
Elman            5x40              3   127  bfloat16  reverse
Elman            2x96              3   127  float32   mask
Elman            1x200             3   127  float16   reset
Elman            12x64            16   127  bfloat16  reset mask
Elman            1x768            16   127  bfloat16  reset reverse
Elman            3x256            16   127  bfloat16  mask
Elman            1x520             5   127  bfloat16  reset
Elman            1x1024           16   127  bfloat16  mask
Elman            2x24              3     1  float16   reset
Elman            1x96              3   127  bfloat16  layer
AntisymmetricRNN 3x24              3   127  bfloat16  reset
AntisymmetricRNN 1x40              3   127  float32   reset mask reverse
AntisymmetricRNN 1x200             3   127  bfloat16  mask
AntisymmetricRNN 12x64            16  1023  bfloat16  reset
AntisymmetricRNN 1x768            16   127  bfloat16  reset mask
AntisymmetricRNN 2x96              3     1  bfloat16  -
AGRU             1x24              3   127  bfloat16  reset mask
AGRU             3x40              3   127  bfloat16  reverse
AGRU             1x96              3   127  float16   reset
AGRU             2x200             3   127  bfloat16  mask
AGRU             12x64            16   127  bfloat16  reset mask
AGRU             1x768            16   127  bfloat16  reset reverse
AGRU             3x256            16   127  bfloat16  mask
AGRU             1x600             3   127  bfloat16  reset
AGRU             2x104             5   127  bfloat16  reset mask
AGRU             1x1000            1   127  bfloat16  reset
AGRU             1x1000           23   127  bfloat16  mask
AGRU             1x512            16   127  bfloat16  reset
AGRU             1x1024           16   127  bfloat16  mask
AGRU             1x128           128    28  float32   reset
AGRU             1x64              3     1  bfloat16  reset
AGRU             2x64              3   127  bfloat16  layer reset
"""


def dtypes(name: str) -> Sequence[str]:
  """Returns in which dtypes a shape is measured by default."""
  if name.endswith('_mnist'):
    return ('float32',)
  # cuDNN's LSTM has one head and float32 only.
  return DTYPES[:2] if name in ('small', '1x768') else DTYPES[:1]


def problems(
    layers: Sequence[str],
    implementations: Sequence[str] | None,
    name: str,
    dtype: str,
) -> list[benchmark_steps.Problem]:
  """Returns what is measured at a shape, with arguments in memory.

  Args:
    layers: names in `LAYERS`.
    implementations: in which ways; None for a choice that fits the shape.
    name: of a shape in `SHAPES`.
    dtype: of the arrays.
  """
  found = []
  for layer, projection in _measured(name, dtype):
    if layer in layers:
      chosen = _chosen(layer, projection, name, dtype, implementations)
      make = _on_gates if projection == 'without' else _on_input
      found.append(make(layer, SHAPES[name], dtype, chosen))
  return found


def _measured(name: str, dtype: str) -> Iterator[tuple[str, str]]:
  """Yields (layer, projection)."""
  if name.endswith('_mnist'):
    yield from ((layer, 'with') for layer in ('GRU', 'AGRU', 'LSTM'))
    return
  cells: Sequence[str] = ('LSTM',) if '_batch' in name else LAYERS
  if dtype == 'float32' and name != 'small':
    cells = ()
  yield from ((layer, 'without') for layer in cells)
  if name in _REFERENCE_SHAPES:
    yield 'LSTM', 'with'
    if dtype != 'float32':
      yield 'GRU', 'with'


def _chosen(layer, projection, name, dtype, implementations) -> list[str]:
  """Returns the implementations that there are, or those of the default."""
  there = ['pallas', 'scan']
  if layer == 'LSTM' and projection == 'without':
    there += benchmark_baselines.LAX_SCANS
  one_head = SHAPES[name].num_heads == 1
  if (layer, projection, dtype, one_head) == ('LSTM', 'with', 'float32', True):
    there.append(benchmark_baselines.CUDNN)
  if implementations is not None:
    return [each for each in there if each in implementations]
  if '_batch' in name:
    return ['pallas', 'lax_scan_8']
  if name in _REFERENCE_SHAPES and layer in ('LSTM', 'GRU'):
    return there
  return there if name.endswith('_mnist') else there[:1]


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
    heads, head_dim = map(int, size.split('x'))
    shape = _heads(heads, head_dim, int(batch), int(time))
    make = _on_input if 'layer' in options else _on_gates
    ways = [
        way
        for way in IMPLEMENTATIONS[:2]
        if way in (implementations or ('pallas',))
    ]
    problem = make(layer, shape, dtype, ways, [o for o in options if o != '-'])
    title = f'{layer} {size} B{batch} T{time} {dtype} {" ".join(options)}'
    found.append(dataclasses.replace(problem, layer=title))
  return found


# Problems.


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


def _on_gates(
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
  if implementation in benchmark_baselines.LAX_SCANS:
    unroll = benchmark_baselines.LAX_SCANS[implementation]
    return benchmark_baselines.lax_scan(unroll)

  def time_major(x):
    return None if x is None else jnp.swapaxes(x, 0, 1)

  def run(arrays):
    carry = arrays['carry']
    final, (h,) = unrolling.run(
        cell,
        arrays['params'],
        unrolling._split_gates,
        (),
        time_major(arrays['x_gates']),
        arrays['kernel'],
        carry,
        restart=arrays.get('restart', tuple(map(jnp.zeros_like, carry))),
        reset=time_major(reset),
        mask=time_major(mask),
        reverse=reverse,
        implementation=implementation,
        time_major=False,
        out_dtype=dtype,
    )
    h = time_major(h.astype(dtype))
    return {'h': h, 'carry': final} if 'restart' in arrays else h

  return run


def _on_input(
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
    if implementation == benchmark_baselines.CUDNN:
      return benchmark_baselines.cudnn
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
