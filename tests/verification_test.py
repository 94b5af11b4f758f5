"""`rnnzoo.verify` tells a recurrence that forgets from a chaotic one."""

import math
from unittest import mock

from absl.testing import absltest
from flax import nnx
import jax
import pytest

import rnnzoo
from rnnzoo.engines.time import newton

X = jax.random.normal(jax.random.key(0), (2, 300, 4))


class VerificationTest(absltest.TestCase):

  @pytest.mark.slow
  def test_forgets(self):
    layer = rnnzoo.GRU(4, 8, rngs=nnx.Rngs(0))
    found = rnnzoo.verify(layer, X)
    self.assertFalse(found.fell_back)
    self.assertBetween(found.least_iterations, 0, found.iterations)
    self.assertLess(found.error, 2e-6)
    self.assertLess(found.lyapunov, -0.1)

  @pytest.mark.slow
  def test_chaos(self):  # It ends, since no further iteration helps.
    layer = rnnzoo.AGRU(4, 16, gamma=0.0, rngs=nnx.Rngs(1))
    with mock.patch.object(newton, 'MOST_ITERATIONS', 2**31 - 1):
      found = rnnzoo.verify(layer, X)
    self.assertTrue(found.fell_back)
    # Parts of time are exact after enough of it, but nothing is gained.
    self.assertGreater(found.in_turn, X.shape[1])
    self.assertEqual(found.error, 0)
    self.assertGreater(found.lyapunov, 0)

  @pytest.mark.slow
  def test_known_rate(self):
    # Where relu lets all through, h' = u h + x: the exponent is log u.
    layer = rnnzoo.IndRNN(4, 2, recurrent_range=(0.5, 0.5), rngs=nnx.Rngs(0))
    layer.bias[...] = layer.bias[...] + 100
    found = rnnzoo.verify(layer, X[:, :50])
    self.assertAlmostEqual(found.lyapunov, math.log(0.5), places=5)
    self.assertEqual(found.least_iterations, 0)


if __name__ == '__main__':
  absltest.main()
