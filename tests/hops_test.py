"""How far it is from a layer's call to the launch of its kernel.

The functions of this library that stand on the stack, and their files, where a
kernel is made. A change that needs more of either says so in DEEPEST.
"""

import pathlib
import traceback
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import pytest

import rnnzoo
from tests.testing import abstract_gpu as gpu
from tests.testing import random_layers

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = tuple(str(ROOT / folder) for folder in ('rnnzoo', 'pallas_kernels'))


def given():
  return {'dtype': jnp.bfloat16, 'rngs': nnx.Rngs(0)}


# A layer, the batch and time of its input; the functions and files forward, and
# with the gradient.
DEEPEST = {
    'streaming': (rnnzoo.MinGRU, {}, (16, 1024), (14, 9), (19, 10)),
    'dense': (rnnzoo.LSTM, {'num_heads': 12}, (16, 1024), (13, 9), (17, 10)),
    'tiled': (rnnzoo.LSTM, {}, (2048, 64), (13, 9), (17, 10)),
}
STACK = (17, 10), (19, 10)


class HopsTest(parameterized.TestCase):

  def _check(self, make, lead, forward, gradient):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    kernel, stacks = plgpu.kernel, []

    def spied(*args, **kwargs):
      frames = traceback.extract_stack()
      stacks.append([f for f in frames if f.filename.startswith(OURS)])
      return kernel(*args, **kwargs)

    loss, state = random_layers.squares(nnx.eval_shape(make))
    x = jax.ShapeDtypeStruct((*lead, 768), jnp.bfloat16)
    for function, most in ((loss, forward), (jax.grad(loss), gradient)):
      stacks.clear()
      jax.clear_caches()
      with mock.patch.object(plgpu, 'kernel', spied):
        jax.eval_shape(function, state, x)
      deepest = max(stacks, key=len)
      self.assertLessEqual(len(deepest), most[0])
      self.assertLessEqual(len({f.filename for f in deepest}), most[1])

  @parameterized.named_parameters((k, *v) for k, v in DEEPEST.items())
  @pytest.mark.slow
  def test_layer(self, make, options, lead, forward, gradient):
    with gpu.device(self, 'NVIDIA H200'):
      layer = lambda: make(768, 768, **options, **given())
      self._check(layer, lead, forward, gradient)

  @pytest.mark.slow
  def test_stack(self):
    with gpu.device(self, 'NVIDIA H200'):
      options = {'num_heads': 12, 'num_layers': 2}
      layer = lambda: rnnzoo.Stack(rnnzoo.LSTM, 768, 768, **options, **given())
      self._check(layer, (16, 1024), *STACK)


if __name__ == '__main__':
  absltest.main()
