"""Weights of `flax.nnx` cells."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import numpy as np

from rnnzoo import settings
from rnnzoo.cells import elman
from rnnzoo.cells import gru
from rnnzoo.cells import lstm
from rnnzoo.convert import weights as weights_lib
from rnnzoo.layers import recurrent

Weights = weights_lib.Weights

_CELLS: dict[type, type] = {
    nnx.SimpleCell: elman.ElmanCell,
    nnx.GRUCell: gru.GRUCell,
    nnx.LSTMCell: lstm.LSTMCell,
    nnx.OptimizedLSTMCell: lstm.LSTMCell,
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
  joined = lambda parameters: np.concatenate(
      [weights_lib.numbers(p, label) for p in parameters], axis=-1
  )
  inputs, hidden = _sides(cell)
  weight_ih = joined([part.kernel for part in inputs])
  weight_hh = joined([part.kernel for part in hidden])
  bias = joined([part.bias for part in _with_bias(cell)])
  gates, features = layer.cell.input_gates, layer.out_features
  width = gates * features
  check = lambda value, shape, name: weights_lib.checked(
      value, shape, layer, f'The {name} of {type(cell).__name__}'
  )
  weight_ih = check(weight_ih, (layer.in_features, width), 'input kernel')
  weight_hh = check(weight_hh, (features, width), 'recurrent kernel')
  bias = check(bias, (width,), 'bias')
  is_gru = isinstance(layer.cell, gru.GRUCell)
  weights_lib.store(
      layer,
      Weights(
          kernel=weights_lib.split_gates(weight_ih, gates),
          recurrent_kernel=weights_lib.split_gates(weight_hh, gates)[:, None],
          bias=bias.reshape(gates, features),
          recurrent_bias=np.zeros(features) if is_gru else None,
      ),
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
  inputs, hidden = _sides(cell)
  with_bias = _with_bias(cell)
  biases = _shares(weights.bias[:, None], with_bias)
  updates = [
      *_pairs(inputs, 'kernel', _shares(weights.kernel, inputs)),
      *_pairs(
          hidden, 'kernel', _shares(weights.recurrent_kernel[:, 0], hidden)
      ),
      *_pairs(with_bias, 'bias', [b[0] for b in biases]),
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


def _pairs(parts: list[Any], name: str, values: list[np.ndarray]):
  """Returns pairs (variable, its value)."""
  return zip([getattr(part, name) for part in parts], values, strict=True)


def _shares(kernel: np.ndarray, parts: list[Any]) -> list[np.ndarray]:
  """[gates, from, to] -> one [from, columns] for each of a cell's parts."""
  per = len(kernel) // len(parts)
  return [
      weights_lib.join_gates(kernel[per * index : per * (index + 1)])
      for index in range(len(parts))
  ]


def _sides(cell: Any) -> tuple[list[Any], list[Any]]:
  """Returns the linear parts on the input and on the memory."""
  if isinstance(cell, nnx.LSTMCell):
    return (
        [cell.ii, cell.if_, cell.ig, cell.io],
        [cell.hi, cell.hf, cell.hg, cell.ho],
    )
  return [cell.dense_i], [cell.dense_h]


def _with_bias(cell: Any) -> list[Any]:
  """Returns the parts that have the bias: one side's parts."""
  sides = _sides(cell)
  parts = [part for side in sides for part in side if part.bias is not None]
  if parts not in sides:
    raise ValueError(
        f'cell must have one bias for each gate, as {type(cell).__name__} makes'
        ' them; biases of this one were set to None or added.'
    )
  return parts


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
  hint = ''
  if isinstance(cell, nnx.RNN):
    hint = ' The cell of an nnx.RNN is its .cell.'
  elif isinstance(cell, Mapping):
    hint = ' from_linen takes parameters of flax.linen.'
  raise ValueError(
      'cell must be an nnx.SimpleCell without residual, or an nnx.GRUCell,'
      ' nnx.LSTMCell or nnx.OptimizedLSTMCell with gate_fn=nnx.sigmoid, got'
      f' {type(cell).__qualname__} of {type(cell).__module__}.{hint}'
  )
