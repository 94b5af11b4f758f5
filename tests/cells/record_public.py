"""Records what public packages compute, for public_test.py.

    git clone https://github.com/Doraemonzzz/hgru-pytorch
    git clone https://github.com/lindermanlab/S5
    pip install jax flax equinox torch einops transformers
    pip install --no-deps discretax==0.3.0 memax==0.1.1 ncps==1.0.1 \
        flash-linear-attention==0.6.0 fla-core==0.6.0
    JAX_ENABLE_X64=1 python tests/cells/record_public.py hgru-pytorch S5

Run by hand, on a CPU. Parameters are random and float32; layers run in float64,
memax and flash-linear-attention in float32. Every case has the input x, the
output y, and dx, the gradient of sum(y²) by x.
"""

import importlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import types
from unittest import mock

os.environ['TRITON_INTERPRET'] = '1'  # Kernels of Triton on a CPU.

from discretax import sequence_mixers
import equinox
from fla.layers import hgrn
from fla.ops.hgrn import naive
import jax
import jax.numpy as jnp
from memax.equinox.semigroups import lru
import ncps.torch
import numpy as np
import torch
from triton.runtime import autotuner

BATCH, TIME, FEATURES, STATE = 2, 7, 4, 3
KEY = jax.random.key(0)
HGRU, S5 = map(pathlib.Path, sys.argv[1:])

rng = np.random.default_rng(0)
record = {}


def draw(*shape):
  return (0.5 * rng.standard_normal(shape)).astype(np.float32)


def save(case, params, x, y, dx):
  arrays = {f'params/{name}': p for name, p in params.items()}
  arrays |= {'x': x, 'y': y, 'dx': dx}
  record.update({f'{case}/{k}': np.float32(v) for k, v in arrays.items()})


def save_jax(case, layer, run, dtype=jnp.float64):
  """Records a layer of equinox; run(layer, x) -> y of one sequence."""
  wide = lambda p: jnp.asarray(p, dtype)
  draws = lambda p: wide(draw(*p.shape))
  layer = jax.tree.map(lambda p: draws(p) if equinox.is_array(p) else p, layer)
  x = wide(draw(BATCH, TIME, FEATURES))
  apply = lambda x: jax.vmap(lambda x: run(layer, x))(x)
  params = {k: v for k, v in vars(layer).items() if equinox.is_array(v)}
  save(case, params, x, apply(x), jax.grad(lambda x: (apply(x) ** 2).sum())(x))


def save_torch(case, layer, run, x, dtype=torch.float64):
  """Records a module of torch; run(layer, x) -> y of a batch."""
  layer = layer.to(dtype)
  with torch.no_grad():
    for p in layer.parameters():
      p.copy_(torch.tensor(draw(*p.shape)))
  x = torch.tensor(x, dtype=dtype, requires_grad=True)
  y = run(layer, x)
  (y**2).sum().backward()
  save(case, layer.state_dict(), *(a.detach() for a in (x, y, x.grad)))


# discretax and memax.
mixer = lambda layer, x: layer(x, KEY)
save_jax(
    'lru_discretax',
    sequence_mixers.LRUSequenceMixer(FEATURES, KEY, state_dim=STATE),
    mixer,
)
for rule in ('zoh', 'bilinear'):
  layer = sequence_mixers.S5SequenceMixer(
      FEATURES, KEY, state_dim=2 * STATE, discretization=rule
  )
  save_jax(f's5_{rule}', layer, mixer)
for rule in ('IM', 'IMEX'):
  layer = sequence_mixers.LinOSSSequenceMixer(
      FEATURES, KEY, state_dim=STATE, discretization=rule, damping=False
  )
  save_jax(f'linoss_{rule}', layer, mixer)
start, no = lambda layer: layer.initialize_carry(), np.zeros(TIME, bool)
memax = lambda layer, x: layer(start(layer), (x, no))[1]
with jax.enable_x64(False):
  layer = lru.LRU(recurrent_size=FEATURES, hidden_size=FEATURES, key=KEY)
  save_jax('lru_memax', layer, memax, jnp.float32)

# S5, by the paper's authors.
jnp.DeviceArray = jax.Array  # Its name in older versions.
sys.path.insert(0, str(S5))
ssm = importlib.import_module('s5.ssm')
for rule in ('zoh', 'bilinear'):
  size, basis = jnp.zeros(STATE), jnp.zeros((2 * STATE, STATE))
  layer = ssm.S5SSM(
      *(size, size, basis, basis.T, FEATURES, STATE, 'lecun_normal', rule),
      *(0.001, 0.1),
  )
  x = draw(BATCH, TIME, FEATURES)
  params = layer.init(KEY, x[0])['params']
  params = {name: draw(*p.shape) for name, p in params.items()}
  params['Lambda_re'] = -np.abs(params['Lambda_re']) - 0.01

  def authors(x, layer=layer, params=params):
    wide = jax.tree.map(np.float64, params)
    return jax.vmap(lambda x: layer.apply({'params': wide}, x))(x)

  dx = jax.grad(lambda x: (authors(x) ** 2).sum())(np.float64(x))
  save(f's5_authors_{rule}', params, x, authors(np.float64(x)), dx)

# ncps: times [batch, time] would meet the units, so the units have them too.
for mode in ('default', 'no_gate', 'pure'):
  layer = ncps.torch.CfC(STATE, FEATURES, mode=mode, backbone_layers=0)
  x = draw(BATCH, TIME, STATE + 1)
  x[..., -1] = np.abs(x[..., -1])

  def cfc(layer, x):
    ts = x[..., -1:].expand(*x.shape[:-1], FEATURES)
    zero = x.new_zeros(BATCH, FEATURES)
    return layer(x[..., :-1], zero, timespans=ts)[0]

  save_torch(f'cfc_{mode}', layer, cfc, x)

# flash-linear-attention: gradients with its loop, outputs with its kernel too.
autotuner.Autotuner._bench = lambda *_, **__: [0.0] * 3
bound = torch.tensor([0.0, 0.1, 0.5, 0.9])
x = draw(BATCH, TIME, FEATURES)


def fla(layer, x):
  with mock.patch.object(hgrn, 'chunk_hgrn', naive.naive_recurrent_hgrn):
    y, *_ = layer(x, lower_bound=bound)
  with torch.no_grad():
    torch.testing.assert_close(layer.eval()(x, lower_bound=bound)[0], y)
  return y


layer = hgrn.HGRNAttention(hidden_size=FEATURES, layer_idx=1)
save_torch('hgrn', layer, fla, x, torch.float32)

# hgru-pytorch, by the paper's authors: a loop in place of the CUDA extension.
for name in ('hgru_cuda', 'hgru_real_cuda'):
  sys.modules[name] = types.ModuleType(name)
sys.path.insert(0, str(HGRU))
hgru1d = importlib.import_module('hgru.hgru1d')
layer = hgru1d.Hgru1d(FEATURES)
layer.norm = torch.nn.RMSNorm(2 * FEATURES, eps=1e-5)
layer.gate = torch.nn.Linear(FEATURES, 2 * FEATURES, bias=False)
layer.out_proj = torch.nn.Linear(2 * FEATURES, FEATURES, bias=False)
authors = lambda layer, x: layer.forward_naive(x.swapaxes(0, 1), bound)
run = lambda layer, x: authors(layer, x).swapaxes(0, 1)
save_torch('hgrn_complex', layer, run, x)

names = 'discretax memax ncps flash-linear-attention jax torch'.split()
versions = [f'{name} {importlib.metadata.version(name)}' for name in names]
for name, folder in {'hgru-pytorch': HGRU, 'S5': S5}.items():
  git = 'git', '-C', str(folder), 'rev-parse', '--short=8', 'HEAD'
  commit = subprocess.run(git, capture_output=True, text=True, check=True)
  versions.append(f'{name} {commit.stdout.strip()}')
path = pathlib.Path(__file__).parent / 'public.npz'
np.savez_compressed(path, versions=versions, bound=bound.numpy(), **record)
