"""Weights from other libraries: `torch.nn` modules and `flax.nnx` cells.

Both functions fill a layer in place, as `nnx.update` does, and return nothing:
the layer says what is right, so weights of another shape are an error. Neither
changes the layer unless all of its weights were found. Gates have the same
order here as there: r, z, n in a GRU and i, f, g, o in an LSTM.

torch itself is not needed: tensors are read through numpy.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo import checks
from rnnzoo.cells import elman
from rnnzoo.cells import gru
from rnnzoo.cells import lstm
from rnnzoo.layers import bidirectional
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer
from rnnzoo.layers import stack

Array = jax.Array

# Cells that torch and flax define by the same equations.
_CELLS = (elman.ElmanCell, gru.GRUCell, lstm.LSTMCell)


def from_torch(
    layer: sequence_layer.SequenceLayer,
    state_dict: Mapping[str, Any],
    *,
    prefix: str = '',
) -> None:
  """Fills a layer with the weights of a `torch.nn.RNN`, `LSTM` or `GRU`.

  torch has two biases for each gate, which are added: both stand in the same
  sum. The exception is the GRU's n, where the reset gate multiplies the
  recurrent one, kept as `cell_params['recurrent_bias']`.

  >>> import numpy as np, rnnzoo
  >>> from flax import nnx
  >>> from rnnzoo import convert
  >>> weights = {               # state_dict() of a torch.nn.RNN(3, 8)
  ...     'weight_ih_l0': np.ones((8, 3)), 'weight_hh_l0': np.ones((8, 8)),
  ...     'bias_ih_l0': np.ones(8), 'bias_hh_l0': np.ones(8),
  ... }
  >>> layer = rnnzoo.Elman(3, 8, rngs=nnx.Rngs(0))
  >>> convert.from_torch(layer, weights)
  >>> layer.bias[0, :2]
  Array([2., 2.], dtype=float32)

  Args:
    layer: an `Elman`, `GRU` or `LSTM` with one head, a `Bidirectional` of such
      a layer, or a `Stack` of either; it is changed in place. Give `Elman` the
      module's `nonlinearity` as `activation`. Normalisation in a stack, which
      torch does not have, is left as it is.
    state_dict: `module.state_dict()`, torch tensors or numpy arrays. Level k of
      a stack has these entries, and for the backward direction the same with
      `_reverse` appended:
        weight_ih_lk  [gates * features, in_features]
        weight_hh_lk  [gates * features, features]
        bias_ih_lk    [gates * features]
        bias_hh_lk    [gates * features]
      A module with `bias=False` has no biases, and fills a layer with
      `use_bias=False`.
    prefix: the start of the entries' names, for instance 'encoder.' for the
      recurrent part of a model; entries without it are passed over.

  Raises:
    ValueError: an entry is missing, left over or of another shape, or the layer
      is of a kind that torch does not have.
  """
  if not isinstance(state_dict, Mapping):
    raise ValueError(
        'state_dict must be a mapping from names to arrays, as'
        f' module.state_dict() returns it, got a {type(state_dict).__name__}.'
    )
  if not isinstance(prefix, str):
    raise ValueError(f'prefix must be a str, got {prefix!r}.')
  names = [name for name in state_dict if not isinstance(name, str)]
  if names:
    raise ValueError(f'state_dict must have str as names, got {names[0]!r}.')
  given = {
      name.removeprefix(prefix): value
      for name, value in state_dict.items()
      if name.startswith(prefix)
  }
  updates = []
  for part, suffix in _torch_parts(layer):
    weights = _torch_weights(part, given, prefix, suffix, state_dict)
    updates.append((part, weights))
  if given:
    raise ValueError(
        'The state dict has entries that the layer has no place for:'
        f' {sorted(prefix + name for name in given)}.'
    )
  for part, weights in updates:
    nnx.update(part, weights)


def from_flax(layer: recurrent.RecurrentLayer, cell: Any) -> None:
  """Fills a layer with the weights of a `flax.nnx` cell.

  >>> import numpy as np, rnnzoo
  >>> from flax import nnx
  >>> from rnnzoo import convert
  >>> cell = nnx.GRUCell(3, 8, rngs=nnx.Rngs(0))
  >>> layer = rnnzoo.GRU(3, 8, rngs=nnx.Rngs(1))
  >>> convert.from_flax(layer, cell)
  >>> x = np.ones((2, 5, 3), np.float32)
  >>> difference = layer(x) - nnx.RNN(cell)(x)
  >>> float(abs(difference).max()) < 1e-6
  True

  Args:
    layer: an `Elman`, `GRU` or `LSTM` with one head and biases; it is changed
      in place.
    cell: `nnx.SimpleCell`, `nnx.GRUCell` (which has no recurrent bias: it
      becomes zero), `nnx.LSTMCell` or `nnx.OptimizedLSTMCell`.

  Raises:
    ValueError: the cell computes something else than the layer, or its weights
      have another shape.
  """
  _check_layer(layer)
  if layer.bias is None:
    raise ValueError('flax cells have biases; the layer has use_bias=False.')
  kind, activation = _flax_kind(cell)
  want_activation = getattr(layer.cell, 'activation', 'tanh')
  if not isinstance(layer.cell, kind) or activation != want_activation:
    raise ValueError(
        f'{type(cell).__name__} with {activation} does not compute what'
        f' {type(layer).__name__} with {want_activation} does.'
    )
  if isinstance(cell, nnx.LSTMCell):
    inputs = [cell.ii, cell.if_, cell.ig, cell.io]
    hidden = [cell.hi, cell.hf, cell.hg, cell.ho]
    joined = lambda parts: jnp.concatenate(parts, axis=-1)
    weight_ih = joined([part.kernel[...] for part in inputs])
    weight_hh = joined([part.kernel[...] for part in hidden])
    biases = [part.bias for part in hidden if part.bias is not None]
    bias = joined([b[...] for b in biases])
  else:
    weight_ih = cell.dense_i.kernel[...]
    weight_hh = cell.dense_h.kernel[...]
    # Each cell has one bias, beside the input or beside the memory.
    with_bias = cell.dense_i if cell.dense_i.bias is not None else cell.dense_h
    bias = with_bias.bias[...]
  gates, features = layer.cell.input_gates, layer.out_features
  width = gates * features
  named = {
      'input kernel': (weight_ih, (layer.in_features, width)),
      'recurrent kernel': (weight_hh, (features, width)),
      'bias': (bias, (width,)),
  }
  for name, (value, shape) in named.items():
    if value.shape != shape:
      raise ValueError(
          f'The {name} of {type(cell).__name__} must have shape {shape} for'
          f' in_features = {layer.in_features} and features = {features}, got'
          f' {value.shape}.'
      )
    label = f'The {name} of {type(cell).__name__}'
    checks.number(value, label)
    _check_range(layer, np.asarray(value), label)
  weights = _weights(
      layer, weight_ih.T, weight_hh.T, bias, jnp.zeros_like(bias)
  )
  nnx.update(layer, weights)


def _torch_parts(layer):
  """Yields (layer of one direction, suffix of torch's names)."""
  levels = list(layer.layers) if isinstance(layer, stack.Stack) else [layer]
  for index, level in enumerate(levels):
    if isinstance(level, bidirectional.Bidirectional):
      yield level.forward, f'_l{index}'
      yield level.backward, f'_l{index}_reverse'
    else:
      yield level, f'_l{index}'


def _torch_weights(layer, given, prefix, suffix, state_dict) -> dict[str, Any]:
  """Takes one layer's entries out of `given`."""
  _check_layer(layer)
  features = layer.out_features
  width = layer.cell.input_gates * features

  def take(name, *shape):
    name += suffix
    if name not in given:
      hint = ''
      if name.startswith('bias'):
        hint = ' A module with bias=False fills a layer with use_bias=False.'
      raise ValueError(
          f'The state dict has no entry {prefix + name!r}, which should have'
          f' shape {shape}; it has {sorted(state_dict)}.{hint}'
      )
    value = _numpy(given.pop(name), prefix + name)
    if value.shape != shape:
      raise ValueError(
          f'{prefix + name} must have shape {shape} for a'
          f' {type(layer).__name__} with in_features = {layer.in_features} and'
          f' features = {features}, got {value.shape}.'
      )
    _check_range(layer, value, prefix + name)
    return value

  weight_ih = take('weight_ih', width, layer.in_features)
  weight_hh = take('weight_hh', width, features)
  bias_ih = bias_hh = np.zeros(width)
  if layer.bias is not None:
    bias_ih, bias_hh = take('bias_ih', width), take('bias_hh', width)
  return _weights(layer, weight_ih, weight_hh, bias_ih, bias_hh)


def _weights(layer, weight_ih, weight_hh, bias_ih, bias_hh) -> dict[str, Any]:
  """Arranges weights in torch's layout as the state of a layer.

  Args:
    layer: the layer that the weights are for.
    weight_ih: [gates * features, in_features].
    weight_hh: [gates * features, features].
    bias_ih: [gates * features].
    bias_hh: [gates * features].
  """
  gates, features = layer.cell.input_gates, layer.out_features
  dtype = layer.param_dtype
  # [gates * to, from] -> [gates, from, to]
  split = lambda w: w.reshape(gates, features, -1).swapaxes(1, 2)
  bias_ih = bias_ih.reshape(gates, features)
  bias_hh = bias_hh.reshape(gates, features)
  weights = {
      'kernel': split(weight_ih),
      'recurrent_kernel': split(weight_hh)[:, None],
  }
  if isinstance(layer.cell, gru.GRUCell):
    weights['cell_params'] = {'recurrent_bias': bias_hh[-1]}
    bias = [*(bias_ih + bias_hh)[:-1], bias_ih[-1]]
  else:
    bias = bias_ih + bias_hh
  if layer.bias is not None:
    weights['bias'] = np.stack(bias)
  return jax.tree.map(lambda w: jnp.asarray(w, dtype), weights)


def _check_range(layer, value: np.ndarray, name: str) -> None:
  """Raises ValueError if a weight is finite, but not as a layer stores it."""
  with np.errstate(over='ignore'):  # An error instead of the warning.
    stored = value.astype(layer.param_dtype)
  if np.any(np.isfinite(value) & np.isinf(stored)):
    raise ValueError(
        f'{name} is too large for param_dtype={jnp.dtype(layer.param_dtype)} of'
        f' the {type(layer).__name__}, where it would become infinite.'
    )


def _check_layer(layer) -> None:
  if not isinstance(layer, recurrent.RecurrentLayer) or not isinstance(
      layer.cell, _CELLS
  ):
    raise ValueError(
        'Weights can be converted for Elman, GRU and LSTM layers, from torch'
        ' also for Bidirectional and Stack of them; got'
        f' {type(layer).__name__}.'
    )
  if layer.num_heads != 1:
    raise ValueError(
        'Weights can be converted for layers with num_heads=1, got'
        f' num_heads={layer.num_heads}.'
    )


def _flax_kind(cell: Any) -> tuple[type, str]:
  """Returns the class of the same equations, and the activation's name."""
  names: dict[Any, str] = {nnx.tanh: 'tanh', nnx.relu: 'relu'}
  activation = getattr(cell, 'activation_fn', None)
  name = names.get(activation) if callable(activation) else None
  name = name or 'another activation'
  if isinstance(cell, nnx.SimpleCell) and not cell.residual:
    return elman.ElmanCell, name
  if getattr(cell, 'gate_fn', None) is nnx.sigmoid:
    if isinstance(cell, nnx.GRUCell):
      return gru.GRUCell, name
    if isinstance(cell, (nnx.LSTMCell, nnx.OptimizedLSTMCell)):
      return lstm.LSTMCell, name
  raise ValueError(
      'cell must be an nnx.SimpleCell without residual, or an nnx.GRUCell,'
      ' nnx.LSTMCell or nnx.OptimizedLSTMCell with gate_fn=nnx.sigmoid, got'
      f' {type(cell).__qualname__} of {type(cell).__module__}.'
  )


def _numpy(value: Any, name: str) -> np.ndarray:
  """Returns an array or a torch tensor as a numpy array of real numbers."""
  if isinstance(value, np.ma.MaskedArray):
    raise ValueError(
        f'{name} must be an array without a mask, which would be ignored.'
    )
  if hasattr(value, 'detach'):
    value = value.detach().cpu()
    if str(value.dtype) == 'torch.bfloat16':  # numpy has no such type
      value = value.float()
  try:
    value = np.asarray(value)
  except ValueError as error:  # A ragged list.
    raise ValueError(f'{name} must be an array: {error}') from error
  checks.number(value, name)
  return value
