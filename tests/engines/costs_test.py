"""Where `None` passes over the kernels, since 'scan' is faster."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import devices
import rnnzoo
from rnnzoo.engines import choice as choice_lib
from tests.testing import abstract_gpu
from tests.testing import random_layers

IS_FASTER = "'scan' is faster than the kernels"


class SlowerKernelTest(parameterized.TestCase):

  def choices(self, batch, features=768, make=rnnzoo.LSTM, **options):
    """Returns the choices of a layer on a GPU, and runs nothing."""
    options = {'dtype': jnp.bfloat16, **options}
    build = lambda: make(8, features, rngs=nnx.Rngs(0), **options)
    call, state = random_layers.pure(nnx.eval_shape(build))
    x = jax.ShapeDtypeStruct((batch, 4, 8), jnp.float32)
    on_gpu = mock.patch.object(devices, 'platform', lambda: 'gpu')
    with on_gpu, choice_lib.noted() as choices:
      jax.eval_shape(call, state, x)
    return choices

  @parameterized.parameters(
      {'batch': 1024},
      {'batch': 16384, 'make': rnnzoo.GRU, 'dtype': jnp.float16},
      {'batch': 64, 'features': 2000},
  )
  def test_takes_scan(self, **case):
    (choice,) = self.choices(**case)
    self.assertEqual(choice.path, 'scan')
    ((path, reason),) = choice.passed_over
    self.assertEqual(path, 'pallas')
    self.assertStartsWith(reason, IS_FASTER)

  def test_both_directions(self):
    make = lambda *sizes, **options: rnnzoo.Bidirectional(
        rnnzoo.LSTM, *sizes, **options
    )
    self.assertEqual(
        [c.path for c in self.choices(1024, make=make)], ['scan'] * 2
    )

  @parameterized.parameters(
      {'batch': 1023},
      {'batch': 1023, 'features': 2000, 'make': rnnzoo.GRU},
      {'batch': 4096, 'features': 512},
      {'batch': 4096, 'num_heads': 2},
      {'batch': 4096, 'dtype': jnp.float32},
      {'batch': 4096, 'make': rnnzoo.MinGRU},
      {'batch': 4096, 'make': rnnzoo.IndRNN},
  )
  def test_tries_kernels(self, **case):
    for choice in self.choices(**case):
      for _, reason in choice.passed_over:
        self.assertNotStartsWith(reason, IS_FASTER)

  def test_kernels_in_tiles_are_faster(self):
    with abstract_gpu.device(self, 'NVIDIA H200'):
      if not abstract_gpu.RUNS:
        devices.current()
      self.assertEqual([c.path for c in self.choices(2048)], ['pallas'])
      # Two stages: not in tiles.
      agru = self.choices(2048, make=rnnzoo.AGRU)
      self.assertEqual([c.path for c in agru], ['scan'])

  def test_a_name_is_obeyed(self):
    with self.assertRaisesRegex(NotImplementedError, 'GPU kernels need'):
      self.choices(1024, implementation='pallas')

  def test_devices_may_have_fewer_rows(self):
    with mock.patch.object(jax, 'device_count', lambda: 4):
      (choice,) = self.choices(1024)
    ((_, reason),) = choice.passed_over
    self.assertNotStartsWith(reason, IS_FASTER)


class LinearTest(parameterized.TestCase):

  # Before jax 0.11 no kernel is tried.
  __test__ = abstract_gpu.RUNS

  @parameterized.product(
      case=(
          ((1, 65536, 64), 'associative_scan'),
          ((1, 65535, 64), 'pallas'),
          ((2, 65536, 64), 'pallas'),
          ((16, 4, 64), 'associative_scan'),
          ((17, 4, 64), 'pallas'),
          ((16, 5, 64), 'pallas'),
      ),
      kind=('linear_scan', 'MinGRU'),
  )
  @pytest.mark.few(2)
  def test_path_of_none(self, case, kind):
    (batch, time, features), path = case
    make = lambda: rnnzoo.MinGRU(features, features, rngs=nnx.Rngs(0))
    run, state = random_layers.pure(nnx.eval_shape(make))
    if kind == 'linear_scan':
      run = lambda state, x: rnnzoo.linear_scan(x, x)
    x = jax.ShapeDtypeStruct((batch, time, features), jnp.float32)
    mesh = abstract_gpu.mesh('NVIDIA H200', 'Explicit')
    with choice_lib.noted() as choices:
      with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(run, state, x)
    self.assertEqual([choice.path for choice in choices], [path])


if __name__ == '__main__':
  absltest.main()
