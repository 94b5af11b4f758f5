"""DenseStack: levels over all outputs below, with the contract of a layer."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 3, 5, 4, 6
OUT = IN + 2 * FEATURES
LENGTHS = np.array([5, 2, 0], np.int32)

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
valid = np.arange(TIME) < LENGTHS[:, None]
reset = rng.random((BATCH, TIME)) < 0.3

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
equal = np.testing.assert_array_equal


def make(layer=rnnzoo.GRU, **options):
  options = {'num_layers': 2} | options
  stack = random_layers.make(rnnzoo.DenseStack, layer, IN, FEATURES, **options)
  for norm in stack.norms:
    if isinstance(norm, nnx.BatchNorm):
      norm.var[...] = 1 + jnp.abs(norm.var[...])
  return stack


class DenseStackTest(parameterized.TestCase):

  @parameterized.parameters(None, 'layer', 'batch')
  @pytest.mark.few(2)
  def test_each_level_is_over_all_below(self, norm):
    stack = make(norm=norm)

    @reference.jit
    def run(stack, x):
      outputs = x
      for index, level in enumerate(stack.layers):
        y = level(outputs, reset=reset)
        if norm == 'batch':
          y = stack.norms[index](y, use_running_average=True)
        elif norm:
          y = stack.norms[index](y)
        outputs = jnp.concatenate([outputs, y], axis=-1)
      return stack(x, reset=reset), outputs

    got, want = run(stack, x)
    self.assertEqual(got.shape, (BATCH, TIME, OUT))
    self.assertEqual(stack.out_features, OUT)
    self.assertEqual(stack.features, FEATURES)
    close(got, want)

  def test_drops_new_outputs_while_training(self):
    stack = make(rnnzoo.LSTM, dropout_rate=0.5)
    train = nnx.jit(lambda stack, x, rngs: stack(x, rngs=rngs))
    y = np.asarray(train(stack, x, nnx.Rngs(dropout=0)))
    equal(y[..., :IN], x)
    first, last = np.split(y[..., IN:], 2, axis=-1)
    self.assertBetween(np.mean(first == 0), 0.2, 0.8)
    self.assertEqual(np.mean(last == 0), 0)

  def test_modes(self):
    stack = make(dropout_rate=0.5, norm='batch')
    rngs = lambda: nnx.Rngs(dropout=0)
    want = stack(x)
    stack.eval()
    equal(stack(x, rngs=rngs()), want)
    equal(stack.norms[0].mean[...], make(norm='batch').norms[0].mean[...])
    stack.train()
    with self.assertRaisesRegex(ValueError, 'this DenseStack needs random num'):
      stack(x)
    self.assertGreater(np.abs(stack(x, rngs=rngs()) - want).max(), 1e-3)

  @parameterized.parameters(
      ({'norm_momentum': 0.5}, ValueError, "needs norm='batch'"),
      ({'layer': [rnnzoo.GRU]}, ValueError, 'one factory or num_layers = 2'),
      ({'residual': True}, TypeError, 'dense or residual, not both'),
      ({'residual': False}, TypeError, 'dense or residual, not both'),
      ({'gamma': 1.0}, TypeError, "GRU has no argument 'gamma'"),
  )
  def test_options_are_refused(self, options, error, message):
    layer = options.pop('layer', rnnzoo.GRU)
    options = {'num_layers': 2, 'rngs': nnx.Rngs(0)} | options
    with self.assertRaisesRegex(error, message):
      rnnzoo.DenseStack(layer, IN, FEATURES, **options)

  def test_calls_are_refused(self):
    stack = make()
    with self.assertRaisesRegex(ValueError, 'carry must be a tuple of 2'):
      stack.step((), x[:, 0])
    with self.assertRaisesRegex(ValueError, 'in_features = 4, got shape'):
      stack(x[..., :2])


if __name__ == '__main__':
  absltest.main()
