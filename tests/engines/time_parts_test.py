"""Time over devices, for linear cells."""

import functools
import re

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

import rnnzoo
from rnnzoo import linen as rnnzoo_linen
from tests.testing import abstract_gpu
from tests.testing import random_layers
from tests.testing import several_devices


class Numbers(parameterized.TestCase):
  """Compares eight devices with one, and reads what they exchange."""

  def assert_same(self, *names):
    output = several_devices.run(self, 'time_parts_program', *names)
    for name in names:
      self.assertIn(f'{name} is the same on 8 devices', output)


class NumbersTest(Numbers):

  @pytest.mark.slow
  def test_auto_axes(self):
    self.assert_same('MinGRU-auto-scan', 'MinGRU-auto-associative_scan')

  @parameterized.parameters('jit', 'shard_map')
  @pytest.mark.exhaustive
  def test_every_way(self, way):
    paths = ['scan', 'associative_scan', *['pallas'] * abstract_gpu.RUNS]
    names = [
        f'{function}-{way}-{path}'
        for function in ('linear_scan', 'MinGRU')
        for path in paths
    ]
    self.assert_same(*names, f'Stack-{way}-scan', f'Bidirectional-{way}-scan')

  @pytest.mark.exhaustive
  def test_parts_that_forget(self):
    self.assert_same(
        *(
            f'{function}-jit-{path}'
            for function in ('forgetful', 'infinities')
            for path in ('scan', *['pallas'] * abstract_gpu.RUNS)
        )
    )


MESH = abstract_gpu.mesh('NVIDIA H200', 'Explicit')
scan = functools.partial(rnnzoo.linear_scan, implementation='pallas')


class KernelsTest(parameterized.TestCase):
  """Lowers programs for two GPUs that are not there."""

  # Before jax 0.11 no kernel is launched.
  __test__ = abstract_gpu.RUNS

  @parameterized.parameters('linear_scan', 'MinGRU')
  @pytest.mark.slow
  def test_lowers(self, function):
    layer = rnnzoo.MinGRU(24, 24, implementation='pallas', rngs=nnx.Rngs(0))
    loss, params = random_layers.squares(layer)
    if function == 'linear_scan':
      loss = lambda params, x: jnp.sum(scan(x, x) ** 2)
    with jax.sharding.use_abstract_mesh(MESH):
      x = several_devices.sharded(MESH, P(None, 'data'), (2, 40, 24))
      text = abstract_gpu.lower(jax.grad(loss, (0, 1)), params, x)
    # Forward and backward, each with one exchange between two runs.
    self.assertLessEqual(text.count('stablehlo.custom_call @mosaic_gpu'), 4)
    self.assertEqual(text.count('"stablehlo.all_gather"'), 2)

  def long(self, *lead):
    """Returns the type of parts of time of 8192 steps."""
    spec = P(*[None] * (len(lead) + 1), 'data')
    shape = (*lead, 1, 16384, 64)
    return several_devices.sharded(MESH, spec, shape, 'bfloat16')

  @pytest.mark.slow
  def test_reads_each_step_once(self):
    with jax.sharding.use_abstract_mesh(MESH):
      x = self.long()
      text = abstract_gpu.lower(lambda x, g: jax.vjp(scan, x, x)[1](g), x, x)
    kernels = re.findall(r'@mosaic_gpu.* : \((.*)\) ->', text)
    # Forward and backward: the last steps of a part, and all steps. The latter
    # run again in a loop, which begins where a part has an infinity.
    sizes = [int(re.search(r'<1x(\d+)x64xbf16>', k)[1]) for k in kernels]
    self.assertEqual(sorted(sizes), [4096] * 2 + [8192] * 2)
    self.assertEqual(text.count('stablehlo.while'), 2)
    for operands in kernels:
      self.assertNotIn('64xf32>', re.sub(r'tensor<1x128xf32>', '', operands))

  @pytest.mark.slow
  def test_second_derivatives_are_refused(self):
    loss = lambda x: jnp.sum(scan(x, x).astype(jnp.float32) ** 2)
    slope = lambda x: jnp.sum(jax.grad(loss)(x) ** 2)
    with jax.sharding.use_abstract_mesh(MESH):
      with self.assertRaisesRegex(NotImplementedError, 'first derivatives'):
        jax.jit(jax.grad(slope)).trace(self.long())

  @pytest.mark.slow
  def test_vmap_lowers(self):
    each = jax.vmap(lambda x, g: jax.vjp(scan, x, x)[1](g))
    with jax.sharding.use_abstract_mesh(MESH):
      text = abstract_gpu.lower(each, self.long(3), self.long(3))
    self.assertEqual(text.count('@mosaic_gpu'), 4)


class ErrorsTest(parameterized.TestCase):

  def test_other_cells_need_time_whole(self):
    with self.assertRaisesRegex(ValueError, 'is for linear cells.*all_gath'):
      rnnzoo.GRU(3, 4, time_axis_name='time', rngs=nnx.Rngs(0))

  @parameterized.parameters(3, (('time', 3),))
  def test_names(self, given):
    x = jnp.ones((1, 2, 3))
    with self.assertRaisesRegex(ValueError, 'time_axis_name must be the name'):
      rnnzoo.MinGRU(3, 4, time_axis_name=given, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, 'time_axis_name must be the name'):
      rnnzoo.linear_scan(x, x, time_axis_name=given)
    with self.assertRaisesRegex(ValueError, 'each mesh axis once'):
      rnnzoo.linear_scan(x, x, time_axis_name=('time', 'time'))

  @parameterized.product(
      name=('data', 'time'),
      function=('linear_scan', 'MinGRU', 'Stack'),
      spec=(P('data', 'time'), P()),
  )
  def test_outside_of_shard_map(self, name, function, spec):
    options = {'time_axis_name': name, 'rngs': nnx.Rngs(0)}
    run = {
        'linear_scan': lambda x: rnnzoo.linear_scan(x, x, time_axis_name=name),
        'MinGRU': rnnzoo.MinGRU(3, 3, **options),
        'Stack': rnnzoo.Stack(rnnzoo.MinGRU, 3, 3, **options),
    }[function]
    mesh = several_devices.explicit_mesh(data=2, time=2)
    with jax.sharding.use_abstract_mesh(mesh):
      x = several_devices.sharded(mesh, spec, (2, 4, 3))
      with self.assertRaisesRegex(ValueError, 'inside jax.shard_map .*None'):
        jax.eval_shape(run, x)

  def test_linen_has_the_option(self):
    module = rnnzoo_linen.MinGRU(4, time_axis_name='time')
    self.assertEqual(module.time_axis_name, 'time')


if __name__ == '__main__':
  absltest.main()
