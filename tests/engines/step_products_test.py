"""A step's product on a CPU has the values and derivatives of a product."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnzoo.engines import step_products
from tests.testing import comparison
from tests.testing import several_devices

multiply = step_products.multiply


def draw(*shape, dtype='float32'):
  return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


class SuitsTest(parameterized.TestCase):

  @parameterized.parameters(
      ((128, 128), 512, 'float32', True),
      ((64, 256), 768, 'float32', True),
      ((65, 256), 768, 'float32', False),
      ((0, 128), 512, 'float32', False),
      ((2, 64, 128), 512, 'float32', False),
      ((128,), 512, 'float32', False),
      ((128, 128), 512, 'float16', False),
      ((*jax.export.symbolic_shape('b'), 128), 512, 'float32', False),
  )
  def test_sizes_and_dtypes(self, shape, width, dtype, suits):
    got = []
    ask = lambda *a: got.append(step_products.suits(*a, jnp.dtype(dtype)))
    matrix = jax.ShapeDtypeStruct((shape[-1], width), dtype)
    jax.eval_shape(ask, jax.ShapeDtypeStruct(shape, dtype), matrix)
    self.assertEqual(got, [suits])


class MultiplyTest(parameterized.TestCase):

  def check(self, got, want):
    comparison.assert_near(got, want, 1e-6)

  @parameterized.parameters((1, 8, 24), (37, 16, 5), (128, 128, 512))
  def test_values(self, rows, columns, width):
    x, matrix = draw(rows, columns), draw(columns, width)
    self.check(jax.jit(multiply)(x, matrix), np.asarray(x) @ np.asarray(matrix))

  def test_compiles_to_a_product_for_all_threads(self):
    x, matrix = draw(128, 128), draw(128, 512)
    text = jax.jit(multiply).lower(x, matrix).compile().as_text()
    self.assertIn(' dot(', text)
    self.assertNotIn('convolution(', text)
    self.assertNotIn('ynn', text)

  def test_other_platforms_get_a_product(self):
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (16, 32))]
    text = lambda platform: jax.export.export(
        jax.jit(multiply), platforms=(platform,)
    )(*types).mlir_module()
    self.assertIn('stablehlo.convolution', text('cpu'))
    self.assertNotIn('stablehlo.convolution', text('cuda'))

  @pytest.mark.slow
  def test_derivatives(self):
    operands = draw(3, 4), draw(4, 8)
    tangents = draw(3, 4) + 1, draw(4, 8) - 1
    self.check(
        jax.jvp(multiply, operands, tangents),
        jax.jvp(jnp.matmul, operands, tangents),
    )

    def twice(product):
      loss = lambda *a: jnp.sum(jnp.sin(product(*a)))
      first = jax.grad(loss, (0, 1))
      second = lambda *a: sum(jnp.sum(d**2) for d in first(*a))
      return first(*operands), jax.grad(second, (0, 1))(*operands)

    self.check(twice(multiply), twice(jnp.matmul))
    hessian = lambda f: jax.hessian(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1))
    self.check(hessian(multiply)(*operands), hessian(jnp.matmul)(*operands))

  @parameterized.parameters(((0, None),), ((None, 0),), ((0, 0),), ((1, 2),))
  @pytest.mark.slow
  def test_vmap(self, axes):
    operands = tuple(
        x if axis is None else jnp.stack([x, x + 1, 2 * x], axis)
        for x, axis in zip((draw(6, 4), draw(4, 8)), axes, strict=True)
    )
    mapped = [jax.vmap(f, axes) for f in (multiply, jnp.matmul)]
    self.check(*[f(*operands) for f in mapped])
    gradients = [
        jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), (0, 1))
        for f in mapped
    ]
    self.check(*[f(*operands) for f in gradients])
    text = jax.jit(mapped[0]).lower(*operands).compile().as_text()
    self.assertNotIn('convolution(', text)

  @pytest.mark.slow
  def test_on_several_devices(self):
    several_devices.run(self, 'step_products_program', devices=2)


if __name__ == '__main__':
  absltest.main()
