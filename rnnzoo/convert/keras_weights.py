"""Weights of keras 3's layers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rnnzoo import settings
from rnnzoo.cells import gru
from rnnzoo.convert import weights as weights_lib
from rnnzoo.layers import sequence_layer
from rnnzoo.layers import stack


def from_keras(
    layer: sequence_layer.SequenceLayer, weights: Sequence[Any]
) -> None:
  """Fills a layer with the weights of a `keras.layers` layer.

      convert.from_keras(layer, keras_layer.get_weights())

  Args:
    layer: an `Elman`, `GRU` or `LSTM` with one head, or a `Bidirectional` of
      one; it is changed in place. Give `Elman` the layer's `activation`.
    weights: arrays of `get_weights()` of a `SimpleRNN`, `GRU` or `LSTM`
      with their default activations, or of `keras.layers.Bidirectional` with
      merge_mode='concat':
        kernel            [in_features, gates * features]
        recurrent_kernel  [features, gates * features]
        bias              [gates * features], of a GRU [2, gates * features];
                          none if use_bias=False
      Gates are in the order i, f, c, o and z, r, h. A GRU must have
      `reset_after=True`, the default.

  Raises:
    ValueError: an array is missing, left over or of another shape, or the layer
      is of a kind that keras does not have.
  """
  if not isinstance(weights, (list, tuple)):
    raise ValueError(
        'weights must be a list of arrays, as layer.get_weights() returns it,'
        f' got {settings.a(type(weights))}.'
    )
  parts = _parts(layer)
  count = sum(2 + (part.bias is not None) for part in parts)
  if len(weights) != count:
    raise ValueError(
        f'weights must be {count} arrays for this {type(layer).__name__}'
        f' (kernel, recurrent_kernel, bias), got {len(weights)}. A layer'
        ' without biases fills one with use_bias=False.'
    )
  left = list(weights)
  for part, taken in [(part, _take(part, left)) for part in parts]:
    weights_lib.store(part, taken)


def to_keras(layer: sequence_layer.SequenceLayer) -> list[np.ndarray]:
  """Returns a layer's weights for `keras_layer.set_weights`.

  Args:
    layer: layer to read, as in `from_keras`.

  Raises:
    ValueError: keras has no such layer.
  """
  arrays = []
  for part in _parts(layer):
    weights, order = weights_lib.read(part, 'keras'), _order(part)
    arrays.append(weights_lib.join_gates(weights.kernel[order]))
    arrays.append(weights_lib.join_gates(weights.recurrent_kernel[:, 0][order]))
    if weights.bias is not None:
      bias = weights.bias[order].reshape(-1)
      if weights.recurrent_bias is not None:  # It is the last gate's.
        extra = weights.recurrent_bias
        bias = np.stack([bias, np.pad(extra, (len(bias) - len(extra), 0))])
      arrays.append(bias)
  return arrays


def _take(layer: Any, left: list[Any]) -> weights_lib.Weights:
  """Takes one layer's arrays from the front of a list."""
  gates, features = layer.cell.input_gates, layer.out_features
  width, order = gates * features, _order(layer)
  is_gru = isinstance(layer.cell, gru.GRUCell)

  def take(name, *shape):
    value = left.pop(0)
    if is_gru and name == 'bias' and np.shape(value) == (width,):
      raise ValueError(
          f'bias has shape ({width},), as a keras GRU with reset_after=False'
          ' has it: that one multiplies h by the reset gate before the product'
          ' with R, and rnnzoo.GRU after it; no weights make them equal.'
      )
    return weights_lib.checked(value, shape, layer, name)

  kernel = take('kernel', layer.in_features, width)
  recurrent = take('recurrent_kernel', features, width)
  bias = extra = None
  if layer.bias is not None and is_gru:
    both = take('bias', 2, width).reshape(2, gates, features)[:, order]
    bias, extra = both.sum(0), both[1, -1]
    bias[-1] = both[0, -1]
    weights_lib.fits(bias, layer, 'The sum of both rows of bias')
  elif layer.bias is not None:
    bias = take('bias', width).reshape(gates, features)[order]
  elif is_gru:
    extra = np.zeros(features)
  split = lambda columns: weights_lib.split_gates(columns, gates)[order]
  hidden = split(recurrent)[:, None]
  return weights_lib.Weights(split(kernel), hidden, bias, extra)


def _parts(layer: Any) -> list[Any]:
  if isinstance(layer, stack.Stack):
    raise ValueError(
        'keras has no Stack: convert stack.layers[k] with the weights of each'
        ' keras layer.'
    )
  parts = [part for part, _, _ in weights_lib.parts(layer)]
  for part in parts:
    weights_lib.check_layer(part)
  weights_lib.check_alike(parts, 'keras')
  return parts


def _order(layer: Any) -> list[int]:
  """Our gates by their places in keras, which is also the inverse."""
  if isinstance(layer.cell, gru.GRUCell):
    return [1, 0, 2]  # z, r, h
  return list(range(layer.cell.input_gates))  # i, f, c, o
