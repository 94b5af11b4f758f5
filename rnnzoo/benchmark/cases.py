"""Cases: a layer at a shape, in a dtype, with or without its projection.

`problems` makes the arrays and functions of a case. `suites` lists the cases
that are timed; `dense_checks.txt` and `linear_checks.txt` list cases that are
only checked.
"""

from collections.abc import Sequence, Set
import dataclasses
import math
import pathlib
import re
from typing import Any

DIRECTIONS = ('forward', 'forward+backward')
BF16, F16, F32 = 'bfloat16', 'float16', 'float32'


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
  def x(self) -> tuple[int, int, int]:
    """The shape of x."""
    return self.batch, self.time, self.in_features

  @property
  def head_dim(self) -> int:
    """Features of a head."""
    return self.features // self.num_heads

  def __str__(self):
    parts = f' = {self.num_heads} x {self.head_dim}'
    return (
        f'batch {self.batch}, time {self.time}, in_features {self.in_features},'
        f' features {self.features}{parts if self.options else ""}'
    )


def parse_shape(text: str) -> tuple[str, Shape]:
  """Returns name and shape of 'batch,time,in_features,features[,heads]'.

  Raises:
    ValueError: these are not four or five sizes of a layer.
  """
  if not re.fullmatch(r' *[1-9]\d*( *, *[1-9]\d*){3,4} *', text):
    raise ValueError(
        f'{text!r} is not batch,time,in_features,features[,heads], four or five'
        ' positive numbers as in 16,1024,64,768,12'
    )
  sizes = [int(size) for size in text.split(',')]
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


# Options of a check. 'both': two layers in opposite directions, in one kernel.
# Resets and masks are random, and a reset restarts from a random carry.
OPTIONS = ('both', 'reset', 'mask', 'reverse')


@dataclasses.dataclass(frozen=True)
class Case:
  """A layer at a shape, to be computed by some implementations.

  Attributes:
    layer: a name that `problems.layer_class` knows, or 'linear_scan'.
    projection: 'with' for a layer on x, 'without' for a cell on input gates.
    implementations: paths to compare with the reference and each other.
    drawn: whether parameters and initial carry are random, of a size for which
      rounding errors do not grow. Otherwise parameters are as initialised, and
      the carry starts from zero.
    checked: the label of a case that is not timed. It returns and
      differentiates everything that it can.
    options: those of `OPTIONS` that a check gives to a layer or to an unrolled
      cell.
    param_dtype: dtype of the parameters, in the suite 'devices'.
    directions: the passes that are timed.
  """

  layer: str
  shape_name: str
  shape: Shape
  dtype: str
  projection: str
  implementations: Sequence[str]
  drawn: bool = False
  checked: str = ''
  options: Set[str] = frozenset()
  param_dtype: str = F32
  directions: Sequence[str] = DIRECTIONS

  @property
  def label(self) -> str:
    """The layer's name in results; a check's has all of the case."""
    return self.checked or self.layer

  @property
  def exact_dtype(self) -> str:
    """The dtype of the reference, whose arrays have to fit into memory."""
    sizes = self.shape.batch, self.shape.time, self.shape.features
    return 'float32' if math.prod(sizes) > 2**26 else 'float64'

  @property
  def title(self) -> str:
    """The title of the part of a table that the case is in."""
    if self.checked:
      return 'checks'
    dtypes = self.dtype
    if self.param_dtype != F32:
      dtypes += f', {self.param_dtype} parameters'
    return f'{self.shape_name} ({self.shape}), {dtypes}'

  def row(self, program: str, direction: str) -> dict[str, Any]:
    """Returns a row of results as it begins."""
    return {
        'layer': self.label,
        'shape': self.shape_name,
        **dataclasses.asdict(self.shape),
        'dtype': self.dtype,
        'param_dtype': self.param_dtype,
        'projection': self.projection,
        'program': program,
        'direction': direction,
        'status': 'ok',
        'reason': '',
    }


def check(label: str) -> Case:
  """Returns the case that is only checked and has this label."""
  layer, size, batch, time, dtype, *words = label.split()
  num_heads, head_dim = map(int, size.split('x'))
  shape = heads(num_heads, head_dim, int(batch[1:]), int(time[1:]))
  projection = 'with' if 'layer' in words else 'without'
  # A word that is no option is a ValueError.
  known = [OPTIONS[OPTIONS.index(word)] for word in words if word != 'layer']
  return Case(
      *(layer, 'checks', shape, dtype, projection, (), True, label),
      options=frozenset(known),
  )


def checks(suite: str) -> tuple[Case, ...]:
  """Returns the cases of a suite that are only checked.

  A file has their labels, which results show: layer, heads x size, batch, time
  and dtype, 'layer' for one on x with random lengths and a learned carry, and
  `OPTIONS`. Sizes are off the grid of the kernels. Few long sequences of a
  linear cell run in segments, where blocks, features and flags have other ends.
  """
  return tuple(map(check, lines(f'{suite}_checks')))


def lines(name: str) -> list[str]:
  """Returns the lines of a table beside this file."""
  return (
      pathlib.Path(__file__).with_name(f'{name}.txt').read_text().splitlines()
  )
