"""Zoneout and recurrent dropout against their formulas, by all paths."""

import functools
import re
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import linen
from rnnzoo.layers import levels
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import dense_loops
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 3, 6, 2, 4
LAUNCH = re.compile(r'custom_call @mosaic_gpu')

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN))
reset = rng.random((BATCH, TIME)) < 0.3
lengths = np.array([TIME, 4, 0])
sigmoid = lambda x: 1 / (1 + np.exp(-x))
draw = lambda seed=1: nnx.Rngs(dropout=seed)

BOTH = {'zoneout_rate': 0.3, 'recurrent_dropout_rate': 0.4}
LAYERS = {
    'LSTM': BOTH | {'zoneout_rate': (0.2, 0.5)},
    'GRU': BOTH | {'recurrent_dropout_per_step': True},
    'AGRU': BOTH | {'learn_epsilon': False},
    'IndRNN': {'zoneout_rate': 0.3},
}


def lstm(own, x, r, seen, h, c):
  del own, h
  i, f, g, o = (x[k] + r(k, seen) for k in range(4))
  c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
  return sigmoid(o) * np.tanh(c), c


def gru(own, x, r, seen, h):
  reset, z = (sigmoid(x[k] + r(k, seen)) for k in range(2))
  n = np.tanh(x[2] + reset * (r(2, seen) + own['recurrent_bias']))
  return ((1 - z) * n + z * h,)


def agru(own, x, r, seen, h):
  reset, z = (sigmoid(x[k] + r(k, seen)) for k in range(2))
  return (h + own['epsilon'] * z * np.tanh(x[2] + r(2, reset * seen)),)


@functools.cache
def make(name, implementation=None, **options):
  options = options or LAYERS[name]
  return random_layers.make(
      *(name, IN, FEATURES),
      implementation=implementation,
      param_dtype=jnp.float64,
      learn_initial_carry=True,
      **options,
  )


def formula(equations, layer, masks, train):
  """Returns all h and the last carry by numpy, with resets and lengths."""
  kernel, bias = np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])
  recurrent = np.asarray(layer._recurrent_kernel(jnp.float64))[:, 0]
  own = {k: np.asarray(v[...]) for k, v in layer.cell_params.items()}
  start = [np.asarray(c[...]) for c in layer.learned_carry]
  carry = [np.broadcast_to(c, (BATCH, FEATURES)) for c in start]
  keep = np.ones((BATCH, TIME, FEATURES))
  if train:
    shared = np.asarray(masks.dropout)
    shared = shared if shared.ndim == 3 else shared[:, None]
    keep = keep * shared / (1 - layer.recurrent_dropout_rate)
  dropout, outputs = keep[:, 0], []
  for t in range(TIME):
    valid = (t < lengths)[:, None]
    begins = reset[:, t, None] & valid
    old = [np.where(begins, s, c) for s, c in zip(start, carry, strict=True)]
    dropout = np.where(begins, keep[:, 0], dropout)
    gates = [x[:, t] @ kernel[g] + bias[g] for g in range(len(kernel))]
    product = lambda gate, h: h @ recurrent[gate]
    new = equations(own, gates, product, dropout * old[0], *old)
    z = layer.zoneout_rate
    if train:
      z = [np.asarray(mask)[:, t] for mask in masks.zoneout]
    new = [k * a + (1 - k) * b for k, a, b in zip(z, old, new, strict=True)]
    carry = [np.where(valid, a, b) for a, b in zip(new, old, strict=True)]
    dropout = np.where(valid, keep[:, t], dropout)
    outputs.append(np.where(valid, new[0], 0))
  return np.stack(outputs, 1), carry


@functools.partial(reference.jit, static_argnums=(0, 3, 4))
def run(graphdef, state, x, train=True, reverse=False):
  """Returns the final carry and outputs, and gradients."""

  def loss(state, x):
    carry, y = nnx.merge(graphdef, state).unroll(
        x,
        reset=reset[:, : x.shape[1]],
        seq_lengths=lengths,
        reverse=reverse,
        rngs=draw() if train else None,
    )
    return sum(jnp.sum(jnp.sin(v)) for v in (y, *carry)), (carry, y)

  gradients, outputs = jax.grad(loss, (0, 1), has_aux=True)(state, x)
  return outputs, gradients


def of(layer, *args, **options):
  return run(*nnx.split(layer), x, *args, **options)


def launches(layer, train, differentiated=False):
  """Returns how many GPU kernels a call starts."""
  call, state = random_layers.pure(layer)
  f = lambda state, x: call(state, x, rngs=draw() if train else None)
  if differentiated:
    f = jax.grad(lambda state, x, f=f: jnp.sum(f(state, x), dtype='float32'))
  x = jax.ShapeDtypeStruct((16, 5, 8), jnp.bfloat16)
  return len(LAUNCH.findall(abstract_gpu.lower(f, state, x)))


class RegularisationTest(parameterized.TestCase):

  @parameterized.parameters(('LSTM', lstm), ('GRU', gru), ('AGRU', agru))
  @pytest.mark.few(2)
  def test_formula(self, name, equations):
    with jax.enable_x64(True):
      layer = make(name)
      masks = layer._masks(x, False, draw())
      for train in (True, False):
        (carry, y), _ = of(layer, train)
        want = formula(equations, layer, masks, train)
        for got, value in zip((y, *carry), (want[0], *want[1]), strict=True):
          np.testing.assert_allclose(got, value, atol=1e-13)
      _, y_0 = layer.step(layer.initial_carry((BATCH,)), x[:, 0])
      np.testing.assert_allclose(y_0[:2], y[:2, 0], atol=1e-13)
    self.assertEqual(carry._fields, layer.cell.carry_names)

  @parameterized.parameters(*LAYERS)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_paths(self, name):
    with jax.enable_x64(True):
      got = of(make(name, 'associative_scan'), True, True)
      want = of(make(name, 'scan'), True, True)
      chex.assert_trees_all_close(got, want, rtol=1e-7, atol=1e-12)

  @parameterized.parameters('LSTM', 'AGRU', 'IndRNN')
  @pytest.mark.slow
  def test_kernels(self, name):
    loops = dense_loops.imitated  # Dense kernels cannot be interpreted.
    within = abstract_gpu.interpreted if name == 'IndRNN' else loops
    options = BOTH | LAYERS[name]
    make = functools.partial(random_layers.make, name, IN, FEATURES, **options)
    with within(self):
      got, want = (of(make(implementation=p)) for p in ('pallas', 'scan'))
      comparison.assert_near(got, want, 3e-5)

  @pytest.mark.slow
  def test_lowers_and_is_not_fused_in_training(self):
    options = {'implementation': 'pallas', 'dtype': jnp.bfloat16}
    make = lambda cls, **more: nnx.eval_shape(
        lambda: cls(rnnzoo.LSTM, 8, 64, rngs=nnx.Rngs(0), **options, **more)
    )
    both = rnnzoo.Bidirectional
    stack = functools.partial(rnnzoo.Stack, num_layers=2)
    with abstract_gpu.device(self, 'NVIDIA H200'):
      dropping = {'recurrent_dropout_rate': 0.3}
      # An LSTM reads only the dropped h, so h has a gradient of 0.
      self.assertEqual(launches(make(both, **dropping), True, True), 4)
      self.assertEqual(launches(make(both), True), 1)
      self.assertEqual(launches(make(both, **dropping), False), 1)
      self.assertEqual(launches(make(both, **dropping), True), 2)
      self.assertEqual(launches(make(both, zoneout_rate=0.1), False), 2)
      self.assertEqual(launches(make(both, **BOTH), True), 2)
      refuse = NotImplementedError('not at once')
      with mock.patch.object(levels, 'unroll', side_effect=refuse) as at_once:
        for train in (True, False):
          self.assertGreater(launches(make(stack, **dropping), train), 0)
          self.assertEqual(at_once.called, not train)

  @pytest.mark.slow
  def test_masks(self):
    layer = rnnzoo.LSTM(IN, FEATURES, rngs=nnx.Rngs(0), **LAYERS['LSTM'])
    masks = layer._masks(x, False, draw())
    turned = layer._masks(np.swapaxes(x, 0, 1), True, draw())
    longer = layer._masks(np.tile(x, (1, 2, 1)), False, draw())
    others = layer._masks(x, False, draw(2))
    np.testing.assert_array_equal(masks.dropout, longer.dropout)
    np.testing.assert_array_equal(masks.dropout, turned.dropout)
    self.assertTrue(np.any(masks.dropout != others.dropout))
    for i in range(2):
      z = np.asarray(masks.zoneout[i])
      np.testing.assert_array_equal(z, longer.zoneout[i][:, :TIME])
      np.testing.assert_array_equal(z, np.swapaxes(turned.zoneout[i], 0, 1))
      self.assertTrue(np.any(z != others.zoneout[i]))
    self.assertTrue(np.any(masks.zoneout[0] != masks.zoneout[1]))
    wide = rnnzoo.LSTM(1, 100, rngs=nnx.Rngs(0), **LAYERS['LSTM'])
    masks = wide._masks(np.ones((50, 20, 1)), False, draw())
    shares = [np.mean(mask) for mask in (*masks.zoneout, masks.dropout)]
    np.testing.assert_allclose(shares, (0.2, 0.5, 0.6), atol=0.03)

  @pytest.mark.slow
  def test_transformations(self):
    layer = random_layers.make('GRU', IN, FEATURES, **BOTH)
    f = lambda x, key: layer(x, rngs=nnx.Rngs(dropout=key))
    keys = jax.random.split(jax.random.key(0), 2)
    many = reference.jit(jax.vmap(f, (None, 0)))(x, keys)
    for key, y in zip(keys, many, strict=True):
      np.testing.assert_allclose(y, reference.jit(f)(x, key), atol=1e-6)

  def test_rate_0_is_the_plain_layer(self):
    plain = random_layers.make('LSTM', IN, FEATURES)
    zero = random_layers.make(
        *('LSTM', IN, FEATURES),
        zoneout_rate=(0, 0.0),
        recurrent_dropout_rate=0.0,
    )
    self.assertEqual(nnx.split(zero)[0], nnx.split(plain)[0])
    options = {'recurrent_dropout_rate': 0.5}
    dropping = random_layers.make('LSTM', IN, FEATURES, **options)
    chex.assert_trees_all_equal(of(dropping, False), of(plain, False))

  @pytest.mark.slow
  def test_composed(self):
    lstm = functools.partial(rnnzoo.LSTM, **BOTH)
    both = functools.partial(rnnzoo.Bidirectional, lstm)
    stack = rnnzoo.Stack(both, IN, FEATURES, num_layers=2, rngs=nnx.Rngs(0))
    plain, drawn, again = stack(x), stack(x, rngs=draw()), stack(x, rngs=draw())
    np.testing.assert_array_equal(drawn, again)
    self.assertGreater(np.abs(drawn - plain).max(), 1e-3)
    rngs, ways = draw(), stack.layers[0]
    first, second = (
        way._masks(x, False, rngs) for way in (ways.forward, ways.backward)
    )
    self.assertTrue(np.any(first.dropout != second.dropout))
    stack.eval()
    np.testing.assert_array_equal(stack(x, rngs=draw()), plain)
    layer = lstm(IN, FEATURES, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, "stream 'dropout'"):
      layer(x, rngs=nnx.Rngs(params=0))
    off = nnx.view(layer, deterministic=True)
    np.testing.assert_array_equal(off(x, rngs=draw()), layer(x))
    stack.train()
    with self.assertRaisesRegex(ValueError, r'After train\(\), this LSTM'):
      stack(x)
    module = linen.LSTM(FEATURES, **BOTH)
    variables = module.init(jax.random.key(0), x)
    keys = {'dropout': jax.random.key(1)}
    dropped = module.apply(variables, x, rngs=keys)
    self.assertGreater(np.abs(dropped - module.apply(variables, x)).max(), 1e-3)

  @parameterized.parameters(
      (
          'LSTM',
          {'zoneout_rate': 1.0},
          r'zoneout_rate must be .* from 0 below 1',
      ),
      (
          'LSTM',
          {'zoneout_rate': True},
          r'zoneout_rate must be .* from 0 below 1',
      ),
      ('LSTM', {'zoneout_rate': (0.1,)}, r"each of the carries \('h', 'c'\)"),
      ('LSTM', {'zoneout_rate': '0.1'}, 'zoneout_rate must be a number'),
      (
          'GRU',
          {'recurrent_dropout_rate': -0.1},
          r'rate must be .* from 0 below 1',
      ),
      ('SLSTM', {'zoneout_rate': 0.1}, r'\(0.1, 0, 0, 0\) would work'),
      ('MinGRU', {'zoneout_rate': 0.1}, 'MinGRUCell has none'),
      ('LRU', {'recurrent_dropout_rate': 0.1}, 'LRUCell has none'),
  )
  def test_refused(self, name, options, message):
    with self.assertRaisesRegex(ValueError, message):
      rnnzoo.LAYERS[name](3, 4, rngs=nnx.Rngs(0), **options)


if __name__ == '__main__':
  absltest.main()
