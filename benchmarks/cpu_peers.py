"""Times Elman, LSTM and GRU on a CPU beside flax.nnx.RNN and torch.

  python benchmarks/cpu_peers.py

Forward and backward in float32: the gradients of sum(y * w) by the parameters
and by x. All programs share weights and inputs, are checked to compute the same
function, and take turns. torch takes part where it can be imported; it is no
dependency of the project.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo.benchmark import program as program_lib
from rnnzoo.benchmark import timing

try:
  import torch
except ModuleNotFoundError:
  torch = None

# Name: (batch, time, in_features, features), repeats.
SHAPES = {
    'row_mnist': ((128, 28, 28, 128), 31),
    'pixel_mnist': ((16, 784, 1, 128), 11),
}

# Layer: flax cells and the torch layer of the same equations.
PEERS = {
    'Elman': ((nnx.SimpleCell,), 'RNN'),
    'LSTM': ((nnx.LSTMCell, nnx.OptimizedLSTMCell), 'LSTM'),
    'GRU': ((nnx.GRUCell,), 'GRU'),
}

# (shape, layer, peer): the largest ratio of our time to the peer's.
TARGETS = {
    ('row_mnist', 'Elman', 'flax'): 1.05,
    ('row_mnist', 'LSTM', 'flax'): 1.05,
    ('row_mnist', 'GRU', 'flax'): 1.05,
    ('pixel_mnist', 'Elman', 'flax'): 1.0,
    ('pixel_mnist', 'LSTM', 'flax'): 1.0,
    ('pixel_mnist', 'GRU', 'flax'): 1.0,
    ('pixel_mnist', 'GRU', 'torch'): 1.0,
}

# Float32 results of T steps in another order of summation.
TOLERANCE = 1e-4

Call = Callable[[], Sequence[Any]]  # Returns the loss and d loss / dx first.

_OUTPUT = flags.DEFINE_string(
    'output', 'benchmarks/cpu_peers.json', 'The JSON file to write.'
)


def jax_program(layer: nnx.Module, x: np.ndarray, w: np.ndarray) -> Call:
  """Returns a call of a compiled loss and its gradients by x and parameters."""
  graphdef, parameters, rest = nnx.split(layer, nnx.Param, ...)
  x, w = jnp.asarray(x), jnp.asarray(w)

  def loss(x, parameters, rest, w):
    # flax's RNN counts its random numbers, which needs variables of its own.
    y = nnx.merge(graphdef, parameters, rest, copy=True)(x)
    return jnp.sum(y * w)

  step = jax.jit(jax.value_and_grad(loss, (0, 1)))

  def call():
    value, gradients = step(x, parameters, rest, w)
    return value, *gradients

  return call


def torch_program(layer: Any, x: np.ndarray, w: np.ndarray) -> Call:
  """The same for a torch layer."""
  x = torch.tensor(x, requires_grad=True)
  w = torch.tensor(w)
  by = [x, *layer.parameters()]

  def call():
    y, _ = layer(x)
    value = torch.sum(y * w)
    return value.detach(), *torch.autograd.grad(value, by)

  return call


def flax_layer(cell_type: type, ours: rnnzoo.RecurrentLayer) -> nnx.RNN:
  """Returns a flax layer with the weights of ours."""
  cell = cell_type(ours.in_features, ours.out_features, rngs=nnx.Rngs(0))
  kernels, recurrent = ours.kernel[...], ours.recurrent_kernel[:, 0]
  if cell_type is nnx.LSTMCell:
    for gate, kernel, block in zip('ifgo', kernels, recurrent, strict=True):
      getattr(cell, 'if_' if gate == 'f' else f'i{gate}').kernel[...] = kernel
      getattr(cell, f'h{gate}').kernel[...] = block
  else:
    cell.dense_i.kernel[...] = jnp.concatenate(kernels, axis=-1)
    cell.dense_h.kernel[...] = jnp.concatenate(recurrent, axis=-1)
  return nnx.RNN(cell)


def torch_layer(name: str, ours: rnnzoo.RecurrentLayer) -> Any:
  """Returns a torch layer with the weights of ours."""
  layer = getattr(torch.nn, name)(
      ours.in_features, ours.out_features, batch_first=True
  )
  rows = lambda kernel: torch.tensor(  # [G, in, out] -> [G out, in]
      np.asarray(kernel).swapaxes(1, 2).reshape(-1, kernel.shape[1])
  )
  with torch.no_grad():
    layer.weight_ih_l0.copy_(rows(ours.kernel[...]))
    layer.weight_hh_l0.copy_(rows(ours.recurrent_kernel[:, 0]))
    layer.bias_ih_l0.zero_()
    layer.bias_hh_l0.zero_()
  return layer


def programs(name: str, shape: Sequence[int]) -> dict[str, Call]:
  """Returns the programs that are timed for one layer, ours first."""
  batch, time, in_features, features = shape
  rng = np.random.default_rng(0)
  draw = lambda *size: rng.standard_normal(size).astype(np.float32)
  x, w = draw(batch, time, in_features), draw(batch, time, features)
  cells, torch_name = PEERS[name]
  # Biases are zero everywhere: flax has fewer of them.
  ours = rnnzoo.LAYERS[name](in_features, features, rngs=nnx.Rngs(0))
  calls = {'rnnzoo': jax_program(ours, x, w)}
  for cell in cells:
    calls[f'flax {cell.__name__}'] = jax_program(flax_layer(cell, ours), x, w)
  if torch is not None:
    calls[f'torch {torch_name}'] = torch_program(
        torch_layer(torch_name, ours), x, w
    )
  return calls


def disagreement(got: Sequence[Any], expected: Sequence[Any]) -> float:
  """Returns ||a - b|| / ||b|| of the gradients by x."""
  a, b = np.asarray(got[1]), np.asarray(expected[1])
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main(argv: list[str]) -> int:
  """Prints and writes the comparison; returns the exit code."""
  program_lib.flags_alone(argv)
  program_lib.writable(_OUTPUT.value)
  cores = len(os.sched_getaffinity(0))
  result = {
      'command': 'python benchmarks/cpu_peers.py',
      **timing.environment(),
      'rows': [],
  }
  if torch is not None:
    torch.set_num_threads(cores)
    result['versions']['torch'] = torch.__version__
  if jax.default_backend() != 'cpu':
    raise app.UsageError('this compares CPUs: set JAX_PLATFORMS=cpu')
  print(f'{result["device"]["kind"]}, {cores} cores, {result["versions"]}')
  print(f'load {result["load_average"]:.1f}')
  print(
      'shape        layer  program                     ms         quartiles'
      '  ours/peer  target'
  )
  wrong = False
  for shape_name, (shape, repeats) in SHAPES.items():
    for name in PEERS:
      calls = programs(name, shape)
      ours = calls['rnnzoo']()
      errors = [disagreement(call(), ours) for call in calls.values()]
      times = timing.interleave(list(calls.values()), repeats)
      for program, error, measured in zip(calls, errors, times, strict=True):
        peer = program.split()[0]
        target = TARGETS.get((shape_name, name, peer))
        ratio = times[0].median_ms / measured.median_ms
        row = {
            'shape': shape_name,
            'sizes': dict(zip('BTIF', shape, strict=True)),
            'layer': name,
            'program': program,
            **dataclasses.asdict(measured),
            'disagreement': error,
            'ours_over_peer': ratio,
            'target': target,
        }
        result['rows'].append(row)
        spread = f'{measured.low_ms:.2f} - {measured.high_ms:.2f}'
        verdict = ''
        if target is not None:
          verdict = f'<= {target:.2f} {"met" if ratio <= target else "missed"}'
        if not error <= TOLERANCE:
          wrong = True
          verdict += f' computes another function: {error:.1e}'
        print(
            f'{shape_name:12} {name:6} {program:22} {measured.median_ms:7.2f}'
            f' {spread:>17} {ratio:10.3f}  {verdict}',
            flush=True,
        )
  path = pathlib.Path(_OUTPUT.value)
  path.write_text(json.dumps(result, indent=2) + '\n')
  print(path)
  return int(wrong)


if __name__ == '__main__':
  app.run(main)
