"""Exercises what docs/libraries.json says of other libraries, on a CPU.

    pip install dm-haiku keras torch flashrnn minGRU-pytorch memax torchrl \
        pararnn-torch equinox recurrentgemma
    JAX_PLATFORMS=cpu python tests/testing/other_libraries.py

A feature that a library is said to have is tried. The exit code is 1 if a claim
fails, or has no trial. Libraries that are not installed are named.
tests/libraries_test.py tries those that are.

A library is a function run(x, carry=None, reset=None) -> (y, carry), and trials
of its own by key. A trial returns two arrays that must be equal, or anything
but False.
"""

import functools
import importlib
import json
import os
import pathlib
import sys

from flax import linen
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

DATA = pathlib.Path(__file__).parents[2] / 'docs' / 'libraries.json'
B, T, F = 2, 4, 4
X = np.random.default_rng(0).standard_normal((B, T, F)).astype(np.float32)
RESET = np.tile(np.arange(T) == 2, (B, 1))
LENGTHS = np.array([2, 4])
ZERO = np.zeros((B, F), np.float32)
NO = 'no', '-', 'other means', 'not tried'
UNTRIED = 'kernel', 'own_kernel', 'nnx_and_linen'  # A GPU's, and names.


def trials(run, x, own, half=None):
  """Returns the trials of a library by key: those that all have, and its own.

  Args:
    run: (x, carry, reset) -> (y, carry).
    x: an array or tensor [B, T, F].
    own: what this library has besides, or tries in another way.
    half: run in 16 bits, if another function.
  """
  y = lambda x, *given: run(x, *given)[0]
  bad = np.where(np.arange(T)[:, None] == 1, np.nan, X)
  if not isinstance(x, np.ndarray):
    bad = x.new_tensor(bad)
  found = {
      'nan': lambda: (y(bad, None, RESET)[:, 2:], y(x[:, 2:])),
      'given_carry': lambda: (y(x[:, 2:], run(x[:, :2])[1]), y(x)[:, 2:]),
      'resets': lambda: (y(x, None, RESET)[:, 2:], y(x[:, 2:])),
      'step': lambda: (y(x[:, :1]), y(x)[:, :1]),
  }
  square = lambda f: lambda x: (f(x) ** 2).sum()
  if isinstance(x, np.ndarray):
    mesh = jax.sharding.Mesh(jax.devices(), 'd')
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    found |= {
        'bfloat16': lambda: [(half or y)(jnp.asarray(x, jnp.bfloat16))],
        'forward_mode': lambda: jax.jvp(y, (x,), (x,))[1],
        'second': lambda: jax.grad(square(jax.grad(square(y))))(x),
        'export': lambda: jax.export.export(jax.jit(y))(x),
        'devices': lambda: (jax.jit(y)(jax.device_put(x, whole)), y(x)),
    }
  else:
    import torch

    module = torch.nn.Module()
    module.forward = y
    found |= {
        'bfloat16': lambda: [(half or y)(x.bfloat16())],
        'forward_mode': lambda: torch.func.jvp(y, (x,), (x,))[1],
        'second': lambda: [
            torch.func.grad(square(torch.func.grad(square(y))))(x)
        ],
        'export': lambda: torch.export.export(module, (x,)),
    }
  return found | own


def flax_nnx():
  make = lambda **kw: nnx.RNN(nnx.GRUCell(F, F, rngs=nnx.Rngs(0), **kw))
  rnn, options = make(), {'return_carry': True}
  graphdef, state = nnx.split(rnn)

  def run(x, carry=None, reset=None, **kw):
    copy = nnx.merge(graphdef, state, copy=True)
    return copy(x, initial_carry=carry, **kw, **options)[::-1]

  own = {
      'lengths': lambda: (run(X, seq_lengths=LENGTHS)[1][0], rnn(X)[0, 1]),
      'step': lambda: (rnn.cell(ZERO, X[:, 0])[1], rnn(X)[:, 0]),
      'bidirectional': lambda: nnx.Bidirectional(rnn, make())(X),
      'stack': lambda: nnx.Sequential(rnn, make())(X),
  }
  return trials(run, X, own, make(dtype=jnp.bfloat16))


def flax_linen():
  rnn, key = linen.RNN(linen.GRUCell(F), return_carry=True), jax.random.key(0)
  params = rnn.init(key, X)
  inner = {'params': params['params']['cell']}
  both = linen.Bidirectional(*(linen.RNN(linen.GRUCell(F)) for _ in range(2)))
  deep = linen.Sequential([linen.RNN(linen.GRUCell(F)) for _ in range(2)])

  def run(x, carry=None, reset=None, **kw):
    return rnn.apply(params, x, initial_carry=carry, **kw)[::-1]

  step = lambda: linen.GRUCell(F).apply(inner, ZERO, X[:, 0])[1]
  own = {
      'lengths': lambda: (run(X, seq_lengths=LENGTHS)[1][0], run(X)[0][0, 1]),
      'step': lambda: (step(), run(X)[0][:, 0]),
      'bidirectional': lambda: both.init_with_output(key, X)[0],
      'stack': lambda: deep.init_with_output(key, X)[0],
  }
  return trials(run, X, own)


def scanned():
  def body(cell, carry, given):
    x, reset = given
    return cell(jnp.where(reset[:, None], jnp.zeros_like(carry), carry), x)

  class Scanned(linen.Module):

    @linen.compact
    def __call__(self, carry, given):
      split = {'variable_broadcast': 'params', 'split_rngs': {'params': False}}
      over_time = linen.scan(body, in_axes=1, out_axes=1, **split)
      return over_time(linen.GRUCell(F), carry, given)

  def run(x, carry=None, reset=None):
    carry = ZERO if carry is None else carry
    reset = np.zeros(x.shape[:2], bool) if reset is None else reset
    return Scanned().apply(params, carry, (x, reset))[::-1]

  params = Scanned().init(jax.random.key(0), ZERO, (X, RESET))
  return trials(run, X, {})


def haiku():
  import haiku as hk

  core = hk.LSTM

  def unroll(make, x, carry=None, reset=None):
    cell = make()
    carry = cell.initial_state(B) if carry is None else carry
    if x.dtype == jnp.bfloat16:
      carry = jax.tree.map(lambda c: c.astype(x.dtype), carry)
    given = x if reset is None else (x, reset)
    return hk.dynamic_unroll(cell, given, carry, time_major=False)

  def transformed(make):
    function = functools.partial(unroll, make)
    return hk.without_apply_rng(hk.transform(function))

  plain = transformed(lambda: core(F))
  reset = transformed(lambda: hk.ResetCore(core(F)))
  key = jax.random.key(0)
  params = plain.init(key, X)

  def run(x, carry=None, flags=None):
    by = plain if flags is None else reset
    return by.apply(params, x, carry, flags)

  deep = transformed(lambda: hk.DeepRNN([core(F), core(F)]))
  low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
  half = lambda x: plain.apply(low, x)
  return trials(run, X, {'stack': lambda: deep.init(key, X)}, half)


def keras():
  os.environ.setdefault('KERAS_BACKEND', 'jax')
  from keras import layers

  make = functools.partial(layers.LSTM, F, return_sequences=True)
  rnn, mask = make(return_state=True), np.arange(T) < LENGTHS[:, None]
  stack = layers.RNN([layers.LSTMCell(F)] * 2, return_sequences=True)

  def run(x, carry=None, reset=None, mask=None):
    y, *carry = rnn(x, initial_state=carry, mask=mask)
    return y, carry

  own = {
      'lengths': lambda: (run(X, mask=mask)[0][0, 3], run(X)[0][0, 1]),
      'mask': lambda: (
          run(X, mask=~RESET)[0][:, 3],
          run(X[:, [0, 1, 3]])[0][:, 2],
      ),
      'step': lambda: (rnn.cell(X[:, 0], [ZERO] * 2)[0], run(X)[0][:, 0]),
      'bidirectional': lambda: layers.Bidirectional(make())(X),
      'stack': lambda: stack(X),
  }
  return trials(run, X, own, make(dtype='mixed_bfloat16'))


def torch_nn():
  import torch

  make = functools.partial(torch.nn.LSTM, F, F, batch_first=True)
  rnn, x = make(), torch.tensor(X)
  pack = torch.nn.utils.rnn.pack_padded_sequence
  packed = pack(x, LENGTHS, batch_first=True, enforce_sorted=False)
  wide, x64 = make().double(), x.double()
  jvp = lambda: torch.func.jvp(lambda x: wide(x)[0], (x64,), (x64,))[1]
  own = {
      'lengths': lambda: (rnn(packed)[1][0][0, 0], rnn(x)[0][0, 1]),
      'forward_mode': jvp,
      'bidirectional': lambda: make(bidirectional=True)(x)[0],
      'stack': lambda: make(num_layers=2)(x)[0],
  }
  run = lambda x, carry=None, reset=None: rnn(x, carry)
  return trials(run, x, own, make().bfloat16())


def flashrnn():
  os.environ.setdefault('CUDA_HOME', '/usr/local/cuda')
  import flashrnn as library
  import torch

  x, R, b = (torch.randn(s) for s in ((B, T, 4, 2, 2), (4, 2, 2, 2), (4, 2, 2)))

  def run(x, carry=None, reset=None):
    arrays = (a.to(x.dtype) for a in (x, R, b))
    options = {'backend': 'vanilla', 'dtype': str(x.dtype).split('.')[1]}
    states, last = library.flashrnn(*arrays, carry, **options)
    return states[0], last

  return trials(run, x, {'heads': lambda: run(x)[0]})


def mingru():
  import minGRU_pytorch as library
  from minGRU_pytorch import minLM
  import torch

  rnn, x = library.minGRU(F), torch.tensor(X)
  half = library.minGRU(F).bfloat16()
  deep = minLM.minLM(num_tokens=5, dim=F, depth=2)
  run = lambda x, carry=None, reset=None: rnn(x, carry, True)
  at_once, carry = [], None
  for t in range(T):
    y, carry = run(x[:, t : t + 1], carry)
    at_once.append(y)
  own = {
      'given_carry': lambda: (torch.cat(at_once, 1), run(x)[0]),
      'parallel': lambda: run(x)[0],
      'stack': lambda: deep(torch.zeros(B, T, dtype=int)),
  }
  return trials(run, x, own, half)


def memax():
  from memax.linen.models import residual
  from memax.linen.semigroups import lru
  from memax.linen.set_actions import gru

  sizes = {'recurrent_size': F}
  scan, algebra = gru.GRU.default_scan(), gru.GRU.default_algebra(**sizes)
  make = lambda **kw: gru.GRU(algebra=algebra, scan=scan, **sizes)
  rnn, none = make(), np.zeros((B, T), bool)
  zero = jax.tree.map(lambda h: jnp.stack([h] * B), rnn.zero_carry())
  params = rnn.init(jax.random.key(0), rnn.zero_carry(), (X[0], none[0]))
  deep = residual.ResidualModel(make, output_size=F, **sizes)

  def run(x, carry=None, reset=None):
    one = lambda carry, x, reset: rnn.apply(params, carry, (x, reset))
    reset = none[:, : x.shape[1]] if reset is None else reset
    carry, y = jax.vmap(one)(zero if carry is None else carry, x, reset)
    return y, jax.tree.map(lambda h: h[:, -1], carry)

  own = {
      'parallel': lambda: lru.LRU.default_scan().__name__ == 'semigroup_scan',
      'stack': lambda: [deep.zero_carry()],
  }
  return trials(run, X, own)


def torchrl():
  import tensordict
  import torch
  from torchrl import modules

  def call(module, x, carry=None, reset=None, names='h'):
    lead = x.shape[:-1]
    none = np.zeros(lead, bool) if reset is None else reset
    given = {'x': x, 'is_init': torch.tensor(none)[..., None]}
    ways = module.lstm.bidirectional + 1 if len(names) > 1 else 1
    for name in names:
      given[name] = x.new_zeros(*lead, ways, F) if carry is None else carry
    with modules.set_recurrent_mode(x.ndim == 3):
      return module(tensordict.TensorDict(given, lead))['y']

  def run(x, carry=None, reset=None):
    y = call(rnn, x, carry, reset)
    return y, y[:, -1:, None].expand(B, T - x.shape[1], 1, F)

  keys = lambda names: {
      'in_keys': ['x', *names],
      'out_keys': ['y', *(('next', name) for name in names)],
  }
  make = functools.partial(modules.GRUModule, F, F, **keys('h'))
  rnn, half, x = make(), make().bfloat16(), torch.tensor(X)
  both = modules.LSTMModule(F, F, bidirectional=True, **keys('hc'))
  own = {
      'step': lambda: (call(rnn, x[:, 0]), call(rnn, x)[:, 0]),
      'bidirectional': lambda: call(both, x, names='hc'),
      'stack': lambda: make(num_layers=2),
      'heads': lambda: modules.DreamerV3BlockGRU(F, F, num_blocks=2),
      'second': lambda: trials(slow, x, {})['second'](),
  }
  plain = make(python_based=True)
  slow = lambda x, *given: (call(plain, x, *given), None)
  return trials(run, x, own, functools.partial(call, half))


def pararnn():
  import pararnn as library
  import torch

  cell, x = library.ParaGRU(F, F), torch.tensor(X)
  rnn, newton = (
      library.ParaRNN(cell, solver=way) for way in ('sequential', 'newton')
  )
  half = library.ParaRNN(library.ParaGRU(F, F)).bfloat16()
  parts = torch.tensor([0, 2, T])
  heads = library.ParaRNN(library.ParaGRU(F, F, mix='head', n_heads=2))
  stack = library.ParaRNN([library.ParaGRU(F, F), library.ParaGRU(F, F)])
  packed = lambda x=x: rnn(x[:1], cu_seqlens=parts)
  bad = torch.where(torch.arange(T)[:, None] == 1, torch.nan, x)

  def run(x, carry=None, reset=None):
    y = rnn(x, h0=carry)
    return y, y[:, -1]

  step = lambda: library.decode_step(cell, torch.zeros(B, F), x[:, 0])
  own = {
      'resets': lambda: (packed()[:, 2:], rnn(x[:1, 2:])),
      'nan': lambda: (packed(bad)[:, 2:], rnn(x[:1, 2:])),
      'lengths': lambda: (packed()[:, 1], rnn(x)[:1, 1]),
      'step': lambda: (step(), rnn(x)[:, 0]),
      'stack': lambda: stack(x),
      'heads': lambda: heads(x),
      'parallel': lambda: (newton(x), rnn(x)),
  }
  return trials(run, x, own, half)


def equinox():
  import equinox as library

  make = lambda **kw: library.nn.GRUCell(F, F, key=jax.random.key(0), **kw)

  def run(x, carry=None, reset=None, cell=None):
    cell = cell or make()
    step = lambda h, x: (jax.vmap(cell)(x, h),) * 2
    carry = jnp.zeros((B, F), x.dtype) if carry is None else carry
    carry, y = jax.lax.scan(step, carry, jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(y, 0, 1), carry

  half = functools.partial(run, cell=make(dtype=jnp.bfloat16))
  return trials(run, X, {}, lambda x: half(x)[0])


def recurrentgemma():
  import recurrentgemma.jax as library

  make = functools.partial(library.RGLRU, width=F, num_heads=2)
  places = jnp.tile(jnp.arange(T), (B, 1))
  params = make().init(jax.random.key(0), jnp.asarray(X), places)

  def run(x, carry=None, reset=None, layer=None):
    layer = layer or make()
    begin = places[:, : x.shape[1]] + (carry is not None)
    begin = begin if reset is None else jnp.where(reset, 0, begin)
    return layer.apply(params, jnp.asarray(x), begin, carry)

  at_once = make(scan_type=library.ScanType.ASSOCIATIVE_NATIVE)
  own = {
      'parallel': lambda: (run(X, layer=at_once)[0], run(X)[0]),
      'stack': lambda: library.Griffin,
  }
  half = lambda x: run(x, layer=make(dtype=jnp.bfloat16))[0]
  return trials(run, X, own, half)


# By the name of a column: a module that shows whether it is installed.
LIBRARIES = {
    'flax.nnx.RNN': ('flax', flax_nnx),
    'flax.linen.RNN': ('flax', flax_linen),
    'haiku': ('haiku', haiku),
    'keras 3 on JAX': ('keras', keras),
    'torch.nn': ('torch', torch_nn),
    'FlashRNN': ('flashrnn', flashrnn),
    'minGRU-pytorch': ('minGRU_pytorch', mingru),
    'ScannedRNN of purejaxrl': ('flax', scanned),
    'memax': ('memax', memax),
    'torchrl': ('torchrl', torchrl),
    'pararnn-torch': ('pararnn', pararnn),
    'equinox': ('equinox', equinox),
    'recurrentgemma': ('recurrentgemma', recurrentgemma),
}


def wrong(name: str) -> list[str]:
  """Returns the claims about a library that fail, with their errors."""
  data = json.loads(DATA.read_text(encoding='utf-8'))
  column = data['libraries'].index(name)
  cells = {row['key']: row['cells'][column] for row in data['rows']}
  found, own = [], LIBRARIES[name][1]()
  for key, cell in cells.items():
    if cell in NO or key in UNTRIED:
      continue
    try:
      result = own[key]()
      if isinstance(result, tuple) and len(result) == 2:
        got, expected = map(_numpy, result)
        np.testing.assert_allclose(got, expected, atol=1e-5)
      elif result is False:
        raise ValueError('it is not so')
    except Exception as error:
      text = ' '.join(str(error).split())[:200]
      found.append(f'{name}, {key}, {cell!r}: {type(error).__name__}: {text}')
  return found


def _numpy(array):
  return np.asarray(array.detach() if hasattr(array, 'detach') else array)


def main() -> int:
  """Tries all libraries that are installed; returns the exit code."""
  failed = []
  for name, (module, _) in LIBRARIES.items():
    if importlib.util.find_spec(module) is None:
      print(f'{name} is not installed')
    else:
      failed += wrong(name)
      print(f'{name} was tried', flush=True)
  print(*failed, sep='\n')
  return int(bool(failed))


if __name__ == '__main__':
  sys.exit(main())
