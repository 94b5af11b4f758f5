"""Weights of the sLSTM layers of xLSTM and TiRex, into one cell's layer.

xlstm_blocks.py converts whole blocks.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rnnzoo import settings
from rnnzoo.cells import slstm
from rnnzoo.cells import slstm_block
from rnnzoo.convert import weights as weights_lib
from rnnzoo.convert import xlstm_blocks
from rnnzoo.layers import recurrent

Weights = weights_lib.Weights


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
    xlstm_blocks.fill(layer, state_dict, prefix)
    return
  heads, size = _sizes(layer)
  entries = weights_lib.Entries(state_dict, 'state dict', prefix)
  for part, reason in {
      'conv1d': 'a convolution before i and f, which an SLSTM has not; an'
      ' rnnzoo.SLSTMBlock has it',
      'group_norm': 'a group norm after the cell, which an SLSTM has not; an'
      ' rnnzoo.SLSTMBlock has it, or leave its entry out',
  }.items():
    if any(name.startswith(part) for name in entries.names()):
      raise ValueError(f'The state dict has {reason}.')
  blocks, recurrent_kernel, bias = xlstm_blocks.take_cell(
      entries, '', heads, layer
  )
  entries.finish()
  kernel = np.zeros((4, heads, size, heads, size), blocks.dtype)
  for head in range(heads):
    kernel[:, head, :, head] = blocks[:, head]
  weights = Weights(
      kernel=kernel.reshape(4, heads * size, heads * size),
      recurrent_kernel=recurrent_kernel,
      bias=bias,
  )
  weights_lib.store(layer, weights)


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
    return xlstm_blocks.state_dict(layer, backend)
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
  return xlstm_blocks.cell_entries(
      blocks, weights.recurrent_kernel, weights.bias, backend
  )


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
  xlstm_blocks.check_bound(layer)
  if layer.in_features != layer.out_features:
    raise ValueError(
        'An sLSTMLayer has as many inputs as features; the SLSTM has'
        f' in_features = {layer.in_features} and features ='
        f' {layer.out_features}.'
    )
  return layer.num_heads, layer.out_features // layer.num_heads
