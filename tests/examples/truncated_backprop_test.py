"""The example learns; chunks see the past, and no gradient enters it."""

from absl.testing import absltest
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import truncated_backprop


class TruncatedBackpropTest(absltest.TestCase):

  def test_answers_come_from_the_chunk_before(self):
    config = truncated_backprop.Config(batch=2, delay=3, chunk=4, num_chunks=3)
    x, answers = truncated_backprop.stream(config)
    flat = lambda a: np.swapaxes(a, 0, 1).reshape(2, 12)
    self.assertEqual(x.shape, (3, 2, 4))
    np.testing.assert_array_equal(flat(answers)[:, 3:], flat(x)[:, :-3])
    np.testing.assert_array_equal(flat(answers)[:, :3], 0)

  @pytest.mark.slow
  def test_chunks_hand_the_carry_over(self):
    config = truncated_backprop.Config(features=4, batch=2)
    model = truncated_backprop.Echo(config, nnx.Rngs(0))

    def chunked(x, truncate):
      carry, first = model.unroll(None, x[:, :3])
      carry = jax.lax.stop_gradient(carry) if truncate else carry
      _, second = model.unroll(carry, x[:, 3:])
      return jnp.concatenate([first, second], axis=1)

    @jax.jit
    def run(x):
      second = lambda x, truncate: chunked(x, truncate)[:, 3:].sum()
      return (
          model.unroll(None, x)[1],
          chunked(x, False),
          *(jax.grad(second)(x, truncate) for truncate in (False, True)),
      )

    x = jnp.linspace(-1, 1, 12).reshape(2, 6)
    whole, in_chunks, through, truncated = map(np.array, run(x))
    np.testing.assert_allclose(in_chunks, whole, rtol=1e-5, atol=1e-6)
    self.assertTrue(through[:, :3].any())
    np.testing.assert_array_equal(truncated[:, :3], 0)
    np.testing.assert_allclose(truncated[:, 3:], through[:, 3:], rtol=1e-5)

  @pytest.mark.slow
  def test_runs_at_a_small_size(self):
    config = truncated_backprop.Config(
        features=4, batch=2, delay=1, chunk=3, num_chunks=4
    )
    _, accuracies = truncated_backprop.train(config)
    self.assertEqual(accuracies.shape, (4,))

  @pytest.mark.slow
  def test_learns(self):
    _, accuracies = truncated_backprop.train(truncated_backprop.Config())
    self.assertGreaterEqual(float(accuracies[-80:].mean()), 0.99)


if __name__ == '__main__':
  absltest.main()
