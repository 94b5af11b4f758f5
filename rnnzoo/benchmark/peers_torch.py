"""Peers on torch, with the weights of a layer of ours.

Each function of torch, a layer and options of tensors returns a function of x,
and the parameters that it uses. They run on torch's GPU where JAX runs on one.
"""

from collections.abc import Callable
import dataclasses
import os
import shutil
import sys
import time
from typing import Any

import jax
import numpy as np

import rnnzoo
from rnnzoo import convert
from rnnzoo.benchmark import timing
from rnnzoo.convert import weights

Parts = tuple[Callable[[Any], Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class _Results:
  """Tensors for which `jax.block_until_ready` waits too."""

  tensors: tuple[Any, ...]

  def __getitem__(self, index: int) -> np.ndarray:
    return self.tensors[index].detach().float().cpu().numpy()

  def block_until_ready(self) -> '_Results':
    if self.tensors[0].is_cuda:
      import torch

      torch.cuda.synchronize()
    return self


def copy_gb_per_s(repeats: int) -> float | None:
  """Returns the bytes that a large copy moves per second, on a GPU."""
  if jax.default_backend() != 'gpu':
    return None
  try:
    import torch  # Slow to import, and often not there.

    arrays = [torch.ones(2**28, device='cuda') for _ in range(2)]

    def copies():
      for _ in range(10):
        arrays[0].copy_(arrays[1])
      torch.cuda.synchronize()

    (times,) = timing.interleave([copies], repeats)
    moved = 10 * sum(array.nbytes for array in arrays)
    arrays.clear()
    torch.cuda.empty_cache()
    return moved / times['ms'] / 1e6
  except (ImportError, OSError, AssertionError, RuntimeError) as error:
    print(f'no copy by torch: {error}', file=sys.stderr)
    return None


def program(
    make: Callable[[Any, rnnzoo.RecurrentLayer, dict[str, Any]], Parts],
    ours: rnnzoo.RecurrentLayer,
    arrays: tuple[np.ndarray, np.ndarray],
    dtype: str,
    backward: bool,
    *,
    time_major: bool = False,
) -> tuple[Callable[[], Any], dict[str, Any]]:
  """Returns a call and fields of a row, as `peers_jax.program` does.

  The first call counts as compilation. Memory is the allocator's peak of a
  call, on a GPU only. If `time_major`, for cuDNN, steps come first in memory;
  axes stay. bfloat16 is float16 there: torch keeps weights in bfloat16 apart,
  and cuDNN then copies them at each call.
  """
  # FlashRNN, when imported, asks where CUDA's compiler is, even for its Triton
  # kernels, which do without; torch looks for it once.
  os.environ.setdefault('CUDA_HOME', '/usr/local/cuda')
  import torch

  on_gpu = jax.default_backend() == 'gpu'
  if on_gpu and not torch.cuda.is_available():
    raise NotImplementedError('JAX has a GPU, and this torch is for CPUs.')
  if time_major and dtype == 'bfloat16':
    dtype = 'float16'
  options: dict[str, Any] = {
      'device': 'cuda' if on_gpu else 'cpu',
      'dtype': getattr(torch, dtype),
  }
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  function, params = make(torch, ours, options)
  x, w = (torch.tensor(a, **options) for a in arrays)
  if time_major:
    x, w = (a.transpose(0, 1).contiguous().transpose(0, 1) for a in (x, w))
  x.requires_grad_(backward)

  def call():
    if backward:
      loss = torch.sum(function(x) * w)
      return _Results(torch.autograd.grad(loss, [x, *params]))
    with torch.no_grad():
      return _Results((function(x),))

  start = time.perf_counter()
  call().block_until_ready()
  fields: dict[str, Any] = {'compile_s': time.perf_counter() - start}
  if x.is_cuda:
    torch.cuda.reset_peak_memory_stats()
    call().block_until_ready()
    fields['peak_mib'] = torch.cuda.max_memory_allocated() / 2**20
  return call, fields


def eager(torch: Any, ours: Any, options: dict[str, Any]) -> Parts:
  """torch.nn.LSTM or GRU: cuDNN on a GPU."""
  module = _module(torch, ours, options, batch_first=True)
  return lambda x: module(x)[0], [*module.parameters()]


def cudnn(torch: Any, ours: Any, options: dict[str, Any]) -> Parts:
  """torch.nn's module with steps first in memory, as is best for cuDNN."""
  if options['device'] != 'cuda':
    raise NotImplementedError('cuDNN needs a GPU.')
  module = _module(torch, ours, options)
  run = lambda x: module(x.transpose(0, 1))[0].transpose(0, 1)
  return run, [*module.parameters()]


def _module(torch: Any, ours: Any, options: Any, **more: Any) -> Any:
  """Returns torch's module of a layer or a stack, with its weights."""
  parts = list(weights.parts(ours))
  layer, _, _ = parts[0]
  _, level, backward = parts[-1]
  name = type(layer).__name__
  make = getattr(torch.nn, {'Elman': 'RNN'}.get(name, name))
  more |= {'num_layers': level + 1, 'bidirectional': backward}
  module = make(layer.in_features, layer.out_features, **more)
  state = convert.to_torch(ours)
  module.load_state_dict(
      {k: torch.tensor(np.array(a)) for k, a in state.items()}
  )
  return module.to(**options)


def compiled(torch: Any, ours: Any, options: dict[str, Any]) -> Parts:
  """torch.nn's module through torch.compile.

  By default torch.compile calls the library for these modules, as eager does;
  `torch._dynamo.config.allow_rnn` has it trace every step.
  """
  function, params = eager(torch, ours, options)
  return torch.compile(function), params


def _parameters(torch: Any, arrays: Any, options: dict[str, Any]) -> list[Any]:
  arrays = map(np.ascontiguousarray, arrays)
  return [torch.tensor(a, **options, requires_grad=True) for a in arrays]


def flashrnn(torch: Any, ours: Any, options: dict[str, Any]) -> Parts:
  """FlashRNN after torch's product W x.

  On a GPU it is its fused kernel, which nvcc compiles; without nvcc its Triton
  kernel, which it has for the LSTM only.
  """
  import flashrnn as library

  name, backend = type(ours).__name__, 'vanilla'
  if options['device'] == 'cuda':
    backend = 'cuda_fused' if shutil.which('nvcc') else 'triton_fused'
    if backend == 'triton_fused' and name != 'LSTM':
      raise NotImplementedError(
          f"FlashRNN's {name} needs nvcc, which is not on the PATH: its Triton"
          ' kernels are for LSTM and sLSTM.'
      )
  params = _parameters(torch, convert.to_flashrnn(ours), options)
  R, b, kernel = params
  heads, size = R.shape[1:3]

  def run(x):
    Wx = (x @ kernel.T).reshape(*x.shape[:2], -1, heads, size)
    states, _ = library.flashrnn(
        Wx,
        R,
        b,
        function=name.lower(),
        backend=backend,
        dtype=str(options['dtype']).removeprefix('torch.'),
    )
    return states[0].flatten(-2)

  return run, params


def mingru(torch: Any, ours: Any, options: dict[str, Any]) -> Parts:
  """minGRU_pytorch.minGRU: in log space."""
  import minGRU_pytorch

  if ours.in_features != ours.out_features:
    raise NotImplementedError(
        'minGRU-pytorch has as many inputs as features, and here are'
        f' {ours.in_features} and {ours.out_features}.'
    )
  module = minGRU_pytorch.minGRU(ours.out_features)
  z, h = np.asarray(ours.kernel[...])
  rows = np.concatenate([h, z], axis=1).T
  with torch.no_grad():
    module.to_hidden_and_gate.weight.copy_(torch.tensor(rows))
  module.to(**options)
  return module, [*module.parameters()]


def accelerated_scan(torch: Any, ours: Any, options: dict[str, Any]) -> Parts:
  """A minGRU around accelerated_scan's scan, a Triton kernel."""
  if options['device'] != 'cuda':
    raise NotImplementedError('accelerated-scan needs a GPU.')
  import accelerated_scan.scalar

  kernels = _parameters(torch, np.asarray(ours.kernel[...]), options)

  def run(x):
    z, h = (x @ kernel for kernel in kernels)
    h = torch.where(h >= 0, h + 0.5, torch.sigmoid(h))
    by_time = lambda a: a.transpose(1, 2).contiguous()
    y = accelerated_scan.scalar.scan(
        by_time(torch.sigmoid(-z)), by_time(torch.sigmoid(z) * h)
    )
    return y.transpose(1, 2)

  return run, kernels


def pararnn(torch: Any, ours: Any, options: dict[str, Any]) -> Parts:
  """ParaGRU by Newton's method: a GRU whose heads have one feature.

  There the reset gate may as well come before the product, as it does in it.
  """
  heads, features = ours.num_heads, ours.out_features
  if heads != features:
    raise NotImplementedError(
        "ParaRNN's GRU multiplies r h, not h, which is the same only with one"
        f' feature a head, and here are {features // heads}: try'
        ' --shapes=heads_of_one.'
    )
  import pararnn as library

  cell = library.ParaGRU(ours.in_features, features, max_recurrent_norm=None)
  to_torch = lambda a: torch.tensor(np.asarray(a[...], np.float32))
  # Its gates are z, r, n, and its z is our 1 - z.
  gates = (1, -1), (0, 1), (2, 1)
  W, b, R = map(to_torch, (ours.kernel, ours.bias, ours.recurrent_kernel))
  flip = lambda a: torch.stack([sign * a[gate] for gate, sign in gates])
  with torch.no_grad():
    cell.W_x.weight.copy_(flip(W).mT.flatten(0, 1))
    cell.W_x.bias.copy_(flip(b).flatten())
    for own, value in zip(
        (cell.a_z, cell.a_r, cell.a_n), flip(R.flatten(1)), strict=True
    ):
      own.copy_(value)
  module = library.ParaRNN(cell, solver='newton').to(**options)
  return module, [*module.parameters()]
