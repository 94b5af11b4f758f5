"""Layers where JAX is told to refuse promotions that nobody asked for."""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp

import rnnzoo

BATCH, TIME, FEATURES = 2, 3, 4


class StrictDtypesTest(parameterized.TestCase):
  """`dtype` asks for a cast of x and the parameters, and for wide sums."""

  @parameterized.product(
      name=tuple(rnnzoo.LAYERS),
      implementation=('scan', 'associative_scan'),
  )
  def test_layers(self, name, implementation):
    with jax.numpy_dtype_promotion('strict'):
      layer = rnnzoo.LAYERS[name](
          FEATURES,
          FEATURES,
          dtype=jnp.bfloat16,
          learn_initial_carry=True,
          implementation=implementation,
          rngs=nnx.Rngs(0),
      )
      graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
      x = jnp.ones((BATCH, TIME, FEATURES))
      reset = jnp.zeros((BATCH, TIME), bool)

      def loss(params, x):
        layer = nnx.merge(graphdef, params, rest)
        carry, y = layer.unroll(x, reset=reset, mask=~reset)
        carry, y = layer.step(carry, y[:, -1], reset=reset[:, 0])
        return y.astype(jnp.float32).sum()

      _, d_x = jax.eval_shape(jax.grad(loss, (0, 1)), params, x)
    self.assertEqual(d_x.dtype, jnp.float32)

  @parameterized.parameters('vanilla', 'cuda_fused')
  def test_flashrnn(self, backend):
    config = rnnzoo.FlashRNNConfig(backend=backend)
    given = (
        jnp.ones((2, 3, 4, 2, 4)),
        jnp.ones((4, 2, 4, 4)),
        jnp.ones((4, 2, 4)),
    )
    with jax.numpy_dtype_promotion('strict'):
      states, _ = jax.eval_shape(
          lambda *arrays: rnnzoo.flashrnn(*arrays, config=config),
          given[0].astype(jnp.bfloat16),
          *given[1:],
      )
    self.assertEqual(states.dtype, jnp.bfloat16)

  def test_linear_scan(self):
    a = jnp.ones((BATCH, TIME, FEATURES), jnp.bfloat16)
    with jax.numpy_dtype_promotion('strict'):
      h = jax.eval_shape(rnnzoo.linear_scan, a, a)
    self.assertEqual(h.dtype, jnp.bfloat16)


if __name__ == '__main__':
  absltest.main()
