"""`rnnzoo.Scan`: memory against time."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo.engines import choice as choice_lib
from tests.testing import random_layers

BATCH, TIME = 64, 256


def gradient(path, layer=rnnzoo.GRU, features=32, dtype=jnp.float32):
  """Returns a compiled gradient by the parameters and x, and its arguments."""
  layer = layer(
      4, features, implementation=path, param_dtype=dtype, rngs=nnx.Rngs(0)
  )
  call, state = random_layers.pure(layer)
  loss = lambda state, x: (call(state, x) ** 2).sum()
  x = np.random.default_rng(0).normal(size=(BATCH, TIME, 4)).astype(dtype)
  arguments = state, jnp.asarray(x)
  return jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile(), arguments


class ScanTest(parameterized.TestCase):

  @parameterized.parameters('GRU', 'AGRU', 'IRevRNN')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_is_the_same_function(self, name):
    layer = rnnzoo.LAYERS[name]
    with jax.enable_x64(True):
      settings = (
          'scan',
          rnnzoo.Scan(keep='carries', chunk=100),
          rnnzoo.Scan(keep='gates', chunk=7),
      )
      made = [gradient(path, layer, 8, jnp.float64) for path in settings]
      wanted, *others = (run(*arguments) for run, arguments in made)
      for other in others:
        chex.assert_trees_all_close(other, wanted, rtol=1e-9, atol=1e-9)

  @pytest.mark.slow
  def test_gates_that_malloc_would_map_are_formed_again(self):
    run = lambda path: gradient(path, rnnzoo.LSTM, 64)[0].memory_analysis()
    sizes = [
        run(path).temp_size_in_bytes
        for path in ('scan', rnnzoo.Scan(keep='carries'))
    ]
    self.assertEqual(*sizes)
    self.assertLess(sizes[0], 2**25)

  @parameterized.parameters('scan', 'associative_scan')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_memory_of_inner_steps(self, path):
    def temporary(inner_steps):
      layer = functools.partial(rnnzoo.IRevRNN, inner_steps=inner_steps)
      compiled, _ = gradient(path, layer)
      return compiled.memory_analysis().temp_size_in_bytes

    self.assertLess(temporary(12), 1.1 * temporary(1))

  @pytest.mark.slow
  def test_memory(self):
    temporary = lambda path: (
        gradient(path)[0].memory_analysis().temp_size_in_bytes
    )
    gates = 3 * 4 * BATCH * TIME * 32
    least = temporary(rnnzoo.Scan(keep='carries', chunk=16))
    kept = temporary(rnnzoo.Scan(keep='gates', chunk=16))
    at_once = temporary(rnnzoo.Scan(keep='carries', chunk=TIME))
    self.assertLess(least, kept - gates / 2)
    self.assertLess(least, at_once - gates / 2)

  @pytest.mark.slow
  def test_settings_reach_all_directions(self):
    make = lambda path: rnnzoo.Bidirectional(
        rnnzoo.GRU, 3, 4, implementation=path, rngs=nnx.Rngs(0)
    )
    x = jnp.ones((2, 5, 3))
    with choice_lib.noted() as choices:
      y = make(rnnzoo.Scan(chunk=2))(x)
    self.assertEqual([choice.path for choice in choices], ['scan', 'scan'])
    np.testing.assert_allclose(y, make('scan')(x), rtol=1e-6)

  def test_time_that_is_not_known(self):
    time = jax.export.symbolic_shape('t')[0]
    layer = rnnzoo.GRU(
        3, 4, implementation=rnnzoo.Scan(chunk=2), rngs=nnx.Rngs(0)
    )
    exported = jax.export.export(jax.jit(layer))(
        jax.ShapeDtypeStruct((2, time, 3), jnp.float32)
    )
    x = jnp.ones((2, 5, 3))
    np.testing.assert_allclose(exported.call(x), layer(x), rtol=1e-6)


if __name__ == '__main__':
  absltest.main()
