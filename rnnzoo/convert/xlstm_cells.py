"""Weights of the sLSTM layers and blocks of xLSTM and TiRex.

xLSTM's norms store scale - 1, and so do both libraries' group norms; TiRex's
RMS norms store the scale.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import numpy as np

from rnnzoo import settings
from rnnzoo.cells import slstm
from rnnzoo.cells import slstm_block
from rnnzoo.convert import weights as weights_lib
from rnnzoo.layers import recurrent

# The projections of i, f, z, o. Both libraries feed i by the one that they call
# fgate, and f by igate.
_PROJECTIONS = ('fgate', 'igate', 'zgate', 'ogate')
_KERNEL, _BIAS = 'slstm_cell._recurrent_kernel_', 'slstm_cell._bias_'


def from_xlstm(
    layer: recurrent.RecurrentLayer | slstm_block.SLSTMBlock,
    state_dict: Mapping[str, Any],
    *,
    prefix: str = '',
) -> None:
  """Fills an `SLSTMBlock` with an `sLSTMBlock`, or an `SLSTM` with its cell.

      block = rnnzoo.SLSTMBlock(64, 64, num_heads=4, rngs=rngs)
      convert.from_xlstm(block, torch_block.state_dict())

  An `SLSTMBlock` with `residual=False` takes an `sLSTMLayer`. One with
  `norm='rms'` takes TiRex's `sLSTMBlock`, whose options are in
  `help(rnnzoo.SLSTMBlock)`, and any other xLSTM's.

  An `SLSTM` takes an `sLSTMLayer` without convolution and group norm. That
  layer projects each head by itself: here that is a W whose other blocks are
  zero.

  Args:
    layer: an `SLSTMBlock`, or an `SLSTM` with in_features = features and
      biases; with as many heads. It is changed in place. For TiRex it needs
      `max_forget=15`.
    state_dict: `state_dict()` of the module, for an `SLSTM` without its group
      norm. xLSTM's backends 'vanilla' and 'cuda' lay out the cell's entries in
      different ways; the shape of `_recurrent_kernel_` tells them apart.
    prefix: the start of the entries' names, as in 'blocks.0.slstm_layer.';
      entries without it are passed over.

  Raises:
    ValueError: an entry is missing, left over or of another shape, or the
      module has a convolution, which an `SLSTM` has not.
  """
  if isinstance(layer, slstm_block.SLSTMBlock):
    _fill(layer, state_dict, prefix)
    return
  heads, size = _sizes(layer)
  entries = weights_lib.Entries(state_dict, 'state dict', prefix)
  blocks, recurrent_kernel, bias = _take_cell(entries, '', heads, layer)
  entries.finish()
  kernel = np.zeros((4, heads, size, heads, size), blocks.dtype)
  for head in range(heads):
    kernel[:, head, :, head] = blocks[:, head]
  kernel = kernel.reshape(4, heads * size, heads * size)
  weights_lib.store(layer, weights_lib.Weights(kernel, recurrent_kernel, bias))


def to_xlstm(
    layer: recurrent.RecurrentLayer | slstm_block.SLSTMBlock,
    *,
    backend: str = 'cuda',
) -> dict[str, np.ndarray]:
  """Returns a layer's weights as the state dict that `from_xlstm` reads.

  Args:
    layer: layer as in `from_xlstm`; an `SLSTM`'s W must be zero between
      different heads.
    backend: 'cuda', which is TiRex's layout, too, or 'vanilla'.

  Raises:
    ValueError: W is not zero between different heads, or the layer is another.
  """
  settings.choice(backend, ('cuda', 'vanilla'), 'backend')
  if isinstance(layer, slstm_block.SLSTMBlock):
    return _state_dict(layer, backend)
  heads, size = _sizes(layer)
  weights = weights_lib.read(layer, 'xLSTM')
  kernel = weights.kernel.reshape(4, heads, size, heads, size)
  between = kernel * ~np.eye(heads, dtype=bool)[:, None, :, None]
  if between.any():
    raise ValueError(
        'An sLSTMLayer projects each head by itself, and W of the SLSTM is not'
        ' zero between different heads.'
    )
  blocks = np.stack([kernel[:, head, :, head] for head in range(heads)], 1)
  return _cell_entries(blocks, weights.recurrent_kernel, weights.bias, backend)


def _sizes(layer: Any) -> tuple[int, int]:
  """Returns the number of heads and their size."""
  is_layer = isinstance(layer, recurrent.RecurrentLayer)
  is_slstm = is_layer and type(layer.cell) is slstm.SLSTMCell
  if not is_slstm or layer.bias is None:
    raise ValueError(
        'An sLSTMLayer is an SLSTM with biases, got'
        f' {settings.a(type(layer))}{" without" * is_slstm}.'
    )
  weights_lib.check_structure(layer)
  _check_bound(layer)
  if layer.in_features != layer.out_features:
    raise ValueError(
        'An sLSTMLayer has as many inputs as features; the SLSTM has'
        f' in_features = {layer.in_features} and features ='
        f' {layer.out_features}.'
    )
  return layer.num_heads, layer.out_features // layer.num_heads


def _take_cell(
    entries: weights_lib.Entries, start: str, heads: int, layer: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Takes W and R, each [4, heads, from, to], and b, [4, features].

  Names of the `sLSTMLayer` begin with `start`.
  """
  size = layer.out_features // heads
  kernel = np.stack(
      [
          entries.take(f'{start}{name}.weight', (heads, size, size), layer)
          for name in _PROJECTIONS
      ]
  )
  # xLSTM's backends lay out the cell in two ways; TiRex uses 'cuda' order.
  transposed = (heads, 4 * size, size)
  vanilla = np.shape(entries.left.get(start + _KERNEL, 0)) == transposed
  shape = transposed if vanilla else (heads, size, 4 * size)
  inner = entries.take(start + _KERNEL, shape, layer)
  bias = entries.take(start + _BIAS, (4 * heads * size,), layer)
  if vanilla:
    inner, bias = inner.swapaxes(1, 2), bias.reshape(4, -1)
  else:
    bias = bias.reshape(heads, 4, size).swapaxes(0, 1).reshape(4, -1)
  inner = inner.reshape(heads, size, 4, size).transpose(2, 0, 1, 3)
  return kernel.swapaxes(2, 3), inner, bias


def _check_bound(layer: Any) -> None:
  """Raises ValueError for a bound of f that xLSTM and TiRex have not."""
  norm = getattr(layer, 'norm', None)
  allowed: tuple[Any, ...] = (None, 15)  # A layer alone, of xLSTM or TiRex.
  if norm is not None:
    allowed = (15 if isinstance(norm, nnx.RMSNorm) else None,)
  if layer.cell.max_forget not in allowed:
    raise ValueError(
        'xLSTM has max_forget=None and TiRex 15: here it must be'
        f' {" or ".join(map(str, allowed))}, and the {type(layer).__name__} has'
        f' {layer.cell.max_forget}.'
    )


def _cell_entries(
    kernel: np.ndarray,
    recurrent_kernel: np.ndarray,
    bias: np.ndarray,
    backend: str,
) -> dict[str, np.ndarray]:
  """Returns entries of an `sLSTMLayer`; the reverse of `_take_cell`."""
  _, heads, size, _ = kernel.shape
  state = {
      f'{name}.weight': blocks.swapaxes(1, 2)
      for name, blocks in zip(_PROJECTIONS, kernel, strict=True)
  }
  inner = recurrent_kernel.transpose(1, 2, 0, 3).reshape(heads, size, 4 * size)
  bias = bias.reshape(4, heads, size)
  if backend == 'vanilla':
    inner = inner.swapaxes(1, 2)
  else:
    bias = bias.swapaxes(0, 1)
  return state | {_KERNEL: inner, _BIAS: bias.reshape(-1)}


def _fill(
    block: slstm_block.SLSTMBlock, given: Mapping[str, Any], prefix: str
) -> None:
  """Fills a block from a state dict, as `from_xlstm` says."""
  entries = weights_lib.Entries(given, 'state dict', prefix)
  features = block.out_features
  is_rms, start, first, second = _names(block)
  _check_bound(block)

  def take(name, *shape):
    return entries.take(name, shape, block)

  def scale(name, stored):
    return {'scale': take(f'{name}.weight', features) + (1 - stored)}

  kernel, inner, bias = _take_cell(entries, start, block.num_heads, block)
  state: dict[str, Any] = {
      'gates': {'kernel': kernel, 'bias': bias},
      'recurrent_kernel': inner,
      'head_norm': scale(f'{start}group_norm', stored=0),
  }
  if block.convolution is not None:
    name = f'{start}conv1d.conv'
    weight = take(f'{name}.weight', features, 1, block.conv_width)
    state['convolution'] = {
        'kernel': weight[:, 0].T,
        'bias': take(f'{name}.bias', features),
    }
  if block.norm is not None:
    state['norm'] = scale(first, stored=is_rms)
  if block.mlp is not None:
    width = block.mlp.down.kernel.shape[0]
    if is_rms:
      gate = take('ffn.proj_up_gate.weight', width, features)
      up = np.concatenate([gate, take('ffn.proj_up.weight', width, features)])
    else:
      up = take('ffn.proj_up.weight', 2 * width, features)
    state['mlp'] = {
        'norm': scale(second, stored=is_rms),
        'up': {'kernel': up.T},
        'down': {'kernel': take('ffn.proj_down.weight', features, width).T},
    }
  entries.finish()
  weights_lib.update(block, state)


def _state_dict(
    block: slstm_block.SLSTMBlock, backend: str
) -> dict[str, np.ndarray]:
  """Returns a block's weights by name; the reverse of `_fill`."""
  is_rms, start, first, second = _names(block)
  _check_bound(block)
  numbers = lambda p: weights_lib.numbers(p, 'A parameter of the SLSTMBlock')
  scale = lambda norm, stored: numbers(norm.scale) - (1 - stored)
  inner = _cell_entries(
      numbers(block.gates.kernel),
      numbers(block.recurrent_kernel),
      numbers(block.gates.bias),
      backend,
  )
  inner['group_norm.weight'] = scale(block.head_norm, stored=0)
  if block.convolution is not None:
    inner['conv1d.conv.weight'] = numbers(block.convolution.kernel).T[:, None]
    inner['conv1d.conv.bias'] = numbers(block.convolution.bias)
  state = {start + name: value for name, value in inner.items()}
  if block.norm is not None:
    state[f'{first}.weight'] = scale(block.norm, stored=is_rms)
  if block.mlp is not None:
    state[f'{second}.weight'] = scale(block.mlp.norm, stored=is_rms)
    up = numbers(block.mlp.up.kernel).T
    if is_rms:
      up_gate, up = np.split(up, 2)
      state['ffn.proj_up_gate.weight'] = up_gate
    state['ffn.proj_up.weight'] = up
    state['ffn.proj_down.weight'] = numbers(block.mlp.down.kernel).T
  return state


def _names(block: slstm_block.SLSTMBlock) -> tuple[bool, str, str, str]:
  """Says which library's a block is, or raises ValueError.

  Returns whether it is TiRex's, the start of the layer's names, and the names
  of the norms before the layer and before the MLP.
  """
  if block.norm is None:
    return False, '', '', ''
  if not isinstance(block.norm, nnx.RMSNorm):
    return False, 'xlstm.', 'xlstm_norm', 'ffn_norm'
  if block.mlp is None or block.mlp.activation != 'silu' or block.conv_width:
    raise ValueError(
        "An SLSTMBlock with norm='rms' is TiRex's if it has conv_width=0,"
        " mlp_activation='silu' and an MLP; got"
        f' conv_width={block.conv_width} and'
        f' {"no MLP" if block.mlp is None else block.mlp.activation}.'
    )
  return True, 'slstm_layer.', 'norm_slstm', 'norm_ffn'
