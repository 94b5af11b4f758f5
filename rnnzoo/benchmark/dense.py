"""What the suite 'dense' measures: cells whose steps multiply by R.

  python -m rnnzoo.benchmark --suite=dense
  python -m rnnzoo.benchmark --suite=dense --layers=LSTM --shapes=12x64,1x768
  python -m rnnzoo.benchmark --suite=dense --check_only

These recurrences have a product R h in every step, so the limit is the latency
of a step, times T. Cells on given gates are measured, and layers on x at a few
shapes (`benchmark_problems`). '12x64' is 12 heads of 64 features. By default
the kernels are measured everywhere, and what they are compared with
(`benchmark_baselines`) at a few shapes.

With `--check_only` nothing is timed, and what is checked is the table `CHECKS`
of sizes that are off every grid, unless shapes are named.
"""

from collections.abc import Iterator, Mapping, Sequence

from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import problems as benchmark_problems
from rnnzoo.benchmark import steps as benchmark_steps

Shape = benchmark_problems.Shape
heads = benchmark_problems.heads

LAYERS = ('LSTM', 'GRU', 'SLSTM', 'Elman', 'AntisymmetricRNN', 'AGRU')

IMPLEMENTATIONS = ('pallas', 'scan', *baselines.NAMES)

DTYPES = ('bfloat16', 'float32', 'float16')

SHAPES: Mapping[str, Shape] = {
    'small': heads(2, 8, batch=4, time=12),
    '48x16': heads(48, 16),
    '32x24': heads(32, 24),
    '12x64': heads(12, 64),
    '6x128': heads(6, 128),
    '3x256': heads(3, 256),
    '1x512': heads(1, 512),
    '1x768': heads(1, 768),
    '1x1024': heads(1, 1024),
    '12x64_batch1': heads(12, 64, batch=1),
    '12x64_batch8': heads(12, 64, batch=8),
    '12x64_batch64': heads(12, 64, batch=64),
    '12x64_batch256': heads(12, 64, batch=256),
    '1x768_batch1': heads(1, 768, batch=1),
    '1x768_batch8': heads(1, 768, batch=8),
    '1x768_batch64': heads(1, 768, batch=64),
    '1x768_batch256': heads(1, 768, batch=256),
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
      make = benchmark_problems.on_input
      if projection == 'without':
        make = benchmark_problems.on_gates
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
    there += baselines.LAX_SCANS
  one_head = SHAPES[name].num_heads == 1
  if (layer, projection, dtype, one_head) == ('LSTM', 'with', 'float32', True):
    there.append(baselines.CUDNN)
  if implementations is not None:
    return [each for each in there if each in implementations]
  if '_batch' in name:
    return ['pallas', 'lax_scan_8']
  if name in _REFERENCE_SHAPES and layer in ('LSTM', 'GRU'):
    return there
  return there if name.endswith('_mnist') else there[:1]
