"""Weights of `flax.linen` cells, which are dicts of parameters."""

from collections.abc import Mapping
from typing import Any

from flax import linen
import jax
import numpy as np

from rnnzoo.cells import elman
from rnnzoo.cells import gru
from rnnzoo.cells import lstm
from rnnzoo.convert import weights as weights_lib
from rnnzoo.layers import recurrent

Weights = weights_lib.Weights

# Names of linen's parts without the side, gate by gate in our order.
_GATES: dict[type, tuple[str, ...]] = {
    elman.ElmanCell: ('',),
    gru.GRUCell: ('r', 'z', 'n'),
    lstm.LSTMCell: ('i', 'f', 'g', 'o'),
}


def from_linen(
    layer: recurrent.RecurrentLayer,
    params: Mapping[str, Any],
    *,
    prefix: str = '',
) -> None:
  """Fills a layer with the parameters of a `flax.linen` cell.

  >>> import jax, numpy as np, rnnzoo
  >>> from flax import linen, nnx
  >>> from rnnzoo import convert
  >>> x = np.ones((2, 5, 3), np.float32)
  >>> rnn = linen.RNN(linen.GRUCell(8))
  >>> params = rnn.init(jax.random.key(0), x)['params']
  >>> layer = rnnzoo.GRU(3, 8, rngs=nnx.Rngs(1))
  >>> convert.from_linen(layer, params, prefix='cell/')
  >>> difference = layer(x) - rnn.apply({'params': params}, x)
  >>> float(abs(difference).max()) < 1e-6
  True

  Args:
    layer: an `Elman`, `GRU` or `LSTM` with one head and biases; it is changed
      in place. Give `Elman` the cell's `activation_fn` as `activation`.
    params: parameters of a `linen.SimpleCell` without residual, `GRUCell`,
      `linen.LSTMCell` or `linen.OptimizedLSTMCell` with their default
      activations, or of a model that contains one. If `init` returned
      variables, give `variables['params']`.
    prefix: names from the top of `params` down to the cell, joined and ended
      by '/', as in 'ScannedRNN_0/GRUCell_0/'; others are passed over.

  Raises:
    ValueError: an entry is missing, left over or of another shape, or linen has
      no such layer.
  """
  names = _names(layer)
  unboxed = linen.meta.unbox(params)
  entries = weights_lib.Entries(unboxed, 'mapping params', prefix)
  features = layer.out_features
  hint = _hint(params, prefix)
  take = lambda name, shape: entries.take(name, shape, layer, hint)
  kernel = lambda name, rows: take(f'{name}/kernel', (rows, features))
  inputs = [kernel(f'i{name}', layer.in_features) for name in names]
  hidden = [kernel(f'h{name}', features) for name in names]
  bias = [take(f'{side}/bias', (features,)) for side in _with_bias(layer)]
  extra = None
  if isinstance(layer.cell, gru.GRUCell):
    extra = take('hn/bias', (features,))
  entries.finish()
  weights = Weights(
      kernel=np.stack(inputs),
      recurrent_kernel=np.stack(hidden)[:, None],
      bias=np.stack(bias),
      recurrent_bias=extra,
  )
  weights_lib.store(layer, weights)


def to_linen(layer: recurrent.RecurrentLayer) -> dict[str, Any]:
  """Returns a layer's weights as the parameters of a `flax.linen` cell.

  Args:
    layer: layer to read, as in `from_linen`.

  Returns:
    The parameters of `linen.SimpleCell`, `linen.GRUCell` or, for an `LSTM`,
    `linen.LSTMCell` and `linen.OptimizedLSTMCell` alike.

  Raises:
    ValueError: linen has no such layer.
  """
  names = _names(layer)
  weights = weights_lib.read(layer, 'flax')
  params: dict[str, Any] = {}
  for index, name in enumerate(names):
    params[f'i{name}'] = {'kernel': weights.kernel[index]}
    params[f'h{name}'] = {'kernel': weights.recurrent_kernel[index, 0]}
  for index, side in enumerate(_with_bias(layer)):
    params[side]['bias'] = weights.bias[index]
  if weights.recurrent_bias is not None:
    params['hn']['bias'] = weights.recurrent_bias
  return jax.tree.map(np.asarray, params)


def _hint(params: Any, prefix: str) -> str:
  """Returns a sentence for an entry that is missing in variables."""
  is_outer = isinstance(params, Mapping) and 'params' in params
  if not is_outer or prefix.startswith('params/'):
    return ''
  return (
      ' These are variables, whose parameters are one level down:'
      " from_linen(layer, variables['params'], ...) would work."
  )


def _names(layer: Any) -> tuple[str, ...]:
  weights_lib.check_layer(layer, with_bias='flax')
  return _GATES[type(layer.cell)]


def _with_bias(layer: Any) -> list[str]:
  """Returns the parts that have a gate's bias, in our order."""
  side = 'h' if isinstance(layer.cell, lstm.LSTMCell) else 'i'
  return [f'{side}{name}' for name in _GATES[type(layer.cell)]]
