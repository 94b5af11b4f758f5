"""`rnnzoo.flashrnn` and its weights against FlashRNN's own numbers.

convert/record_flashrnn.py recorded them, gradients too.
"""

import functools
import math
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo import convert

RECORDED = pathlib.Path(__file__).resolve().parent / 'convert'
LAYERS = {'elman': 'Elman', 'lstm': 'LSTM', 'gru': 'GRU', 'slstm': 'SLSTM'}
HEADS, SIZE = 2, 3

close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)


def load(function, given_states):
  with np.load(RECORDED / f'flashrnn_{function}_{given_states}.npz') as data:
    return dict(data)


def given(arrays):
  return arrays['Wx'], arrays['R'], arrays['b']


class FlashRNNTest(parameterized.TestCase):

  @parameterized.product(function=list(LAYERS), given_states=[0, 1])
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_same_states_and_gradients(self, function, given_states):
    arrays = load(function, given_states)
    start = arrays.get('start')

    def loss(Wx, R, b):
      states, last = rnnzoo.flashrnn(
          Wx, R, b, start, function=function, dtype='float32'
      )
      return jnp.sin(states[0]).sum(), (states, last)

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    grads, (states, last) = run(*given(arrays))
    close(states, arrays['states'])
    close(last, arrays['last'])
    for grad, name in zip(grads, ('dWx', 'dR', 'db'), strict=True):
      close(grad, arrays[name], err_msg=name)

  @pytest.mark.slow
  def test_axes_and_initial_values(self):
    arrays = load('slstm', 1)
    values = [0.5, -1, 2, 0.1]
    start = np.reshape(values, (4, 1, 1, 1, 1))
    start = np.broadcast_to(start, arrays['start'].shape)
    options = {'function': 'slstm', 'backend': 'vanilla'}
    want, want_last = rnnzoo.flashrnn(*given(arrays), start, **options)
    self.assertEqual(want.dtype, jnp.float32)
    config = rnnzoo.FlashRNNConfig(
        **options,
        input_shape='TBGHD',
        recurrent_shape='HPDG',
        bias_shape='HDG',
        output_shape='SBHTD',
        initial_val=values,
    )
    got, last = rnnzoo.flashrnn(
        arrays['Wx'].transpose(1, 0, 2, 3, 4),
        arrays['R'].transpose(1, 3, 2, 0),
        arrays['b'].transpose(1, 2, 0),
        config=config,
    )
    close(got, want.transpose(0, 1, 3, 2, 4))
    close(last, want_last.transpose(0, 1, 3, 2, 4))

  def test_dtype(self):
    arrays = load('lstm', 0)
    states, last = rnnzoo.flashrnn(*given(arrays))
    self.assertEqual((states.dtype, last.dtype), (jnp.bfloat16, jnp.bfloat16))
    error = np.abs(np.float32(states) - arrays['states']).max()
    self.assertBetween(error, 1e-4, 3e-2)

  def grads(self, arrays, weights=1, **options):
    """Returns the gradient by Wx of an Elman network's states."""
    options |= {'function': 'elman', 'dtype': 'float32'}
    config = rnnzoo.FlashRNNConfig(**options)
    run = lambda Wx: rnnzoo.flashrnn(
        Wx, arrays['R'], arrays['b'], config=config
    )
    return jax.grad(lambda Wx: jnp.sum(weights * run(Wx)[0]))(arrays['Wx'])

  @pytest.mark.slow
  def test_gradient_through_the_recurrent_matrix(self):
    arrays = load('elman', 0)
    grads = functools.partial(self.grads, arrays)
    h = arrays['states'][0]
    cut = (1 - h**2)[:, :, None]
    close(grads(gradient_recurrent_cut=True), cut)
    close(grads(gradient_recurrent_clipval=1e-6), cut, atol=1e-5)
    self.assertGreater(np.abs(grads() - cut).max(), 0.1)

  @parameterized.parameters(np.nan, np.inf)
  def test_gradients_that_are_not_finite(self, bad):
    arrays = load('elman', 0)
    # The cotangent from the third step is not finite.
    weights = np.zeros(arrays['states'].shape, np.float32)
    weights[:, :, 2] = bad
    options = {'gradient_recurrent_clipval': 0.1}
    grads = functools.partial(self.grads, arrays, weights, **options)
    self.assertTrue(np.any(np.asarray(grads())[:, 1] != 0))  # A NaN, too.
    zeroed = grads(gradient_recurrent_zero_not_finite=True)
    np.testing.assert_array_equal(zeroed[:, :2], 0)
    with self.assertRaisesRegex(ValueError, 'needs gradient_recurrent_clipval'):
      rnnzoo.FlashRNNConfig(gradient_recurrent_zero_not_finite=True)

  @parameterized.parameters(*LAYERS.items())
  @pytest.mark.few(1)
  @pytest.mark.slow
  def test_weights_both_ways(self, function, name):
    arrays = load(function, 0)
    options = {'num_heads': HEADS, 'rngs': nnx.Rngs(0)}
    layer = rnnzoo.LAYERS[name](5, HEADS * SIZE, **options)
    gates = layer.cell.input_gates
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((gates * HEADS * SIZE, 5)).astype(np.float32)
    convert.from_flashrnn(layer, arrays['R'], arrays['b'], kernel=kernel)
    x = rng.standard_normal((2, 4, 5)).astype(np.float32)
    Wx = (x @ kernel.T).reshape(2, 4, gates, HEADS, SIZE)
    want, last = rnnzoo.flashrnn(
        Wx, arrays['R'], arrays['b'], function=function, dtype='float32'
    )
    carry, y = layer.unroll(x)
    close(y, want[0].reshape(y.shape), rtol=1e-5, atol=1e-5)
    last = last.reshape(len(carry), *carry[0].shape)
    close(carry, last, rtol=1e-5, atol=1e-5)
    back, want = convert.to_flashrnn(layer), (arrays['R'], arrays['b'], kernel)
    jax.tree.map(np.testing.assert_array_equal, tuple(back), want)

  def test_errors(self):
    arrays = load('gru', 0)
    Wx, R, b = (arrays[name] for name in ('Wx', 'R', 'b'))
    run = functools.partial(rnnzoo.flashrnn, function='gru', dtype='float32')
    config = rnnzoo.FlashRNNConfig
    cases = (
        (lambda: run(Wx[0], R, b), 'Wx must have the axes BTGHD'),
        (lambda: run(Wx[:, 0], R, b), r'One step has an axis too: Wx\[:, None'),
        (
            lambda: run(Wx[..., :0], R[:, :, :0, :0], b[..., :0]),
            'head dimension of at least 1',
        ),
        (lambda: config(initial_val='a'), "initial_val must be .* got 'a'"),
        (lambda: config(initial_val=None), 'initial_val must be .* got None'),
        (lambda: config(initial_val=(0, 'a')), "initial_val .* got 'a'"),
        (lambda: config(initial_val=np.zeros(2)), r'number .* got array\(\['),
        *(
            (lambda x=x: config(initial_val=x), re.escape(f'got {x}'))
            for x in (math.nan, math.inf, 4e38)
        ),
        (lambda: config(gradient_recurrent_clipval=-1), 'above 0.* got -1'),
        (
            lambda: run(Wx[..., :0, :], R[:, :0], b[:, :0]),
            'Wx must have heads',
        ),
        (
            lambda: run(Wx, R[..., :2], b),
            r'R must have shape \(3, 2, 3, 3\) along GHDP.* \(3, 2, 3, 2\)',
        ),
        (lambda: run(Wx, R, b, dtype='float64'), 'would run in float32'),
        (lambda: run(Wx, R[:2], b), r'R must have shape \(3, 2, 3, 3\)'),
        (lambda: run(Wx, R, b[:3]), r'b must have shape \(4, 2, 3\)'),
        (lambda: run(Wx, R, b, Wx), 'states must have shape'),
        (lambda: run(Wx, R * 1j, b), 'R must be real'),
        (lambda: run(Wx, R, b, backend='xla'), 'backend must be'),
        (lambda: run(Wx, R, b, config={}), 'config must be .* got a dict'),
        (lambda: config(function='mlstm'), 'function must be'),
        (lambda: config(output_shape='TSBHD'), 'output_shape must be'),
        (
            lambda: run(
                Wx, R, b, config=config(function='gru', initial_val=(0, 0))
            ),
            'initial_val must be a number or 1 of them',
        ),
    )
    for call, message in cases:
      with self.subTest(message), self.assertRaisesRegex(ValueError, message):
        call()


if __name__ == '__main__':
  absltest.main()
