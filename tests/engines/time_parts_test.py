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


class KernelsTest(parameterized.TestCase):
  """Lowers programs for two GPUs that are not there."""

  @parameterized.parameters('linear_scan', 'MinGRU')
  @pytest.mark.slow
  def test_lowers(self, function):
    mesh = abstract_gpu.mesh('NVIDIA H200', 'Explicit')
    layer = rnnzoo.MinGRU(24, 24, implementation='pallas', rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)

    def loss(params, x):
      if function == 'MinGRU':
        return jnp.sum(nnx.merge(graphdef, params)(x) ** 2)
      h = rnnzoo.linear_scan(x, x, implementation='pallas')
      return jnp.sum(h**2)

    with jax.sharding.use_abstract_mesh(mesh):
      over_time = jax.sharding.NamedSharding(mesh, P(None, 'data'))
      x = jax.ShapeDtypeStruct((2, 40, 24), jnp.float32, sharding=over_time)
      if not abstract_gpu.RUNS:
        with self.assertRaisesRegex(NotImplementedError, 'need jax >= 0.11'):
          jax.eval_shape(loss, params, x)
        return
      traced = jax.jit(jax.grad(loss, (0, 1))).trace(params, x)
      text = traced.lower(lowering_platforms=('cuda',)).as_text()
    # Forward and backward, each with one exchange between two runs.
    self.assertLessEqual(text.count('stablehlo.custom_call @mosaic_gpu'), 4)
    self.assertEqual(text.count('"stablehlo.all_gather"'), 2)


class LongPartsTest(parameterized.TestCase):

  # Before jax 0.11 no kernel is launched.
  __test__ = abstract_gpu.RUNS

  @pytest.mark.slow
  def test_reads_each_step_once(self):
    mesh = abstract_gpu.mesh('NVIDIA H200', 'Explicit')
    scan = functools.partial(rnnzoo.linear_scan, implementation='pallas')
    with jax.sharding.use_abstract_mesh(mesh):
      over_time = jax.sharding.NamedSharding(mesh, P(None, 'data'))
      x = jax.ShapeDtypeStruct((1, 16384, 64), jnp.bfloat16, sharding=over_time)
      traced = jax.jit(lambda x, g: jax.vjp(scan, x, x)[1](g)).trace(x, x)
      text = traced.lower(lowering_platforms=('cuda',)).as_text()
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
    mesh = abstract_gpu.mesh('NVIDIA H200', 'Explicit')
    scan = functools.partial(rnnzoo.linear_scan, implementation='pallas')
    loss = lambda x: jnp.sum(scan(x, x).astype(jnp.float32) ** 2)
    slope = lambda x: jnp.sum(jax.grad(loss)(x) ** 2)
    with jax.sharding.use_abstract_mesh(mesh):
      over_time = jax.sharding.NamedSharding(mesh, P(None, 'data'))
      x = jax.ShapeDtypeStruct((1, 16384, 64), jnp.bfloat16, sharding=over_time)
      with self.assertRaisesRegex(NotImplementedError, 'first derivatives'):
        jax.jit(jax.grad(slope)).trace(x)

  @pytest.mark.slow
  def test_vmap_lowers(self):
    mesh = abstract_gpu.mesh('NVIDIA H200', 'Explicit')
    scan = functools.partial(rnnzoo.linear_scan, implementation='pallas')
    each = jax.vmap(lambda x, g: jax.vjp(scan, x, x)[1](g))
    with jax.sharding.use_abstract_mesh(mesh):
      over_time = jax.sharding.NamedSharding(mesh, P(None, None, 'data'))
      x = jax.ShapeDtypeStruct(
          (3, 1, 16384, 64), jnp.bfloat16, sharding=over_time
      )
      traced = jax.jit(each).trace(x, x)
      text = traced.lower(lowering_platforms=('cuda',)).as_text()
    self.assertEqual(text.count('@mosaic_gpu'), 4)


class ErrorsTest(parameterized.TestCase):

  def test_other_cells_need_time_whole(self):
    with self.assertRaisesRegex(ValueError, 'is for linear cells .*all_gath'):
      rnnzoo.GRU(3, 4, time_axis_name='time', rngs=nnx.Rngs(0))

  @parameterized.parameters(3, (('time', 3),))
  def test_names(self, given):
    with self.assertRaisesRegex(ValueError, 'time_axis_name must be the name'):
      rnnzoo.MinGRU(3, 4, time_axis_name=given, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 2, 3))
    with self.assertRaisesRegex(ValueError, 'time_axis_name must be the name'):
      rnnzoo.linear_scan(x, x, time_axis_name=given)

  def test_each_name_once(self):
    x = jnp.ones((1, 2, 3))
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
      sharding = jax.sharding.NamedSharding(mesh, spec)
      x = jax.ShapeDtypeStruct((2, 4, 3), jnp.float32, sharding=sharding)
      with self.assertRaisesRegex(ValueError, 'inside jax.shard_map .*None'):
        jax.eval_shape(run, x)

  def test_linen_has_the_option(self):
    module = rnnzoo_linen.MinGRU(4, time_axis_name='time')
    self.assertEqual(module.time_axis_name, 'time')


if __name__ == '__main__':
  absltest.main()
