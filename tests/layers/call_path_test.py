"""How many functions lie between a call of a layer and its GPU kernel."""

import pathlib
import traceback
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
import rnnzoo
from tests.testing import abstract_gpu

PACKAGES = tuple(
    f'{pathlib.Path(package.__file__).parent}/'
    for package in (rnnzoo, pallas_kernels)
)
MOST_FUNCTIONS, MOST_FILES = 13, 8


def call_paths(test, layer, batch=16, time=128):
  """Returns, for each kernel that a layer launches, the functions above it.

  Args:
    test: the test that asks.
    layer: the layer.
    batch: number of sequences.
    time: number of steps.
  """
  from jax.experimental.pallas import mosaic_gpu as plgpu

  make_kernel = plgpu.kernel
  paths = []

  def noted(*args, **options):
    kernel = make_kernel(*args, **options)

    def launch(*arrays):
      frames = traceback.extract_stack()
      paths.append([f for f in frames if f.filename.startswith(PACKAGES)])
      return kernel(*arrays)

    return launch

  graphdef, params = nnx.split(layer)
  x = jax.ShapeDtypeStruct((batch, time, layer.in_features), jnp.bfloat16)
  # A kernel that was traced before would not be launched again.
  jax.clear_caches()
  with mock.patch.object(plgpu, 'kernel', noted):
    with abstract_gpu.device(test, 'NVIDIA H200'):
      jax.jit(lambda p, x: nnx.merge(graphdef, p)(x)).trace(params, x)
  return paths


class CallPathTest(parameterized.TestCase):

  # Before jax 0.11 no kernel is launched.
  __test__ = abstract_gpu.RUNS

  def setUp(self):
    super().setUp()
    if not self.__test__:
      self.skipTest('needs jax >= 0.11')

  @parameterized.product(
      name=('LSTM', 'GRU', 'IndRNN', 'MinGRU'),
      implementation=('pallas', None),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_few_functions_in_few_files(self, name, implementation):
    layer = rnnzoo.LAYERS[name](
        64,
        64,
        dtype=jnp.bfloat16,
        implementation=implementation,
        rngs=nnx.Rngs(0),
    )
    paths = call_paths(self, layer)
    self.assertLen(paths, 1)
    (path,) = paths
    lines = [f'{pathlib.Path(f.filename).name} {f.name}' for f in path]
    self.assertLessEqual(len(path), MOST_FUNCTIONS, lines)
    self.assertLessEqual(len({f.filename for f in path}), MOST_FILES, lines)


if __name__ == '__main__':
  absltest.main()
