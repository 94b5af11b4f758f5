"""Weights of the sLSTM layers of xLSTM and TiRex."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rnnzoo.cells import slstm
from rnnzoo.convert import weights as weights_lib
from rnnzoo.layers import recurrent

Weights = weights_lib.Weights

# The projections of i, f, z, o. Both libraries feed i by the one that they call
# fgate, and f by igate.
_PROJECTIONS = ('fgate', 'igate', 'zgate', 'ogate')
_KERNEL, _BIAS = 'slstm_cell._recurrent_kernel_', 'slstm_cell._bias_'
_BACKENDS = ('cuda', 'vanilla')


def from_xlstm(
    layer: recurrent.RecurrentLayer,
    state_dict: Mapping[str, Any],
    *,
    prefix: str = '',
) -> None:
  """Fills an `SLSTM` with the gates and the cell of an `sLSTMLayer`.

  The `sLSTMLayer` of xLSTM and of TiRex projects each head by itself: here that
  is a W whose other blocks are zero. After the cell it normalises each head of
  the outputs, which is not part of an `SLSTM`:

      weights = dict(layer_of_torch.state_dict())
      scale = 1 + weights.pop('group_norm.weight').numpy()
      convert.from_xlstm(layer, weights)
      y = layer(x).reshape(*x.shape[:-1], num_heads, -1)
      y -= y.mean(-1, keepdims=True)
      y /= jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
      y = y.reshape(x.shape) * scale

  Args:
    layer: an `SLSTM` with as many heads, in_features = features and biases; it
      is changed in place. For TiRex it needs `max_forget=15`.
    state_dict: `state_dict()` of an `sLSTMLayer`, without its group norm.
      xLSTM's backends 'vanilla' and 'cuda' lay out the cell's entries in
      different ways; the shape of `_recurrent_kernel_` tells them apart.
    prefix: the start of the entries' names, as in 'blocks.0.slstm_layer.';
      entries without it are passed over.

  Raises:
    ValueError: an entry is missing, left over or of another shape, or the
      module has a convolution, which an `SLSTM` has not.
  """
  heads, size = _sizes(layer)
  entries = weights_lib.Entries(state_dict, 'state dict', prefix)
  for part, reason in {
      'conv1d': 'a convolution before i and f, which an SLSTM has not',
      'group_norm': 'a group norm after the cell: see from_xlstm on how to'
      ' apply it, and leave its entry out',
  }.items():
    if any(name.startswith(part) for name in entries.names()):
      raise ValueError(f'The state dict has {reason}.')
  blocks = np.stack(
      [
          entries.take(f'{name}.weight', (heads, size, size), layer)
          for name in _PROJECTIONS
      ]
  )
  kernel = np.zeros((4, heads, size, heads, size), blocks.dtype)
  for head in range(heads):
    kernel[:, head, :, head] = blocks[:, head].swapaxes(1, 2)
  vanilla = np.shape(state_dict.get(prefix + _KERNEL, ())) == (
      heads,
      4 * size,
      size,
  )
  shape = (heads, 4 * size, size) if vanilla else (heads, size, 4 * size)
  recurrent_kernel = entries.take(_KERNEL, shape, layer)
  bias = entries.take(_BIAS, (4 * heads * size,), layer)
  entries.finish()
  if vanilla:
    recurrent_kernel = recurrent_kernel.swapaxes(1, 2)
    bias = bias.reshape(4, -1)
  else:
    bias = bias.reshape(heads, 4, size).swapaxes(0, 1).reshape(4, -1)
  recurrent_kernel = recurrent_kernel.reshape(heads, size, 4, size)
  weights = Weights(
      kernel=kernel.reshape(4, heads * size, heads * size),
      recurrent_kernel=recurrent_kernel.transpose(2, 0, 1, 3),
      bias=bias,
  )
  weights_lib.store(layer, weights)


def to_xlstm(
    layer: recurrent.RecurrentLayer, *, backend: str = 'cuda'
) -> dict[str, np.ndarray]:
  """Returns an `SLSTM`'s weights as entries of an `sLSTMLayer`'s state dict.

  Args:
    layer: as for `from_xlstm`; W must be zero between different heads.
    backend: 'cuda', which is TiRex's layout, too, or 'vanilla'.

  Raises:
    ValueError: W is not zero between different heads, or the layer is another.
  """
  heads, size = _sizes(layer)
  if backend not in _BACKENDS:
    raise ValueError(f'backend must be one of {_BACKENDS}, got {backend!r}.')
  weights = weights_lib.read(layer, 'xLSTM')
  kernel = weights.kernel.reshape(4, heads, size, heads, size)
  between = kernel * ~np.eye(heads, dtype=bool)[:, None, :, None]
  if between.any():
    raise ValueError(
        'An sLSTMLayer projects each head by itself, and W of the SLSTM is not'
        ' zero between different heads.'
    )
  state = {}
  for gate, name in enumerate(_PROJECTIONS):
    blocks = [kernel[gate, head, :, head].T for head in range(heads)]
    state[f'{name}.weight'] = np.stack(blocks)
  inner = weights.recurrent_kernel.transpose(1, 2, 0, 3)
  inner = inner.reshape(heads, size, 4 * size)
  bias = weights.bias.reshape(4, heads, size)
  if backend == 'vanilla':
    inner = inner.swapaxes(1, 2)
  else:
    bias = bias.swapaxes(0, 1)
  return state | {_KERNEL: inner, _BIAS: bias.reshape(-1)}


def _sizes(layer: Any) -> tuple[int, int]:
  """Returns the number of heads and their size."""
  is_slstm = isinstance(layer, recurrent.RecurrentLayer) and isinstance(
      layer.cell, slstm.SLSTMCell
  )
  if not is_slstm or layer.bias is None:
    raise ValueError(
        'An sLSTMLayer is an SLSTM with biases, got a'
        f' {type(layer).__name__}{" without" * is_slstm}.'
    )
  if layer.in_features != layer.out_features:
    raise ValueError(
        'An sLSTMLayer has as many inputs as features; the SLSTM has'
        f' in_features = {layer.in_features} and features ='
        f' {layer.out_features}.'
    )
  return layer.num_heads, layer.out_features // layer.num_heads
