"""An LSTM with peepholes and a projection: its formula in numpy, all paths."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 2, 5, 3, 6

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN))
reset = rng.random((BATCH, TIME)) < 0.3
sigmoid = lambda x: 1 / (1 + np.exp(-x))


def make(**options):
  return random_layers.make(
      *(rnnzoo.LSTM, IN, FEATURES), param_dtype=jnp.float64, **options
  )


def formula(layer):
  """Yields y, m and c of each step, by the formulas of TensorFlow and torch."""
  kernel, bias = np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])
  recurrent = np.asarray(layer.recurrent_kernel[...])[:, 0]
  P = np.eye(FEATURES)
  if layer.readout is not None:
    P = np.asarray(layer.readout.kernel[...])
  own = {k: np.asarray(v[...]) for k, v in layer.cell_params.items()}
  p_i, p_f, p_o = (own.get(name, 0) for name in ('p_i', 'p_f', 'p_o'))
  y, c = np.zeros((BATCH, P.shape[1])), np.zeros((BATCH, FEATURES))
  for t in range(TIME):
    y, c = (np.where(reset[:, t, None], 0, value) for value in (y, c))
    i, f, g, o = (
        x[:, t] @ w + b + y @ r
        for w, b, r in zip(kernel, bias, recurrent, strict=True)
    )
    c = sigmoid(f + p_f * c) * c + sigmoid(i + p_i * c) * np.tanh(g)
    m = sigmoid(o + p_o * c) * np.tanh(c)
    y = m @ P
    yield y, m, c


@functools.partial(reference.jit, static_argnums=0)
def run(graphdef, state):
  """Returns the final carry and outputs, and gradients."""

  def loss(state):
    carry, y = nnx.merge(graphdef, state).unroll(x, reset=reset)
    return sum(jnp.sum(jnp.sin(v)) for v in (y, *carry)), (carry, y)

  gradients, outputs = jax.grad(loss, has_aux=True)(state)
  return outputs, gradients


class LSTMTest(parameterized.TestCase):

  @parameterized.parameters(
      {'peephole': True}, {'projection': 4}, {'peephole': True, 'projection': 4}
  )
  @pytest.mark.few(2)
  def test_formula_and_paths(self, **options):
    with jax.enable_x64(True):
      close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)
      layer = make(implementation='scan', **options)
      (carry, y), gradients = run(*nnx.split(layer))
      steps = list(formula(layer))
      jax.tree.map(close, tuple(carry), steps[-1][1:])
      close(y, np.stack([y_t for y_t, _, _ in steps], 1))
      newton = make(implementation='associative_scan', **options)
      outputs, others = run(*nnx.split(newton))
      jax.tree.map(close, (outputs, others), ((carry, y), gradients))
      own = layer.initial_carry((BATCH,))
      for t in range(2):
        own, y_t = layer.step(own, x[:, t], reset=reset[:, t])
        close(y_t, y[:, t])

  def test_shapes(self):
    wide = rnnzoo.LSTM(3, 8, projection=2, rngs=nnx.Rngs(0))
    self.assertEqual(wide.recurrent_kernel.shape, (4, 1, 2, 8))
    self.assertEqual((wide.features, wide.out_features), (8, 2))

  @parameterized.parameters(
      ({'projection': 0}, 'projection must be a positive int'),
      ({'projection': 2, 'num_heads': 2}, 'num_heads=1 would work'),
      ({'peephole': 1}, 'peephole must be a bool'),
      (
          {'projection': 2, 'recurrent_structure': lambda k: k + k.mT},
          r'R of projection=2, \(4, 1, 2, 8\), which is not square',
      ),
  )
  def test_refused(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      rnnzoo.LSTM(3, 8, rngs=nnx.Rngs(0), **options)

  def test_projection_makes_the_readout(self):
    with self.assertRaisesRegex(TypeError, "^LSTM sets 'readout' itself"):
      rnnzoo.LSTM(3, 8, projection=2, readout=None, rngs=nnx.Rngs(0))


if __name__ == '__main__':
  absltest.main()
