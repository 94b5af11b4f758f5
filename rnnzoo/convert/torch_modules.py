"""Weights of `torch.nn` modules."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rnnzoo import settings
from rnnzoo.cells import gru
from rnnzoo.convert import weights as weights_lib
from rnnzoo.layers import dense_stack
from rnnzoo.layers import sequence_layer
from rnnzoo.layers import stack


def from_torch(
    layer: sequence_layer.SequenceLayer,
    state_dict: Mapping[str, Any],
    *,
    prefix: str = '',
) -> None:
  """Fills a layer with the weights of a `torch.nn.RNN`, `LSTM` or `GRU`.

  torch has two biases for each gate, which are added: both stand in one
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
      a layer, or a `Stack` of either without normalisation and residual sums;
      it is changed in place. Give `Elman` the module's `nonlinearity` as
      `activation`.
    state_dict: `module.state_dict()`, torch tensors or numpy arrays. Level k of
      a stack has these entries, and for the backward direction entries with
      `_reverse` appended; an `RNNCell`, `LSTMCell` or `GRUCell` has them
      without `_lk`:
        weight_ih_lk  [gates * features, in_features]
        weight_hh_lk  [gates * features, features]
        weight_hr_lk  [proj_size, features], of an `LSTM` with a projection
        bias_ih_lk    [gates * features]
        bias_hh_lk    [gates * features]
      A module with `bias=False` has no biases, and fills a layer with
      `use_bias=False`, one with `proj_size=n` a layer with `projection=n`.
    prefix: the start of the entries' names, for instance 'encoder.' for the
      recurrent part of a model; entries without it are passed over.

  Raises:
    ValueError: an entry is missing, left over or of another shape, or the layer
      is of a kind that torch does not have.
  """
  parts = _parts(layer)
  entries = weights_lib.Entries(state_dict, 'state dict', prefix)
  projected = [name for name in entries.left if 'weight_hr' in name]
  if projected and parts[0][0].readout is None:
    given = 'state_dict' + f', prefix={prefix!r}' * bool(prefix)
    raise ValueError(
        f'The state dict has {projected} of a module with proj_size, for which'
        f' LSTM(..., projection=proj_size) would work;'
        f' convert.fold_projection({given}) makes one without.'
    )
  updates = []
  for part, level, backward in parts:
    suffix = f'_l{level}' + '_reverse' * backward
    if part is layer and 'weight_ih' in entries.left:
      suffix = ''
    updates.append((part, _take(part, entries, suffix)))
  entries.finish()
  for part, weights in updates:
    weights_lib.store(part, weights)


def _parts(layer: sequence_layer.SequenceLayer) -> list[Any]:
  """Returns `weights.parts`, or raises ValueError for a layer torch has not."""
  if isinstance(layer, stack.Stack):
    is_dense = isinstance(layer, dense_stack.DenseStack)
    for name, has in (
        ('levels over the outputs of all below', is_dense),
        ('normalisation between levels', layer.norms),
        ('residual sums between levels', layer.residual),
    ):
      if has:
        raise ValueError(
            f'torch has no {name}, and the {type(layer).__name__} has.'
        )
  parts = list(weights_lib.parts(layer))
  for part, _, _ in parts:
    weights_lib.check_layer(part, projected=True)
  weights_lib.check_alike([part for part, _, _ in parts], 'torch')
  levels = len({level for _, level, _ in parts})
  if len(parts) not in (levels, 2 * levels):
    raise ValueError(
        'torch has as many directions in all levels, and the Stack has'
        f' {len(parts)} in {levels} levels.'
    )
  return parts


def to_torch(
    layer: sequence_layer.SequenceLayer, *, cell: bool = False, prefix: str = ''
) -> dict[str, np.ndarray]:
  """Returns a layer's weights as the state dict of a `torch.nn` module.

      module = torch.nn.LSTM(3, 8, batch_first=True)
      weights = convert.to_torch(layer)
      module.load_state_dict({k: torch.tensor(v) for k, v in weights.items()})

  Args:
    layer: layer as in `from_torch`. Give `torch.nn.RNN` the `activation` of an
      `Elman` as `nonlinearity`, and `bias=False` to the module of a layer with
      `use_bias=False`.
    cell: the names of an `RNNCell`, `LSTMCell` or `GRUCell`, without `_l0`.
    prefix: put before each name.

  Returns:
    The entries that `from_torch` describes. Both biases of a gate stand in one
    sum: ours is `bias_ih`, and `bias_hh` is zero but for the GRU's n.

  Raises:
    ValueError: torch has no such layer.
  """
  weights_lib.check_prefix(prefix)
  state: dict[str, np.ndarray] = {}
  for part, level, backward in _parts(layer):
    if cell and part is not layer:
      raise ValueError(f'torch has no cell for {settings.a(type(layer))}.')
    suffix = '' if cell else f'_l{level}' + '_reverse' * backward
    weights = weights_lib.read(part, 'torch')
    # A library's matrix multiplies from the left.
    rows = lambda kernel: weights_lib.join_gates(kernel).T
    state[f'{prefix}weight_ih{suffix}'] = rows(weights.kernel)
    state[f'{prefix}weight_hh{suffix}'] = rows(weights.recurrent_kernel[:, 0])
    if weights.projection is not None:
      state[f'{prefix}weight_hr{suffix}'] = weights.projection.T
    extra = weights.recurrent_bias
    if weights.bias is None:
      continue
    bias_hh = np.zeros_like(weights.bias)
    if extra is not None:
      bias_hh[-1] = extra
    state[f'{prefix}bias_ih{suffix}'] = weights.bias.reshape(-1)
    state[f'{prefix}bias_hh{suffix}'] = bias_hh.reshape(-1)
  return state


def fold_projection(
    state_dict: Mapping[str, Any], *, prefix: str = ''
) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Rewrites the weights of a `torch.nn.LSTM` with `proj_size` without it.

  An `rnnzoo.LSTM` with `projection` takes them as they are, by `from_torch`.

  Such a module multiplies h by a matrix P before anything uses it. Equal
  outputs come from an LSTM whose matrices on h are R P and, in the level above,
  W P, and whose outputs are multiplied by P at the end:

      weights, projection = convert.fold_projection(module.state_dict())
      convert.from_torch(layer, weights)
      y = layer(x) @ projection

  The layer's h is the one before P: an initial h other than zero cannot be
  converted, and trained further, R P need not keep its low rank.

  Args:
    state_dict: `module.state_dict()`, with weight_hr_lk [proj_size, features].
    prefix: the start of the entries' names, as in `from_torch`.

  Returns:
    The state dict for `from_torch`, without the prefix and with products in
    float64, and the projection of the outputs, [directions * features,
    directions * proj_size].

  Raises:
    ValueError: the lowest level has no weight_hr, or a shape does not fit.
  """
  entries = weights_lib.Entries(state_dict, 'state dict', prefix)
  left: dict[str, Any] = {
      name: weights_lib.to_numpy(value, prefix + name)
      for name, value in entries.left.items()
  }
  if 'weight_hr_l0' not in left:
    raise ValueError(
        f'The state dict has no entry {prefix + "weight_hr_l0"!r}, which a'
        f' module with proj_size has; it has {sorted(entries.all)}.'
    )
  from scipy import linalg  # Slow to import.

  below, level = None, 0
  while f'weight_hr_l{level}' in left:
    blocks = []
    for suffix in (f'_l{level}', f'_l{level}_reverse'):
      if f'weight_hr{suffix}' not in left:
        continue
      matrix = left.pop(f'weight_hr{suffix}')
      fold = {f'weight_hh{suffix}': matrix, f'weight_ih{suffix}': below}
      for name, factor in fold.items():
        if factor is None:
          continue
        shape = np.shape(left.get(name, 0))
        if shape[1:] != factor.shape[:1]:
          raise ValueError(
              f'{prefix + name} must have {factor.shape[0]} columns, as many'
              f' as are projected to, got shape {shape}.'
          )
        # The layer's dtype rounds the product, once.
        left[name] = left[name].astype(np.float64) @ factor.astype(np.float64)
      blocks.append(matrix)
    below = linalg.block_diag(*blocks)
    level += 1
  return left, np.asarray(below).T


def _take(
    layer, entries: weights_lib.Entries, suffix: str
) -> weights_lib.Weights:
  """Takes one layer's entries."""
  gates, features = layer.cell.input_gates, layer.state_features
  width = gates * features
  hint = ' A module with bias=False fills a layer with use_bias=False.'
  take = lambda name, *shape: entries.take(name + suffix, shape, layer)
  weight_ih = take('weight_ih', width, layer.in_features)
  weight_hh = take('weight_hh', width, layer.out_features)
  projection = None
  if layer.readout is not None:
    projection = take('weight_hr', layer.out_features, features).T
  bias_ih = bias_hh = np.zeros((gates, features))
  if layer.bias is not None:
    bias_ih, bias_hh = (
        entries.take(name + suffix, (width,), layer, hint).reshape(gates, -1)
        for name in ('bias_ih', 'bias_hh')
    )
  bias, extra = bias_ih + bias_hh, None
  if isinstance(layer.cell, gru.GRUCell):
    bias[-1], extra = bias_ih[-1], bias_hh[-1]
  both = f'The sum of bias_ih{suffix} and bias_hh{suffix}'
  weights_lib.fits(bias, layer, both)
  split = lambda rows: weights_lib.split_gates(rows.T, gates)
  hidden = split(weight_hh)[:, None]
  return weights_lib.Weights(split(weight_ih), hidden, bias, extra, projection)
