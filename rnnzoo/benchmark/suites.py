"""The suites of `python -m rnnzoo.benchmark`: the cases that each has.

'cells' has every layer, at shapes of tasks. 'linear' has recurrences without a
product R h: memory bandwidth is their limit, the time to read the input gates
and to write h. 'dense' has cells with a product R h in every step: their limit
is the latency of a step, times T.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses

import rnnzoo
from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import timing
from rnnzoo.engines import selection

Shape, heads = cases.Shape, cases.heads
BF16, F16, F32 = cases.BF16, cases.F16, cases.F32

# The layers that have heads.
_DENSE = ('LSTM', 'GRU', 'SLSTM', 'Elman', 'AntisymmetricRNN', 'AGRU')
_LINEAR = ('linear_scan', 'MinGRU', 'MinLSTM', 'IndRNN', 'IRevRNN')


@dataclasses.dataclass(frozen=True)
class Entry:
  """Layers that are measured alike.

  Attributes:
    shapes: at these, by name; None for shapes that a user gives.
    layers: these.
    projection: 'with' or 'without'.
    dtypes: in these, unless a user gives others.
    implementations: by these, unless a user gives others; None for all.
  """

  shapes: Sequence[str] | None
  layers: Sequence[str]
  projection: str
  dtypes: Sequence[str] = (F32,)
  implementations: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class Suite:
  """The cases of a suite.

  Attributes:
    layers: names of what it measures.
    shapes: by name.
    entries: what it measures at these.
    timer: how it times.
    default_shapes: names of those measured if none are named.
    implementations: names of all that can run in it.
    drawn: as for `cases.Case`.
    checks: cases that are only checked.
    memory_of: a layer, the memory of whose gradient is measured; '' for none.
  """

  layers: Sequence[str]
  shapes: Mapping[str, Shape]
  entries: Sequence[Entry]
  timer: timing.Timer
  default_shapes: Sequence[str]
  implementations: Sequence[str] = selection.IMPLEMENTATIONS
  drawn: bool = False
  checks: Sequence[cases.Case] = ()
  memory_of: str = ''

  def timed(
      self,
      shapes: Mapping[str, Shape],
      layers: Sequence[str],
      implementations: Sequence[str] | None = None,
      dtypes: Sequence[str] | None = None,
  ) -> Iterator[cases.Case]:
    """Yields cases by shape and dtype.

    Args:
      shapes: by name; others than the suite's own are measured as those that a
        user gives.
      layers: those that are wanted.
      implementations: those that are wanted; None for the entries' choice.
      dtypes: likewise.
    """
    for name, shape in shapes.items():
      own = [
          entry
          for entry in self.entries
          if (name in entry.shapes if entry.shapes else name not in self.shapes)
      ]
      found = dtypes or dict.fromkeys(d for entry in own for d in entry.dtypes)
      for dtype in found:
        for entry in own:
          if dtypes is None and dtype not in entry.dtypes:
            continue
          for layer in entry.layers:
            if layer in layers and (shape.num_heads == 1 or layer in _DENSE):
              case = cases.Case(
                  layer, name, shape, dtype, entry.projection, (), self.drawn
              )
              wanted = implementations or entry.implementations
              ways = tuple(_ways(case, self.implementations, wanted))
              if ways:
                yield dataclasses.replace(case, implementations=ways)

  def checked(
      self,
      layers: Sequence[str],
      implementations: Sequence[str] | None = None,
      dtypes: Sequence[str] | None = None,
  ) -> Iterator[cases.Case]:
    """Yields the cases that are only checked, by 'pallas' if None is given."""
    wanted = implementations or ('pallas',)
    ways = tuple(way for way in ('pallas', 'scan') if way in wanted)
    for case in self.checks:
      if case.layer in layers and (not dtypes or case.dtype in dtypes):
        yield dataclasses.replace(case, implementations=ways)


def _ways(case, known, wanted) -> Iterator[str]:
  """Yields the implementations of a case that are wanted, or all if None."""
  if case.layer == 'projection':
    yield 'dot'
    return
  lstm = case.layer == 'LSTM'
  given = case.projection == 'without'
  one_head = case.shape.num_heads == 1
  for way in known:
    if way in baselines.LAX_SCANS and not (lstm and given):
      continue
    if way == baselines.CUDNN and (
        given or not lstm or not one_head or case.dtype != F32
    ):
      continue
    if wanted is None or way in wanted:
      yield way


def _cells() -> Suite:
  layers = tuple(rnnzoo.LAYERS)
  shapes = {
      'small': Shape(batch=4, time=12, in_features=3, features=8),
      'row_mnist': Shape(batch=128, time=28, in_features=28, features=128),
      'pixel_mnist': Shape(batch=16, time=784, in_features=1, features=128),
      'long': Shape(batch=16, time=4096, in_features=64, features=256),
  }
  return Suite(
      layers=layers,
      shapes=shapes,
      entries=[
          Entry(names, [layer], projection)
          for names in (tuple(shapes), None)
          for layer in layers
          for projection in ('with', 'without')
      ],
      timer=timing.Timer(max_sets=1),
      default_shapes=('row_mnist', 'pixel_mnist'),
  )


def _linear() -> Suite:
  both = (F32, BF16)
  shapes = {
      'small': Shape(batch=4, time=12, in_features=3, features=8),
      'wide': Shape(batch=8, time=4096, in_features=2048, features=2048),
      'thin': Shape(batch=16, time=1024, in_features=768, features=768),
      'one_long': Shape(batch=1, time=65536, in_features=1024, features=1024),
      'diagonal': Shape(batch=32, time=2048, in_features=1024, features=1024),
  }
  mingru = ('MinGRU', 'projection')
  return Suite(
      layers=(*_LINEAR, 'projection'),
      shapes=shapes,
      entries=[
          Entry(['small'], _LINEAR, 'without', both),
          Entry(['wide'], _LINEAR[:3], 'without', both),
          Entry(['thin', 'one_long'], ['linear_scan'], 'without', both),
          Entry(['diagonal'], ['IndRNN', 'IRevRNN'], 'without', both),
          Entry(['small', 'thin'], mingru, 'with', both),
          Entry(None, _LINEAR, 'without', both),
          Entry(None, mingru, 'with', both),
      ],
      timer=timing.Timer(one_program=True),
      default_shapes=tuple(shapes)[1:],
      checks=cases.LINEAR_CHECKS,
      memory_of='IRevRNN',
  )


def _dense() -> Suite:
  whole = {
      '48x16': heads(48, 16),
      '32x24': heads(32, 24),
      '12x64': heads(12, 64),
      '6x128': heads(6, 128),
      '3x256': heads(3, 256),
      '1x512': heads(1, 512),
      '1x768': heads(1, 768),
      '1x1024': heads(1, 1024),
  }
  batches = {
      f'{name}_batch{batch}': dataclasses.replace(whole[name], batch=batch)
      for name in ('12x64', '1x768')
      for batch in (1, 8, 64, 256)
  }
  mnist = {
      'row_mnist': Shape(128, 28, 28, 128),
      'pixel_mnist': Shape(128, 784, 1, 128),
  }
  small = {'small': heads(2, 8, batch=4, time=12)}
  # Everything there is to compare with is measured at these.
  reference = ('12x64', '1x768')
  others = [name for name in whole if name not in reference]
  kernels = ('pallas',)
  gates, layer = 'without', 'with'
  return Suite(
      layers=_DENSE,
      shapes={**small, **whole, **batches, **mnist},
      entries=[
          Entry(['small'], _DENSE[:2], gates, (BF16, F32)),
          Entry(['small'], _DENSE[2:], gates, (BF16, F32), kernels),
          Entry(reference, _DENSE[:2], gates, (BF16,)),
          Entry(reference, _DENSE[2:], gates, (BF16,), kernels),
          Entry(others, _DENSE, gates, (BF16,), kernels),
          Entry(batches, ['LSTM'], gates, (BF16,), ('pallas', 'lax_scan_8')),
          # cuDNN's LSTM has one head and float32 only.
          Entry(['small', '1x768'], ['LSTM'], layer, (BF16, F32)),
          Entry(['12x64'], ['LSTM'], layer, (BF16,)),
          Entry(['small', *reference], ['GRU'], layer, (BF16,)),
          Entry(mnist, ['GRU', 'AGRU', 'LSTM'], layer, (F32,)),
          Entry(None, _DENSE, gates, (BF16,)),
          Entry(None, _DENSE, layer, (BF16,)),
      ],
      timer=timing.Timer(compile_alone=False),
      default_shapes=(*whole, *batches, *mnist),
      implementations=('pallas', 'scan', *baselines.NAMES),
      drawn=True,
      checks=cases.DENSE_CHECKS,
  )


SUITES: Mapping[str, Suite] = {
    'cells': _cells(),
    'linear': _linear(),
    'dense': _dense(),
}

DTYPES = (F32, BF16, F16)
