"""Weights of haiku's modules."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rnnzoo.cells import elman
from rnnzoo.cells import lstm
from rnnzoo.convert import weights as weights_lib
from rnnzoo.layers import recurrent

# haiku's gates are i, g, f, o: ours by their place there, and the inverse.
_ORDER = [0, 2, 1, 3]

# hk.LSTM adds it to f in its code.
_FORGET_BIAS = 1.0


def from_haiku(
    layer: recurrent.RecurrentLayer,
    params: Mapping[str, Any],
    *,
    prefix: str = '',
) -> None:
  """Fills a layer with the parameters of an `hk.LSTM` or `hk.VanillaRNN`.

  haiku orders an LSTM's gates i, g, f, o and adds 1 to f outside of its
  parameters; here that 1 is in the bias. `hk.GRU` multiplies h by the reset
  gate before the product with R, where `rnnzoo.GRU` does so after it, as torch,
  flax and cuDNN do: its weights cannot be converted.

  Args:
    layer: an `LSTM`, or an `Elman` with activation='relu' for a `VanillaRNN`,
      with one head and biases; it is changed in place.
    params: result of `hk.transform(...).init`: {'lstm/linear': {'w': ...,
      'b': ...}}, or for a `VanillaRNN` entries 'linear' and
      'linear_1' (which has no bias if `double_bias=False`).
    prefix: the module's name ended by '/', as in 'lstm/'; other modules are
      passed over.

  Raises:
    ValueError: an entry is missing, left over or of another shape, or haiku has
      no such layer.
  """
  _check(layer)
  entries = weights_lib.Entries(params, 'mapping params', prefix)
  size, features = layer.in_features, layer.out_features
  if isinstance(layer.cell, lstm.LSTMCell):
    weight = entries.take('linear/w', (size + features, 4 * features), layer)
    bias = entries.take('linear/b', (4 * features,), layer)
    kernels = weights_lib.split_gates(weight, 4)[_ORDER]
    inputs, hidden = kernels[:, :size], kernels[:, size:]
    bias = bias.reshape(4, features)[_ORDER]
    bias[1] += _FORGET_BIAS
    total = 'linear/b with 1 added to f'
  else:
    inputs = entries.take('linear/w', (size, features), layer)[None]
    hidden = entries.take('linear_1/w', (features, features), layer)
    hidden = hidden[None]
    bias = entries.take('linear/b', (features,), layer)[None]
    if 'linear_1/b' in entries.left:
      bias = bias + entries.take('linear_1/b', (features,), layer)
    total = 'The sum of linear/b and linear_1/b'
  entries.finish()
  weights_lib.fits(bias, layer, total)
  weights_lib.store(layer, weights_lib.Weights(inputs, hidden[:, None], bias))


def to_haiku(
    layer: recurrent.RecurrentLayer, *, prefix: str
) -> dict[str, dict[str, np.ndarray]]:
  """Returns a layer's weights as the parameters of a haiku module.

  Args:
    layer: layer to read, as in `from_haiku`.
    prefix: the module's name ended by '/', as in 'lstm/' or 'vanilla_rnn/'.

  Returns:
    The mapping that `from_haiku` describes; for a `VanillaRNN` the mapping with
    the default, `double_bias=True`.

  Raises:
    ValueError: haiku has no such layer.
  """
  _check(layer)
  weights_lib.check_prefix(prefix)
  weights = weights_lib.read(layer, 'haiku')
  inputs, hidden = weights.kernel, weights.recurrent_kernel[:, 0]
  bias = np.array(weights.bias)
  if isinstance(layer.cell, lstm.LSTMCell):
    bias[1] -= _FORGET_BIAS
    kernels = np.concatenate([inputs, hidden], axis=1)[_ORDER]
    w = weights_lib.join_gates(kernels)
    return {f'{prefix}linear': {'w': w, 'b': bias[_ORDER].reshape(-1)}}
  return {
      f'{prefix}linear': {'w': inputs[0], 'b': bias[0]},
      f'{prefix}linear_1': {'w': hidden[0], 'b': np.zeros_like(bias[0])},
  }


def _check(layer: Any) -> None:
  if type(layer).__name__ == 'GRU':
    raise ValueError(
        'hk.GRU multiplies h by the reset gate before the product with R, and'
        ' rnnzoo.GRU after it: no weights make them equal.'
    )
  cells = elman.ElmanCell, lstm.LSTMCell
  weights_lib.check_layer(layer, cells, with_bias='haiku')
  if getattr(layer.cell, 'activation', 'relu') != 'relu':
    raise ValueError(
        "hk.VanillaRNN applies relu: it is an Elman with activation='relu', got"
        f' {layer.cell.activation!r}.'
    )
