"""The suite 'peers': layers of other libraries beside ours, in one run.

Each library that is installed takes part, with our weights and inputs, and is
compared with our 'scan' in float64: `error` is the error of y, or backward of
the gradient by x; `ahead` is its time over the time of rnnzoo. All libraries
take turns. `compile_s` of a torch program is its first call; memory is as each
library tells it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
from importlib import metadata
from importlib import util
from typing import Any, NamedTuple

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
from rnnzoo.benchmark import timing
from rnnzoo.convert import weights

OURS = 'rnnzoo'
SCAN = "rnnzoo's scan"
LAYERS = ('LSTM', 'GRU', 'MinGRU', 'Elman')

# Larger relative errors are mistakes, or digits that a program lost. A GPU
# multiplies float32 in TF32 by default.
_LIMITS = {'float32': 1e-4, 'bfloat16': 5e-2, 'float16': 1e-2}
_TF32 = 1e-2


class Peer(NamedTuple):
  """A library's layers.

  Attributes:
    program: function of ours, arrays, dtype and direction that makes a call.
    package: its distribution, as pip knows it.
    layers: the names in `LAYERS` of layers that it has.
    module: the module that shows whether it is installed, if not `package`.
    stacks: whether it takes several layers and both directions.
  """

  program: Callable[..., tuple[Callable[[], Any], dict[str, Any]]]
  package: str
  layers: Sequence[str]
  module: str = ''
  stacks: bool = False

  @property
  def installed(self) -> bool:
    """Whether it can be imported."""
    return util.find_spec(self.module or self.package) is not None

  def version(self) -> str | None:
    """Returns its version, or None where it has no metadata."""
    try:
      return metadata.version(self.package)
    except metadata.PackageNotFoundError:
      return None


def _jax(make, *facts, **more) -> Peer:
  return Peer(functools.partial(peers_jax.program, make), *facts, **more)


def _torch(make, *facts, **more) -> Peer:
  return Peer(functools.partial(peers_torch.program, make), *facts, **more)


_CUDNN = functools.partial(
    peers_torch.program, peers_torch.cudnn, time_major=True
)
_BOTH, _LINEAR = LAYERS[:2], LAYERS[2:3]
_THREE = (*_BOTH, 'Elman')
PEERS: Mapping[str, Peer] = {
    OURS: _jax(peers_jax.zoo, OURS, LAYERS, stacks=True),
    SCAN: _jax(peers_jax.scan, OURS, LAYERS, stacks=True),
    'flax.nnx': _jax(peers_jax.flax_nnx, 'flax', _THREE, stacks=True),
    'flax.nnx.LSTMCell': _jax(peers_jax.flax_lstm_cell, 'flax', ['LSTM']),
    'flax.linen': _jax(peers_jax.flax_linen, 'flax', _BOTH),
    'haiku': _jax(peers_jax.haiku, 'dm-haiku', ['LSTM'], 'haiku'),
    'keras': _jax(peers_jax.keras, 'keras', _BOTH),
    'torch': _torch(peers_torch.eager, 'torch', _THREE),
    'cudnn': Peer(_CUDNN, 'torch', _THREE, stacks=True),
    'torch, compiled': _torch(peers_torch.compiled, 'torch', _BOTH),
    'flashrnn': _torch(peers_torch.flashrnn, 'flashrnn', _BOTH),
    'minGRU-pytorch': _torch(
        peers_torch.mingru, 'minGRU-pytorch', _LINEAR, 'minGRU_pytorch'
    ),
    'accelerated-scan': _torch(
        *(peers_torch.accelerated_scan, 'accelerated-scan', _LINEAR),
        'accelerated_scan',
    ),
    'pararnn': _torch(peers_torch.pararnn, 'pararnn-torch', ['GRU'], 'pararnn'),
}


def takes(name: str, case: cases.Case) -> bool:
  """Returns whether a peer has the layer of a case."""
  *several, layer = case.layer.split()
  peer = PEERS[name]
  return layer in peer.layers and (peer.stacks or not several)


def measure(
    selected: Iterable[cases.Case],
    timer: timing.Timer,
    watchdog: timing.Watchdog,
) -> Iterator[dict[str, Any]]:
  """Compares every peer with float64, then times all.

  Yields:
    One row for each case, peer and direction, with the labels of
    `measurement.measure`; `program` is the peer, `version` its version. A peer
    that raises an error `cannot`; one whose error is too large `failed`.
  """
  for case in selected:
    rows = [
        case.row(name, direction) | {'version': PEERS[name].version()}
        for name in case.implementations
        for direction in cases.DIRECTIONS
    ]
    yield from measurement.side_by_side(_measure, case, rows, timer, watchdog)


def _measure(case: cases.Case, rows, timer: timing.Timer, watchdog) -> None:
  """Adds errors, memory and times to the rows of a case."""
  ours, arrays = _problem(case)
  exact = functools.cache(functools.partial(_exact, ours, arrays))
  timed: list[dict[str, Any]] = []
  calls: list[Callable[[], Any]] = []
  for row in rows:
    name, backward = row['program'], row['direction'] != cases.DIRECTIONS[0]
    watchdog.start(f'{case.layer} of {name}, {row["direction"]}')
    try:
      call, fields = PEERS[name].program(ours, arrays, case.dtype, backward)
      row |= {**fields, **_compare(call()[0], exact(backward), case.dtype)}
      timed.append(row)
      calls.append(call)
    except Exception as error:  # Another library's: the rest goes on.
      status = 'failed' if name in (OURS, SCAN) else 'cannot'
      row |= measurement.failure(error) | {'status': status}
  if not timer.repeats:
    return
  measurement.take_turns(case, timed, calls, timer, watchdog)
  ours_ms = {r['direction']: r['ms'] for r in timed if r['program'] == OURS}
  for row in timed:
    if row['direction'] in ours_ms:
      row['ahead'] = row['ms'] / ours_ms[row['direction']]


def _problem(case) -> tuple[rnnzoo.RecurrentLayer, tuple[Any, ...]]:
  """Returns a layer with random biases, x, and weights of y's sum."""
  shape, rng = case.shape, np.random.default_rng(0)
  options: dict[str, Any] = {}
  if case.layer == 'MinGRU':  # As in the packages that have one.
    options = {'candidate': 'positive', 'use_bias': False}
  layer = problems.new_layer(case, **options)
  # Programs start from numbers that the dtype has.
  fits = lambda a: np.asarray(jnp.asarray(a, case.dtype), np.float32)
  draw = lambda *size: rng.standard_normal(size)
  for level in levels(layer):
    level.dtype = jnp.dtype(case.dtype)
    if level.bias is not None:
      level.bias[...] += 0.1 * draw(*level.bias.shape)
  nnx.update(layer, jax.tree.map(fits, nnx.state(layer)))
  arrays = draw(*shape.x), draw(*shape.x[:2], layer.out_features)
  return layer, tuple(map(fits, arrays))


def levels(layer: Any) -> Sequence[Any]:
  """Returns all layers of a stack, in both directions."""
  return [part for part, _, _ in weights.parts(layer)]


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
  name = 'y or its gradient differs from float64'
  return measurement.judged(error, limit, name)
