"""Records what torch's cells and projected LSTM compute, for convert_test.py.

    pip install torch && python tests/convert/record_torch.py

The recurrent modules themselves are recorded in tests/cells/golden.
"""

import pathlib

import numpy as np
import torch

BATCH, TIME, IN, FEATURES, PROJECTED = 2, 5, 3, 4, 2


def randomize(module):
  module.double()
  with torch.no_grad():
    for parameter in module.parameters():
      parameter.copy_(0.5 * torch.randn(parameter.shape))
  state = module.state_dict()
  return {
      f'weights/{k}': v.numpy().astype(np.float32) for k, v in state.items()
  }


def record_cell(kind):
  cell = getattr(torch.nn, f'{kind}Cell')(IN, FEATURES)
  arrays = randomize(cell)
  x = torch.randn(TIME, BATCH, IN).float().double()
  carry, outputs = None, []
  for step in x:
    carry = cell(step, carry)
    outputs.append(carry[0] if kind == 'LSTM' else carry)
  final = carry if kind == 'LSTM' else (carry,)
  arrays |= {'x': x.transpose(0, 1), 'y': torch.stack(outputs, 1)}
  return arrays | {f'carry/{i}': c for i, c in enumerate(final)}


def record_projected():
  module = torch.nn.LSTM(
      IN,
      FEATURES,
      num_layers=2,
      proj_size=PROJECTED,
      bidirectional=True,
      batch_first=True,
  )
  arrays = randomize(module)
  x = torch.randn(BATCH, TIME, IN).float().double()
  y, (_, c) = module(x)
  return arrays | {'x': x, 'y': y, 'c': c}


torch.manual_seed(0)
for name, made in {
    **{f'{kind}_cell': record_cell(kind) for kind in ('RNN', 'LSTM', 'GRU')},
    'projected': record_projected(),
}.items():
  path = pathlib.Path(__file__).parent / f'torch_{name.lower()}.npz'
  arrays = {
      k: (v.detach().numpy() if hasattr(v, 'detach') else v).astype(np.float32)
      for k, v in made.items()
  }
  np.savez(path, **arrays)
