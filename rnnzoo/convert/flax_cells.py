"""Weights of `flax.nnx` cells, and of `flax.linen` cells, which are dicts."""

from collections.abc import Mapping
from typing import Any

from flax import linen
from flax import nnx
import jax
import numpy as np

from rnnzoo import settings
from rnnzoo.cells import elman
from rnnzoo.cells import gru
from rnnzoo.cells import lstm
from rnnzoo.convert import weights as weights_lib
from rnnzoo.layers import recurrent

_CELLS: dict[type, type] = {
    nnx.SimpleCell: elman.ElmanCell,
    nnx.GRUCell: gru.GRUCell,
    nnx.LSTMCell: lstm.LSTMCell,
    nnx.OptimizedLSTMCell: lstm.LSTMCell,
}

# Names of linen's parts without the side, gate by gate in our order.
_GATES: dict[type, tuple[str, ...]] = {
    elman.ElmanCell: ('',),
    gru.GRUCell: ('r', 'z', 'n'),
    lstm.LSTMCell: ('i', 'f', 'g', 'o'),
}


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
  _check(layer, cell)
  label = f'A parameter of cell, {settings.a(type(cell))},'
  gates, features = layer.cell.input_gates, layer.out_features
  shapes = {
      'input kernel': (layer.in_features, gates * features),
      'recurrent kernel': (features, gates * features),
      'bias': (gates * features,),
  }
  kernel, recurrent_kernel, bias = (
      weights_lib.checked(
          np.concatenate(
              [weights_lib.numbers(each, label) for each in variables], axis=-1
          ),
          shape,
          layer,
          f'The {name} of {type(cell).__name__}',
      )
      for (name, shape), variables in zip(
          shapes.items(), _variables(cell), strict=True
      )
  )
  extra = np.zeros(features) if isinstance(layer.cell, gru.GRUCell) else None
  bias = bias.reshape(gates, features)
  weights_lib.store(
      layer,
      weights_lib.of_columns(layer, kernel, recurrent_kernel, bias, extra),
  )


def to_flax(layer: recurrent.RecurrentLayer, cell: Any) -> None:
  """Fills a `flax.nnx` cell with the weights of a layer.

  Args:
    layer: layer as in `from_flax`. A `GRU` whose recurrent bias is not zero is
      refused: `nnx.GRUCell` has none; `to_linen` keeps it.
    cell: cell as in `from_flax`; it is changed in place.

  Raises:
    ValueError: the cell computes something else than the layer, or its weights
      have another shape.
  """
  _check(layer, cell)
  weights = weights_lib.read(layer, 'flax')
  if weights.recurrent_bias is not None and weights.recurrent_bias.any():
    raise ValueError(
        'nnx.GRUCell has no bias b_hn, and the GRU has one other than zero in'
        " cell_params['recurrent_bias']; linen.GRUCell has it (to_linen)."
    )
  inputs, hidden, biases = _variables(cell)
  shares = lambda kernel, parts: [
      weights_lib.join_gates(own) for own in np.split(kernel, len(parts))
  ]
  updates = [
      *zip(inputs, shares(weights.kernel, inputs), strict=True),
      *zip(hidden, shares(weights.recurrent_kernel[:, 0], hidden), strict=True),
      *zip(biases, np.split(weights.bias.ravel(), len(biases)), strict=True),
  ]
  for variable, value in updates:
    if variable.shape != value.shape:
      raise ValueError(
          f'A weight of {type(cell).__name__} has shape {variable.shape}, and'
          f' the {type(layer).__name__} has {value.shape} in its place.'
      )
  for variable, value in updates:
    old = variable.get_value()
    variable.set_value(weights_lib.placed(value, variable.dtype, old))


def _variables(cell: Any) -> tuple[list[Any], list[Any], list[Any]]:
  """Returns the kernels on the input, those on the memory, and the biases."""
  if isinstance(cell, nnx.LSTMCell):
    inputs = [cell.ii, cell.if_, cell.ig, cell.io]
    hidden = [cell.hi, cell.hf, cell.hg, cell.ho]
  else:
    inputs, hidden = [cell.dense_i], [cell.dense_h]
  with_bias = [part for part in inputs + hidden if part.bias is not None]
  if with_bias not in (inputs, hidden):  # One side has them.
    raise ValueError(
        f'cell must have one bias for each gate, as {type(cell).__name__} makes'
        ' them; biases of this one were set to None or added.'
    )
  return (
      [part.kernel for part in inputs],
      [part.kernel for part in hidden],
      [part.bias for part in with_bias],
  )


def _check(layer: Any, cell: Any) -> None:
  """Raises ValueError unless both compute one function."""
  weights_lib.check_layer(layer, with_bias='flax')
  kind, activation = _kind(cell)
  want_activation = getattr(layer.cell, 'activation', 'tanh')
  if not isinstance(layer.cell, kind) or activation != want_activation:
    raise ValueError(
        f'{type(cell).__name__} with {activation} does not compute what'
        f' {type(layer).__name__} with {want_activation} does.'
    )
  init = cell.carry_init or nnx.initializers.zeros_init()
  with jax.ensure_compile_time_eval():  # Inside of jax.jit, too.
    start = init(jax.random.key(0), (layer.out_features,), np.float32)
  if np.any(np.asarray(start)):
    raise ValueError(
        f'The {type(cell).__name__} begins with its carry_init, which is not'
        ' zero, and layers begin with zeros: carry_init=nnx.initializers.'
        'zeros_init() would work. initial_carry= of a call can be other than'
        ' zero.'
    )


def _kind(cell: Any) -> tuple[type, str]:
  """Returns the class with the cell's equations, and the activation's name."""
  names: dict[Any, str] = {nnx.tanh: 'tanh', nnx.relu: 'relu'}
  activation = getattr(cell, 'activation_fn', None)
  name = names.get(activation) if callable(activation) else None
  name = name or 'another activation'
  kind = _CELLS.get(type(cell))  # A subclass may have other equations.
  plain = not getattr(cell, 'residual', False)
  if kind and plain and getattr(cell, 'gate_fn', nnx.sigmoid) is nnx.sigmoid:
    return kind, name
  raise ValueError(
      'cell must be an nnx.SimpleCell without residual, or an nnx.GRUCell,'
      ' nnx.LSTMCell or nnx.OptimizedLSTMCell with gate_fn=nnx.sigmoid, got'
      f' {type(cell).__qualname__} of {type(cell).__module__}.'
  )


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
  take = lambda name, shape: entries.take(name, shape, layer)
  kernel = lambda name, rows: take(f'{name}/kernel', (rows, features))
  inputs = [kernel(f'i{name}', layer.in_features) for name in names]
  hidden = [kernel(f'h{name}', features) for name in names]
  bias = [take(f'{side}/bias', (features,)) for side in _with_bias(layer)]
  extra = None
  if isinstance(layer.cell, gru.GRUCell):
    extra = take('hn/bias', (features,))
  entries.finish()
  arrays = np.stack(inputs), np.stack(hidden)[:, None], np.stack(bias), extra
  weights_lib.store(layer, weights_lib.Weights(*arrays))


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


def _names(layer: Any) -> tuple[str, ...]:
  weights_lib.check_layer(layer, with_bias='flax')
  return _GATES[type(layer.cell)]


def _with_bias(layer: Any) -> list[str]:
  """Returns the parts that have a gate's bias, in our order."""
  side = 'h' if isinstance(layer.cell, lstm.LSTMCell) else 'i'
  return [f'{side}{name}' for name in _GATES[type(layer.cell)]]
