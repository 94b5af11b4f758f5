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
  _, start, _, _ = _names(layer)
  entries = weights_lib.Entries(state_dict, 'state dict', prefix)
  heads, size = layer.num_heads, layer.out_features // layer.num_heads
  given = np.shape(entries.left.get(start + _KERNEL, 0))
  is_vanilla = given == (heads, 4 * size, size)
  weights_lib.fill(layer, _parts(layer, is_vanilla), entries)


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
  parts = _parts(layer, backend == 'vanilla')
  if not isinstance(layer, slstm_block.SLSTMBlock):
    heads = layer.num_heads
    kernel = weights_lib.read(layer, 'xLSTM').kernel
    blocks = kernel.reshape(4, heads, len(kernel[0]) // heads, heads, -1)
    if (blocks * ~np.eye(heads, dtype=bool)[:, None, :, None]).any():
      raise ValueError(
          'An sLSTMLayer projects each head by itself, and W of the SLSTM is'
          ' not zero between different heads.'
      )
  return weights_lib.arrays(layer, parts)


def _parts(layer: Any, is_vanilla: bool) -> list[weights_lib.Part]:
  """Returns the parameters of a layer or block, and their names there.

  Args:
    layer: as in `from_xlstm`.
    is_vanilla: whether the cell's entries are those of the backend 'vanilla',
      which transposes R and has the biases gate by gate.
  """
  _, start, _, _ = _names(layer)
  _check_bound(layer)
  heads, size = layer.num_heads, layer.out_features // layer.num_heads
  part = weights_lib.Part
  names = [f'{start}{name}.weight' for name in _PROJECTIONS]

  def blocks_of(*given):  # Each [heads, to, from].
    return np.stack(given).swapaxes(2, 3)

  def whole(*given):
    blocks = blocks_of(*given)
    kernel = np.zeros((4, heads, size, heads, size), blocks.dtype)
    kernel[:, range(heads), :, range(heads)] = blocks.swapaxes(0, 1)
    return kernel.reshape(4, heads * size, heads * size)

  def blocks_in(kernel):
    kernel = kernel.reshape(4, heads, size, heads, size)
    blocks = kernel[:, range(heads), :, range(heads)]
    return blocks.transpose(1, 0, 3, 2)

  def kernel_of(given):
    given = given.swapaxes(1, 2) if is_vanilla else given
    return given.reshape(heads, size, 4, size).transpose(2, 0, 1, 3)

  def of_kernel(kernel):
    given = kernel.transpose(1, 2, 0, 3).reshape(heads, size, 4 * size)
    return [given.swapaxes(1, 2) if is_vanilla else given]

  def bias_of(given):
    given = given.reshape((4, heads, size) if is_vanilla else (heads, 4, size))
    return (given if is_vanilla else given.swapaxes(0, 1)).reshape(4, -1)

  def of_bias(bias):
    bias = bias.reshape(4, heads, size)
    return [(bias if is_vanilla else bias.swapaxes(0, 1)).reshape(-1)]

  is_block = isinstance(layer, slstm_block.SLSTMBlock)
  at = ('gates',) if is_block else ()
  parts = [
      part(('recurrent_kernel',), [start + _KERNEL], kernel_of, of_kernel),
      part((*at, 'bias'), [start + _BIAS], bias_of, of_bias),
  ]
  if not is_block:
    return [*parts, part(('kernel',), names, whole, blocks_in)]
  parts.append(
      part(('gates', 'kernel'), names, blocks_of, lambda x: x.swapaxes(2, 3))
  )
  return parts + _around_cell(layer)


def _around_cell(block: slstm_block.SLSTMBlock) -> list[weights_lib.Part]:
  """Returns the parameters of a block beside its gates and R."""
  is_rms, start, first, second = _names(block)
  part = weights_lib.Part

  def scale(path, name, stored):
    shift, names = 1 - stored, [f'{name}.weight']
    return part(path, names, lambda x: x + shift, lambda x: [x - shift])

  parts = [scale(('head_norm', 'scale'), f'{start}group_norm', False)]
  if block.convolution is not None:
    name = f'{start}conv1d.conv'
    one = (lambda x: x[:, 0].T), (lambda x: [x.T[:, None]])
    parts.append(part(('convolution', 'kernel'), [f'{name}.weight'], *one))
    parts.append(part(('convolution', 'bias'), [f'{name}.bias']))
  if block.norm is not None:
    parts.append(scale(('norm', 'scale'), first, is_rms))
  if block.mlp is not None:
    names = ['ffn.proj_up_gate.weight'] * is_rms + ['ffn.proj_up.weight']
    joined = lambda *given: np.concatenate(given).T
    split = lambda x: np.split(x.T, len(names))
    parts.append(scale(('mlp', 'norm', 'scale'), second, is_rms))
    parts.append(part(('mlp', 'up', 'kernel'), names, joined, split))
    down = ('mlp', 'down', 'kernel'), ['ffn.proj_down.weight']
    parts.append(part(*down, lambda x: x.T, lambda x: [x.T]))
  return parts


def _check_layer(layer: Any) -> None:
  """Raises ValueError unless it is an `SLSTM` as an `sLSTMLayer` has it."""
  is_layer = isinstance(layer, recurrent.RecurrentLayer)
  is_slstm = is_layer and type(layer.cell) is slstm.SLSTMCell
  if not is_slstm or layer.bias is None:
    raise ValueError(
        'An sLSTMLayer is an SLSTM with biases, got'
        f' {settings.a(type(layer))}{" without" * is_slstm}.'
    )
  weights_lib.check_structure(layer)
  if layer.in_features != layer.out_features:
    raise ValueError(
        'An sLSTMLayer has as many inputs as features; the SLSTM has'
        f' in_features = {layer.in_features} and features ='
        f' {layer.out_features}.'
    )


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


def _names(block: Any) -> tuple[bool, str, str, str]:
  """Says which library's a layer or block is, or raises ValueError.

  Returns whether it is TiRex's, the start of the layer's names, and the names
  of the norms before the layer and before the MLP.
  """
  if not isinstance(block, slstm_block.SLSTMBlock):
    _check_layer(block)
  if getattr(block, 'norm', None) is None:
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
