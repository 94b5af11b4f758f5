"""The suite 'peers': layers of other libraries beside ours, in one run.

Each library that is installed takes part, with the same weights and inputs, and
is compared with our 'scan' in float64: `error` is that of y, or backward that
of the gradient by x. All of them take turns. `compile_s` of a torch program is
its first call; memory is as each library tells it.

The libraries run in a process of their own: one that does not end within
--timeout, or ends its process, costs its own row, and the others go on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
from importlib import metadata
from importlib import util
import multiprocessing
import sys
from typing import Any, TypeAlias

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import peers_jax
from rnnzoo.benchmark import peers_torch
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import suites
from rnnzoo.benchmark import timing

# Work in a process of its own, which another one replaces when it hangs.
#
# A library of others may hang, in a kernel or while it tunes one, and may end
# its process. Either costs only the piece of work that was under way.


# Names a piece of work: a library and a direction, say.
Piece: TypeAlias = tuple[str, ...]
Work: TypeAlias = Callable[
    [Any, Mapping[Piece, str], Callable[[Piece], None]], Any
]


class Process:
  """Runs a function in another process, as often as it takes."""

  def __init__(self, work: Work, seconds: float):
    """Creates it; the process starts with the first call.

    Args:
      work: a function of a module, of an argument, the pieces to leave out with
        the reason of each, and a function to be called with each piece before
        it begins.
      seconds: how long a piece may take.
    """
    self._work = work
    self._seconds = seconds
    self._process: Any = None

  def __call__(self, argument: Any) -> Any:
    """Returns what the function returns, for all pieces that end in time.

    Args:
      argument: can be pickled, as its result can.

    Raises:
      ChildProcessError: if the process ends before the first piece.
    """
    lost: dict[Piece, str] = {}
    while True:
      if self._process is None:
        self._start()
      self._pipe.send((argument, lost))
      piece = None
      try:
        while True:
          if piece is not None and not self._pipe.poll(self._seconds):
            reason = f'did not end within {self._seconds:g} s'
            break
          piece, result = self._pipe.recv()
          if piece is None:
            return result
      except (EOFError, ConnectionResetError):
        self._process.join()
        reason = f'ended its process: exit code {self._process.exitcode}'
      self.stop()
      if piece is None or piece in lost:
        raise ChildProcessError(f'the work of another process {reason}')
      lost[piece] = reason
      print(f'{" ".join(piece)} {reason}', file=sys.stderr, flush=True)

  def _start(self) -> None:
    context = multiprocessing.get_context('spawn')
    self._pipe, theirs = context.Pipe()
    self._process = context.Process(
        target=_serve, args=(self._work, theirs), daemon=True
    )
    self._process.start()
    theirs.close()  # The child has its own; its end is the pipe's.

  def stop(self) -> None:
    """Ends the process, if there is one."""
    if self._process is not None:
      self._process.kill()
      self._process.join()
      self._process = None


def _serve(work: Work, pipe: Any) -> None:
  """Answers one argument after the other, in the other process."""
  while True:
    argument, lost = pipe.recv()
    result = work(argument, lost, lambda piece: pipe.send((piece, None)))
    pipe.send((None, result))


OURS = 'rnnzoo'
LAYERS = ('LSTM', 'GRU', 'MinGRU', 'Elman')

# Larger relative errors are mistakes, or digits that a program lost. A GPU
# multiplies float32 in TF32 by default.
_LIMITS = {'float32': 1e-4, 'bfloat16': 5e-2, 'float16': 1e-2}
_TF32 = 1e-2


@dataclasses.dataclass(frozen=True)
class Peer:
  """A library's layers.

  Attributes:
    package: its distribution, as pip knows it.
    module: the module that shows whether it is installed.
    layers: those of `LAYERS` that it has.
    program: makes a call of ours, arrays, dtype and direction.
  """

  package: str
  module: str
  layers: Sequence[str]
  program: Callable[..., tuple[Callable[[], Any], dict[str, Any]]]

  @property
  def installed(self) -> bool:
    """Whether it can be imported."""
    return util.find_spec(self.module) is not None

  def version(self) -> str | None:
    """Returns its version, or None where it has no metadata."""
    try:
      return metadata.version(self.package)
    except metadata.PackageNotFoundError:
      return None


def _jax(package, module, layers, make) -> Peer:
  program = functools.partial(peers_jax.program, make)
  return Peer(package, module, layers, program)


def _torch(package, module, layers, make, **options) -> Peer:
  program = functools.partial(peers_torch.program, make, **options)
  return Peer(package, module, layers, program)


_BOTH, _LINEAR = LAYERS[:2], LAYERS[2:3]
_THREE = (*_BOTH, 'Elman')
# Layers of cuDNN, some above each other.
CUDNN = (*_BOTH, '2 x LSTM', '4 x LSTM', '4 x GRU')
PEERS: Mapping[str, Peer] = {
    OURS: _jax(OURS, OURS, LAYERS, peers_jax.zoo),
    'flax.nnx': _jax('flax', 'flax', _THREE, peers_jax.flax_nnx),
    'flax.nnx.LSTMCell': _jax(
        'flax', 'flax', _BOTH[:1], peers_jax.flax_lstm_cell
    ),
    'flax.linen': _jax('flax', 'flax', _BOTH, peers_jax.flax_linen),
    'haiku': _jax('dm-haiku', 'haiku', _BOTH[:1], peers_jax.haiku),
    'keras': _jax('keras', 'keras', _BOTH, peers_jax.keras),
    'torch': _torch('torch', 'torch', _THREE, peers_torch.eager),
    'cudnn': _torch(
        'torch', 'torch', CUDNN, peers_torch.cudnn, time_major=True
    ),
    'torch, compiled': _torch('torch', 'torch', _BOTH, peers_torch.compiled),
    'torchrl': _torch('torchrl', 'torchrl', _BOTH, peers_torch.torchrl),
    'flashrnn': _torch('flashrnn', 'flashrnn', _BOTH, peers_torch.flashrnn),
    'minGRU-pytorch': _torch(
        'minGRU-pytorch', 'minGRU_pytorch', _LINEAR, peers_torch.mingru
    ),
    'accelerated-scan': _torch(
        'accelerated-scan',
        'accelerated_scan',
        _LINEAR,
        peers_torch.accelerated_scan,
    ),
    'pararnn': _torch(
        'pararnn-torch', 'pararnn', _BOTH[1:], peers_torch.pararnn
    ),
}


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[dict[str, Any]]:
  """Compares every peer with float64, then times all.

  Args:
    selected: the cases.
    timer: how to time; with no repeats, results are compared only.
    watchdog: knows how long each step may take.

  Yields:
    One row for each case, peer and direction, with the labels of
    `measurement.measure`; `implementation` is the peer, `version` its version.
    A peer that raises an error, or does not end in time, `cannot`; one whose
    error is too large `failed`.
  """
  say_missing()
  process = Process(measure_one, watchdog.seconds)
  try:
    for case in selected:
      peers = {name: PEERS[name] for name in case.implementations}
      yield from process((case, timer, peers))
  finally:
    process.stop()


@functools.cache
def say_missing() -> None:
  """Prints one line for each library that is not installed, once."""
  missing = [peer.package for peer in PEERS.values() if not peer.installed]
  for package in dict.fromkeys(missing):
    print(f'{package} is not installed', file=sys.stderr, flush=True)


def measure_one(
    argument: tuple[cases.Case, timing.Timer, Mapping[str, Peer]],
    lost: Mapping[tuple[str, ...], str],
    begins: Callable[[tuple[str, ...]], None],
) -> list[dict[str, Any]]:
  """Returns the rows of one case.

  Args:
    argument: the case, how to time, and the peers by name.
    lost: reasons why a peer, in a direction, is left out.
    begins: called before each step with the peer and the direction.
  """
  case, timer, peers = argument
  problem, failed = measurement.attempt(_problem, case)
  if failed:
    return [
        {**case.row(name, direction), 'version': peer.version(), **failed}
        for name, peer in peers.items()
        for direction in cases.DIRECTIONS
    ]
  ours, arrays = problem
  exact = functools.cache(functools.partial(_exact, ours, arrays))
  rows: list[dict[str, Any]] = []
  timed = []
  for name, peer in peers.items():
    for direction in cases.DIRECTIONS:
      row = {**case.row(name, direction), 'version': peer.version()}
      rows.append(row)
      backward = direction != cases.DIRECTIONS[0]
      try:
        if (name, direction) in lost:
          raise TimeoutError(lost[name, direction])
        begins((name, direction))
        call, fields = peer.program(ours, arrays, case.dtype, backward)
        got = call()[0]
        row |= {**fields, **_compare(got, exact(backward), case.dtype)}
        timed.append((row, call))
      except Exception as error:  # Another library's: the rest goes on.
        status = 'failed' if name == OURS else 'cannot'
        row |= {'status': status, 'reason': _reason(error)}
  if timer.repeats:
    pieces = [(row['program'], row['direction']) for row, _ in timed]
    times = timing.interleave(
        [call for _, call in timed],
        timer.repeats,
        lambda index: begins(pieces[index]),
    )
    for (row, _), each in zip(timed, times, strict=True):
      row |= dataclasses.asdict(each)
      row['us_per_step'] = 1e3 * each.ms / case.shape.time
  return rows


def _problem(case) -> tuple[rnnzoo.RecurrentLayer, tuple[Any, ...]]:
  """Returns a layer with random biases, x, and weights of y's sum."""
  shape, rng = case.shape, np.random.default_rng(0)
  options: dict[str, Any] = {}
  if case.layer == 'MinGRU':  # As in the packages that have one.
    options = {'candidate': 'positive', 'use_bias': False}
  elif shape.num_heads > 1:
    options = {'num_heads': shape.num_heads}
  make = problems.layer_class(case.layer)
  layer = make(shape.in_features, shape.features, rngs=nnx.Rngs(0), **options)
  # Programs start from numbers that the dtype has.
  fits = lambda a: np.asarray(jnp.asarray(a, case.dtype), np.float32)
  draw = lambda *size: rng.standard_normal(size)
  for level in levels(layer):
    level.dtype = jnp.dtype(case.dtype)
    if level.bias is not None:
      level.bias[...] += 0.1 * draw(*level.bias.shape)
  nnx.update(layer, jax.tree.map(fits, nnx.state(layer)))
  lead = shape.batch, shape.time
  arrays = draw(*lead, shape.in_features), draw(*lead, shape.features)
  return layer, tuple(map(fits, arrays))


def levels(layer: Any) -> Sequence[Any]:
  """Returns the layers of a stack, or the layer alone."""
  return getattr(layer, 'layers', [layer])


def _exact(ours, arrays, backward: bool) -> np.ndarray:
  """Returns y or the gradient by x, by 'scan' in float64."""
  layer = nnx.clone(ours)
  for level in levels(layer):
    level.implementation, level.dtype = 'scan', None
  with jax.enable_x64(True):
    call, _ = peers_jax.program(
        peers_jax.zoo, layer, arrays, 'float64', backward
    )
    return np.asarray(call()[0])


def _compare(got, exact: np.ndarray, dtype: str) -> dict[str, Any]:
  got = np.asarray(got, np.float64)
  error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
  limit = _LIMITS[dtype]
  if jax.default_backend() != 'cpu':
    limit = max(limit, _TF32)
  fields: dict[str, Any] = {'error': error, 'tolerance': limit}
  if not error <= limit:
    reason = f'y or its gradient is {error:.1e} from float64'
    fields |= {'status': 'failed', 'reason': reason}
  return fields


def _reason(error: Exception) -> str:
  text = ' '.join(str(error).split())
  if isinstance(error, NotImplementedError | TimeoutError):
    return text
  return f'{type(error).__name__}: {text}'[:300]


def _suite() -> suites.Suite:
  shapes = {
      'small': cases.Shape(batch=4, time=12, in_features=8, features=8),
      'row_mnist': cases.Shape(128, 28, in_features=28, features=128),
      'pixel_mnist': cases.Shape(16, 784, in_features=1, features=128),
      '1x256': cases.heads(1, 256, time=256),
      'heads_of_one': cases.heads(256, 1, time=256),
  }
  names = [name for name, peer in PEERS.items() if peer.installed]
  names = [name for name in names if name != 'cudnn']  # It has a suite.
  return suites.Suite(
      layers=LAYERS,
      shapes=shapes,
      entries=[suites.Entry(None, LAYERS, 'with')],
      timer=timing.Timer(),
      default_shapes=('row_mnist', 'pixel_mnist', '1x256'),
      implementations=names,
      measure=measure,
      runs=lambda name, case: case.layer in PEERS[name].layers,
  )


SUITE = _suite()
