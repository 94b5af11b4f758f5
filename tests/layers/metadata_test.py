"""Parameters with metadata: shardings and what else users write on them."""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo

normal = jax.nn.initializers.normal()


class MetadataTest(parameterized.TestCase):

  @parameterized.parameters('AGRU', 'MinGRU')
  @pytest.mark.slow
  def test_partitioning(self, name):
    mesh = jax.make_mesh(
        (1,), ('model',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    make = lambda init, bias: rnnzoo.LAYERS[name](
        3, 8, kernel_init=init, bias_init=bias, rngs=nnx.Rngs(0)
    )
    with jax.set_mesh(mesh):
      layer = make(
          nnx.with_partitioning(normal, (None, 'model')),
          nnx.with_partitioning(normal, ('model',)),
      )
      specs = nnx.get_partition_spec(nnx.state(layer))
      plain = make(normal, normal)
      self.assertEqual(
          specs['kernel'].get_value(),
          jax.sharding.PartitionSpec(None, None, 'model'),
      )
      self.assertEqual(
          specs['bias'].get_value(), jax.sharding.PartitionSpec(None, 'model')
      )
      x = jnp.ones((2, 5, 3))
      np.testing.assert_array_equal(layer(x), plain(x))

  def test_heads(self):
    init = nnx.with_metadata(normal, note='mine')
    layer = rnnzoo.LSTM(
        3, 8, num_heads=2, recurrent_kernel_init=init, rngs=nnx.Rngs(0)
    )
    self.assertEqual(layer.recurrent_kernel.get_metadata()['note'], 'mine')
    self.assertEqual(layer.recurrent_kernel.shape, (4, 2, 4, 4))

  def test_gates_that_differ(self):
    inits = [nnx.with_metadata(normal, note=i) for i in range(3)]
    with self.assertRaisesRegex(ValueError, 'must have the same metadata'):
      rnnzoo.GRU(3, 8, kernel_init=inits, rngs=nnx.Rngs(0))


if __name__ == '__main__':
  absltest.main()
