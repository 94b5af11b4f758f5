"""Errors of `pallas_kernels` for arguments that it cannot take."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
import rnnzoo
from tests.testing import abstract_gpu

H200 = 'NVIDIA H200'
CELL = rnnzoo.ElmanCell()
BOTH = pallas_kernels.Call(both_directions=True)
CLIP = pallas_kernels.Call(recurrent_gradient_clip=1.0)
STOP = pallas_kernels.Call(stop_recurrent_gradient=True)


def zeros(*shape, dtype=jnp.float32):
  return jnp.zeros(shape, dtype)


def scan(**changes):
  """Calls `linear_scan` on (2, 5, 8) with some arguments changed."""
  given = {'a': zeros(2, 5, 8), 'b': zeros(2, 5, 8)} | changes
  return jax.eval_shape(lambda: pallas_kernels.linear_scan(**given))


def recur(**changes):
  """Calls `recurrence` of a diagonal cell on (2, 5, 8), likewise."""
  given = {
      'cell': CELL,
      'params': {},
      'x_gates': zeros(2, 5, 1, 8),
      'recurrent_kernel': zeros(1, 8, 1, 1),
      'carry': (zeros(2, 8),),
  } | changes
  return jax.eval_shape(lambda: pallas_kernels.recurrence(**given))


BAD_SCANS = {
    'a': (
        {'a': zeros(5, 8)},
        r'a must be like b, or \[features\] = \(2, 5, 8\)',
    ),
    'b': ({'b': zeros(5, 8)}, r'b must be \[batch, time, features\], got'),
    'h0': ({'h0': zeros(3, 8)}, r'h0 must be .* = \(2, 8\), got \(3, 8\)'),
    'reset': (
        {'reset': zeros(5, 2, dtype=bool)},
        r'reset must be .* = \(2, 5\)',
    ),
    'flags': (
        {'reset': zeros(2, 5, dtype=jnp.int32)},
        'reset must be bool, got int32',
    ),
}

BAD_RECURRENCES = {
    'axes': ({'x_gates': zeros(2, 5)}, 'x_gates must be'),
    'gates': ({'x_gates': zeros(2, 5, 2, 8)}, 'must hold 1 gates .* got 2'),
    'time': (
        {'x_gates': (zeros(2, 5, 8), zeros(2, 4, 8))},
        'x_gates must be alike',
    ),
    'bias': ({'bias': zeros(2, 8)}, r'bias must be .* = \(1, 8\)'),
    'input_kernel': (
        {'x_gates': zeros(2, 5, 3), 'input_kernel': zeros(1, 4, 8)},
        r'input_kernel must be .* = \(1, 3, 8\), got \(1, 4, 8\)',
    ),
    'inputs': (
        {'input_kernel': zeros(1, 8, 8)},
        r'x_gates must be .batch, time, in_features. with an input_kernel',
    ),
    'kernel': (
        {'recurrent_kernel': zeros(1, 4, 1, 1)},
        r'recurrent_kernel must be .* = \(1, 8, 1, 1\)',
    ),
    'no_kernel': (
        {'recurrent_kernel': None},
        'ElmanCell needs a recurrent_kernel',
    ),
    'carry': ({'carry': zeros(2, 8)}, 'carry must be a tuple of one array'),
    'restart': (
        {'restart': (zeros(2, 8), zeros(2, 8))},
        'restart must be a tuple .* got 2',
    ),
    'mask': ({'mask': zeros(2, 5)}, 'mask must be bool, got float32'),
    'outputs': (
        {'call': pallas_kernels.Call(outputs=2)},
        'outputs must be 0 to 1 .* got 2',
    ),
    'both': (
        {'call': BOTH, 'reset': zeros(2, 5, dtype=bool)},
        r'reset must be .* = \(2, 2, 5\), got \(2, 5\)',
    ),
    'odd_heads': (
        {'call': BOTH, 'recurrent_kernel': zeros(1, 1, 8, 8)},
        'both_directions needs an even number of heads, got 1',
    ),
}

CANNOT = {
    'out_dtype': (
        {'call': pallas_kernels.Call(out_dtype=jnp.int32)},
        "takes and returns .*'int32'",
    ),
    'time': ({'x_gates': zeros(2, 0, 1, 8)}, 'above 0'),
    'clip': ({'call': CLIP}, 'that are not diagonal only'),
    'stop': ({'call': STOP}, 'that are not diagonal only'),
    'both': ({'call': BOTH}, 'that are not diagonal only'),
}


class ArgumentsTest(parameterized.TestCase):

  def check(self, call, changes, error, message):
    with abstract_gpu.device(self, H200):
      if not abstract_gpu.RUNS:
        call(**changes)
      with self.assertRaisesRegex(error, message):
        call(**changes)

  @parameterized.parameters(*BAD_SCANS.values())
  def test_linear_scan(self, changes, message):
    self.check(scan, changes, ValueError, message)

  @parameterized.parameters(*BAD_RECURRENCES.values())
  def test_recurrence(self, changes, message):
    self.check(recur, changes, ValueError, message)

  @parameterized.parameters(*CANNOT.values())
  def test_cannot(self, changes, message):
    self.check(recur, changes, NotImplementedError, message)

  def test_too_many_sequences(self):
    many = {name: zeros(70000, 1, 1) for name in ('a', 'b')}
    message = '65535 sequences .* split the batch'
    self.check(scan, many, NotImplementedError, message)

  def test_second_derivative(self):
    x = np.ones((1, 4, 8), np.float32)

    def loss(a):
      h = rnnzoo.linear_scan(a, x, implementation='pallas')
      return jnp.sum(h**2)

    slope = lambda a: jnp.sum(jax.grad(loss)(a) ** 2)
    message = "first derivatives only.*'scan' has second"
    with abstract_gpu.device(self, H200):
      if not abstract_gpu.RUNS:
        jax.eval_shape(slope, x)
      with self.assertRaisesRegex(NotImplementedError, message):
        jax.eval_shape(jax.grad(slope), x)


class NoGpuTest(absltest.TestCase):

  def test_names_no_path_of_the_caller(self):
    # rnnzoo adds which of its paths would run, see selection.py.
    with self.assertRaisesRegex(NotImplementedError, 'GPU kernels') as caught:
      scan()
    self.assertNotIn('implementation', str(caught.exception))


if __name__ == '__main__':
  absltest.main()
