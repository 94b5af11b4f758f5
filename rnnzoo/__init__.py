"""rnnzoo: recurrent networks for JAX, each cell defined once, run three ways.

>>> import jax.numpy as jnp, rnnzoo
>>> from flax import nnx
>>> layer = rnnzoo.GRU(in_features=28, features=128, rngs=nnx.Rngs(0))
>>> layer(jnp.zeros((8, 28, 28))).shape              # [batch, time, features]
(8, 28, 128)

The layers are listed in `rnnzoo.LAYERS`; `help(rnnzoo.GRU)` tells how to use
one, `help(rnnzoo.Stack)` how to combine them.
"""

from collections.abc import Mapping as _Mapping
import types as _types

from rnnzoo.agru import AGRU
from rnnzoo.agru import AGRUCell
from rnnzoo.antisymmetric import AntisymmetricRNN
from rnnzoo.antisymmetric import AntisymmetricRNNCell
from rnnzoo.antisymmetric import GatedAntisymmetricRNNCell
from rnnzoo.bidirectional import Bidirectional
from rnnzoo.cell import Cell
from rnnzoo.cell import LinearCell
from rnnzoo.cell import TwoStageCell
from rnnzoo.constraints import constrain
from rnnzoo.elman import Elman
from rnnzoo.elman import ElmanCell
from rnnzoo.gru import GRU
from rnnzoo.gru import GRUCell
from rnnzoo.indrnn import IndRNN
from rnnzoo.irevrnn import IRevRNN
from rnnzoo.irevrnn import IRevRNNCell
from rnnzoo.layer import RecurrentLayer
from rnnzoo.linear_recurrence import linear_scan
from rnnzoo.lstm import LSTM
from rnnzoo.lstm import LSTMCell
from rnnzoo.mingru import MinGRU
from rnnzoo.mingru import MinGRUCell
from rnnzoo.minlstm import MinLSTM
from rnnzoo.minlstm import MinLSTMCell
from rnnzoo.sequence_layer import SequenceLayer
from rnnzoo.slstm import SLSTM
from rnnzoo.slstm import SLSTMCell
from rnnzoo.stack import Stack
from rnnzoo.unrolling import unroll
from rnnzoo.unrolling import unroll_carries

# Every layer by name, as configs name it.
LAYERS: _Mapping[str, type[RecurrentLayer]] = _types.MappingProxyType(
    {
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
    }
)
