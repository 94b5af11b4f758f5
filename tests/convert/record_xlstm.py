"""Records what the sLSTM layers of xLSTM and TiRex compute.

    git clone https://github.com/NX-AI/xlstm
    git clone https://github.com/NX-AI/tirex
    pip install torch && python tests/convert/record_xlstm.py xlstm tirex

Without xLSTM's convolution, and of TiRex by its function for torch alone, in
float32 instead of bfloat16. Some forget gates are far above TiRex's bound.
"""

import importlib
import pathlib
import sys
import types

import numpy as np
import torch

BATCH, TIME, FEATURES, HEADS = 2, 40, 6, 2
FOLDER = pathlib.Path(__file__).parent

sys.path.insert(0, sys.argv[1])
# TiRex's package imports all that it needs to forecast.
for name in ('tirex', 'tirex.models', 'tirex.models.slstm', 'tirex.util'):
  package = types.ModuleType(name)
  package.__path__ = [f'{sys.argv[2]}/src/{name.replace(".", "/")}']
  package.dataclass_from_dict = None
  sys.modules[name] = package

xlstm = importlib.import_module('xlstm.blocks.slstm.layer')
tirex = importlib.import_module('tirex.models.slstm.layer')
tirex_cell = importlib.import_module('tirex.models.slstm.cell')


def save(name, layer, cell_outputs):
  with torch.no_grad():
    for parameter in layer.parameters():
      parameter.copy_(0.5 * torch.randn(parameter.shape))
    gates = layer.slstm_cell._bias_.view(HEADS, 4, -1)  # TiRex's layout
    if name == 'tirex':
      gates[:, 1] += 14
    x = torch.randn(BATCH, TIME, FEATURES)
    inner, carry = cell_outputs(layer, x)
    y = layer.group_norm(inner).transpose(1, 2).reshape(BATCH, TIME, -1)
    inner = inner.transpose(1, 2).reshape(BATCH, TIME, -1)
    if name == 'xlstm':
      torch.testing.assert_close(layer(x), y)
  arrays = {f'weights/{k}': v for k, v in layer.state_dict().items()}
  arrays |= {'x': x, 'y': inner, 'normed': y}
  arrays |= {f'carry/{i}': c for i, c in enumerate(carry)}
  np.savez(
      FOLDER / f'{name}.npz',
      **{k: v.numpy().astype(np.float32) for k, v in arrays.items()},
  )


def gates(layer, x):
  """The cell's inputs, as both layers' `forward` makes them."""
  parts = (layer.fgate(x), layer.igate(x), layer.zgate(x), layer.ogate(x))
  return torch.cat(parts, dim=-1)


def run_xlstm(layer, x):
  y, state = layer.slstm_cell(gates(layer, x))
  return y, state


def run_tirex(layer, x):
  cell = layer.slstm_cell
  inputs = cell._get_input(gates(layer, x)).reshape(TIME, BATCH, -1)
  state = torch.zeros(4, BATCH, FEATURES)
  bias = cell._bias_.reshape(HEADS, 4, -1).permute(1, 0, 2).reshape(-1)
  y, state = cell._impl_forward_torch(
      inputs, state, cell._recurrent_kernel_, bias
  )
  return cell._permute_output(y), state


torch.manual_seed(0)
config = xlstm.sLSTMLayerConfig(
    embedding_dim=FEATURES,
    num_heads=HEADS,
    conv1d_kernel_size=0,
    backend='vanilla',
    dtype='float32',
    enable_automatic_mixed_precision=False,
)
save('xlstm', xlstm.sLSTMLayer(config), run_xlstm)
config = tirex_cell.sLSTMBlockConfig(embedding_dim=FEATURES, num_heads=HEADS)
save('tirex', tirex.sLSTMLayer(config, 'torch'), run_tirex)
