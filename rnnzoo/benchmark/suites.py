"""The suites of `python -m rnnzoo.benchmark`: the cases that each has.

'cells' has every layer, at shapes of tasks. 'linear' has recurrences without a
product R h: their limit is the time to read the input gates and to write h.
'dense' has cells with a product R h in every step: their limit is the latency
of a step, times T. 'stacks' has layers of a stack in turn and together,
'devices' training steps of stacks on one device and on all, 'time_devices'
linear recurrences with time over devices, 'resets' linear recurrences with
resets. 'newton' has cells that are not linear, by an iteration that is parallel
in time and step by step; 'newton_long' long sequences of such cells. 'memory'
has the arrays that paths keep for a gradient, 'rollouts' `ScannedRNN`, and
'steps' single steps in a loop, both beside flax.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, TypeAlias

import rnnzoo
from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import devices
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import memory
from rnnzoo.benchmark import newton
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing
from rnnzoo.engines import selection

Shape: TypeAlias = cases.Shape
Names: TypeAlias = Sequence[str] | None
heads = cases.heads
BF16, F16, F32 = cases.BF16, cases.F16, cases.F32

_GATES, _LAYER = 'without', 'with'

DTYPES = (F32, BF16, F16)
_BOTH = DTYPES[:2]

_ALL = tuple(rnnzoo.LAYERS)
_DENSE = ('LSTM', 'GRU', 'SLSTM', 'Elman', 'AntisymmetricRNN', 'AGRU')
_STREAMED = ('linear_scan', 'MinGRU', 'MinLSTM', 'IndRNN', 'IRevRNN')
_LINEAR = (*_STREAMED, 'IRevRNN_8_inner_steps')
_MINGRU = ('MinGRU', 'projection')


@dataclasses.dataclass(frozen=True)
class Entry:
  """Layers that are measured alike.

  Attributes:
    shapes: names of shapes; None for all that no entry of the suite names.
    layers: names of the layers.
    projection: 'with' or 'without'.
    dtypes: the choice unless a user gives others.
    implementations: the choice unless a user gives others; None for all.
    param_dtypes: dtypes of the parameters, each in cases of its own.
    directions: the passes of a case.
  """

  shapes: Names
  layers: Sequence[str]
  projection: str
  dtypes: Sequence[str] = (F32,)
  implementations: Names = None
  param_dtypes: Sequence[str] = (F32,)
  directions: Sequence[str] = cases.DIRECTIONS


def _runs(implementation: str, case: cases.Case) -> bool:
  """Returns whether it can be tried: a baseline has one kind of LSTM only."""
  if implementation not in baselines.NAMES:
    return True
  if implementation == baselines.FLAX:
    name = case.layer.split(' x ')[-1]
    steps = [f'{cell}{problems.STEP}' for cell in baselines.FLAX_CELLS]
    return name in steps or (name, case.dtype) == ('ScannedRNN', F32)
  kind = case.layer, case.projection
  if implementation in baselines.LAX_SCANS:
    return kind == ('LSTM', _GATES)
  return (*kind, case.shape.num_heads, case.dtype) == ('LSTM', _LAYER, 1, F32)


@dataclasses.dataclass(frozen=True)
class Suite:
  """The cases of a suite, and how they are measured.

  Attributes:
    shapes: all that have names; the first one is for tests.
    default: names of the shapes that are measured if none are named; None for
      all but the first.
    implementations: names of all that can run in it.
    measure: (cases, timer, watchdog) -> rows.
    runs: (implementation, case) -> whether the implementation can be tried.
  """

  shapes: Mapping[str, Shape]
  entries: Sequence[Entry]
  timer: timing.Timer = timing.Timer()
  default: Names = None
  implementations: Sequence[str] = selection.IMPLEMENTATIONS
  drawn: bool = False
  checks: Sequence[cases.Case] = ()
  measure: Callable[..., Iterator[dict[str, Any]]] = measurement.measure
  runs: Callable[[str, cases.Case], bool] = _runs

  @property
  def layers(self) -> Sequence[str]:
    """Names of the layers of all entries."""
    names = [name for entry in self.entries for name in entry.layers]
    return list(dict.fromkeys(names))

  @property
  def default_shapes(self) -> Sequence[str]:
    """Names of the shapes that are measured if none are named."""
    return [*self.shapes][1:] if self.default is None else self.default

  def timed(
      self,
      shapes: Mapping[str, Shape],
      layers: Sequence[str],
      implementations: Names,
      dtypes: Names,
  ) -> Iterator[cases.Case]:
    """Yields cases by shape and dtype; None leaves the choice to entries."""
    named = {name for entry in self.entries for name in entry.shapes or ()}
    keys = itertools.product(shapes, dtypes or DTYPES, self.entries)
    for name, dtype, entry in keys:
      measured = name in entry.shapes if entry.shapes else name not in named
      if not measured or not (dtypes or dtype in entry.dtypes):
        continue
      for param_dtype, layer in itertools.product(
          entry.param_dtypes, entry.layers
      ):
        dense = layer.split(' x ')[-1] in _DENSE
        if layer not in layers or (shapes[name].num_heads > 1 and not dense):
          continue
        case = cases.Case(
            layer,
            name,
            shapes[name],
            dtype,
            entry.projection,
            (),
            self.drawn,
            param_dtype=param_dtype,
            directions=entry.directions,
        )
        wanted = (
            implementations or entry.implementations or self.implementations
        )
        ways = [way for way in self.implementations if way in wanted]
        ways = [way for way in ways if self.runs(way, case)]
        if layer == 'projection':
          ways = ['dot']
        if ways:
          yield dataclasses.replace(case, implementations=ways)

  def checked(
      self, layers: Sequence[str], implementations: Names, dtypes: Names
  ) -> Iterator[cases.Case]:
    """Yields the cases that are only checked, by 'pallas' if None is given."""
    wanted = implementations or ('pallas',)
    ways = tuple(way for way in ('pallas', 'scan') if way in wanted)
    for case in self.checks:
      if ways and case.layer in layers and case.dtype in (dtypes or DTYPES):
        yield dataclasses.replace(case, implementations=ways)


def _square(batch: int, time: int, units: int) -> Shape:
  return Shape(batch, time, units, units)


_SMALL = Shape(batch=4, time=12, in_features=3, features=8)
_MNIST = {
    'row_mnist': Shape(batch=128, time=28, in_features=28, features=128),
    'pixel_mnist': Shape(batch=16, time=784, in_features=1, features=128),
}
_LONGEST = {'longest': _square(1, 2**20, 1024)}
_ONE_SET = timing.Timer(max_sets=1)


def _dense() -> Suite:
  sizes = [(48, 16), (32, 24), (12, 64), (6, 128), (3, 256)]
  sizes += [(1, 512), (1, 768), (1, 1024)]
  whole = {f'{n}x{size}': heads(n, size) for n, size in sizes}
  batches = {
      f'{name}_batch{batch}': dataclasses.replace(whole[name], batch=batch)
      for name in ('12x64', '1x768')
      for batch in (1, 8, 64, 256)
  }
  mnist = {k: dataclasses.replace(v, batch=128) for k, v in _MNIST.items()}
  small = {'small': heads(2, 8, batch=4, time=12)}
  # At these there is everything to compare with.
  reference = ('12x64', '1x768')
  others = [name for name in whole if name not in reference]
  kernels, beside = ('pallas',), ('pallas', 'lax_scan_8')
  return Suite(
      small | whole | batches | mnist,
      [
          Entry(['small'], _DENSE[:2], _GATES, _BOTH),
          Entry(['small'], _DENSE[2:], _GATES, _BOTH, kernels),
          Entry(reference, _DENSE[:2], _GATES, (BF16,)),
          Entry(reference, _DENSE[2:], _GATES, (BF16,), kernels),
          Entry(others, _DENSE, _GATES, (BF16,), kernels),
          Entry(tuple(batches), ['LSTM'], _GATES, (BF16,), beside),
          # cuDNN's LSTM has one head and float32 only.
          Entry(['small', '1x768'], ['LSTM'], _LAYER, _BOTH),
          Entry(['12x64'], ['LSTM'], _LAYER, (BF16,)),
          Entry(['small', *reference], ['GRU'], _LAYER, (BF16,)),
          Entry(tuple(mnist), ['GRU', 'AGRU', 'LSTM'], _LAYER),
          Entry(None, _DENSE, _GATES, (BF16,)),
          Entry(None, _DENSE, _LAYER, (BF16,)),
      ],
      implementations=('pallas', 'scan', *baselines.NAMES),
      drawn=True,
      checks=cases.checks('dense'),
  )


def _linear() -> Suite:
  return Suite(
      {
          'small': _SMALL,
          'wide': _square(8, 4096, 2048),
          'thin': _square(16, 1024, 768),
          'one_long': _square(1, 65536, 1024),
          'diagonal': _square(32, 2048, 1024),
      },
      [
          Entry(['small'], _STREAMED, _GATES, _BOTH),
          Entry(['wide'], _LINEAR[:3], _GATES, _BOTH),
          Entry(['thin', 'one_long'], ['linear_scan'], _GATES, _BOTH),
          Entry(['diagonal'], _LINEAR[3:5], _GATES, _BOTH),
          # Nothing of the inner steps is kept between the passes, so memory
          # should not grow with their number.
          Entry(['diagonal'], _LINEAR[5:], _GATES),
          Entry(['small', 'thin'], _MINGRU, _LAYER, _BOTH),
          Entry(None, _LINEAR, _GATES, _BOTH),
          Entry(None, _MINGRU, _LAYER, _BOTH),
      ],
      timing.Timer(one_program=True),
      checks=cases.checks('linear'),
  )


def _stacks() -> Suite:
  layers = ('2 x LSTM', '4 x LSTM', '4 x GRU')
  two = ('64x784x28x128', '16x2048x256', '16x1024x512')
  return Suite(
      {
          'small': heads(1, 8, batch=2, time=12),
          '12x64': heads(12, 64),
          '32x512x128': _square(32, 512, 128),
          '64x784x28x128': Shape(64, 784, 28, 128),
          '16x2048x256': _square(16, 2048, 256),
          '16x1024x512': _square(16, 1024, 512),
      },
      [
          Entry(['12x64'], layers[1:], _LAYER, (BF16,)),
          Entry(['32x512x128'], layers[:2], _LAYER, (BF16,)),
          Entry(two, layers[:1], _LAYER, (BF16,)),
          Entry(None, layers, _LAYER, (BF16,)),
      ],
      implementations=('in turn', 'at once', 'scan'),
  )


def _devices() -> Suite:
  # Gradients are summed in the parameters' dtype.
  steps = lambda shapes, stacks: Entry(
      shapes, stacks, _LAYER, (BF16,), None, _BOTH, (devices.STEP,)
  )
  return Suite(
      {
          'small_step': heads(1, 8, batch=2, time=12),
          '768': heads(1, 768),
          '12x64': heads(12, 64),
      },
      [
          steps(['small_step', '768'], ['2 x LSTM']),
          steps(['small_step', '768'], ['4 x MinGRU']),
          steps(['small_step', '12x64'], ['4 x GRU']),
          steps(None, devices.STACKS),
      ],
      # In so many calls the launch of the first one counts little.
      timing.Timer(pace=timing.Pace(sample=0.2)),
      implementations=(devices.ONE, *devices.KINDS),
      measure=devices.measure,
  )


def _memory() -> Suite:
  inner = tuple(f'IRevRNN_{n}_inner_steps' for n in (1, 2, 4, 8, 16))
  # The cases of irevrnn's public code, where each sample has 10 features.
  published = {
      '2 x IRevRNN': Shape(32, 100, 10, 64),
      '3 x IRevRNN': Shape(64, 200, 10, 128),
      '4 x IRevRNN': Shape(128, 500, 10, 256),
  }
  kernels = {'LSTM': '1x768', 'GRU': '12x64', 'IndRNN': '512'}
  scans = ['scan', *(name for name in problems.PATHS if name[:4] == 'Scan')]
  keep = [name for name in problems.PATHS if name[:6] == 'Pallas']
  entry = lambda shape, layers, ways, dtypes=(F32,): Entry(
      [shape], layers, _LAYER, dtypes, ways, directions=cases.DIRECTIONS[1:]
  )
  return Suite(
      {
          'small': _SMALL,
          '4000_steps': Shape(16, 4000, in_features=64, features=128),
          'inner_steps': _square(32, 200, 128),
          **published,
          '1x768': heads(1, 768),
          '12x64': heads(12, 64),
          '512': _square(16, 4096, 512),
          # 256 rows of 768 units run in tiles.
          '256x256x768': _square(256, 256, 768),
      },
      [
          entry('small', ('LSTM', *inner, '2 x IRevRNN'), scans),
          entry('4000_steps', ('LSTM', 'GRU'), scans),
          entry('inner_steps', inner, ['scan', 'associative_scan']),
          *(entry(name, [name], ['scan']) for name in published),
          *(entry(at, [name], keep, _BOTH) for name, at in kernels.items()),
          *(
              entry(at, [f'4 x {name}'], keep, (BF16,))
              for name, at in kernels.items()
          ),
          entry('256x256x768', ['4 x LSTM'], keep, (BF16,)),
          Entry(None, ('LSTM', 'GRU'), _LAYER, directions=cases.DIRECTIONS[1:]),
      ],
      _ONE_SET,
      implementations=('scan', 'associative_scan', *scans[1:], *keep),
      measure=memory.measure,
  )


def _newton_long() -> Suite:
  inputs = ('IndRNN_tanh', 'IndRNN_tanh_small', 'IndRNN', 'IndRNN_relu_small')
  shapes = {
      'small': _SMALL,
      '16x100000x1': _square(16, 100_000, 1),
      '16x100000x8': _square(16, 100_000, 8),
      'heads_of_one': heads(256, 1, batch=8, time=4096),
      'wide': _square(1, 65536, 768),
      'one_row': heads(256, 1, batch=1, time=2048),
      'eight_rows': heads(256, 1, batch=8, time=2048),
  }
  return Suite(
      shapes | _grid((8, 64)),
      [
          Entry(['small'], ('GRU', *inputs, 'linear_scan'), _GATES),
          Entry(['wide'], (*inputs, 'linear_scan'), _GATES),
          Entry(['one_row', 'eight_rows'], ['SLSTM'], _GATES),
          Entry(None, ['GRU'], _GATES),
      ],
      _ONE_SET,
      default=[*shapes][1:],
  )


def _newton() -> Suite:
  more = {'heads_of_one': heads(256, 1, batch=8, time=4096)}
  thousand = {'thousand': Shape(2, 1000, in_features=16, features=32)}
  return Suite(
      {'small': _SMALL} | thousand | _grid((1, 8, 64)) | more,
      [Entry(None, newton.LAYERS, _LAYER)],
      _ONE_SET,
      default=[*thousand],
      measure=newton.measure,
  )


def _grid(sizes: Sequence[int]) -> dict[str, Shape]:
  """Returns shapes by time x batch x units."""
  return {
      f'{time}x{batch}x{size}': _square(batch, time, size)
      for time in (1000, 10_000, 100_000)
      for batch in (1, 16)
      for size in sizes
  }


_STEPS = ('LSTM step', 'GRU step', 'MinGRU step', '2 x LSTM step')
_RESETS = ('linear_scan', *problems.RESETS)

SUITES: Mapping[str, Suite] = {
    'cells': Suite(
        {'small': _SMALL, **_MNIST, 'long': Shape(16, 4096, 64, 256)},
        [Entry(None, _ALL, each) for each in (_LAYER, _GATES)],
        _ONE_SET,
        default=[*_MNIST],
    ),
    'linear': _linear(),
    'dense': _dense(),
    'stacks': _stacks(),
    'devices': _devices(),
    'time_devices': Suite(
        {'small': _square(1, 64, 8), **_LONGEST},
        [Entry(None, tuple(devices.RECURRENCES), _GATES, (BF16,))],
        implementations=(devices.ONE, devices.OVER_TIME),
        measure=devices.measure,
    ),
    'resets': Suite(
        {'small': _SMALL, **_LONGEST, 'thin': _square(16, 1024, 768)},
        [Entry(None, _RESETS, _GATES, (BF16,), ('pallas',))],
        _ONE_SET,
    ),
    'memory': _memory(),
    'newton': _newton(),
    'newton_long': _newton_long(),
    'rollouts': Suite(
        {'small': _SMALL, '128x128x256': _square(128, 128, 256)},
        [Entry(None, ('ScannedRNN', 'GRU'), _LAYER, _BOTH)],
        implementations=('pallas', 'scan', baselines.FLAX),
    ),
    'steps': Suite(
        {
            'small': heads(1, 16, batch=3, time=4),
            # The y of more steps depends on rounding alone.
            '1x512': _square(1, 256, 512),
            '64x256': _square(64, 256, 256),
            '1024x512': _square(1024, 256, 512),
        },
        [Entry(None, _STEPS, _LAYER, _BOTH, directions=cases.DIRECTIONS[:1])],
        _ONE_SET,
        implementations=('rnnzoo', baselines.FLAX),
    ),
}
