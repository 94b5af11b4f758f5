"""rnnzoo: recurrent networks for JAX, each cell defined once, run three ways.

>>> import jax.numpy as jnp, rnnzoo
>>> from flax import nnx
>>> layer = rnnzoo.GRU(in_features=28, features=128, rngs=nnx.Rngs(0))
>>> layer(jnp.zeros((8, 28, 28))).shape              # [batch, time, features]
(8, 28, 128)

The layers are listed in `rnnzoo.LAYERS`; `help(rnnzoo.GRU)` tells how to use
one, `help(rnnzoo.Stack)` how to combine them. `rnnzoo.linen`, `convert`,
`models`, `tasks` and `training` are imported when they are first used.
"""

from collections.abc import Mapping as _Mapping
import importlib as _importlib
import types as _types
import typing as _typing

from rnnzoo.cell import Cell
from rnnzoo.cell import HiddenCarry
from rnnzoo.cell import LinearCell
from rnnzoo.cell import TwoStageCell
from rnnzoo.cells.agru import AGRU
from rnnzoo.cells.agru import AGRUCell
from rnnzoo.cells.antisymmetric import AntisymmetricRNN
from rnnzoo.cells.antisymmetric import AntisymmetricRNNCell
from rnnzoo.cells.antisymmetric import GatedAntisymmetricRNNCell
from rnnzoo.cells.cfc import CfC
from rnnzoo.cells.cfc import CfCCell
from rnnzoo.cells.elman import Elman
from rnnzoo.cells.elman import ElmanCell
from rnnzoo.cells.griffin_block import GriffinBlock
from rnnzoo.cells.gru import GRU
from rnnzoo.cells.gru import GRUCell
from rnnzoo.cells.hgrn import ComplexHGRNCell
from rnnzoo.cells.hgrn import HGRN
from rnnzoo.cells.hgrn import HGRNCell
from rnnzoo.cells.indrnn import IndRNN
from rnnzoo.cells.irevrnn import IRevRNN
from rnnzoo.cells.irevrnn import IRevRNNCarry
from rnnzoo.cells.irevrnn import IRevRNNCell
from rnnzoo.cells.linoss import LinOSS
from rnnzoo.cells.linoss import LinOSSCell
from rnnzoo.cells.linoss import OscillatorCarry
from rnnzoo.cells.lru import ComplexCarry
from rnnzoo.cells.lru import LRU
from rnnzoo.cells.lru import LRUCell
from rnnzoo.cells.lstm import LSTM
from rnnzoo.cells.lstm import LSTMCarry
from rnnzoo.cells.lstm import LSTMCell
from rnnzoo.cells.lstm import PeepholeLSTMCell
from rnnzoo.cells.mingru import MinGRU
from rnnzoo.cells.mingru import MinGRUCell
from rnnzoo.cells.minlstm import MinLSTM
from rnnzoo.cells.minlstm import MinLSTMCell
from rnnzoo.cells.qrnn import IfoQRNNCell
from rnnzoo.cells.qrnn import QRNN
from rnnzoo.cells.qrnn import QRNNCell
from rnnzoo.cells.rglru import RGLRU
from rnnzoo.cells.rglru import RGLRUCell
from rnnzoo.cells.s5 import S5
from rnnzoo.cells.s5 import S5Cell
from rnnzoo.cells.slstm import SLSTM
from rnnzoo.cells.slstm import SLSTMCarry
from rnnzoo.cells.slstm import SLSTMCell
from rnnzoo.cells.slstm_block import SLSTMBlock
from rnnzoo.doors.flash import flashrnn
from rnnzoo.doors.flash import FlashRNNConfig
from rnnzoo.doors.scanned import ScannedRNN
from rnnzoo.engines.linear import linear_scan
from rnnzoo.engines.paths import unroll
from rnnzoo.engines.paths import unroll_carries
from rnnzoo.engines.selection import AssociativeScan
from rnnzoo.engines.selection import Pallas
from rnnzoo.engines.selection import Scan
from rnnzoo.inspect.planning import DryRun
from rnnzoo.inspect.planning import dryrun
from rnnzoo.inspect.verification import Verification
from rnnzoo.inspect.verification import verify
from rnnzoo.layers.bidirectional import Bidirectional
from rnnzoo.layers.dense_stack import DenseStack
from rnnzoo.layers.initializers import constrain
from rnnzoo.layers.initializers import dropconnect
from rnnzoo.layers.recurrent import RecurrentLayer
from rnnzoo.layers.sequence_layer import SequenceLayer
from rnnzoo.layers.stack import Stack

__version__ = '0.1.0.dev0'

_LAYERS: dict[str, type[RecurrentLayer]] = {
    'Elman': Elman,
    'LSTM': LSTM,
    'GRU': GRU,
    'SLSTM': SLSTM,
    'AGRU': AGRU,
    'AntisymmetricRNN': AntisymmetricRNN,
    'IndRNN': IndRNN,
    'IRevRNN': IRevRNN,
    'MinGRU': MinGRU,
    'MinLSTM': MinLSTM,
    'LRU': LRU,
    'S5': S5,
    'LinOSS': LinOSS,
    'RGLRU': RGLRU,
    'HGRN': HGRN,
    'QRNN': QRNN,
    'CfC': CfC,
}
_OWN_NAMES = frozenset(_LAYERS)

# Every layer by name, as configs name it.
LAYERS: _Mapping[str, type[RecurrentLayer]] = _types.MappingProxyType(_LAYERS)


def register(layer: type[RecurrentLayer]) -> None:
  """Adds a layer of another project to `LAYERS`, by the name of its class.

  Configs then name it: `config.model.layer = 'MyLayer'`. A config's file calls
  this, and so does a program that loads a run of such a config.

  Args:
    layer: its class. To register a name again, as a config that is loaded twice
      does, replaces the class.

  Raises:
    TypeError: `layer` is no class of a recurrent layer.
    ValueError: a layer of rnnzoo has this name.
  """
  if not isinstance(layer, type) or not issubclass(layer, RecurrentLayer):
    raise TypeError(
        f'a layer must be a subclass of rnnzoo.RecurrentLayer; got {layer!r}'
    )
  if layer.__name__ in _OWN_NAMES:
    raise ValueError(
        f'{layer.__name__!r} is a layer of rnnzoo; choose another name'
    )
  _LAYERS[layer.__name__] = layer


# Modules that are imported when they are first asked for: they take time, and
# some need an extra.
_MODULES = ('convert', 'linen', 'models', 'tasks', 'training')

if _typing.TYPE_CHECKING:
  from rnnzoo import convert as convert
  from rnnzoo import linen as linen
  from rnnzoo import models as models
  from rnnzoo import tasks as tasks
  from rnnzoo import training as training
else:  # A type checker would take any name for one of this module.

  def __getattr__(name: str) -> _types.ModuleType:
    if name not in _MODULES:
      raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    try:
      return _importlib.import_module(f'{__name__}.{name}')
    except ModuleNotFoundError as error:
      # An extra is missing. `hasattr` and `help` go on after this one alone.
      raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
  return sorted({*globals(), *_MODULES})
