"""Kernels whose batch XLA may split."""

from unittest import mock

from absl.testing import absltest
from flax import nnx
import jax
from jax import export
import jax.numpy as jnp

from pallas_kernels import auto_axes
import rnnzoo
from tests.testing import abstract_gpu


class ExportTest(absltest.TestCase):

  def test_says_that_explicit_axes_work(self):
    layer = rnnzoo.IndRNN(4, 8, implementation='pallas', rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((4, 5, 4), jnp.float32)
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    with abstract_gpu.device(self, 'NVIDIA H200'):
      with mock.patch.object(auto_axes, 'may_be_split', lambda _: True):
        if not abstract_gpu.RUNS:
          jax.eval_shape(run, state, x)
        message = 'Export with Explicit axes'
        with self.assertRaisesRegex(NotImplementedError, message):
          export.export(run, platforms=['cuda'])(state, x)


if __name__ == '__main__':
  absltest.main()
