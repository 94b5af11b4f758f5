"""Weights of the sLSTM blocks of xLSTM and TiRex, by the names of their parts.

xLSTM's norms store scale - 1, and so do both libraries' group norms; TiRex's
RMS norms store the scale.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import numpy as np

from rnnzoo.cells import slstm_block
from rnnzoo.convert import weights as weights_lib

# The projections of i, f, z, o. Both libraries feed i by the one that they call
# fgate, and f by igate.
_PROJECTIONS = ('fgate', 'igate', 'zgate', 'ogate')
_KERNEL, _BIAS = 'slstm_cell._recurrent_kernel_', 'slstm_cell._bias_'


def take_cell(
    entries: weights_lib.Entries, start: str, heads: int, layer: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Takes the weights of projections and cell.

  Args:
    entries: the state dict.
    start: start of the names of an `sLSTMLayer`.
    heads: number of heads.
    layer: the layer that gets them.

  Returns:
    W and R, each [4, heads, from, to], and b, [4, features].
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
  vanilla = entries.shape(start + _KERNEL) == transposed
  shape = transposed if vanilla else (heads, size, 4 * size)
  inner = entries.take(start + _KERNEL, shape, layer)
  bias = entries.take(start + _BIAS, (4 * heads * size,), layer)
  if vanilla:
    inner, bias = inner.swapaxes(1, 2), bias.reshape(4, -1)
  else:
    bias = bias.reshape(heads, 4, size).swapaxes(0, 1).reshape(4, -1)
  inner = inner.reshape(heads, size, 4, size).transpose(2, 0, 1, 3)
  return kernel.swapaxes(2, 3), inner, bias


def check_bound(layer: Any) -> None:
  """Raises ValueError for a bound of f that xLSTM and TiRex have not."""
  norm = getattr(layer, 'norm', None)
  allowed: tuple[Any, ...] = (None,)
  if isinstance(norm, nnx.RMSNorm):
    allowed = (15,)
  elif norm is None:  # A layer alone, of xLSTM or TiRex.
    allowed = (None, 15)
  if layer.cell.max_forget not in allowed:
    raise ValueError(
        'xLSTM has max_forget=None and TiRex 15: here it must be'
        f' {" or ".join(map(str, allowed))}, and the {type(layer).__name__} has'
        f' {layer.cell.max_forget}.'
    )


def cell_entries(
    kernel: np.ndarray,
    recurrent_kernel: np.ndarray,
    bias: np.ndarray,
    backend: str,
) -> dict[str, np.ndarray]:
  """Returns entries of an `sLSTMLayer`; the reverse of `take_cell`."""
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


def fill(
    block: slstm_block.SLSTMBlock, given: Mapping[str, Any], prefix: str
) -> None:
  """Fills a block from a state dict, as `from_xlstm` says."""
  entries = weights_lib.Entries(given, 'state dict', prefix)
  features = block.out_features
  is_rms, start, first, second = _names(block)
  check_bound(block)

  def take(name, *shape):
    return entries.take(name, shape, block)

  def scale(name, stored):
    return {'scale': take(f'{name}.weight', features) + (1 - stored)}

  kernel, inner, bias = take_cell(entries, start, block.num_heads, block)
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


def state_dict(
    block: slstm_block.SLSTMBlock, backend: str
) -> dict[str, np.ndarray]:
  """Returns a block's weights by name; the reverse of `fill`."""
  is_rms, start, first, second = _names(block)
  check_bound(block)
  numbers = lambda p: weights_lib.numbers(p, 'A parameter of the SLSTMBlock')
  scale = lambda norm, stored: numbers(norm.scale) - (1 - stored)
  inner = cell_entries(
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

  Returns:
    Whether it is TiRex's, the start of the layer's names, and the names of the
    norms before the layer and before the MLP.
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
