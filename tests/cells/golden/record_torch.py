"""Records what torch's recurrent modules compute, for golden_test.py.

    pip install torch && python tests/golden/record_torch.py

writes rnn.npz, lstm.npz and gru.npz beside this file. Each has three modules,
one of them bidirectional over sequences of different lengths. Computed in
float64 and stored in float32, to keep the files small.
"""

import pathlib

import numpy as np
import torch
from torch.nn.utils import rnn

BATCH, TIME, IN, FEATURES = 2, 4, 2, 3
MODULES = {'rnn': torch.nn.RNN, 'lstm': torch.nn.LSTM, 'gru': torch.nn.GRU}

# (number of layers, bidirectional, sequence lengths)
VARIANTS = {
    'one_layer': (1, False, None),
    'two_layers': (2, False, None),
    'bidirectional': (2, True, [4, 2]),
}


def record(kind, layers, bidirectional, lengths):
  """Returns arrays by name."""
  module = MODULES[kind](
      IN, FEATURES, layers, batch_first=True, bidirectional=bidirectional
  ).double()
  # Rounded to float32, so that the file has the values that were used.
  draw = lambda *shape: torch.randn(*shape).double().requires_grad_()
  with torch.no_grad():
    for parameter in module.parameters():
      parameter.copy_(0.5 * torch.randn(parameter.shape))
  x = draw(BATCH, TIME, IN)
  directions = 2 if bidirectional else 1
  carry_shape = (layers * directions, BATCH, FEATURES)
  count = 2 if kind == 'lstm' else 1
  initial = [draw(*carry_shape) for _ in range(count)]
  w_y = draw(BATCH, TIME, directions * FEATURES).detach()
  w_final = [draw(*carry_shape).detach() for _ in range(count)]

  inputs = x
  if lengths is not None:
    inputs = rnn.pack_padded_sequence(x, lengths, batch_first=True)
  y, final = module(inputs, tuple(initial) if count == 2 else initial[0])
  if lengths is not None:
    y, _ = rnn.pad_packed_sequence(y, batch_first=True, total_length=TIME)
  final = list(final) if count == 2 else [final]
  total = (w_y * y).sum()
  total += sum((w * f).sum() for w, f in zip(w_final, final, strict=True))
  total.backward()

  # One flat array for all weights: each array in a file costs some 300 bytes.
  named = list(module.named_parameters())
  flat = lambda tensors: torch.cat([t.reshape(-1) for t in tensors])
  stacked = lambda tensors: torch.stack(list(tensors))
  arrays = {
      'x': x,
      'initial': stacked(initial),
      'w_y': w_y,
      'w_final': stacked(w_final),
      'weights': flat(p for _, p in named),
      'y': y,
      'final': stacked(final),
      'd_x': x.grad,
      'd_initial': stacked(i.grad for i in initial),
      'd_weights': flat(p.grad for _, p in named),
  }
  arrays = {k: v.detach().numpy().astype('float32') for k, v in arrays.items()}
  arrays['names'] = np.array([name for name, _ in named])
  arrays['rows'] = np.array([p.shape[0] for _, p in named])
  arrays['columns'] = np.array([p[0].numel() for _, p in named])
  if lengths is not None:
    arrays['seq_lengths'] = np.array(lengths, np.int32)
  return arrays


def main():
  torch.manual_seed(0)
  for kind in MODULES:
    arrays = {
        f'{variant}/{name}': value
        for variant, options in VARIANTS.items()
        for name, value in record(kind, *options).items()
    }
    path = pathlib.Path(__file__).with_name(f'{kind}.npz')
    np.savez_compressed(path, **arrays)
    print(f'{path}: {path.stat().st_size} bytes, torch {torch.__version__}')


if __name__ == '__main__':
  main()
