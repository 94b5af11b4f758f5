"""The suites of `python -m rnnzoo.benchmark`: the cases that each has.

'cells' has every layer, at shapes of tasks. 'linear' has recurrences without a
product R h: their limit is the time to read the input gates and to write h.
'complex' has one of complex numbers, and layers with such a memory or gates.
'dense' has cells with a product R h in every step: their limit is the latency
of a step, times T. 'stacks' has layers of a stack in turn and together,
'devices' training steps of stacks on one device and on all, 'time_devices'
linear recurrences with time over devices, 'resets' linear recurrences with
resets. 'newton' has cells that are not linear, by an iteration that is parallel
in time and step by step; 'newton_long' long sequences of such cells. 'memory'
has the arrays that paths keep for a gradient, 'rollouts' `ScannedRNN`, and
'steps' single steps in a loop, both beside flax.

'batches' has LSTM and GRU from few rows to thousands, and FlashRNN's own
sweeps; 'lengths' has linear recurrences from one step to 65,536, with and
without copying their inputs from the host. `batches.txt` has the shapes of
'batches': first a middle, a large and a small batch of every number of
features, so that a part of a run covers the range. 'peers' has layers of other
libraries. 'cudnn' has cuDNN's line, by torch, with the shapes of one head of
`batches.txt` in float16. 'card' is short, for a GPU that nobody has tried.
'workloads' has published programs, beside flax and cuDNN: `workloads.txt` has
their names, layers, shapes and sources.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import os
from typing import Any, TypeAlias

import rnnzoo
from rnnzoo.benchmark import baselines
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import devices
from rnnzoo.benchmark import facts
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import peers
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import timing
from rnnzoo.engines import selection

Shape: TypeAlias = cases.Shape
Names: TypeAlias = Sequence[str] | None

BF16, F16, F32 = cases.BF16, cases.F16, cases.F32

_GATES, _LAYER = 'without', 'with'

DTYPES = (F32, BF16, F16)
_BOTH = DTYPES[:2]

_DENSE = ('LSTM', 'GRU', 'SLSTM', 'Elman', 'AntisymmetricRNN', 'AGRU')
_LINEAR = ('linear_scan', 'MinGRU', 'MinLSTM', 'IndRNN', 'IRevRNN')


@dataclasses.dataclass(frozen=True)
class Entry:
  """Layers that are measured alike.

  Attributes:
    shapes: names of shapes; None for all that no entry of the suite names.
    layers: names of the layers.
    projection: 'with' or 'without'.
    dtypes: the choice unless a user gives others.
    implementations: the choice unless a user gives others; None for all.
  """

  shapes: Names
  layers: Sequence[str]
  projection: str
  dtypes: Sequence[str] = (F32,)
  implementations: Names = None


def _runs(implementation: str, case: cases.Case) -> bool:
  """Returns whether it can be tried: a baseline has one kind of LSTM only."""
  if implementation not in baselines.NAMES:
    return True
  if implementation == baselines.FLAX:
    name = case.layer.split(' x ')[-1]
    steps = [f'{cell}{problems.STEP}' for cell in baselines.FLAX_CELLS]
    return name in steps or (name, case.dtype) == ('ScannedRNN', F32)
  kind = case.layer, case.projection
  if implementation == baselines.LAX_ASSOCIATIVE:
    return case.layer == problems.COMPLEX
  if implementation == baselines.LAX_SCAN:
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
    directions: the passes of a case.
    param_dtypes: dtypes of the parameters, each in cases of its own.
    measure: (cases, timer, watchdog) -> rows.
    runs: (implementation, case) -> whether the implementation can be tried.
  """

  shapes: Mapping[str, Shape]
  entries: Sequence[Entry]
  timer: timing.Timer = timing.Timer()
  default: Names = None
  implementations: Sequence[str] = selection.IMPLEMENTATIONS
  directions: Sequence[str] = cases.DIRECTIONS
  param_dtypes: Sequence[str] = (F32,)
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
    for name, dtype, entry in itertools.product(
        shapes, dtypes or DTYPES, self.entries
    ):
      measured = name in entry.shapes if entry.shapes else name not in named
      if not measured or not (dtypes or dtype in entry.dtypes):
        continue
      wanted = implementations or entry.implementations or self.implementations
      ways = [way for way in self.implementations if way in wanted]
      shape = shapes[name]
      for kind, layer in itertools.product(self.param_dtypes, entry.layers):
        dense = layer.split(' x ')[-1] in _DENSE
        if layer not in layers or (shape.num_heads > 1 and not dense):
          continue
        case = cases.Case(
            *(layer, name, shape, dtype, entry.projection, ways),
            drawn=self.drawn,
            param_dtype=kind,
            directions=self.directions,
        )
        own = [way for way in ways if self.runs(way, case)]
        if own:
          yield dataclasses.replace(case, implementations=own)

  def checked(
      self, layers: Sequence[str], implementations: Names, dtypes: Names
  ) -> Iterator[cases.Case]:
    """Yields the cases that are only checked, by 'pallas' if None is given."""
    wanted = implementations or ('pallas',)
    ways = tuple(way for way in ('pallas', 'scan') if way in wanted)
    for case in self.checks:
      if ways and case.layer in layers and case.dtype in (dtypes or DTYPES):
        yield dataclasses.replace(case, implementations=ways)


def _shapes(text: str) -> dict[str, Shape]:
  """Returns shapes of words name=batch,time,in_features,features[,heads]."""
  pairs = (word.split('=') for word in text.split())
  return {name: cases.parse_shape(sizes)[1] for name, sizes in pairs}


def _grid(sizes: Sequence[int]) -> dict[str, Shape]:
  """Returns shapes by time x batch x units."""
  return {
      f'{time}x{batch}x{size}': Shape(batch, time, size, size)
      for time in (1000, 10_000, 100_000)
      for batch in (1, 16)
      for size in sizes
  }


_SMALL = _shapes('small=4,12,3,8')
_MNIST = _shapes('row_mnist=128,28,28,128 pixel_mnist=16,784,1,128')
_MNIST_128 = _shapes('row_mnist=128,28,28,128 pixel_mnist=128,784,1,128')
_LONGEST = _shapes('longest=1,1048576,1024,1024')
_THIN = _shapes('thin=16,1024,768,768')
_OF_ONE = _shapes('heads_of_one=8,4096,256,256,256')
_WHOLE = _shapes(
    '48x16=16,1024,768,768,48 32x24=16,1024,768,768,32'
    ' 12x64=16,1024,768,768,12 6x128=16,1024,768,768,6 3x256=16,1024,768,768,3'
    ' 1x512=16,1024,512,512 1x768=16,1024,768,768 1x1024=16,1024,1024,1024'
)
_BY_BATCH = {
    f'{name}_batch{batch}': dataclasses.replace(_WHOLE[name], batch=batch)
    for name in ('12x64', '1x768')
    for batch in (1, 8, 64, 256)
}
_STACKS = _shapes(
    'small=2,12,8,8 12x64=16,1024,768,768,12 32x512x128=32,512,128,128'
    ' 64x784x28x128=64,784,28,128 16x2048x256=16,2048,256,256'
    ' 16x1024x512=16,1024,512,512'
)
_LONG = _SMALL | _shapes(
    '16x100000x1=16,100000,1,1 16x100000x8=16,100000,8,8'
    ' heads_of_one=8,4096,256,256,256 wide=1,65536,768,768'
    ' one_row=1,2048,256,256,256 eight_rows=8,2048,256,256,256'
)
_BATCHES = dict(map(cases.parse_shape, cases.lines('batches')))
_ONE_HEAD = {k: v for k, v in _BATCHES.items() if v.num_heads == 1}
_LENGTHS = {
    f'{batch}x{steps}': Shape(batch, steps, 64, 64)
    for steps in (1024, 1, 16384, 16, 4096, 65536, 64, 256, 4)
    for batch in (1, 16)
}

_STACKED = ('2 x LSTM', '4 x LSTM', '4 x GRU')
_STEPS = ('LSTM step', 'GRU step', 'MinGRU step', '2 x LSTM step')
_INPUTS = ('IndRNN_tanh', 'IndRNN_tanh_small', 'IndRNN', 'IndRNN_relu_small')
# Those that are linear in their memory take one pass.
_ONE_PASS = 'MinGRU', 'MinLSTM', 'LRU', 'S5', 'LinOSS', 'RGLRU', 'HGRN', 'QRNN'
_ITERATED = [x for x in rnnzoo.LAYERS if x not in _ONE_PASS]

# A memory of complex numbers, or gates; the first three have A free of time.
_GATED = 'LRU', 'S5', 'LinOSS', 'RGLRU', 'HGRN', 'QRNN', 'CfC'

# At these there is everything to compare with.
_REFERENCE = ('12x64', '1x768')
_OTHERS = [name for name in _WHOLE if name not in _REFERENCE]

_KERNELS = ('pallas',)
_ASSOCIATIVE = 'pallas', 'associative_scan', baselines.LAX_ASSOCIATIVE
_SCANS = ['scan', *(name for name in problems.PATHS if name[:4] == 'Scan')]
_KEPT = ('LSTM', '1x768'), ('GRU', '12x64'), ('IndRNN', '512')
_KEEP = [name for name in problems.PATHS if name[:6] == 'Pallas']

_ONE_SET = timing.Timer(max_sets=1)
# 5 samples of short calls, 3 of long ones: two thousand programs are many.
_PACED = timing.Timer(pace=timing.Pace(sample=0.01, program=0.05, enough=0.3))
_MANY = dataclasses.replace(_PACED, max_sets=2, threads=os.cpu_count() or 1)

_OF_NONE = functools.partial(measurement.measure, add=facts.path_of_none)
_of_peers = functools.partial(Suite, measure=peers.measure, runs=peers.takes)


def _workloads() -> Suite:
  """Returns the suite of published programs, which `workloads.txt` lists."""
  shapes = _shapes('small=4,6,5,8')
  layers: dict[str, list[str]] = {'GRU': ['small'], '2 x bi LSTM': ['small']}
  for line in cases.lines('workloads'):
    name, layer, sizes, _ = (part.strip() for part in line.split('|'))
    _, shapes[name] = cases.parse_shape(sizes)
    layers.setdefault(layer, []).append(name)
  return _of_peers(
      shapes,
      [
          Entry(names, [layer], _LAYER, (BF16,))
          for layer, names in layers.items()
      ],
      _PACED,
      [*shapes][1:],
      (peers.OURS, peers.SCAN, 'flax.nnx', 'cudnn'),
  )


SUITES: Mapping[str, Suite] = {
    'cells': Suite(
        _SMALL | _MNIST | _shapes('long=16,4096,64,256'),
        [Entry(None, tuple(rnnzoo.LAYERS), each) for each in (_LAYER, _GATES)],
        _ONE_SET,
        default=[*_MNIST],
    ),
    'linear': Suite(
        _SMALL
        | _shapes('wide=8,4096,2048,2048 thin=16,1024,768,768')
        | _shapes('one_long=1,65536,1024,1024 diagonal=32,2048,1024,1024'),
        [
            Entry(['small'], _LINEAR, _GATES, _BOTH),
            Entry(['wide'], _LINEAR[:3], _GATES, _BOTH),
            Entry(['thin', 'one_long'], ['linear_scan'], _GATES, _BOTH),
            Entry(['diagonal'], _LINEAR[3:], _GATES, _BOTH),
            Entry(['small', 'thin'], ['MinGRU'], _LAYER, _BOTH),
            Entry(None, _LINEAR, _GATES, _BOTH),
            Entry(None, ['MinGRU'], _LAYER, _BOTH),
        ],
        timing.Timer(one_program=True),
        checks=cases.checks('linear'),
    ),
    'complex': Suite(
        _SMALL
        | _shapes('16x4096x512=16,4096,512,512 64x1024x256=64,1024,256,256')
        | _shapes('1x65536x256=1,65536,256,256 4x17984x128=4,17984,128,128'),
        [
            Entry(['small'], [problems.COMPLEX, 'LRU'], _GATES),
            Entry(['16x4096x512'], [problems.COMPLEX], _GATES),
            Entry(['16x4096x512'], _GATED, _LAYER, (BF16,)),
            Entry(None, [problems.COMPLEX], _GATES),
        ],
        timing.Timer(one_program=True, threads=os.cpu_count() or 1),
        implementations=_ASSOCIATIVE,
    ),
    'dense': Suite(
        _shapes('small=4,12,16,16,2') | _WHOLE | _BY_BATCH | _MNIST_128,
        [
            Entry(['small'], _DENSE[:2], _GATES, _BOTH),
            Entry(['small'], _DENSE[2:], _GATES, _BOTH, _KERNELS),
            Entry(_REFERENCE, _DENSE[:2], _GATES, (BF16,)),
            Entry(_REFERENCE, _DENSE[2:], _GATES, (BF16,), _KERNELS),
            Entry(_OTHERS, _DENSE, _GATES, (BF16,), _KERNELS),
            Entry(
                [*_BY_BATCH],
                ['LSTM'],
                _GATES,
                (BF16,),
                ('pallas', baselines.LAX_SCAN),
            ),
            # cuDNN's LSTM has one head and float32 only.
            Entry(['small', '1x768'], ['LSTM'], _LAYER, _BOTH),
            Entry(['12x64'], ['LSTM'], _LAYER, (BF16,)),
            Entry(['small', *_REFERENCE], ['GRU'], _LAYER, (BF16,)),
            Entry([*_MNIST], ['GRU', 'AGRU', 'LSTM'], _LAYER),
            Entry(None, _DENSE, _GATES, (BF16,)),
            Entry(None, _DENSE, _LAYER, (BF16,)),
        ],
        implementations=('pallas', 'scan', *baselines.NAMES),
        drawn=True,
        checks=cases.checks('dense'),
    ),
    'stacks': Suite(
        _STACKS,
        [
            Entry(['12x64'], _STACKED[1:], _LAYER, (BF16,)),
            Entry(['32x512x128'], _STACKED[:2], _LAYER, (BF16,)),
            Entry([*_STACKS][3:], _STACKED[:1], _LAYER, (BF16,)),
            Entry(None, _STACKED, _LAYER, (BF16,)),
        ],
        implementations=('in turn', 'at once', 'scan'),
    ),
    'devices': Suite(
        _shapes('small_step=2,12,8,8 768=16,1024,768,768')
        | _shapes('12x64=16,1024,768,768,12'),
        [
            Entry(['small_step', '768'], ['2 x LSTM'], _LAYER, (BF16,)),
            Entry(['small_step', '768'], ['4 x MinGRU'], _LAYER, (BF16,)),
            Entry(['small_step', '12x64'], ['4 x GRU'], _LAYER, (BF16,)),
            Entry(None, devices.STACKS, _LAYER, (BF16,)),
        ],
        # In so many calls the launch of the first one counts little.
        timing.Timer(pace=timing.Pace(sample=0.2)),
        implementations=(devices.ONE, *devices.KINDS),
        directions=(devices.STEP,),
        param_dtypes=_BOTH,  # Gradients are summed in it.
        measure=devices.measure,
    ),
    'time_devices': Suite(
        _shapes('small=1,64,8,8') | _LONGEST,
        [Entry(None, tuple(devices.RECURRENCES), _GATES, (BF16,))],
        implementations=(devices.ONE, devices.OVER_TIME),
        measure=devices.measure,
    ),
    'resets': Suite(
        _SMALL | _LONGEST | _THIN,
        [
            Entry(
                None,
                ('linear_scan', *problems.RESETS),
                _GATES,
                (BF16,),
                _KERNELS,
            )
        ],
        _ONE_SET,
    ),
    'memory': Suite(
        _SMALL | _shapes('4000_steps=16,4000,64,128 512=16,4096,512,512')
        # 256 rows of 768 units run in tiles.
        | _shapes('256x256x768=256,256,768,768')
        | {name: _WHOLE[name] for name in _REFERENCE},
        [
            Entry(['small'], ['LSTM'], _LAYER, (F32,), _SCANS),
            Entry(['4000_steps'], ['LSTM', 'GRU'], _LAYER, (F32,), _SCANS),
            *(
                Entry([at], [f'{layers}{name}'], _LAYER, dtypes, _KEEP)
                for layers, dtypes in (('', _BOTH), ('4 x ', (BF16,)))
                for name, at in _KEPT
            ),
            Entry(['256x256x768'], ['4 x LSTM'], _LAYER, (BF16,), _KEEP),
            Entry(None, ['LSTM', 'GRU'], _LAYER),
        ],
        _ONE_SET,
        implementations=(*_SCANS, *_KEEP),
        directions=cases.DIRECTIONS[1:],
        measure=functools.partial(measurement.measure, add=facts.memory),
    ),
    'newton': Suite(
        _SMALL | _shapes('thousand=2,1000,16,32') | _grid((1, 8, 64)) | _OF_ONE,
        [Entry(None, _ITERATED, _LAYER)],
        _ONE_SET,
        default=['thousand'],
        measure=functools.partial(measurement.measure, add=facts.newton),
    ),
    'newton_long': Suite(
        _LONG | _grid((8, 64)),
        [
            Entry(['small'], ('GRU', *_INPUTS, 'linear_scan'), _GATES),
            Entry(['wide'], (*_INPUTS, 'linear_scan'), _GATES),
            Entry(['one_row', 'eight_rows'], ['SLSTM'], _GATES),
            Entry(None, ['GRU'], _GATES),
        ],
        _ONE_SET,
        default=[*_LONG][1:],
    ),
    'rollouts': Suite(
        _SMALL | _shapes('128x128x256=128,128,256,256'),
        [Entry(None, ('ScannedRNN', 'GRU'), _LAYER, _BOTH)],
        implementations=('pallas', 'scan', baselines.FLAX),
    ),
    'steps': Suite(
        # The y of more steps depends on rounding alone.
        _shapes('small=3,4,16,16 1x512=1,256,512,512')
        | _shapes('64x256=64,256,256,256 1024x512=1024,256,512,512'),
        [Entry(None, _STEPS, _LAYER, _BOTH)],
        _ONE_SET,
        implementations=('rnnzoo', baselines.FLAX),
        directions=cases.DIRECTIONS[:1],
    ),
    'cudnn': _of_peers(
        _ONE_HEAD | _STACKS,
        [
            Entry([*_STACKS], _STACKED, _LAYER, (F16,)),
            Entry(None, _DENSE[:2], _LAYER, (F16,)),
        ],
        _PACED,
        [*_ONE_HEAD],
        ('cudnn',),
    ),
    'card': _of_peers(
        {name: _WHOLE[name] for name in ('12x64', '1x512', '1x1024')}
        | _shapes('small=4,12,8,8 1024x64x256=1024,64,256,256'),
        [Entry(None, ('LSTM', 'GRU'), _LAYER, (F16,))],
        _PACED,
        ('12x64', '1x512', '1x1024', '1024x64x256'),
        (peers.OURS, peers.SCAN, 'cudnn'),
    ),
    'batches': Suite(
        _BATCHES,
        [Entry(None, _DENSE[:2], _LAYER, (BF16,))],
        _MANY,
        [*_BATCHES],
        implementations=('pallas', 'scan'),
        drawn=True,
        measure=_OF_NONE,
    ),
    'workloads': _workloads(),
    'lengths': Suite(
        _LENGTHS,
        [
            Entry(None, ['linear_scan'], _GATES),
            Entry(None, ['MinGRU', 'MinLSTM', 'LSTM'], _LAYER),
        ],
        dataclasses.replace(_MANY, max_sets=8, from_host=True),
        [*_LENGTHS],
        measure=_OF_NONE,
    ),
    'peers': _of_peers(
        _shapes('small=4,12,8,8')
        | _MNIST
        | _shapes('1x256=16,256,256,256 heads_of_one=16,256,256,256,256'),
        [Entry(None, peers.LAYERS, _LAYER)],
        default=('row_mnist', 'pixel_mnist', '1x256'),
        # cuDNN has a suite of its own.
        implementations=[
            name
            for name, peer in peers.PEERS.items()
            if peer.installed and name not in ('cudnn', peers.SCAN)
        ],
    ),
}
