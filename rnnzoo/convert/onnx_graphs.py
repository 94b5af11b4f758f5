"""Layers and models as ONNX graphs, for other runtimes.

pip install onnx      # or rnnzoo[onnx]
"""

import importlib
import os
from typing import Any

from flax import nnx
import numpy as np

from rnnzoo import settings
from rnnzoo.cells import elman
from rnnzoo.cells import gru
from rnnzoo.cells import lstm
from rnnzoo.convert import weights as weights_lib
from rnnzoo.layers import readouts
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer
from rnnzoo.layers import stack
from rnnzoo.models import sequence

# The oldest that has all operators as they are used here.
OPSET = 14

# Cell: the operator, and where ONNX's gates stand among ours.
_OPERATORS: dict[Any, tuple[str, list[int]]] = {
    elman.ElmanCell: ('RNN', [0]),
    gru.GRUCell: ('GRU', [1, 0, 2]),
    lstm.LSTMCell: ('LSTM', [0, 3, 1, 2]),
}


def to_onnx(
    model: sequence_layer.SequenceLayer | sequence.SequenceModel,
    path: str | os.PathLike[str],
    *,
    seq_lengths: bool = False,
    initial_carry: bool = False,
) -> None:
  """Writes a layer or a model as an ONNX graph, with ONNX's own operators.

      convert.to_onnx(model, 'model.onnx')
      session = onnxruntime.InferenceSession('model.onnx')
      (y,) = session.run(None, {'x': x})

  The graph computes in float32, and takes any batch and any number of steps.
  With one step and `initial_carry`, it takes steps of a stream.

  Inputs are `x`, [batch, time, in_features], or tokens, int64 [batch, time];
  `seq_lengths`, int32 [batch], if asked for; and, if asked for, the initial
  carry of each level k, `h_k`, and `c_k` of an LSTM, [directions, batch,
  features]. Outputs are `y`, which the model returns, and the final carries
  `last_h_k` and `last_c_k` where it takes initial ones.

  Args:
    model: an `Elman`, `GRU`, `IndRNN` or `LSTM`, a `Bidirectional` of such a
      layer, or a `Stack` of either without normalisation and residual sums; or
      a `SequenceModel` of one of these. A matrix R of several heads is written
      whole, with zeros between the heads.
    path: the file, which is replaced as a whole.
    seq_lengths: whether the graph takes lengths.
    initial_carry: whether the graph takes and returns carries.

  Raises:
    ImportError: the package onnx is missing.
    ValueError: ONNX has no operator for a layer, or a layer learns its initial
      carry.
    OSError: the file cannot be written.
  """
  settings.require('rnnzoo.convert.to_onnx', 'onnx', ['onnx'])
  onnx: Any = importlib.import_module('onnx')
  settings.boolean(seq_lengths, 'seq_lengths')
  settings.boolean(initial_carry, 'initial_carry')
  levels = _levels(model)
  written = _Graph(onnx, seq_lengths, initial_carry).of_model(model, levels)
  onnx.checker.check_model(written, full_check=True)
  with weights_lib.replaced(path) as partial:
    onnx.save(written, partial)


def _levels(model: Any) -> list[list[Any]]:
  """Returns the layers of each level, one for each direction."""
  # A subclass may compute something else.
  models = sequence.SequenceModel, sequence.SequenceClassifier
  is_model = type(model) in models
  layer = model.backbone if is_model else model
  if is_model and model.pooling != 'last':
    raise ValueError(
        "ONNX export reads the last output; got a model of pooling='mean'."
        ' jax.export writes any model (docs/serving.md).'
    )
  is_stack = isinstance(layer, stack.Stack)
  is_other = is_stack and type(layer) is not stack.Stack
  if is_stack and not is_other:
    for name in ('norms', 'residual'):
      if getattr(layer, name):
        raise ValueError(
            f'This Stack has {name}; one without {name} can be written as ONNX.'
        )
  levels: list[list[Any]] = []
  for part, level, backward in weights_lib.parts(layer):
    is_known = recurrent.is_plain(part) and type(part.cell) in _OPERATORS
    if is_other or not is_known:
      got = settings.a(type(layer if is_other else part))
      if isinstance(part, recurrent.RecurrentLayer):
        options = {
            'peephole': isinstance(part.cell, lstm.PeepholeLSTMCell),
            'projection': isinstance(part.readout, readouts.Projection),
            'zoneout_rate': part.zoneout_rate,
        }
        got += ''.join(f' with {name}' for name in options if options[name])
      raise ValueError(
          'ONNX has operators for Elman, GRU, IndRNN and LSTM layers, and for'
          f' Bidirectional and Stack of them; got {got}. jax.export writes any'
          ' model (docs/serving.md).'
      )
    weights_lib.check_structure(part)
    if not backward:
      levels.append([])
    levels[level].append(part)
  return levels


class _Graph:
  """A graph that grows node by node; tensors have names."""

  def __init__(self, onnx: Any, seq_lengths: bool, initial_carry: bool):
    self._onnx = onnx
    self._helper = onnx.helper
    self._nodes: list[Any] = []
    self._constants: list[Any] = []
    self._inputs: list[Any] = []
    self._outputs: list[Any] = []
    self._lengths = 'seq_lengths' if seq_lengths else ''
    self._has_carry = initial_carry

  def of_model(self, model: Any, levels: list[list[Any]]) -> Any:
    """Returns the whole graph as an `onnx.ModelProto`."""
    is_model = isinstance(model, sequence.SequenceModel)
    if is_model and hasattr(model, 'embedding'):
      self._input('x', ('batch', 'time'), 'INT64')
      table = self._constant(_float32(model.embedding.embedding))
      x = self._node('Gather', [table, 'x'])
    else:
      self._input('x', ('batch', 'time', levels[0][0].in_features))
      x = 'x'
    if self._lengths:
      self._input('seq_lengths', ('batch',), 'INT32')
    y = self._node('Transpose', [x], perm=[1, 0, 2])
    for index, parts in enumerate(levels):
      y, last = self._level(y, index, parts)
    if is_model and not model.every_step:
      # Only one direction answers at the end.
      axis = self._constant(np.array([0], np.int64))
      y = self._node('Squeeze', [last, axis])
      axes: tuple[Any, ...] = ('batch',)
    else:
      y = self._node('Transpose', [y], perm=[1, 0, 2])
      axes = 'batch', 'time'
    size = sum(part.out_features for part in levels[-1])
    if is_model:
      y = self._node('MatMul', [y, self._constant(_float32(model.head.kernel))])
      y = self._node('Add', [y, self._constant(_float32(model.head.bias))])
      size = model.head.out_features
    self._output(self._node('Identity', [y], ['y']), (*axes, size))
    self._outputs.insert(0, self._outputs.pop())
    graph = self._helper.make_graph(
        self._nodes, 'rnnzoo', self._inputs, self._outputs, self._constants
    )
    opset = self._helper.make_opsetid('', OPSET)
    return self._helper.make_model(
        graph, producer_name='rnnzoo', opset_imports=[opset], ir_version=8
    )

  def _level(self, x: str, index: int, parts: list[Any]) -> tuple[str, str]:
    """Adds an operator; x is [time, batch, in_features], and so is its y.

    Returns:
      y, and the last h, [directions, batch, features].
    """
    operator, order = _OPERATORS[type(parts[0].cell)]
    features = parts[0].out_features
    options: dict[str, Any] = {
        'hidden_size': features,
        'direction': 'bidirectional' if len(parts) > 1 else 'forward',
    }
    if operator == 'RNN':
      kinds = {'tanh': 'Tanh', 'relu': 'Relu'}
      options['activations'] = [kinds[p.cell.activation] for p in parts]
    if operator == 'GRU':
      options['linear_before_reset'] = 1
    arrays = zip(*(_arrays(part, order) for part in parts), strict=True)
    names = [self._constant(np.stack(both)) for both in arrays]
    carries = list(parts[0].cell.carry_names)
    given = [f'{name}_{index}' if self._has_carry else '' for name in carries]
    last = [f'last_{name}_{index}' for name in carries]
    shape = len(parts), 'batch', features
    ends = [f'end_{name}' for name in last]
    outputs = [f'steps_{index}', *ends]
    inputs = [x, *names, self._lengths, *given]
    self._node(operator, inputs, outputs, **options)
    if self._has_carry:
      for before, end, after in zip(given, ends, last, strict=True):
        self._input(before, shape)
        self._output(self._held(before, end, after), shape)
    # [time, directions, batch, features]
    y = self._node('Transpose', [outputs[0]], perm=[0, 2, 1, 3])
    joined = self._constant(np.array([0, 0, -1], np.int64))
    return self._node('Reshape', [y, joined]), ends[0]

  def _held(self, before: str, end: str, after: str) -> str:
    """Adds the last carry, which no step changes where the length is 0."""
    if not self._lengths:
      return self._node('Identity', [end], [after])
    zero = self._constant(np.zeros((), np.int32))
    runs = self._node('Greater', [self._lengths, zero])
    axis = self._constant(np.array([1], np.int64))
    runs = self._node('Unsqueeze', [runs, axis])
    return self._node('Where', [runs, end, before], [after])

  def _node(self, operator, inputs, outputs=None, **attributes) -> str:
    outputs = outputs or [f'tensor_{len(self._nodes)}']
    self._nodes.append(
        self._helper.make_node(operator, inputs, outputs, **attributes)
    )
    return outputs[0]

  def _constant(self, array: np.ndarray) -> str:
    name = f'constant_{len(self._constants)}'
    self._constants.append(self._onnx.numpy_helper.from_array(array, name))
    return name

  def _input(self, name, shape, kind='FLOAT') -> None:
    kind = getattr(self._onnx.TensorProto, kind)
    value = self._helper.make_tensor_value_info(name, kind, shape)
    self._inputs.append(value)

  def _output(self, name, shape) -> None:
    kind = self._onnx.TensorProto.FLOAT
    value = self._helper.make_tensor_value_info(name, kind, shape)
    self._outputs.append(value)


def _arrays(part: Any, order: list[int]) -> tuple[np.ndarray, ...]:
  """Returns W, R and both biases of a direction, gates in ONNX's order."""
  weights = weights_lib.read(part, 'ONNX', has_biases=True)
  gates, heads, size, _ = weights.recurrent_kernel.shape
  whole = np.zeros((gates, heads, size, heads, size), np.float32)
  each = np.arange(heads)
  whole[:, each, :, each] = weights.recurrent_kernel.swapaxes(0, 1)
  whole = whole.reshape(gates, heads * size, heads * size)
  bias = np.zeros((2, gates, heads * size), np.float32)
  if weights.bias is not None:
    bias[0] = weights.bias
  if weights.recurrent_bias is not None:
    bias[1, -1] = weights.recurrent_bias
  # A library's matrix multiplies from the left.
  rows = lambda kernel: weights_lib.join_gates(kernel[order]).T
  kernels = rows(weights.kernel), rows(whole)
  return *(k.astype(np.float32) for k in kernels), bias[:, order].reshape(-1)


def _float32(parameter: nnx.Variable) -> np.ndarray:
  return weights_lib.numbers(parameter, 'A parameter').astype(np.float32)
