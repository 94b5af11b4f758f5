"""Weights of `flax.nnx` cells, and of `flax.linen` cells, which are dicts."""

from collections.abc import Mapping
from typing import Any

from flax import linen
from flax import nnx
from flax import traverse_util
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

_RECURRENT_BIAS = 'cell_params', 'recurrent_bias'

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
  given = {k: weights_lib.numbers(v, label) for k, v in _own(cell).items()}
  entries = weights_lib.Entries(given, type(cell).__name__)
  weights_lib.fill(layer, _parts_of(layer, cell), entries)


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
  weights_lib.check_state(layer, 'flax')
  given, own = weights_lib.arrays(layer, _parts_of(layer, cell)), _own(cell)
  shapes = lambda arrays: {name: x.shape for name, x in sorted(arrays.items())}
  if shapes(given) != shapes(own):
    raise ValueError(
        f'The {type(cell).__name__} has weights of shapes {shapes(own)}, and'
        f' the {type(layer).__name__} has {shapes(given)} in their place.'
    )
  for name, value in given.items():
    old = own[name]
    own[name] = weights_lib.placed(value, old.dtype, old.get_value())
  nnx.update(cell, traverse_util.unflatten_dict(own, sep='/'))


def _own(cell: Any) -> dict[str, Any]:
  """Returns a cell's parameters by names joined by '/'."""
  return {
      f'{name}/{kind}': getattr(part, kind)
      for name, part in vars(cell).items()
      for kind in ('kernel', 'bias')
      if isinstance(part, nnx.Linear) and getattr(part, kind) is not None
  }


def _parts_of(layer: Any, cell: Any) -> list[weights_lib.Part]:
  """Returns a layer's parameters, and their names in an `nnx` cell."""
  parts = _parts(layer)
  if isinstance(cell, nnx.LSTMCell):
    renamed = lambda name: name.replace('if/', 'if_/')  # `if` is Python's.
    return [p._replace(names=[*map(renamed, p.names)]) for p in parts]

  def joint(part):
    if part.path == _RECURRENT_BIAS:
      zeros = lambda: np.zeros(layer.out_features)
      return part._replace(names=[], ours=zeros, theirs=_none)
    first, gates = part.names[0], len(part.names)
    return part._replace(
        names=[f'dense_{first[0]}/{first.rpartition("/")[2]}'],
        ours=lambda x: part.ours(*np.split(x, gates, axis=-1)),
        theirs=lambda x: [np.concatenate(list(part.theirs(x)), axis=-1)],
    )

  return list(map(joint, parts))


def _none(bias: np.ndarray) -> list[np.ndarray]:
  if bias.any():
    raise ValueError(
        'nnx.GRUCell has no bias b_hn, and the GRU has one other than zero in'
        " cell_params['recurrent_bias']; linen.GRUCell has it (to_linen)."
    )
  return []


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
      f' {type(cell).__qualname__} of {type(cell).__module__}'
      f'{"; its .cell would work" * isinstance(cell, nnx.RNN)}.'
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
  parts = _parts(layer)
  unboxed = linen.meta.unbox(params)
  entries = weights_lib.Entries(unboxed, 'mapping params', prefix)
  weights_lib.fill(layer, parts, entries)


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
  parts = _parts(layer)
  weights_lib.check_state(layer, 'flax')
  found = weights_lib.arrays(layer, parts)
  return traverse_util.unflatten_dict(found, sep='/')


def _parts(layer: Any) -> list[weights_lib.Part]:
  """Returns a layer's parameters, and their names in a `linen` cell."""
  weights_lib.check_layer(layer, with_bias='flax')
  names, part = _GATES[type(layer.cell)], weights_lib.Part
  side = 'h' if isinstance(layer.cell, lstm.LSTMCell) else 'i'
  of_gates = lambda side, name: [f'{side}{gate}/{name}' for gate in names]
  stack = lambda *given: np.stack(given)
  parts = [
      part(('kernel',), of_gates('i', 'kernel'), stack, list),
      part(
          ('recurrent_kernel',),
          of_gates('h', 'kernel'),
          lambda *given: np.stack(given)[:, None],
          lambda kernel: kernel[:, 0],
      ),
      part(('bias',), of_gates(side, 'bias'), stack, list),
  ]
  if isinstance(layer.cell, gru.GRUCell):
    parts.append(part(_RECURRENT_BIAS, ['hn/bias']))
  return parts
