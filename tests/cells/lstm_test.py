"""An LSTM with a projection, against its formula in numpy and by all paths."""

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

BATCH, TIME, IN, FEATURES, OUT = 2, 5, 3, 6, 4

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN))
reset = rng.random((BATCH, TIME)) < 0.3


@functools.cache
def make(peephole=False, implementation=None):
  return random_layers.make(
      *(rnnzoo.LSTM, IN, FEATURES),
      projection=OUT,
      peephole=peephole,
      implementation=implementation,
      param_dtype=jnp.float64,
  )


def formula(layer, x, reset):
  """Returns all y, and the last m and c, by the formula of Sak et al."""
  kernel, bias, recurrent, P = (
      np.asarray(p[...])
      for p in (
          layer.kernel,
          layer.bias,
          layer.recurrent_kernel,
          layer.readout.kernel,
      )
  )
  own = {k: np.asarray(v[...]) for k, v in layer.cell_params.items()}
  peephole = lambda name, c: own.get(name, 0) * c
  sigmoid = lambda x: 1 / (1 + np.exp(-x))
  y, c = np.zeros((BATCH, OUT)), np.zeros((BATCH, FEATURES))
  outputs = []
  for t in range(TIME):
    y, c = (np.where(reset[:, t, None], 0, value) for value in (y, c))
    gates = [
        x[:, t] @ kernel[g] + bias[g] + y @ recurrent[g, 0] for g in range(4)
    ]
    i = sigmoid(gates[0] + peephole('p_i', c))
    f = sigmoid(gates[1] + peephole('p_f', c))
    c = f * c + i * np.tanh(gates[2])
    m = sigmoid(gates[3] + peephole('p_o', c)) * np.tanh(c)
    y = m @ P
    outputs.append(y)
  return np.stack(outputs, 1), m, c


@functools.partial(reference.jit, static_argnums=0)
def run(graphdef, state):
  """Returns the final carry and outputs, and gradients."""

  def loss(state):
    carry, y = nnx.merge(graphdef, state).unroll(x, reset=reset)
    return sum(jnp.sum(jnp.sin(v)) for v in (y, *carry)), (carry, y)

  gradients, outputs = jax.grad(loss, has_aux=True)(state)
  return outputs, gradients


class ProjectionTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_formula_and_paths(self, peephole):
    with jax.enable_x64(True):
      close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)
      layer = make(peephole, 'scan')
      (carry, y), gradients = run(*nnx.split(layer))
      jax.tree.map(close, (y, *carry), formula(layer, x, reset))
      self.assertEqual(carry._fields, ('h', 'c'))
      newton = make(peephole, 'associative_scan')
      outputs, others = run(*nnx.split(newton))
      jax.tree.map(close, outputs, (carry, y))
      jax.tree.map(close, others, gradients)
      self.assertGreater(np.abs(gradients['readout']['kernel'][...]).min(), 0)

  @pytest.mark.slow
  def test_steps(self):
    with jax.enable_x64(True):
      layer = make()
      carry, y = layer.unroll(x, reset=reset)
      own = layer.initial_carry((BATCH,))
      for t in range(TIME):
        own, y_t = layer.step(own, x[:, t], reset=reset[:, t])
        np.testing.assert_allclose(y_t, y[:, t], atol=1e-12)
      np.testing.assert_allclose(own.c, carry.c, atol=1e-12)

  def test_shapes(self):
    wide = rnnzoo.LSTM(3, 8, projection=2, rngs=nnx.Rngs(0))
    self.assertEqual(wide.recurrent_kernel.shape, (4, 1, 2, 8))
    self.assertEqual((wide.features, wide.out_features), (8, 2))
    stack = rnnzoo.Stack(
        *(rnnzoo.LSTM, 3, 8), num_layers=2, projection=4, rngs=nnx.Rngs(0)
    )
    both = rnnzoo.Bidirectional(
        rnnzoo.LSTM, 3, 8, projection=2, rngs=nnx.Rngs(0)
    )
    for layer, out in ((stack, 4), (both, 4)):
      y = jax.eval_shape(lambda layer, x: layer(x), layer, np.ones((2, 5, 3)))
      self.assertEqual(y.shape, (2, 5, out))

  @parameterized.parameters(
      ({'projection': 0}, 'projection must be a positive int'),
      ({'projection': 2, 'num_heads': 2}, 'num_heads=1 would work'),
      ({'peephole': 1}, 'peephole must be a bool'),
  )
  def test_refused(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      rnnzoo.LSTM(3, 8, rngs=nnx.Rngs(0), **options)


if __name__ == '__main__':
  absltest.main()
