"""The language model: its parts, and its steps against its sequences."""

import functools
import logging

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import models
from rnnzoo.models import language as language_model
from tests.testing import random_layers
from tests.testing import several_devices


def make(layer=rnnzoo.MinGRU, **options):
  options = {'features': 6} | options
  return models.LanguageModel(
      layer, 7, num_blocks=2, rngs=nnx.Rngs(0), **options
  )


TOKENS = np.random.RandomState(0).randint(0, 7, (3, 9))


class LanguageModelTest(parameterized.TestCase):

  def test_convolution(self):
    conv = language_model.ShortConvolution(2, 3, rngs=nnx.Rngs(0))
    conv.bias[...] = jnp.array([0.5, -1.0])
    x = np.random.RandomState(1).randn(5, 2).astype(np.float32)
    before = np.random.RandomState(2).randn(2, 2).astype(np.float32)
    whole = np.concatenate([before, x])
    kernel = np.asarray(conv.kernel)
    want = [
        sum(kernel[k] * whole[t + 2 - k] for k in range(3)) + [0.5, -1.0]
        for t in range(5)
    ]
    carry, y = conv.unroll(jnp.asarray(before), jnp.asarray(x))
    np.testing.assert_allclose(y, want, rtol=1e-5)
    np.testing.assert_array_equal(carry, x[-2:])

  @pytest.mark.slow
  def test_arguments_of_a_step_the_other_way_round(self):
    model = make()
    carry = model.initial_carry((3,))
    with self.assertRaisesRegex(
        ValueError, 'tokens must be an array, got a tuple'
    ):
      model.step(TOKENS[:, 0], carry)

  def test_without_values(self):
    model = nnx.eval_shape(make)
    with self.assertRaisesRegex(ValueError, 'Embed.embedding has a shape but'):
      model(TOKENS)

  @parameterized.parameters(
      {'mlp': 'plain'},
      {'mlp': 'gated', 'is_tied': True},
      {'mlp': None, 'conv_width': 0},
      {'layer': rnnzoo.LSTM, 'conv_width': 1},
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_steps_equal_the_sequence(self, **options):
    model = make(**options)
    want = model(TOKENS)
    self.assertEqual(want.shape, (3, 9, 7))
    carry, logits = model.initial_carry((3,)), []
    step = jax.jit(lambda carry, tokens: model.step(carry, tokens))
    for t in range(4):
      carry, now = step(carry, TOKENS[:, t])
      logits.append(now)
    # The rest in one piece.
    _, rest = model.unroll(TOKENS[:, 4:], initial_carry=carry)
    found = jnp.concatenate([jnp.stack(logits, 1), rest], axis=1)
    np.testing.assert_allclose(found, want, atol=2e-5)
    # One text without a batch.
    np.testing.assert_allclose(model(TOKENS[0]), want[0], atol=2e-5)

  def test_a_text_begins_anew(self):
    model = make()
    first, _ = model.step(model.initial_carry((2,)), jnp.array([1, 2]))
    reset = jnp.array([True, False])
    _, y = model.step(first, jnp.array([1, 2]), reset=reset)
    _, begun = model.step(model.initial_carry((2,)), jnp.array([1, 2]))
    _, later = model.step(first, jnp.array([1, 2]))
    want = jnp.where(reset[:, None], begun, later)
    np.testing.assert_allclose(y, want, rtol=1e-5)

  @pytest.mark.slow
  def test_steps_compile_nothing_after_the_first(self):
    block = functools.partial(rnnzoo.SLSTMBlock, num_heads=2)
    newton = functools.partial(rnnzoo.GRU, implementation='associative_scan')
    x = jnp.ones((3, 6))
    for model, given in (
        (make(newton), TOKENS[:, 0]),
        (make(block), TOKENS[:, 0]),
        (block(6, 6, rngs=nnx.Rngs(0)), x),
    ):
      carry, _ = model.step(model.initial_carry((3,)), given)
      with jax.log_compiles(), self.assertLogs('jax', 'WARNING') as logs:
        logging.getLogger('jax').warning('One there must be.')
        model.step(carry, given)
      self.assertNotIn('Compiling', ''.join(logs.output))

  def test_no_token_sees_a_later_one(self):
    model = make()
    other = TOKENS.copy()
    other[:, 5:] = 0
    logits = jax.jit(lambda tokens: model(tokens))
    difference = np.abs(logits(TOKENS) - logits(other)).max((0, 2))
    self.assertEqual(difference[:5].max(), 0.0)
    self.assertGreater(difference[5:].max(), 1e-3)

  @parameterized.parameters(
      ({}, 24), ({'mlp': 'gated'}, 16), ({'mlp_features': 5}, 5)
  )
  def test_features_inside_the_mlp(self, options, inside):
    model = nnx.eval_shape(lambda: make(**options))
    for block in model.blocks:
      self.assertEqual(block.mlp.up.kernel.shape, (6, inside))
      self.assertEqual(block.mlp.down.kernel.shape, (inside, 6))

  @pytest.mark.slow
  def test_dropout_needs_rngs(self):
    model = make(dropout_rate=0.5)
    np.testing.assert_array_equal(model(TOKENS), model(TOKENS))
    difference = model(TOKENS, rngs=nnx.Rngs(dropout=0)) - model(TOKENS)
    self.assertGreater(np.abs(difference).max(), 1e-2)

  @parameterized.parameters({}, {'num_devices': 2, 'is_tied': True})
  @pytest.mark.slow
  def test_a_batch_over_an_explicit_axis(self, num_devices=4, **options):
    # As under jax.set_mesh, on devices that are not here.
    mesh = several_devices.explicit_mesh(data=num_devices)
    sharded = lambda x, *spec: several_devices.sharded(
        mesh, jax.P(*spec), x.shape, x.dtype
    )
    gru = rnnzoo.GRU(3, 6, rngs=nnx.Rngs(0))
    sequence = models.SequenceModel(gru, 2, num_tokens=7, rngs=nnx.Rngs(0))
    translate = random_layers.seq2seq(gru, 6)
    tokens = sharded(jnp.zeros((8, 9), jnp.int32), 'data')
    for model, count in ((make(**options), 1), (sequence, 1), (translate, 2)):
      call, state = random_layers.pure(model)
      state = jax.tree.map(sharded, state)
      loss = lambda *given, call=call: call(*given).sum()
      with jax.sharding.use_abstract_mesh(mesh):
        logits = jax.eval_shape(call, state, *[tokens] * count)
        gradient = jax.eval_shape(jax.grad(loss), state, *[tokens] * count)
      self.assertEqual(logits.sharding.spec[0], 'data')
      jax.tree.map(lambda x: self.assertFalse(any(x.sharding.spec)), gradient)

  @pytest.mark.slow
  def test_gradient_reaches_every_parameter(self):
    model = make(mlp='gated')
    gradients = nnx.grad(lambda model: jnp.sum(model(TOKENS) ** 2))(model)
    for path, leaf in jax.tree.leaves_with_path(gradients):
      self.assertGreater(np.abs(leaf).max(), 0.0, jax.tree_util.keystr(path))

  @parameterized.parameters(
      ({'mlp': 'wide'}, 'mlp must be one of'),
      ({'mlp_features': 0}, 'mlp_features must be'),
      ({'mlp': None, 'mlp_features': 5}, 'mlp_features=5 needs an mlp'),
      ({'conv_width': -1}, 'conv_width must be'),
      ({'dropout_rate': 1.5}, 'dropout_rate must be a finite number'),
      ({'is_tied': 'no'}, 'is_tied must be'),
      ({'dtype': 'int32'}, 'dtype must be'),
      ({'dtype': 'foo'}, 'dtype must be'),
      ({'features': 10**9}, r'kernel of a block must have at most 2\^48'),
  )
  def test_errors(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      make(**options)

  @pytest.mark.slow
  def test_dtype_of_blocks(self):
    options = {'mlp': 'gated', 'conv_width': 2}
    half = functools.partial(rnnzoo.MinGRU, dtype=jnp.bfloat16)
    model = make(half, dtype=jnp.bfloat16, **options)
    kinds = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))}
    self.assertSequenceEqual([*kinds], [jnp.float32])
    logits = jax.jit(model)(TOKENS)
    self.assertEqual(logits.dtype, jnp.float32)
    np.testing.assert_allclose(logits, make(**options)(TOKENS), atol=0.05)
    products = [
        line
        for line in str(jax.make_jaxpr(model)(TOKENS)).splitlines()
        if 'dot_general' in line and ':bf16' in line
    ]
    self.assertLen(products, 2 * 3)  # Those of the MLPs.
    # A carry keeps its dtypes, so that a loop can pass it on.
    _, steps = jax.lax.scan(model.step, model.initial_carry((3,)), TOKENS.T)
    np.testing.assert_allclose(steps.swapaxes(0, 1), logits, atol=0.05)

  @parameterized.parameters(
      (lambda n, m, rngs: rnnzoo.GRU(n, 3, rngs=rngs), 'must have 6 features'),
      (
          functools.partial(rnnzoo.Bidirectional, rnnzoo.GRU),
          'must not read backwards',
      ),
      (rnnzoo.Bidirectional, 'make_layer must say which layer is inside'),
      ('GRU', 'make_layer must be a layer class'),
      (nnx.Linear, 'must be a layer class'),
  )
  def test_layers_that_cannot_be(self, layer, message):
    with self.assertRaisesRegex(ValueError, message):
      make(layer)

  def test_carries_that_cannot_be(self):
    model, carry = make(), make(conv_width=2).initial_carry((3,))
    for given in (carry, carry[:1], model.initial_carry((2,)), 3):
      with self.assertRaisesRegex(ValueError, 'carry must be as initial_carry'):
        model.step(given, TOKENS[:, 0])

  @pytest.mark.slow
  def test_batch_shapes_that_cannot_be(self):
    model = make(functools.partial(rnnzoo.SLSTMBlock, num_heads=2))
    for shape in (-1,), 2, 'a', ('a',), (2.0,):
      with self.assertRaisesRegex(ValueError, 'batch_shape must be a tuple of'):
        model.initial_carry(shape)

  def test_tokens_out_of_range(self):
    with self.assertRaisesRegex(ValueError, 'from 0 to 6, got .* from 0 to 7'):
      make()(np.array([0, 7]))


if __name__ == '__main__':
  absltest.main()
