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


@pytest.mark.slow
class LoweredOnceTest(parameterized.TestCase):

  def count_kernels(self, layer, depth):
    """Returns how many kernels the gradient of a stack has in its text."""
    make = functools.partial(
        rnnzoo.LAYERS[layer], dtype=jnp.bfloat16, implementation='pallas'
    )
    model = nnx.eval_shape(
        lambda: rnnzoo.Stack(make, 64, 64, num_layers=depth, rngs=nnx.Rngs(0))
    )
    graphdef, params = nnx.split(model)
    x = jax.ShapeDtypeStruct((8, 4, 64), jnp.bfloat16)

    def loss(params, x):
      return nnx.merge(graphdef, params)(x).astype(jnp.float32).sum()

    text = ''
    with abstract_gpu.device(self, 'NVIDIA H200'):
      text = abstract_gpu.lower(jax.grad(loss, (0, 1)), params, x)
    return text.count('@mosaic_gpu')

  @parameterized.parameters('LSTM', 'IndRNN')
  def test_layers_share_kernels(self, layer):
    two, four = (self.count_kernels(layer, depth) for depth in (2, 4))
    self.assertEqual(two, four)


if __name__ == '__main__':
  absltest.main()
