"""Records what the sLSTM blocks of xLSTM and TiRex compute.

    pip install torch xlstm
    git clone https://github.com/NX-AI/tirex
    python tests/convert/record_xlstm_blocks.py tirex

TiRex's block runs by its function for torch, in float32 instead of bfloat16.
Some forget gates are far above TiRex's bound.
"""

import importlib
import pathlib
import sys
import types

import numpy as np
import torch
import xlstm

BATCH, TIME, FEATURES, HEADS = 2, 12, 8, 2
FOLDER = pathlib.Path(__file__).parent

# TiRex's package imports all that it needs to forecast.
for name in ('tirex', 'tirex.models', 'tirex.models.slstm', 'tirex.util'):
  package = types.ModuleType(name)
  package.__path__ = [f'{sys.argv[1]}/src/{name.replace(".", "/")}']
  package.dataclass_from_dict = None
  package.round_up_to_next_multiple_of = lambda size, step: -int(
      -size // step * step
  )
  sys.modules[name] = package
tirex = importlib.import_module('tirex.models.slstm.block')
tirex_cell = importlib.import_module('tirex.models.slstm.cell')


def save(name, module, run):
  with torch.no_grad():
    for parameter in module.parameters():
      parameter.copy_(0.5 * torch.randn(parameter.shape))
    for part in module.modules():
      if name.startswith('tirex') and hasattr(part, '_bias_'):
        part._bias_.view(HEADS, 4, -1)[:, 1] += 14
    x = torch.randn(BATCH, TIME, FEATURES)
    arrays = {'x': x} | run(module, x)
  arrays |= {f'weights/{k}': v for k, v in module.state_dict().items()}
  np.savez(
      FOLDER / f'{name}.npz',
      **{k: v.numpy().astype(np.float32) for k, v in arrays.items()},
  )


def run_layer(layer, x):
  y, state = layer(x, return_last_state=True)
  arrays = {f'carry/{i}': c for i, c in enumerate(state['slstm_state'])}
  return {'y': y, 'carry/4': state['conv_state']} | arrays


def run_block(block, x):
  inside = run_layer(block.xlstm, block.xlstm_norm(x))
  return inside | {'y': block(x)}


def run_tirex(block, x):
  cell, seen = block.slstm_layer.slstm_cell, {}

  def forward(x_gates, state):
    inputs = cell._get_input(x_gates).reshape(TIME, BATCH, -1)
    bias = cell._bias_.reshape(HEADS, 4, -1).permute(1, 0, 2).reshape(-1)
    y, state = cell._impl_forward_torch(
        inputs,
        torch.zeros(4, BATCH, FEATURES),
        cell._recurrent_kernel_,
        bias,
    )
    seen.update({f'carry/{i}': c for i, c in enumerate(state)})
    return cell._permute_output(y), state

  cell.forward = forward
  return {'y': block(x)} | seen


torch.manual_seed(0)
options = {
    'embedding_dim': FEATURES,
    'num_heads': HEADS,
    'backend': 'vanilla',
    'dtype': 'float32',
    'enable_automatic_mixed_precision': False,
}
layer_config = xlstm.sLSTMLayerConfig(**options)
block_config = xlstm.sLSTMBlockConfig(
    slstm=layer_config,
    feedforward=xlstm.FeedForwardConfig(proj_factor=1.3, act_fn='gelu'),
    _num_blocks=1,
    _block_idx=0,
)
save('xlstm_block', xlstm.sLSTMBlock(block_config), run_block)
save('xlstm_layer', xlstm.sLSTMBlock(block_config).xlstm, run_layer)
config = tirex_cell.sLSTMBlockConfig(embedding_dim=FEATURES, num_heads=HEADS)
save('tirex_block', tirex.sLSTMBlock(config, 'torch'), run_tirex)
