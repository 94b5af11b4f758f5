"""One trace, compiled for a CPU, for a GPU and for both."""

import functools
import warnings

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo.engines import selection
from tests.testing import abstract_gpu
from tests.testing import random_layers

IN_FEATURES, FEATURES = 8, 64


RESET = jnp.arange(36).reshape(4, 9) % 5 == 0


def make_layer(name, path=None):
  return rnnzoo.LAYERS[name](
      IN_FEATURES, FEATURES, implementation=path, rngs=nnx.Rngs(0)
  )


def make_both(path=None):
  layer = functools.partial(rnnzoo.GRU, implementation=path)
  return rnnzoo.Bidirectional(layer, IN_FEATURES, FEATURES, rngs=nnx.Rngs(0))


def gradient(layer, **call):
  """Returns (parameters, x) -> (loss, outputs), gradients."""
  run, params = random_layers.pure(layer)

  def loss(params, x):
    y = run(params, x, **call)
    return (y.astype(jnp.float32) ** 2).sum(), y

  return jax.value_and_grad(loss, (0, 1), has_aux=True), params


def inputs(batch=4, time=9):
  shape = (batch, time, IN_FEATURES)
  return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def largest_difference(xs, ys):
  """Returns the largest difference, relative to the largest value."""
  differences = [
      float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1))
      for x, y in zip(jax.tree.leaves(xs), jax.tree.leaves(ys), strict=True)
  ]
  return max(differences)


class NoGpuTest(absltest.TestCase):

  def test_a_program_for_cuda_that_has_no_kernels_is_no_secret(self):
    selection.warn_once.cache_clear()
    self.addCleanup(selection.warn_once.cache_clear)
    f, params = gradient(make_layer('MinGRU'))
    traced = jax.jit(jax.vmap(f, (None, 0))).trace(params, inputs()[None])
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      traced.lower(lowering_platforms=('cpu',))
    words = 'compiled for CUDA: it has no GPU'
    with self.assertWarnsRegex(UserWarning, words) as told:
      traced.lower(lowering_platforms=('cuda',))
    self.assertEqual(told.filename, __file__)


class PlatformsTest(parameterized.TestCase):

  # Before jax 0.11 there are no kernels.
  __test__ = abstract_gpu.RUNS

  def trace(self, f, *args):
    """Returns the traced function, planned for an H200."""
    with abstract_gpu.device(self, 'NVIDIA H200'):
      return jax.jit(f).trace(*args)

  def check(self, make, **call):
    """Checks a trace for both platforms against 'scan'."""
    x = inputs()
    f, params = gradient(make(), **call)
    traced = self.trace(f, params, x)
    cuda = traced.lower(lowering_platforms=('cuda',)).as_text()
    self.assertEqual(cuda.count('@mosaic_gpu'), 2)
    cpu = traced.lower(lowering_platforms=('cpu',))
    self.assertNotIn('mosaic_gpu', cpu.as_text())
    on_cpu = cpu.compile()(params, x)
    f, _ = gradient(make('scan'), **call)
    self.assertLess(largest_difference(on_cpu, jax.jit(f)(params, x)), 1e-5)

  @parameterized.parameters(
      *('MinGRU', 'Elman', 'LSTM', 'SLSTM', 'GRU', 'AntisymmetricRNN'),
      *('IndRNN', 'IRevRNN', 'MinLSTM', 'AGRU'),
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_cpu_beside_a_gpu(self, name):
    make = functools.partial(make_layer, name)
    lengths = jnp.array([9, 0, 1, 5])
    self.check(make, reset=RESET, seq_lengths=lengths, reverse=True)

  @pytest.mark.slow
  def test_both_directions(self):
    self.check(make_both, reset=RESET)

  @parameterized.parameters('LSTM', 'MinGRU')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_export_for_both(self, name):
    f, params = gradient(make_layer(name))
    x = inputs()
    with abstract_gpu.device(self, 'NVIDIA H200'):
      exported = export.export(
          jax.jit(f),
          platforms=('cpu', 'cuda'),
          disabled_checks=[
              export.DisabledSafetyCheck.custom_call('mosaic_gpu_v2')
          ],
      )(params, x)
    self.assertEqual(exported.mlir_module().count('@mosaic_gpu'), 2)
    on_cpu = exported.call(params, x)
    f, _ = gradient(make_layer(name, 'scan'))
    self.assertLess(largest_difference(on_cpu, jax.jit(f)(params, x)), 1e-5)

  def test_kernels_alone(self):
    x = inputs(batch=1, time=2)
    f, params = gradient(make_layer('MinGRU', 'pallas'))
    with abstract_gpu.device(self, 'NVIDIA H200'):
      traced = jax.jit(f).trace(params, x)
      self.assertIn(
          '@mosaic_gpu', traced.lower(lowering_platforms=('cuda',)).as_text()
      )
      with self.assertRaisesRegex(NotImplementedError, 'for CUDA alone.*None'):
        traced.lower(lowering_platforms=('cpu', 'cuda'))
      with self.assertRaisesRegex(NotImplementedError, 'reverse mode.*scan'):
        jax.jit(jax.hessian(lambda x: f(params, x)[0][0])).trace(x)

  @parameterized.parameters('GRU', 'MinGRU', 'IndRNN')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_other_derivatives(self, name):
    """Forward mode and second derivatives are those of the other path."""
    x = inputs(2, 5)  # Of fewer steps MinGRU has no kernel.

    def of(implementation):
      layer = make_layer(name, implementation)
      loss = lambda x: (layer(x) ** 2).sum()
      tangent = lambda x: jax.jvp(layer, (x,), (jnp.ones_like(x),))[1]
      second = lambda x: jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
      mapped = lambda x: jax.vmap(jax.grad(loss))(jnp.stack([x, x + 1]))
      return lambda x: (tangent(x), second(x), mapped(x))

    traced = self.trace(of(None), x)
    on_cpu = traced.lower(lowering_platforms=('cpu',)).compile()(x)
    expected = jax.jit(of('scan'))(x)
    self.assertLess(largest_difference(on_cpu, expected), 1e-5)
    cuda = traced.lower(lowering_platforms=('cuda',)).as_text()
    self.assertIn('@mosaic_gpu', cuda)

  @parameterized.parameters('LSTM', 'MinGRU')
  def test_forward_mode_in_16_bits(self, name):
    layer = nnx.eval_shape(
        lambda: rnnzoo.LAYERS[name](32, 32, dtype='bfloat16', rngs=nnx.Rngs(0))
    )
    call, state = random_layers.pure(layer)
    x = jax.ShapeDtypeStruct((4, 40, 32), jnp.bfloat16)
    pushed = lambda state, x: jax.jvp(lambda x: call(state, x), (x,), (x,))
    with abstract_gpu.device(self, 'NVIDIA H200'):
      text = abstract_gpu.lower(pushed, state, x)
    self.assertIn('tensor<4x40x32xbf16>', text)

  def test_linear_scan(self):
    x = inputs(2, 5)
    f = lambda x: rnnzoo.linear_scan(jnp.tanh(x), x)
    traced = self.trace(f, x)
    cuda = traced.lower(lowering_platforms=('cuda',)).as_text()
    self.assertEqual(cuda.count('@mosaic_gpu'), 1)
    on_cpu = traced.lower(lowering_platforms=('cpu',)).compile()(x)
    self.assertLess(largest_difference(on_cpu, f(x)), 1e-6)

  @pytest.mark.slow
  def test_device_of_arrays(self):
    """Outside of `jit`, the arrays say which device computes."""
    layer, x = make_layer('MinGRU'), inputs(2, 5)
    with abstract_gpu.device(self, 'NVIDIA H200'):
      y = layer(x)
    self.assertLess(largest_difference(y, make_layer('MinGRU')(x)), 1e-6)


if __name__ == '__main__':
  absltest.main()
