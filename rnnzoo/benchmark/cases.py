"""Cases: a layer at a shape, in a dtype, with or without its projection.

`problems` makes the arrays and functions of a case. `suites` lists the cases
that are timed; the tables below are those that are only checked.
"""

from collections.abc import Sequence
import dataclasses
import enum
from typing import Any

DIRECTIONS = ('forward', 'forward+backward')


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of a layer: x is [batch, time, in_features]."""

  batch: int
  time: int
  in_features: int
  features: int
  num_heads: int = 1

  @property
  def options(self) -> dict[str, Any]:
    """Options of a layer: the number of heads, unless it is one."""
    return {'num_heads': self.num_heads} if self.num_heads > 1 else {}

  @property
  def head_dim(self) -> int:
    """Features of a head."""
    return self.features // self.num_heads

  def __str__(self):
    parts = f' = {self.num_heads} x {self.head_dim}'
    return (
        f'batch {self.batch}, time {self.time}, in_features {self.in_features},'
        f' features {self.features}{parts if self.num_heads > 1 else ""}'
    )


def parse_shape(text: str) -> tuple[str, Shape]:
  """Returns name and shape of 'batch,time,in_features,features[,heads]'.

  Raises:
    ValueError: these are not four or five sizes of a layer.
  """
  try:
    sizes = [int(size) for size in text.split(',')]
  except ValueError:
    sizes = []
  if len(sizes) not in (4, 5) or min(sizes) < 1:
    raise ValueError(
        f'{text!r} is not batch,time,in_features,features[,heads], four or five'
        ' positive numbers as in 16,1024,64,768,12'
    )
  shape = Shape(*sizes)
  if shape.features % shape.num_heads:
    raise ValueError(
        f'{text!r}: {shape.features} features are not divisible by'
        f' {shape.num_heads} heads'
    )
  return 'x'.join(map(str, sizes)), shape


def heads(num_heads: int, size: int, batch: int = 16, time: int = 1024):
  """Returns the shape of a layer with `num_heads` heads of a size."""
  features = num_heads * size
  return Shape(batch, time, features, features, num_heads)


class Options(enum.Flag):
  """Arguments that a check gives to a layer or to an unrolled cell.

  Resets and masks are random, and a reset restarts from a random carry.
  """

  BOTH = enum.auto()  # two layers in opposite directions, in one kernel
  RESET = enum.auto()
  MASK = enum.auto()
  REVERSE = enum.auto()


@dataclasses.dataclass(frozen=True)
class Case:
  """A layer at a shape, to be computed by some implementations.

  Attributes:
    layer: a name in `rnnzoo.LAYERS` or `problems.VARIANTS`, 'linear_scan', or
      'projection', which is the matrix product of MinGRU's projection alone.
    shape_name: the shape's name in results.
    shape: sizes.
    dtype: of inputs and results.
    projection: 'with' for a layer on x, 'without' for a cell on input gates.
    implementations: to be compared with the reference and with each other.
    drawn: whether parameters and initial carry are random, of a size for which
      rounding errors do not grow. Otherwise parameters are as initialised, and
      the carry starts from zero.
    options: of a check, which also returns and differentiates everything that
      it can; None for a case that is timed.
  """

  layer: str
  shape_name: str
  shape: Shape
  dtype: str
  projection: str
  implementations: Sequence[str]
  drawn: bool = False
  options: Options | None = None

  @property
  def label(self) -> str:
    """The layer's name in results; a check's has all of the case."""
    if self.options is None:
      return self.layer
    size = f'{self.shape.num_heads}x{self.shape.head_dim}'
    words = [self.layer, size, f'B{self.shape.batch} T{self.shape.time}']
    words += [self.dtype, *(['layer'] if self.projection == 'with' else [])]
    return ' '.join(
        [*words, *(str(each.name).lower() for each in self.options)]
    )

  @property
  def title(self) -> str:
    """The title of the part of a table that the case is in."""
    if self.options is not None:
      return 'checks'
    return f'{self.shape_name} ({self.shape}), {self.dtype}'

  def row(self, implementation: str, direction: str) -> dict[str, Any]:
    """Returns a row of results as it begins."""
    return {
        'shape': self.shape_name,
        'dtype': self.dtype,
        'layer': self.label,
        'implementation': implementation,
        'projection': self.projection,
        'direction': direction,
        'status': 'ok',
        'reason': '',
    }


def _on_gates(layer, size, batch, time, dtype, *options) -> Case:
  """A check of a cell on input gates."""
  num_heads, head_dim = size
  shape = heads(num_heads, head_dim, batch, time)
  found = Options(0)
  for option in options:
    found |= option
  return Case(layer, 'checks', shape, dtype, 'without', (), True, found)


def _layer(*row) -> Case:
  """A check of a layer on x, with random lengths and a learned carry."""
  return dataclasses.replace(_on_gates(*row), projection='with')


BOTH, RESET, MASK, REVERSE = Options
BF16, F16, F32 = 'bfloat16', 'float16', 'float32'

# Sizes off the grid of the kernels: layer, (heads, size), batch, time, dtype.
DENSE_CHECKS = (
    _on_gates('LSTM', (1, 24), 3, 127, BF16, RESET),
    _on_gates('LSTM', (3, 40), 3, 127, BF16, RESET, MASK, REVERSE),
    _on_gates('LSTM', (2, 96), 3, 127, F16, MASK),
    _on_gates('LSTM', (1, 200), 3, 127, BF16, RESET, REVERSE),
    _on_gates('LSTM', (48, 16), 16, 127, BF16, RESET),
    _on_gates('LSTM', (12, 64), 16, 127, BF16, RESET, MASK),
    _on_gates('LSTM', (6, 128), 16, 127, BF16, REVERSE),
    _on_gates('LSTM', (3, 256), 16, 127, BF16, RESET),
    _on_gates('LSTM', (1, 512), 16, 127, BF16, MASK),
    _on_gates('LSTM', (1, 1024), 16, 127, BF16, RESET),
    _on_gates('LSTM', (12, 64), 3, 1023, BF16, RESET, MASK),
    _on_gates('LSTM', (1, 768), 3, 1023, BF16, RESET, MASK, REVERSE),
    _on_gates('LSTM', (12, 64), 69, 127, BF16, RESET),
    _on_gates('LSTM', (1, 288), 5, 127, BF16, MASK),
    _on_gates('LSTM', (1, 600), 256, 28, BF16, RESET),
    _on_gates('LSTM', (1, 720), 5, 127, BF16, RESET, MASK),
    _on_gates('LSTM', (1, 768), 61, 127, BF16, RESET, MASK),
    _on_gates('LSTM', (1, 768), 129, 28, BF16, RESET),
    _on_gates('LSTM', (1, 768), 3, 127, F32, RESET),
    _on_gates('LSTM', (1, 1000), 41, 127, BF16, MASK),
    _on_gates('LSTM', (2, 40), 3, 1, BF16, RESET),
    _on_gates('LSTM', (1, 768), 3, 1, BF16),
    _on_gates('LSTM', (1, 128), 128, 28, F32, RESET, MASK),
    _on_gates('LSTM', (4, 24), 3, 127, F32, REVERSE),
    _layer('LSTM', (2, 64), 3, 127, BF16, RESET, REVERSE),
    _layer('LSTM', (2, 64), 3, 127, F32, BOTH, RESET, MASK),
    _layer('LSTM', (1, 768), 3, 127, BF16, BOTH, RESET),
    _on_gates('GRU', (1, 24), 3, 127, BF16, MASK, REVERSE),
    _on_gates('GRU', (3, 40), 3, 127, BF16, RESET, MASK),
    _on_gates('GRU', (1, 96), 3, 127, F16, RESET),
    _on_gates('GRU', (2, 200), 3, 127, BF16),
    _on_gates('GRU', (12, 64), 16, 127, BF16, RESET),
    _on_gates('GRU', (1, 768), 16, 127, BF16, RESET, MASK),
    _on_gates('GRU', (1, 768), 90, 28, BF16, MASK),
    _on_gates('GRU', (4, 96), 3, 1, F32, RESET, MASK),
    _on_gates('GRU', (1, 768), 64, 28, F32, RESET),
    _on_gates('GRU', (1, 128), 128, 28, F32, REVERSE),
    _layer('GRU', (2, 40), 3, 127, F32, RESET),
    _layer('GRU', (1, 128), 3, 127, F32, BOTH, RESET, REVERSE),
    _on_gates('SLSTM', (2, 24), 3, 127, BF16, RESET, REVERSE),
    _on_gates('SLSTM', (1, 40), 3, 127, F16, RESET, MASK),
    _on_gates('SLSTM', (3, 96), 3, 127, BF16, MASK),
    _on_gates('SLSTM', (1, 200), 3, 127, F32, RESET),
    _on_gates('SLSTM', (12, 64), 16, 127, BF16, RESET, MASK),
    _on_gates('SLSTM', (1, 768), 16, 127, BF16, RESET),
    _on_gates('SLSTM', (4, 64), 3, 1, BF16),
    _on_gates('Elman', (1, 24), 3, 127, BF16, RESET, MASK),
    _on_gates('Elman', (5, 40), 3, 127, BF16, REVERSE),
    _on_gates('Elman', (2, 96), 3, 127, F32, MASK),
    _on_gates('Elman', (1, 200), 3, 127, F16, RESET),
    _on_gates('Elman', (12, 64), 16, 127, BF16, RESET, MASK),
    _on_gates('Elman', (1, 768), 16, 127, BF16, RESET, REVERSE),
    _on_gates('Elman', (3, 256), 16, 127, BF16, MASK),
    _on_gates('Elman', (1, 520), 5, 127, BF16, RESET),
    _on_gates('Elman', (1, 1024), 16, 127, BF16, MASK),
    _on_gates('Elman', (2, 24), 3, 1, F16, RESET),
    _layer('Elman', (1, 96), 3, 127, BF16),
    _on_gates('AntisymmetricRNN', (3, 24), 3, 127, BF16, RESET),
    _on_gates('AntisymmetricRNN', (1, 40), 3, 127, F32, RESET, MASK, REVERSE),
    _on_gates('AntisymmetricRNN', (1, 200), 3, 127, BF16, MASK),
    _on_gates('AntisymmetricRNN', (12, 64), 16, 1023, BF16, RESET),
    _on_gates('AntisymmetricRNN', (1, 768), 16, 127, BF16, RESET, MASK),
    _on_gates('AntisymmetricRNN', (2, 96), 3, 1, BF16),
    _on_gates('AGRU', (1, 24), 3, 127, BF16, RESET, MASK),
    _on_gates('AGRU', (3, 40), 3, 127, BF16, REVERSE),
    _on_gates('AGRU', (1, 96), 3, 127, F16, RESET),
    _on_gates('AGRU', (2, 200), 3, 127, BF16, MASK),
    _on_gates('AGRU', (12, 64), 16, 127, BF16, RESET, MASK),
    _on_gates('AGRU', (1, 768), 16, 127, BF16, RESET, REVERSE),
    _on_gates('AGRU', (3, 256), 16, 127, BF16, MASK),
    _on_gates('AGRU', (1, 600), 3, 127, BF16, RESET),
    _on_gates('AGRU', (2, 104), 5, 127, BF16, RESET, MASK),
    _on_gates('AGRU', (1, 1000), 1, 127, BF16, RESET),
    _on_gates('AGRU', (1, 1000), 23, 127, BF16, MASK),
    _on_gates('AGRU', (1, 512), 16, 127, BF16, RESET),
    _on_gates('AGRU', (1, 1024), 16, 127, BF16, MASK),
    _on_gates('AGRU', (1, 128), 128, 28, F32, RESET),
    _on_gates('AGRU', (1, 64), 3, 1, BF16, RESET),
    _layer('AGRU', (2, 64), 3, 127, BF16, RESET),
)

# Few long sequences run in segments, where blocks, features and flags have
# other ends.
LINEAR_CHECKS = (
    _layer('MinGRU', (1, 24), 3, 127, F32, RESET, MASK),
    _layer('MinGRU', (1, 768), 16, 127, BF16, RESET),
    _layer('MinGRU', (1, 200), 64, 300, BF16, RESET, MASK, REVERSE),
    _layer('MinGRU', (1, 40), 3, 1, F16, RESET),
    _layer('MinGRU', (1, 130), 1, 4097, F32, RESET, MASK),
    _layer('MinGRU', (1, 256), 2, 1023, F32, RESET, REVERSE),
    _layer('MinGRU', (1, 128), 39, 512, F32, RESET, MASK),
    _layer('MinGRU', (1, 128), 1, 1000, BF16, MASK, REVERSE),
    _layer('MinGRU', (1, 1024), 1, 4096, BF16, RESET),
    _layer('MinGRU', (1, 8), 1, 20000, F16, RESET, MASK, REVERSE),
    _layer('MinLSTM', (1, 2048), 8, 127, F16, MASK),
    _layer('MinLSTM', (1, 128), 1, 4097, F32, RESET, MASK),
    _layer('MinLSTM', (1, 200), 2, 2048, BF16, REVERSE),
    _layer('MinLSTM', (1, 1024), 1, 600, F32, RESET),
    _layer('IRevRNN', (1, 130), 3, 127, F32, RESET, MASK, REVERSE),
    _layer('IRevRNN', (1, 40), 3, 127, BF16, RESET),
)
