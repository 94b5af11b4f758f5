"""Converted layers against the other library's own forward pass.

record_*.py recorded that, but for flax, which is there. `differences` is also
what docs/converting.md has:

    python tests/convert/libraries_test.py --write

writes benchmarks/conversions.json.
"""

import functools
import json
import pathlib
import sys
import types

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import linen
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import convert
from rnnzoo.benchmark import timing
from tests.cells import golden_test

HERE = pathlib.Path(__file__).resolve().parent
JSON = HERE.parents[1] / 'benchmarks' / 'conversions.json'
BATCH, TIME, IN, FEATURES = 2, 5, 3, 4

relu = functools.partial(rnnzoo.Elman, activation='relu')
unbiased = functools.partial(rnnzoo.GRU, use_bias=False)
both_ways = functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU)
BIDIRECTIONAL = functools.partial(rnnzoo.Bidirectional, rnnzoo.LSTM)
bounded = functools.partial(rnnzoo.SLSTM, max_forget=15)
TIREX = {'conv_width': 0, 'norm': 'rms', 'mlp_features': 64}
TIREX |= {'mlp_activation': 'silu', 'max_forget': 15, 'min_normalizer': 0}
ONE_BIAS = 'VanillaRNN, double_bias=False'


def load(name):
  """Returns recorded arrays, weights apart, in the order of their names."""
  with np.load(HERE / f'{name}.npz') as data:
    arrays = dict(data)
  weights = {
      k.removeprefix('weights/'): arrays.pop(k)
      for k in list(arrays)
      if k.startswith('weights/')
  }
  return arrays, weights


def make(cls, **options):
  return cls(IN, FEATURES, rngs=nnx.Rngs(0), **options)


def carries(arrays):
  return tuple(arrays[k] for k in sorted(arrays) if k.startswith('carry/'))


def torch_cell(name, cls):
  arrays, weights = load(f'torch_{name}')
  layer = make(cls)
  convert.from_torch(layer, weights)
  carry, y = layer.unroll(arrays['x'])
  pairs = (y, arrays['y']), (carry, carries(arrays))
  return weights, convert.to_torch(layer, cell=True), pairs


def projected():
  arrays, weights = load('torch_projected')
  lstm = functools.partial(rnnzoo.LSTM, projection=2)
  both = functools.partial(rnnzoo.Bidirectional, lstm)
  stack = make(functools.partial(rnnzoo.Stack, both, num_layers=2))
  convert.from_torch(stack, weights)
  carry, y = stack.unroll(arrays['x'])
  c = np.stack([pair[way].c for pair in carry for way in range(2)])
  return weights, convert.to_torch(stack), ((y, arrays['y']), (c, arrays['c']))


def folded_projection():
  arrays, weights = load('torch_projected')
  folded, projection = convert.fold_projection(weights)
  stack = make(functools.partial(rnnzoo.Stack, BIDIRECTIONAL, num_layers=2))
  convert.from_torch(stack, folded)
  carry, y = stack.unroll(arrays['x'])
  c = np.stack([pair[way][1] for pair in carry for way in range(2)])
  pairs = (y @ projection, arrays['y']), (c, arrays['c'])
  return folded, convert.to_torch(stack), pairs


def torch_module(name, cls):
  arrays = golden_test.load(name, 'bidirectional')
  weights = golden_test.state_dict(arrays, arrays['weights'])
  stack = rnnzoo.Stack(
      functools.partial(rnnzoo.Bidirectional, cls),
      arrays['x'].shape[-1],
      arrays['initial'].shape[-1],
      num_layers=2,
      rngs=nnx.Rngs(0),
  )
  convert.from_torch(stack, weights)
  start, end = (
      golden_test.unstacked(arrays[key], True) for key in ('initial', 'final')
  )
  carry, y = stack.unroll(
      arrays['x'], initial_carry=start, seq_lengths=arrays['seq_lengths']
  )
  return weights, convert.to_torch(stack), ((y, arrays['y']), (carry, end))


def flashrnn(function, cls):
  with np.load(HERE / f'flashrnn_{function}_1.npz') as data:
    arrays = dict(data)
  given = arrays['R'], arrays['b']
  heads, size = given[0].shape[1:3]
  layer = cls(IN, heads * size, num_heads=heads, rngs=nnx.Rngs(0))
  convert.from_flashrnn(layer, *given)
  options = {'function': function, 'dtype': 'float32'}
  states, last = rnnzoo.flashrnn(
      arrays['Wx'], *given, arrays['start'], **options
  )
  pairs = (states, arrays['states']), (last, arrays['last'])
  return given, convert.to_flashrnn(layer)[:2], pairs


def xlstm(name, cls):
  arrays, weights = load(name)
  scale = 1 + weights.pop('group_norm.weight')
  features = arrays['x'].shape[-1]
  layer = cls(features, features, num_heads=2, rngs=nnx.Rngs(0))
  convert.from_xlstm(layer, weights)
  carry, y = layer.unroll(arrays['x'])
  # Of their y: where three features are nearly equal, rounding grows large.
  heads = arrays['y'].reshape(*y.shape[:2], 2, -1)
  heads = heads - heads.mean(-1, keepdims=True)
  heads = heads / np.sqrt(heads.var(-1, keepdims=True) + 1e-5)
  normed = heads.reshape(y.shape) * scale
  backend = 'vanilla' if name == 'xlstm' else 'cuda'
  states = carry, carries(arrays)
  pairs = ((y, normed), (arrays['y'], arrays['normed'])), states
  return weights, convert.to_xlstm(layer, backend=backend), pairs


def xlstm_block(name, options=types.MappingProxyType({})):
  arrays, weights = load(name)
  features = arrays['x'].shape[-1]
  block = rnnzoo.SLSTMBlock(
      features, features, num_heads=2, rngs=nnx.Rngs(0), **options
  )
  convert.from_xlstm(block, weights)
  carry, y = block.unroll(arrays['x'])
  backend = 'cuda' if name == 'tirex_block' else 'vanilla'
  pairs = (y, arrays['y']), (carry, carries(arrays))
  return weights, convert.to_xlstm(block, backend=backend), pairs


def keras(name, cls):
  arrays, weights = load(f'keras_{name}')
  weights = [weights[str(i)] for i in range(len(weights))]
  layer = make(cls)
  convert.from_keras(layer, weights)
  carry, y = layer.unroll(arrays['x'])
  pairs = (y, arrays['y']), (jax.tree.leaves(carry), list(carries(arrays)))
  return weights, convert.to_keras(layer), pairs


def haiku(name, cls):
  arrays, flat = load(f'haiku_{name}')
  params = {}
  for key, value in flat.items():
    module, entry = key.split(':')
    params.setdefault(module, {})[entry] = value
  prefix = module.rpartition('/')[0] + '/'
  layer = make(cls)
  convert.from_haiku(layer, params, prefix=prefix)
  carry, y = layer.unroll(arrays['x'])
  back = convert.to_haiku(layer, prefix=prefix)
  for one_bias in back.keys() & params.keys():
    if 'b' not in params[one_bias]:
      del back[one_bias]['b']
  return params, back, ((y, arrays['y']), (carry, carries(arrays)))


def flax_linen(name, cls):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
  rnn = linen.RNN(getattr(linen, name)(FEATURES), return_carry=True)
  params = rnn.init(jax.random.key(0), x)['params']
  draw = lambda p: (0.5 * rng.standard_normal(p.shape)).astype(np.float32)
  params = jax.tree.map(draw, params)
  layer = make(cls)
  convert.from_linen(layer, params, prefix='cell/')
  carry, y = layer.unroll(x)
  want_carry, want = rnn.apply({'params': params}, x)
  want_carry = want_carry[::-1] if isinstance(want_carry, tuple) else want_carry
  back = {'cell': convert.to_linen(layer)}
  return params, back, ((y, want), (carry, jax.tree.leaves(want_carry)))


def flax_nnx(name, cls):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
  cells = [
      getattr(nnx, name)(IN, FEATURES, rngs=nnx.Rngs(seed)) for seed in (0, 1)
  ]
  for _, leaf in nnx.to_flat_state(nnx.state(cells[0], nnx.Param)):
    leaf.set_value(jnp.float32(0.5 * rng.standard_normal(leaf.shape)))
  layer = make(cls)
  convert.from_flax(layer, cells[0])
  convert.to_flax(layer, cells[1])
  carry, y = layer.unroll(x)
  want_carry, want = nnx.RNN(cells[0], return_carry=True)(x)
  want_carry = want_carry[::-1] if isinstance(want_carry, tuple) else want_carry
  pure = lambda cell: nnx.to_pure_dict(nnx.state(cell, nnx.Param))
  pairs = (y, want), (carry, jax.tree.leaves(want_carry))
  return pure(cells[0]), pure(cells[1]), pairs


# (library, its class): arguments of a function above
_FLAX = {
    'SimpleCell': rnnzoo.Elman,
    'LSTMCell': rnnzoo.LSTM,
    'OptimizedLSTMCell': rnnzoo.LSTM,
    'GRUCell': rnnzoo.GRU,
}
_TORCH = {'RNN': rnnzoo.Elman, 'LSTM': rnnzoo.LSTM, 'GRU': rnnzoo.GRU}
_TWO = ', 2 levels, bidirectional'
CASES = {
    ('torch', name + _TWO): (torch_module, name.lower(), cls)
    for name, cls in _TORCH.items()
}
CASES |= {
    ('torch', f'{name}Cell'): (torch_cell, f'{name.lower()}_cell', cls)
    for name, cls in _TORCH.items()
}
CASES |= {
    ('torch', 'LSTM, 2 levels, bidirectional, proj_size'): (projected,),
    ('keras 3', 'SimpleRNN'): (keras, 'simplernn', rnnzoo.Elman),
    ('keras 3', 'LSTM'): (keras, 'lstm', rnnzoo.LSTM),
    ('keras 3', 'GRU'): (keras, 'gru', rnnzoo.GRU),
    ('keras 3', 'GRU, use_bias=False'): (keras, 'gru_no_bias', unbiased),
    ('keras 3', 'Bidirectional(GRU)'): (keras, 'bidirectional', both_ways),
    ('haiku', 'LSTM'): (haiku, 'lstm', rnnzoo.LSTM),
    ('haiku', 'VanillaRNN'): (haiku, 'vanilla_rnn', relu),
    ('haiku', ONE_BIAS): (haiku, 'vanilla_rnn_one_bias', relu),
}
CASES |= {
    (f'flax.{library}', name): (function, name, cls)
    for library, function in (('linen', flax_linen), ('nnx', flax_nnx))
    for name, cls in _FLAX.items()
}
CASES |= {
    ('FlashRNN', 'elman'): (flashrnn, 'elman', rnnzoo.Elman),
    ('FlashRNN', 'lstm'): (flashrnn, 'lstm', rnnzoo.LSTM),
    ('FlashRNN', 'gru'): (flashrnn, 'gru', rnnzoo.GRU),
    ('FlashRNN', 'slstm'): (flashrnn, 'slstm', rnnzoo.SLSTM),
    ('xLSTM', 'sLSTMLayer, no convolution'): (xlstm, 'xlstm', rnnzoo.SLSTM),
    ('TiRex', 'sLSTMLayer'): (xlstm, 'tirex', bounded),
    ('xLSTM', 'sLSTMLayer'): (xlstm_block, 'xlstm_layer', {'residual': False}),
    ('xLSTM', 'sLSTMBlock'): (xlstm_block, 'xlstm_block'),
    ('TiRex', 'sLSTMBlock'): (xlstm_block, 'tirex_block', TIREX),
}

# They sum two biases, so only the sum comes back.
SUMMED = ('torch', 'haiku', 'keras 3')


def largest(pair):
  """Returns the largest difference between two trees of arrays."""
  got, want = (jax.tree.leaves(tree) for tree in pair)
  if len(got) != len(want):
    raise ValueError(f'{len(got)} arrays and {len(want)}')
  return max(
      float(np.abs(np.subtract(a, b, dtype=np.float64)).max())
      for a, b in zip(got, want, strict=True)
  )


def differences():
  """Returns the largest differences of outputs and of final states."""
  rows = []
  for (library, name), (function, *arguments) in CASES.items():
    _, _, (outputs, states) = function(*arguments)
    row = {'library': library, 'class': name, 'outputs': largest(outputs)}
    rows.append(row | {'states': largest(states)})
  return rows


class LibrariesTest(parameterized.TestCase):

  @parameterized.named_parameters(
      (f'{library}_{name}', library, name) for library, name in CASES
  )
  @pytest.mark.slow
  @pytest.mark.few(8)
  def test_same_numbers_and_back(self, library, name):
    function, *arguments = CASES[library, name]
    weights, back, pairs = function(*arguments)
    for got, want in pairs:
      size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
      self.assertLess(largest((got, want)), 1e-6 * max(size, 1))
    shapes = lambda tree: jax.tree.map(np.shape, tree)
    self.assertEqual(shapes(back), shapes(weights))
    if library in SUMMED:
      back, weights = both_biases(back), both_biases(weights)
    chex.assert_trees_all_close(back, weights, rtol=1e-6, atol=1e-6)

  def test_fold_projection(self):
    _, _, pairs = folded_projection()
    for pair in pairs:
      self.assertLess(largest(pair), 1e-6)

  @parameterized.parameters((15, 15), (None, 30))
  @pytest.mark.slow
  def test_bound_of_the_forget_gate(self, bound, forget):
    with jax.enable_x64(True):
      options = {'max_forget': bound, 'param_dtype': jnp.float64}
      layer = rnnzoo.SLSTM(1, 1, num_heads=1, rngs=nnx.Rngs(0), **options)
      layer.bias[...] = jnp.array([[-60.0], [30.0], [0.0], [0.0]])
      carry = tuple(jnp.full((1, 1), value) for value in (0.0, 0.0, 1.0, 0.0))
      carry, _ = layer.unroll(jnp.zeros((1, 100, 1)), initial_carry=carry)
      want = 100 * jax.nn.log_sigmoid(jnp.float64(forget))
      np.testing.assert_allclose(carry[3], [[want]], rtol=1e-6)

  @pytest.mark.slow
  def test_blocks_refuse_what_they_have_no_place_for(self):
    _, weights = load('xlstm_block')
    new = functools.partial(
        rnnzoo.SLSTMBlock, 8, 8, num_heads=2, rngs=nnx.Rngs(0)
    )
    block = new()
    missing = {k: v for k, v in weights.items() if k != 'ffn_norm.weight'}
    for case, given, message in (
        (block, missing, "no entry 'ffn_norm.weight'"),
        (new(mlp_features=0), weights, 'has entries'),
        (new(conv_width=0), weights, 'conv1d'),
        (new(mlp_features=32), weights, r'shape \(64, 8\)'),
        (new(norm='rms'), weights, "is TiRex's if it has conv_width=0"),
    ):
      before = nnx.to_pure_dict(nnx.state(case))
      with self.assertRaisesRegex(ValueError, message):
        convert.from_xlstm(case, given)
      after = nnx.to_pure_dict(nnx.state(case))
      chex.assert_trees_all_equal(after, before)
    prefixed = {f'blocks.0.{name}': value for name, value in weights.items()}
    convert.from_xlstm(block, prefixed, prefix='blocks.0.')
    with self.assertRaisesRegex(ValueError, 'backend must be one of'):
      convert.to_xlstm(block, backend='triton')
    again = new()
    convert.from_xlstm(again, convert.to_xlstm(block))
    chex.assert_trees_all_equal(nnx.state(again), nnx.state(block))

  def test_readme_has_what_is_seen(self):
    recorded = {
        (row['library'], row['class'])
        for row in json.loads(JSON.read_text())['rows']
    }
    self.assertEqual(recorded, set(CASES))


def both_biases(weights):
  """Returns weights with biases that stand in one sum added up."""
  if isinstance(weights, list):
    # The biases of z and r stand in one sum each.
    gru = lambda b: np.concatenate([b.sum(0)[:-FEATURES], *b[:, -FEATURES:]])
    return [gru(w) if w.shape == (2, 3 * FEATURES) else w for w in weights]
  flat = {
      name: value
      for name, value in weights.items()
      if not name.startswith('bias') and not isinstance(value, dict)
  }
  nested = {k: v for k, v in weights.items() if isinstance(v, dict)}
  for module, entries in nested.items():
    flat[f'{module}/w'] = entries['w']
  biases = [v['b'] for v in nested.values() if 'b' in v]
  if nested:
    return flat | {'bias': np.sum(biases, axis=0)}
  for name, value in weights.items():
    if name.startswith('bias_ih'):
      flat[name] = value + weights[name.replace('_ih', '_hh')]
  return flat


if __name__ == '__main__':
  if sys.argv[1:] == ['--write']:
    result = {
        'command': 'python tests/convert/libraries_test.py --write',
        **timing.environment(),
        'rows': differences(),
    }
    JSON.write_text(json.dumps(result, indent=1) + '\n')
  else:
    absltest.main()
