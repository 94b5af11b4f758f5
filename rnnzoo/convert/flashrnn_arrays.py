"""Arrays of FlashRNN, whose function takes R and b as they are."""

from typing import Any

import numpy as np

from rnnzoo.cells import elman
from rnnzoo.cells import gru
from rnnzoo.cells import lstm
from rnnzoo.cells import slstm
from rnnzoo.convert import weights as weights_lib
from rnnzoo.layers import recurrent

_CELLS = (elman.ElmanCell, lstm.LSTMCell, gru.GRUCell, slstm.SLSTMCell)

# FlashRNN's GRU orders R's gates n, r, z, and its biases b_hn, r, z, n.
_RECURRENT_GRU = [1, 2, 0]
_BIAS_GRU = [1, 2, 3]


def from_flashrnn(
    layer: recurrent.RecurrentLayer, R: Any, b: Any, *, kernel: Any = None
) -> None:
  """Fills a layer with FlashRNN's recurrent matrix and biases.

  Args:
    layer: an `Elman`, `LSTM`, `GRU` or `SLSTM` with biases and as many heads;
      it is changed in place.
    R: [gates, heads, head_dim (to), head_dim (from)], FlashRNN's default
      `recurrent_shape`, 'GHDP'.
    b: [gates, heads, head_dim]; 4 gates for a GRU.
    kernel: [gates * features, in_features], the weight of the `torch.nn.Linear`
      without bias that makes Wx [batch, time, gates, heads, head_dim]; None
      leaves the layer's own as it is.

  Raises:
    ValueError: an array has another shape, or FlashRNN has no such layer.
  """
  _check(layer)
  gates, features = layer.cell.input_gates, layer.out_features
  heads = layer.num_heads, features // layer.num_heads
  is_gru = isinstance(layer.cell, gru.GRUCell)
  R = weights_lib.checked(R, (gates, *heads, heads[1]), layer, 'R')
  b = weights_lib.checked(b, (gates + is_gru, *heads), layer, 'b')
  if kernel is not None:
    shape = gates * features, layer.in_features
    kernel = weights_lib.checked(kernel, shape, layer, 'kernel')
    kernel = weights_lib.split_gates(kernel.T, gates)
  bias, extra = b.reshape(-1, features), None
  if is_gru:
    R, extra, bias = R[_RECURRENT_GRU], bias[0], bias[_BIAS_GRU]
  R = R.swapaxes(-1, -2)
  weights_lib.store(layer, weights_lib.Weights(kernel, R, bias, extra))


def to_flashrnn(
    layer: recurrent.RecurrentLayer,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns a layer's weights as FlashRNN's arrays.

  Args:
    layer: layer to read, as in `from_flashrnn`.

  Returns:
    R, b and kernel as `from_flashrnn` takes them.

  Raises:
    ValueError: FlashRNN has no such layer.
  """
  _check(layer)
  weights = weights_lib.read(layer, 'FlashRNN')
  R, bias = weights.recurrent_kernel.swapaxes(-1, -2), np.array(weights.bias)
  if weights.recurrent_bias is not None:
    R = R[np.argsort(_RECURRENT_GRU)]
    bias = np.concatenate([weights.recurrent_bias[None], bias])
  b = bias.reshape(len(bias), layer.num_heads, -1)
  return R, b, weights_lib.join_gates(weights.kernel).T


def _check(layer: Any) -> None:
  weights_lib.check_layer(layer, _CELLS, heads=True, with_bias='FlashRNN')
  if layer.cell != type(layer.cell)():
    raise ValueError(
        "FlashRNN's elman applies tanh, and its slstm has no max_forget and"
        f' min_normalizer=1; got {layer.cell}.'
    )
