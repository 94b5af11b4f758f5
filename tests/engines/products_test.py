"""Products of one step are those of sequences, whichever way they are made."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnzoo.engines import products


class ProductsTest(parameterized.TestCase):

  def draw(self, *shape, dtype='float32'):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)

  @parameterized.parameters(
      ((), 'float32', True),
      ((3,), 'float32', True),
      ((2, 2), 'float32', True),
      ((9,), 'float32', False),
      ((3,), 'bfloat16', False),
  )
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_one_step(self, lead, dtype, stored):
    kernel, bias = self.draw(3, 5, 8), self.draw(3, 8)
    x = self.draw(*lead, 5, dtype=dtype)
    self.assertEqual(products.as_stored(kernel, x), stored)
    want = products.project_forward((kernel, bias), x)
    got = products.project_step((kernel, bias), x)
    np.testing.assert_allclose(got, want, atol=1e-5)

    h = self.draw(*lead, 8)
    for heads in (1, 2, 8):
      size = 8 // heads
      recurrent = self.draw(3, heads, size, size, dtype=dtype)
      want = products.multiply(products.pack(recurrent), h)
      got = products.multiply(products.pack_step(stored, recurrent), h)
      np.testing.assert_allclose(got, want, atol=1e-5)

  @parameterized.parameters(3, 40)
  def test_a_loop_copies_no_parameters(self, rows):
    weights = self.draw(4, 16, 16), self.draw(4, 16)
    recurrent = self.draw(4, 1, 16, 16)

    def steps(weights, recurrent, h):
      stored = products.as_stored(weights[0], h)

      def body(h):
        x_gates = products.project_step(weights, h)
        packed = products.pack_step(stored, recurrent)
        h_gates = products.multiply(packed, h)
        return jnp.tanh(sum(x_gates) * sum(h_gates))

      return jax.lax.fori_loop(0, 9, lambda _, h: body(h), h)

    compiled = jax.jit(steps).lower(weights, recurrent, self.draw(rows, 16))
    text = compiled.compile().as_text()
    body = text.partition('body=')[2].partition(',')[0].partition('\n')[0]
    lines = text.partition(f'\n{body} (')[2].partition('\n}')[0].splitlines()
    # Parameters have 16 times as many rows as h or fewer.
    sizes = '64,16', '16,64', '4,16,16'
    copies = [
        line
        for line in lines
        if any(f' = f32[{size}]' in line for size in sizes)
        and not ('get-tuple-element(' in line or 'bitcast(' in line)
    ]
    self.assertEmpty(copies)
    self.assertNotEmpty(lines)


if __name__ == '__main__':
  absltest.main()
