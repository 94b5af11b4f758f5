"""Layers whose parameters are not those that they were made with.

`nnx.merge`, `nnx.update` and checkpoints put anything into a layer. A state
that does not fit is refused in the call, with the parameter's name, since some
of them would run and compute something else.
"""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo

x = np.ones((2, 5, 3), np.float32)


def make(name, **options):
  return rnnzoo.LAYERS[name](3, 4, rngs=nnx.Rngs(0), **options)


def cast(layer, dtype):
  graphdef, state = nnx.split(layer)
  return nnx.merge(graphdef, jax.tree.map(lambda a: a.astype(dtype), state))


class ForeignStateTest(parameterized.TestCase):

  def assert_refused(self, layer, message):
    carry = layer.initial_carry((2,))
    for call in (
        lambda: layer(x),
        lambda: jax.jit(layer.unroll)(x),
        lambda: layer.step(carry, x[:, 0]),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()

  @parameterized.parameters(
      ('GRU', 'LSTM', {}, r'GRU.kernel .* \(3, 3, 4\), .* got \(4, 3, 4\)'),
      ('MinLSTM', 'MinGRU', {}, r'MinLSTM.kernel .* got \(2, 3, 4\)'),
      ('GRU', 'GRU', {'num_heads': 2}, r'GRU.recurrent_kernel .*\(3, 2, 2, 2'),
      ('IndRNN', 'Elman', {}, r'recurrent_kernel .*\(1, 4, 1, 1\).*\(1, 1, 4'),
  )
  def test_of_another_layer(self, name, other, options, message):
    layer = make(name)
    nnx.update(layer, nnx.state(make(other, **options)))
    self.assert_refused(layer, message)

  def test_a_bias_that_would_broadcast(self):
    layer = make('LSTM')
    layer.bias = nnx.Param(jnp.ones((4, 1)))
    self.assert_refused(
        layer, r'LSTM.bias must have shape \(4, 4\), .*\(4, 1\)'
    )

  @parameterized.product(
      name=('Elman', 'AGRU', 'MinGRU'),
      dtype=(jnp.int32, jnp.complex64, jnp.float8_e4m3fn),
  )
  @pytest.mark.few(2)
  def test_of_another_dtype(self, name, dtype):
    message = f'{name}.kernel must .*, got {jnp.dtype(dtype)}'
    self.assert_refused(cast(make(name), dtype), message)

  def test_a_cast_to_16_bits_is_none_of_these(self):
    y = cast(make('GRU'), jnp.bfloat16)(x)
    np.testing.assert_allclose(y, make('GRU')(x), atol=0.05)

  def test_without_values(self):
    layer = nnx.eval_shape(lambda: make('LSTM'))
    self.assert_refused(layer, r'LSTM.kernel has a shape .* nnx.update\(layer')
    nnx.update(layer, nnx.state(make('LSTM')))
    np.testing.assert_array_equal(layer(x), make('LSTM')(x))


if __name__ == '__main__':
  absltest.main()
