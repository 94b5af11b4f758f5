"""Sums of gates are found in a cell's update, and change no result."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import api
from pallas_kernels import step
from pallas_kernels.dense import forward
import rnnzoo
from rnnzoo import cell as cell_lib
from tests.testing import abstract_gpu


class _Gated(cell_lib.Cell):
  """One gate is multiplied, one is read twice, and one is added."""

  input_gates = 3
  recurrent_gates = 3
  carry_names = ('h',)

  def update(self, params, x_gates, h_gates, carry):
    del params
    a, b, c = h_gates
    product = jnp.tanh(x_gates[0] * a) + jnp.exp(x_gates[1] + b) * b
    return (jax.nn.sigmoid(c + 2 * x_gates[2]) * product + carry[0],)


class _Constants(cell_lib.Cell):
  """Constants are added to gates, of a value or of an array."""

  input_gates = 2
  recurrent_gates = 3
  carry_names = ('h',)

  def update(self, params, x_gates, h_gates, carry):
    del params, carry
    a, b, c = h_gates
    a = jnp.tanh(x_gates[0] + a) + jnp.sqrt(2.0) * jnp.tanh(x_gates[1])
    b = jnp.tanh(b + jnp.sqrt(2.0))
    return (a + b + jnp.tanh(jnp.ones_like(c) + c),)


class GateSumsTest(parameterized.TestCase):

  @parameterized.parameters(
      (rnnzoo.LSTMCell(), [True] * 4),
      (rnnzoo.SLSTMCell(), [True] * 4),
      (rnnzoo.GRUCell(), [True] * 3),
      (_Gated(), [False, False, True]),
      (_Constants(), [True, False, False]),
  )
  @pytest.mark.few(2)
  def test_update(self, cell, want):
    count = cell.input_gates
    states = len(cell.carry_names)
    params = {name: np.zeros(5) for name in cell.param_names}
    rows = step.Rows.of(params, np.zeros((count, 5)), None, 5)
    update = step.Gated('update', cell, rows)
    rng = np.random.default_rng(0)
    draw = lambda n: tuple(jnp.asarray(rng.standard_normal((n, 5)), 'float32'))
    theta, row = draw(rows.count), draw(count)
    gates = draw(cell.recurrent_gates)
    carry = draw(states)
    sums = forward.find(update, theta, row, gates, carry)
    starts = sums.starts(theta, row)
    self.assertEqual([start is not None for start in starts], want)
    added = [
        gate if start is None else gate + start
        for gate, start in zip(gates, starts, strict=True)
    ]
    got = sums.update(theta, row, tuple(added), carry)
    for x, y in zip(got, update(theta, row, gates, carry), strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-6)

  def test_constants_lower(self):
    # They have no elements of threads, which sums could start from.
    x = jax.ShapeDtypeStruct((64, 4, 2, 12 * 64), 'bfloat16')
    kernel = jax.ShapeDtypeStruct((3, 12, 64, 64), 'float32')

    def run(x, kernel):
      _, ys = api.recurrence(
          _Constants(), {}, x, kernel, None, bias=jnp.zeros((2, 12 * 64))
      )
      return ys

    with abstract_gpu.device(self, 'NVIDIA H200'):
      text = abstract_gpu.lower(run, x, kernel)
      self.assertEqual(text.count('custom_call @mosaic_gpu'), 1)

  def test_an_equation_without_results(self):
    def update(theta, row, gates, carry):
      del theta, carry
      jax.debug.print('{}', row[0])
      return (jnp.tanh(row[0] + gates[0]),)

    one = (jnp.ones(3),)
    sums = forward.find(update, one, one, one, one)
    np.testing.assert_allclose(*sums.update(one, one, one, one), jnp.tanh(1.0))

  def test_none(self):
    one = (jnp.ones(3),)
    found = forward.find(
        lambda theta, x, h, c: (x[0] * h[0],), one, one, one, one
    )
    self.assertIsNone(found)


if __name__ == '__main__':
  absltest.main()
