"""A GPU kernel is lowered once, however many layers use it."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import pytest

import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import random_layers


@pytest.mark.slow
class LoweredOnceTest(parameterized.TestCase):

  def lower(self, layer, depth):
    """Returns the text of the gradient of a stack."""
    make = functools.partial(
        rnnzoo.LAYERS[layer], dtype=jnp.bfloat16, implementation='pallas'
    )
    model = nnx.eval_shape(
        lambda: rnnzoo.Stack(make, 64, 64, num_layers=depth, rngs=nnx.Rngs(0))
    )
    loss, params = random_layers.squares(model)
    x = jax.ShapeDtypeStruct((8, 4, 64), jnp.bfloat16)
    text = ''
    with abstract_gpu.device(self, 'NVIDIA H200'):
      text = abstract_gpu.lower(jax.grad(loss, (0, 1)), params, x)
    return text

  @parameterized.parameters('LSTM', 'IndRNN')
  def test_layers_share_kernels(self, layer):
    texts = [self.lower(layer, depth) for depth in (2, 4)]
    two, four = (text.count('@mosaic_gpu') for text in texts)
    self.assertEqual(two, four)

  @parameterized.parameters('LSTM', 'MinGRU')
  @pytest.mark.few(1)
  def test_text_is_the_same_each_time(self, layer):
    # JAX finds a compiled program on disk by its text.
    first = self.lower(layer, 1)
    jax.clear_caches()
    self.assertEqual(first, self.lower(layer, 1))


if __name__ == '__main__':
  absltest.main()
