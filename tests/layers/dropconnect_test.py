"""DropConnect on recurrent matrices."""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from tests.testing import random_layers


def kernels(params):
  leaves, _ = jax.tree.flatten_with_path(params)
  names = [[getattr(entry, 'key', '') for entry in path] for path, _ in leaves]
  return [
      np.asarray(leaf)
      for place, (_, leaf) in enumerate(leaves)
      if 'recurrent_kernel' in names[place]
  ]


class DropconnectTest(parameterized.TestCase):

  def test_drops_a_share_and_scales_the_rest(self):
    stack = rnnzoo.Stack(rnnzoo.LSTM, 3, 64, rngs=nnx.Rngs(0))
    params = nnx.state(stack, nnx.Param)
    dropped = rnnzoo.dropconnect(params, 0.25, jax.random.key(1))
    (before,), (after,) = kernels(params), kernels(dropped)
    self.assertEqual(after.shape, (4, 1, 64, 64))
    kept = after != 0
    self.assertAlmostEqual(kept.mean(), 0.75, delta=0.01)
    np.testing.assert_allclose(after[kept], before[kept] / 0.75, rtol=1e-6)
    # All else is the same array.
    others = lambda state: [
        leaf for leaf in jax.tree.leaves(state) if leaf.ndim < 4
    ]
    for one, other in zip(others(params), others(dropped), strict=True):
      self.assertIs(one, other)

  def test_matrices_have_masks_of_their_own(self):
    stack = rnnzoo.Stack(rnnzoo.GRU, 8, 8, num_layers=2, rngs=nnx.Rngs(0))
    params = nnx.state(stack, nnx.Param)
    once = kernels(rnnzoo.dropconnect(params, 0.5, jax.random.key(1)))
    again = kernels(rnnzoo.dropconnect(params, 0.5, jax.random.key(1)))
    other = kernels(rnnzoo.dropconnect(params, 0.5, jax.random.key(2)))
    np.testing.assert_array_equal(once, again)
    self.assertFalse(np.array_equal(once[0] == 0, once[1] == 0))
    self.assertFalse(np.array_equal(once[0] == 0, other[0] == 0))

  @parameterized.parameters('float32', 'bfloat16')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gradients_reach_what_stays(self, dtype):
    layer = rnnzoo.Elman(3, 8, param_dtype=dtype, rngs=nnx.Rngs(0))
    squares, params = random_layers.squares(layer)
    x = jnp.ones((2, 5, 3), dtype)
    drop = lambda params: rnnzoo.dropconnect(params, 0.5, jax.random.key(1))
    loss = jax.jit(lambda params: squares(drop(params), x))
    (kept,) = kernels(drop(params))
    (gradient,) = kernels(jax.grad(loss)(params))
    self.assertEqual(gradient.dtype, jnp.dtype(dtype))
    np.testing.assert_array_equal(gradient != 0, kept != 0)

  def test_single_units_have_no_matrix(self):
    stack = rnnzoo.Stack(rnnzoo.IndRNN, 3, 8, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, 'needs a recurrent matrix'):
      rnnzoo.dropconnect(nnx.state(stack), 0.5, jax.random.key(0))

  def test_a_model_is_no_state(self):
    layer = rnnzoo.LSTM(3, 8, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, 'an LSTM itself'):
      rnnzoo.dropconnect(layer, 0.5, jax.random.key(0))

  @parameterized.parameters(1.0, -0.1, float('nan'), 'half', True)
  def test_bad_rates(self, rate):
    params = nnx.state(rnnzoo.LSTM(3, 8, rngs=nnx.Rngs(0)))
    with self.assertRaisesRegex(ValueError, r'rate must be .* from 0 below 1'):
      rnnzoo.dropconnect(params, rate, jax.random.key(0))

  @parameterized.parameters(0.0, 0, np.float32(0))
  def test_rate_of_zero(self, rate):
    layer = rnnzoo.LSTM(3, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    params = nnx.state(layer)
    same = rnnzoo.dropconnect(params, rate, jax.random.key(0))
    self.assertEqual(kernels(same)[0].dtype, jnp.bfloat16)
    np.testing.assert_array_equal(kernels(params), kernels(same))


if __name__ == '__main__':
  absltest.main()
