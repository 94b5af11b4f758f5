"""Records what FlashRNN's functions compute, for FlashRNN's tests.

    git clone https://github.com/NX-AI/flashrnn
    pip install torch && python tests/convert/record_flashrnn.py flashrnn

Its plain torch functions, 'vanilla', need no GPU; they are loaded by
themselves, since the package compiles for one. The axes of R and Wx that they
expect, HPGD and TBGHD, are made here from the public ones as the package does.
"""

import importlib.util
import pathlib
import sys

import numpy as np
import torch

BATCH, TIME, HEADS, SIZE = 2, 5, 2, 3

# function -> gates of Wx, R and b, and states
FUNCTIONS = {
    'elman': (1, 1, 1, 1),
    'lstm': (4, 4, 4, 2),
    'gru': (3, 3, 4, 1),
    'slstm': (4, 4, 4, 4),
}

folder = pathlib.Path(sys.argv[1]) / 'flashrnn' / 'flashrnn' / 'vanilla'
spec = importlib.util.spec_from_file_location(
    'vanilla', folder / '__init__.py', submodule_search_locations=[str(folder)]
)
vanilla = importlib.util.module_from_spec(spec)
sys.modules['vanilla'] = vanilla
spec.loader.exec_module(vanilla)

torch.manual_seed(0)
draw = lambda *shape: torch.randn(*shape).double()


def record(function, given_states):
  gates, recurrent, biases, states = FUNCTIONS[function]
  Wx = draw(BATCH, TIME, gates, HEADS, SIZE)
  R = 0.5 * draw(recurrent, HEADS, SIZE, SIZE)
  b = draw(biases, HEADS, SIZE)
  start = torch.zeros(states, BATCH, 1, HEADS, SIZE).double()
  if given_states:
    start = draw(states, BATCH, 1, HEADS, SIZE)
    if function == 'slstm':
      start[2] = 1 + start[2].abs()
  arrays = [a.float().double() for a in (Wx, R, b, start)]
  Wx, R, b, start = (a.requires_grad_() for a in arrays)
  carries, last = vanilla.flashrnn_forward(
      Wx.permute(1, 0, 2, 3, 4),
      start.permute(2, 1, 0, 3, 4),
      R.permute(1, 3, 0, 2),
      b,
      vanilla.flashrnn_pointwise_function_registry[function],
      constants={},
  )
  carries, last = (a.permute(2, 1, 0, 3, 4) for a in (carries, last))
  carries[0].sin().sum().backward()
  found = {'Wx': Wx, 'R': R, 'b': b, 'states': carries, 'last': last}
  found |= {'dWx': Wx.grad, 'dR': R.grad, 'db': b.grad}
  return found | {'start': start} if given_states else found


for name in FUNCTIONS:
  for given in (False, True):
    path = pathlib.Path(__file__).parent / f'flashrnn_{name}_{int(given)}.npz'
    np.savez(
        path,
        **{
            k: v.detach().numpy().astype(np.float32)
            for k, v in record(name, given).items()
        },
    )
