"""Promises of single cells: parameters, limits, long sequences, memory."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 2, 6, 3, 4

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)

assert_finite = chex.assert_tree_all_finite


class ConstrainTest(parameterized.TestCase):

  @parameterized.parameters('IndRNN', 'IRevRNN')
  def test_clips_what_multiplies_the_carry_only(self, name):
    layer = random_layers.make(name, IN, FEATURES, scale=5.0, max_abs=1.5)
    copy = lambda: nnx.to_pure_dict(
        jax.tree.map(np.array, nnx.state(layer, nnx.Param))
    )
    before = copy()
    nnx.update(layer, rnnzoo.constrain(nnx.state(layer, nnx.Param)))
    after = copy()
    u = before['recurrent_kernel']
    self.assertGreater(np.abs(u).max(), 1.5)
    before['recurrent_kernel'] = np.clip(u, -1.5, 1.5)
    if name == 'IRevRNN':
      inner = before['cell_params']
      self.assertGreater(min(np.abs(inner[key]).max() for key in 'ab'), 1.5)
      before['cell_params'] = {k: np.clip(inner[k], -1.5, 1.5) for k in 'ab'}
    jax.tree.map(np.testing.assert_array_equal, after, before)

  def test_in_a_stack(self):
    stack = random_layers.make(
        rnnzoo.Stack, rnnzoo.IndRNN, IN, FEATURES, scale=5.0, max_abs=1.5
    )
    clipped = rnnzoo.constrain(nnx.state(stack, nnx.Param))
    kernel = clipped['layers'][0]['recurrent_kernel']
    self.assertEqual(np.abs(kernel[...]).max(), 1.5)

  @parameterized.product(dtype=('bfloat16', 'float16', 'float32'))
  @pytest.mark.few(2)
  def test_no_element_is_above_the_bound(self, dtype):
    # To the nearest, these are 1.0078 and .3008 in bfloat16.
    for bound in (2 ** (1 / 100), 0.3):
      layer = rnnzoo.IndRNN(
          IN, FEATURES, max_abs=bound, param_dtype=dtype, rngs=nnx.Rngs(0)
      )
      kernel = layer.recurrent_kernel
      kernel[...] = jnp.full_like(kernel[...], 5.0)
      clipped = rnnzoo.constrain(nnx.state(layer, nnx.Param))
      values = clipped['recurrent_kernel'][...]
      self.assertEqual(values.dtype, dtype)
      largest = float(values.max())
      self.assertLessEqual(largest, bound)
      self.assertGreater(largest, bound * (1 - float(jnp.finfo(dtype).eps)))

  @parameterized.product(
      name=('IndRNN', 'IRevRNN', 'GRU'),
      bound=(0.05, 0.3),
      dtype=('bfloat16', 'float32'),
  )
  @pytest.mark.few(2)
  def test_layers_start_within_the_bound(self, name, bound, dtype):
    layer = rnnzoo.LAYERS[name](
        IN, 64, max_abs=bound, param_dtype=dtype, rngs=nnx.Rngs(0)
    )
    u = np.asarray(layer.recurrent_kernel[...], np.float64)
    self.assertLessEqual(np.abs(u).max(), bound)
    if name != 'GRU':
      self.assertGreater(np.std(u), bound / 5)  # Drawn, not clipped.

  def test_inner_weights_start_within_the_bound(self):
    options = {'max_abs': 0.3, 'inner_scale': 1.0}
    layer = rnnzoo.IRevRNN(IN, 64, rngs=nnx.Rngs(0), **options)
    for name in 'ab':
      self.assertLessEqual(np.abs(layer.cell_params[name][...]).max(), 0.3)

  @parameterized.parameters('IndRNN', 'IRevRNN')
  def test_a_bound_beyond_the_range_changes_no_draw(self, name):
    for given in ((0.0, 1.0), (-0.5, 0.9), (1.0, 1.01)):
      options = {'recurrent_range': given, 'max_abs': 1.01}
      free, bounded = (
          rnnzoo.LAYERS[name](IN, FEATURES, rngs=nnx.Rngs(0), **own)
          for own in (options | {'max_abs': None}, options)
      )
      chex.assert_trees_all_equal(
          free.recurrent_kernel[...], bounded.recurrent_kernel[...]
      )

  @parameterized.parameters(
      ((0.6, 0.9), r'\(0.5, 0.5\)'),
      ((0.0, 0.9), r'\(0.0, 0.5\)'),
      ([-1, 0], r'\(-0.5, 0\)'),
  )
  def test_a_range_beyond_the_bound(self, given, better):
    for layer in (rnnzoo.IndRNN, rnnzoo.IRevRNN):
      with self.assertRaisesRegex(
          ValueError,
          f'recurrent_range must be within max_abs=0.5, got .*{better} would',
      ):
        layer(3, 8, max_abs=0.5, recurrent_range=given, rngs=nnx.Rngs(0))

  def test_numbers_that_float32_has_not(self):
    with self.assertRaisesRegex(ValueError, 'max_abs must be a finite number'):
      rnnzoo.IndRNN(3, 8, max_abs=10**400, rngs=nnx.Rngs(0))
    wide = (-3e38, 3e38)
    with self.assertRaisesRegex(ValueError, 'at most 3e38 wide'):
      rnnzoo.IndRNN(3, 8, recurrent_range=wide, rngs=nnx.Rngs(0))

  def test_unbounded(self):
    layer = random_layers.make('IndRNN', IN, FEATURES, scale=5.0)
    params = nnx.state(layer, nnx.Param)
    same = rnnzoo.constrain(params)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    nothing = nnx.state(layer, nnx.BatchStat)
    self.assertEmpty(jax.tree.leaves(rnnzoo.constrain(nothing)))


class SLSTMEquationsTest(parameterized.TestCase):

  def paper(self, i, f, z, o, c, n, m):
    """The first form of the equations, and JAX's own derivative of it."""
    l = jax.nn.log_sigmoid(f) + m
    m = jnp.where(n == 0, i, jnp.maximum(i, l))
    new, old = jnp.exp(i - m), jnp.where(n == 0, 0, jnp.exp(l - m))
    c, n = old * c + new * jnp.tanh(z), old * n + new
    n = jnp.where(n < 1, 1, n)  # At a tie, maximum's derivative is a mean.
    return jax.nn.sigmoid(o) * c / n, c, n, m

  def cell(self, i, f, z, o, c, n, m):
    zero = jnp.zeros_like(i)
    h_gates, carry = (zero,) * 4, (zero, c, n, m)
    return rnnzoo.SLSTMCell().update({}, (i, f, z, o), h_gates, carry)

  @pytest.mark.slow
  def test_where_the_normaliser_is_one(self):
    by_n = lambda f: jax.grad(
        lambda n: f(i=-20.0, f=3.0, z=0.5, o=0.2, c=0.7, n=n, m=0.0)[0]
    )(1.0)
    np.testing.assert_allclose(by_n(self.cell), by_n(self.paper), rtol=1e-5)

  @pytest.mark.slow
  def test_learned_carry_stays_empty(self):
    options = {'num_heads': 1, 'learn_initial_carry': True}
    layer = random_layers.make('SLSTM', IN, FEATURES, **options)
    loss, state = random_layers.squares(layer)
    zeros = jax.tree.map(jnp.zeros_like, state['learned_carry'])
    state['learned_carry'] = zeros
    gradient = jax.grad(loss)(state, x)['learned_carry']
    h, *others = jax.tree.leaves(gradient)
    self.assertGreater(np.abs(h).max(), 0)
    jax.tree.map(lambda d: np.testing.assert_array_equal(d, 0), others)


class AntisymmetricTest(parameterized.TestCase):

  def test_a_is_as_wide_as_the_computation(self):
    options = {'epsilon': 1.0, 'dtype': jnp.float32}
    make = lambda dtype: random_layers.make(
        'AntisymmetricRNN', IN, FEATURES, param_dtype=dtype, **options
    )
    narrow, wide = make(jnp.bfloat16), make(jnp.float32)
    cast = lambda a: a.astype(jnp.float32)
    nnx.update(wide, jax.tree.map(cast, nnx.state(narrow)))
    forward = reference.jit(lambda layer: layer(x))
    np.testing.assert_allclose(forward(narrow), forward(wide), atol=1e-6)

  @pytest.mark.slow
  def test_epsilon(self):
    learned = random_layers.make('AGRU', IN, FEATURES)
    grad = reference.jit(jax.grad(lambda layer: jnp.sum(layer(x) ** 2)))
    d_layer = grad(learned)
    self.assertNotEqual(float(d_layer.cell_params['epsilon'][...]), 0)
    fixed = rnnzoo.AGRU(
        IN, FEATURES, epsilon=0.3, learn_epsilon=False, rngs=nnx.Rngs(0)
    )
    params = nnx.to_pure_dict(nnx.state(fixed, nnx.Param))
    self.assertNotIn('cell_params', params)
    self.assertEqual(fixed.cell_params['epsilon'][...], np.float32(0.3))


class IRevRNNTest(parameterized.TestCase):

  @parameterized.parameters(
      ('relu', jax.nn.relu), ('tanh', jnp.tanh), ('sigmoid', jax.nn.sigmoid)
  )
  def test_invert(self, name, phi):
    cell = rnnzoo.IRevRNNCell(inner_activation=name)
    with jax.enable_x64(True):
      draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
      params = {'a': draw(5, FEATURES), 'b': draw(5, FEATURES)}
      h0, c0 = draw(BATCH, FEATURES), draw(BATCH, FEATURES)
      h, c = h0, c0
      for a, b in zip(params['a'], params['b'], strict=True):
        c = c + a * phi(h)
        h = h + b * phi(c)
      inverse = cell.invert(params, h, c)
      np.testing.assert_allclose(inverse, (h0, c0), rtol=1e-12)


class MinimalTest(parameterized.TestCase):
  """minGRU and minLSTM where the gates saturate."""

  @parameterized.product(
      layer=('MinGRU', 'MinLSTM'),
      candidate=('linear', 'positive'),
      path=('scan', 'associative_scan'),
  )
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_saturated_gates(self, layer, candidate, path):
    # Every pair of gates from this list in turn, so that the share kept is
    # exactly 0, exactly 1, or a quotient of two sigmoids that underflow.
    values = np.array([-2000, -200, -90, 0, 90, 2000], np.float32)
    f, i = (a.reshape(-1) for a in np.meshgrid(values, values))
    h = rng.standard_normal(f.shape).astype(np.float32)
    gates = [f, i, h] if layer == 'MinLSTM' else [i, h]
    gates = np.stack(gates, axis=-1)[None, :, :, None]
    cell = getattr(rnnzoo, layer + 'Cell')(candidate)
    carry = (np.ones((1, 1), np.float32),)

    @reference.jit
    def run(gates, carry):
      def loss(gates, carry):
        _, h = rnnzoo.unroll(cell, {}, gates, None, carry, implementation=path)
        return jnp.sum(h), h

      return jax.grad(loss, (0, 1), has_aux=True)(gates, carry)

    gradients, got = run(gates, carry)
    assert_finite((gradients, got))
    f, i, candidates = (np.float64(a) for a in (f, i, h))
    log_sigmoid = lambda v: -np.logaddexp(0, -v)
    if layer == 'MinGRU':
      log_keep, log_take = log_sigmoid(-i), log_sigmoid(i)
    else:
      total = np.logaddexp(log_sigmoid(f), log_sigmoid(i))
      log_keep, log_take = log_sigmoid(f) - total, log_sigmoid(i) - total
    if candidate == 'positive':
      candidates = np.where(
          candidates >= 0, candidates + 0.5, np.exp(log_sigmoid(candidates))
      )
    want, state = [], 1.0
    steps = zip(np.exp(log_keep), np.exp(log_take), candidates, strict=True)
    for keep, take, value in steps:
      state = keep * state + take * value
      want.append(state)
    np.testing.assert_allclose(got[0, :, 0], want, rtol=1e-5, atol=1e-6)

  @parameterized.product(
      layer=('MinGRU', 'MinLSTM'), candidate=('linear', 'positive')
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_long_sequence(self, layer, candidate):
    # In log space the paper's formula loses its digits here.
    x = rng.standard_normal((1, 4096, IN)).astype(np.float32)
    make = lambda path: random_layers.make(
        layer, IN, FEATURES, candidate=candidate, implementation=path
    )
    grad = lambda layer, x: jax.value_and_grad(
        lambda x: jnp.sum(layer(x)[:, -1])
    )(x)
    results = [
        reference.jit(grad)(make(path), x)
        for path in ('scan', 'associative_scan')
    ]
    assert_finite(results)
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


class ForgetBiasTest(parameterized.TestCase):

  @parameterized.parameters(('LSTM', 1), ('MinLSTM', 0))
  def test_is_added_to_one_gate(self, name, gate):
    init = nnx.with_metadata(jax.nn.initializers.constant(0.5), note='mine')
    layer = rnnzoo.LAYERS[name](
        IN, FEATURES, forget_bias=2.0, bias_init=init, rngs=nnx.Rngs(0)
    )
    self.assertEqual(layer.bias.get_metadata()['note'], 'mine')
    want = np.full(layer.bias.shape, 0.5, np.float32)
    want[gate] = 2.5
    np.testing.assert_array_equal(layer.bias[...], want)


class MinLSTMTest(parameterized.TestCase):

  @parameterized.parameters(
      (-np.inf, 0.0, 0.0), (0.0, -np.inf, 1.0), (-np.inf, -np.inf, 0.5)
  )
  def test_infinite_gates(self, f, i, want):
    # An infinity less itself is no number.
    gates = [jnp.full((1, 1), x, jnp.float32) for x in (f, i, 3.0)]
    a, b = rnnzoo.MinLSTMCell().coefficients({}, gates)
    np.testing.assert_allclose([a[0, 0], b[0, 0]], [want, 3 * (1 - want)])


class SLSTMTest(parameterized.TestCase):

  def run_cell(self, gates):
    """Returns h and d sum(h) / d gates for gates [time, 4]."""
    gates = np.asarray(gates, np.float32)[None, :, :, None]
    kernel = np.zeros((4, 1, 1, 1), np.float32)
    carry = (np.zeros((1, 1), np.float32),) * 4

    @reference.jit
    def run(gates):
      f = lambda gates: rnnzoo.unroll(
          rnnzoo.SLSTMCell(), {}, gates, kernel, carry
      )[1]
      return f(gates), jax.grad(lambda gates: jnp.sum(f(gates)))(gates)

    h, gradient = run(gates)
    assert_finite((h, gradient))
    return np.asarray(h)[0, :, 0]

  @parameterized.parameters(-1000.0, 0.0, 95.0)
  def test_first_step(self, i):
    # The zero state stands for no memory, whatever m = 0 would say: h is
    # o tanh(z), since c = i' tanh(z) and n = i'.
    h = self.run_cell([[i, 3.0, 0.7, 0.2]])
    want = np.tanh(0.7) / (1 + np.exp(-0.2))
    np.testing.assert_allclose(h, [want], rtol=1e-6)

  def test_extreme_gates(self):
    values = [-1000.0, -95.0, 0.0, 95.0, 1000.0]
    h = self.run_cell([[i, f, 1.0, 1.0] for i in values for f in values])
    self.assertLessEqual(np.abs(h).max(), 1)

  def test_long_sequence(self):
    gates = 5 * rng.standard_normal((4096, 4))
    h = self.run_cell(gates)
    self.assertLessEqual(np.abs(h).max(), 1)

  def test_forget_bias(self):
    layer = rnnzoo.SLSTM(
        IN, 8, num_heads=2, block_index=1, num_blocks=3, rngs=nnx.Rngs(0)
    )
    exponent = 0.3 + 1.3 * 1 / 2
    want = [5 - 12 * (j / 3) ** exponent for j in range(4)] * 2
    np.testing.assert_allclose(layer.bias[1], want, rtol=1e-6)
    np.testing.assert_array_equal(layer.recurrent_kernel[...], 0)


class LSTMTest(absltest.TestCase):

  @pytest.mark.slow
  def test_chrono(self):
    layer = rnnzoo.LSTM(IN, 400, chrono_steps=100, rngs=nnx.Rngs(0))
    i, f, o, g = layer.bias[...]
    np.testing.assert_array_equal(i, -f)
    np.testing.assert_array_equal(jnp.stack([o, g]), 0)
    # u of log u is uniform on 1 to 99.
    u = np.sort(np.exp(np.asarray(f, np.float64)))
    np.testing.assert_allclose(u, np.linspace(1, 99, 400), atol=8)
    with self.assertRaisesRegex(ValueError, 'which forget_bias=1 shifts'):
      rnnzoo.LSTM(IN, 8, chrono_steps=9, forget_bias=1, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, 'chrono_steps needs use_bias=True'):
      rnnzoo.LSTM(IN, 8, chrono_steps=9, use_bias=False, rngs=nnx.Rngs(0))


if __name__ == '__main__':
  absltest.main()
