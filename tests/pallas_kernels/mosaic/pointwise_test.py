"""Cells' equations as kernels compute them, on plain arrays.

On a CPU exp, tanh and rsqrt are exact, so these tests show the error of the
replacements around them.
"""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import cells
import rnnzoo
from tests.testing import comparison
from tests.testing import random_layers

# Relative errors of float32, whose roundings are 2^-24 = 6e-8.
TOLERANCE = 5e-7

# Where 1 + x or 1 - tanh x is rounded, 2^-24 is this much of the least |x|,
# 0.03, for which that is done.
SMALL = 2e-6

# exp2 rounds its argument, and 2^-24 of it is this much of exp(-60).
EXPONENT = 5e-6

TOLERANCES = {
    'tanh': SMALL,
    'jit': 2 * SMALL,  # tanh squared.
    'checkpoint': SMALL,
    'log1p_small': SMALL,
    'softplus': SMALL,
    'log_sigmoid': SMALL,
    'logistic': EXPONENT,
    'silu': EXPONENT,
}

# Both branches of a `where` are computed; in the one that is not taken, NumPy
# warns of numbers that are too large.
UNTAKEN_MAY_OVERFLOW = np.errstate(over='ignore', invalid='ignore')


def both_signs(low, high, count=400):
  """Numbers of both signs whose size is spread over orders of magnitude."""
  x = np.geomspace(low, high, count, dtype=np.float32)
  return np.concatenate([-x[::-1], x])


def double(f, *args):
  """Returns f of x in float64."""
  with jax.enable_x64(True):
    args = jax.tree.map(lambda x: np.asarray(x, np.float64), args)
    return jax.tree.map(np.asarray, f(*args))


def primitives(f, *args):
  """Returns the names of the primitives of a function."""
  return [e.primitive.name for e in jax.make_jaxpr(f)(*args).eqns]


def vjp(f, *args):
  """`jax.vjp` as kernels compute it; `pointwise.pull` applies the pullback."""
  return cells.legalize(lambda *args: jax.vjp(f, *args))(*args)


def close(got, want, rtol=TOLERANCE):
  np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-30)


FUNCTIONS = {
    'tanh': (jnp.tanh, both_signs(1e-20, 100)),
    'logistic': (jax.nn.sigmoid, both_signs(1e-6, 60)),
    'exp': (jnp.exp, both_signs(1e-6, 80)),
    'log1p_small': (jnp.log1p, both_signs(1e-20, 0.5)),
    'log1p_large': (jnp.log1p, np.geomspace(0.5, 1e30, 400, dtype='f')),
    'expm1': (jnp.expm1, both_signs(1e-20, 60)),
    'reciprocal': (lambda x: 1 / x, both_signs(1e-30, 1e30)),
    'by_a_number': (lambda x: x / -3, both_signs(1e-30, 1e30)),
    'square': (jnp.square, both_signs(1e-10, 1e10)),
    'stop_gradient': (lambda x: x * lax.stop_gradient(x), both_signs(1e-3, 10)),
    'softplus': (jax.nn.softplus, both_signs(1e-6, 80)),
    'log_sigmoid': (jax.nn.log_sigmoid, both_signs(1e-6, 80)),
    'silu': (jax.nn.silu, both_signs(1e-6, 60)),
    'relu': (jax.nn.relu, both_signs(1e-6, 60)),
    'jit': (jax.jit(lambda x: jnp.tanh(x) ** 2), both_signs(1e-6, 60)),
    'checkpoint': (jax.checkpoint(jnp.tanh), both_signs(1e-6, 60)),
    'powers': (lambda x: (x**0, x**3, x**7, x**-1, x**-4), both_signs(0.1, 10)),
}

# Their derivatives differ by cancellation that jax's own have as well: compared
# in the norm.
DERIVATIVES = tuple(name for name in FUNCTIONS if name != 'reciprocal')


class FunctionsTest(parameterized.TestCase):

  @parameterized.parameters(*FUNCTIONS)
  @UNTAKEN_MAY_OVERFLOW
  @pytest.mark.few(3)
  def test_value(self, name):
    f, x = FUNCTIONS[name]
    check = functools.partial(close, rtol=TOLERANCES.get(name, TOLERANCE))
    jax.tree.map(check, cells.legalize(f)(x), double(f, x))

  @parameterized.parameters(*DERIVATIVES)
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_derivative(self, name):
    f, x = FUNCTIONS[name]
    value, pullback = vjp(f, x)
    (got,) = cells.pull(pullback, jax.tree.map(jnp.ones_like, value))

    def gradient(x):
      value, pull = jax.vjp(f, x)
      return pull(jax.tree.map(jnp.ones_like, value))[0]

    want = double(gradient, x)
    self.assertLess(comparison.relative_error(got, want), TOLERANCE)
    self.assertTrue(np.isfinite(got).all())

  def test_division(self):
    x = both_signs(1e-10, 1e10)[:, None]
    y = both_signs(1e-10, 1e10)[None]
    close(cells.legalize(lambda x, y: x / y)(x, y), double(np.divide, x, y))

  @UNTAKEN_MAY_OVERFLOW
  def test_tanh_of_the_largest(self):
    x = np.array([0, 1e30, -1e30, np.inf, -np.inf, np.nan], np.float32)
    y = cells.legalize(jnp.tanh)(x)
    np.testing.assert_array_equal(y, [0, 1, -1, 1, -1, np.nan])

  def test_logistic_of_the_largest(self):
    x = np.array([200, -200, np.inf, -np.inf, 0], np.float32)
    pair = lambda x: (jax.nn.sigmoid(x), jax.nn.sigmoid(-x))
    want = [1, 0, 1, 0, 0.5], [0, 1, 0, 1, 0.5]
    np.testing.assert_allclose(cells.legalize(pair)(x), want, atol=1e-29)
    _, pullback = vjp(pair, x[:2])
    (d_x,) = cells.pull(pullback, (np.ones(2, 'f'), np.ones(2, 'f')))
    np.testing.assert_allclose(d_x, 0, atol=1e-29)

  def test_logistic_is_shared(self):
    # Two gates of one number in either order, one exponential.
    x = both_signs(1e-3, 60)
    for f in (
        lambda x: (jax.nn.sigmoid(x), jax.nn.sigmoid(-x)),
        lambda x: (jax.nn.sigmoid(-x), jax.nn.sigmoid(x)),
    ):
      legal = cells.legalize(f)
      check = functools.partial(close, rtol=EXPONENT)
      jax.tree.map(check, legal(x), double(f, x))
      names = primitives(legal, x)
      self.assertEqual(names.count('exp2'), 1)
      self.assertEqual(names.count('rsqrt'), 1)

  @parameterized.parameters(
      (jnp.sort, 'sort'), (lax.erf_inv, 'erf_inv'), (jnp.cumsum, 'cumsum')
  )
  def test_unknown_primitive(self, f, name):
    x = np.ones(4, np.float32)
    with self.assertRaisesRegex(NotImplementedError, f"primitive '{name}'"):
      cells.legalize(f)(x)
    with self.assertRaisesRegex(NotImplementedError, f"primitive '{name}'"):
      cells.legalize(lambda x: jax.jit(f)(2 * x))(x)


class UsedTest(parameterized.TestCase):

  def test_which_inputs_matter(self):
    x = np.ones(4, np.float32)
    both = lambda p, x: (p * x[0], x[1])
    self.assertEqual(cells.used(both, x, (x, x)), [True, True, True])
    first = lambda p, x: both(p, x)[0]
    self.assertEqual(cells.used(first, x, (x, x)), [True, True, False])
    self.assertEqual(cells.used(lambda x: x[1], (x, x)), [False, True])
    self.assertEqual(cells.used(lambda x: 1.0, x), [False])

  def test_adjoint_of_a_plain_scan_reads_a_alone(self):
    x = np.ones(4, np.float32)

    def adjoint(cotangents, row):
      (a, _), pull = jax.vjp(lambda row: row, row)
      return a, pull(cotangents)

    used = cells.used(adjoint, (x, x), (x, x))
    self.assertEqual(used, [True, True, True, False])


FAST = cells.Accuracy(2**-11)
NEAR = cells.Accuracy(2**-22)
# As a GPU has it.
RECIPROCAL = cells.Accuracy(reciprocal=lambda x: np.float32(1) / x)


class InTurnTest(absltest.TestCase):

  def test_order(self):
    """Known values, then urgent results, then the others."""

    def function(known, later):
      def step(x):
        slow = jnp.sin(x) + jnp.exp(known)
        return jnp.cos(x) + slow, jnp.log(x) * slow, known

      aval = jax.ShapeDtypeStruct(later.shape, later.dtype)
      apply = cells.in_turn(step, [aval], 1)
      now, rest = apply(jnp.tan(later))
      return *now, jnp.sqrt(later), *rest()

    x, y = jnp.linspace(0.1, 1, 5), jnp.linspace(0.2, 1.2, 5)
    found = primitives(function, x, y)
    order = ['exp', 'tan', 'sin', 'cos', 'sqrt', 'log']
    self.assertEqual([name for name in found if name in order], order)
    slow = jnp.sin(jnp.tan(y)) + jnp.exp(x)
    now, rest = jnp.cos(jnp.tan(y)) + slow, jnp.log(jnp.tan(y)) * slow
    expected = now, jnp.sqrt(y), rest, x
    np.testing.assert_allclose(function(x, y), expected, rtol=1e-6)


class AccuracyTest(parameterized.TestCase):
  """Where results are rounded to bfloat16 anyway."""

  @parameterized.product(
      name=('tanh', 'logistic', 'log1p_small'), accuracy=(FAST, NEAR)
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_value_and_derivative(self, name, accuracy):
    # On a GPU a single instruction has an error of 2^-11 more.
    f, x = FUNCTIONS[name]
    fast = cells.legalize(f, accuracy)
    np.testing.assert_allclose(fast(x), double(f, x), rtol=1e-6, atol=2**-22)
    make = lambda x: jax.vjp(f, x)
    value, pullback = cells.legalize(make, accuracy)(x)
    (got,) = cells.pull(pullback, jnp.ones_like(value), accuracy)
    want = double(lambda x: jax.vjp(f, x)[1](jnp.ones_like(x))[0], x)
    self.assertLess(comparison.relative_error(got, want), 1e-6)

  def test_one_instruction(self):
    gates = lambda x, y: (
        jax.nn.sigmoid(x),
        jax.nn.sigmoid(-x),
        1 - jax.nn.sigmoid(x),
        jnp.tanh(y),
        jnp.tanh(y) ** 2,
    )
    x = both_signs(1e-3, 60)
    fast = cells.legalize(gates, FAST)
    names = primitives(fast, x, x)
    self.assertEqual(names.count('tanh'), 2)
    slow = {'exp', 'exp2', 'rsqrt', 'logistic'}
    self.assertEmpty(slow.intersection(names))
    near = cells.legalize(gates, NEAR)
    names = primitives(near, x, x)
    self.assertEqual(names.count('exp2'), 2)
    self.assertNotIn('tanh', names)
    for f in fast, near:
      want = double(gates, x, x)
      np.testing.assert_allclose(f(x, x), want, atol=1e-6)

  @parameterized.parameters(FAST, NEAR, RECIPROCAL)
  @UNTAKEN_MAY_OVERFLOW
  def test_infinities(self, accuracy):
    x = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30], np.float32)
    sigmoid = cells.legalize(jax.nn.sigmoid, accuracy)
    np.testing.assert_allclose(sigmoid(x), [1, 0, np.nan, 1, 0], atol=2e-30)
    tanh = cells.legalize(jnp.tanh, accuracy)
    np.testing.assert_array_equal(tanh(x), [1, -1, np.nan, 1, -1])

  def test_reciprocal(self):
    f = lambda x: (2 / x, x / 3, x**-2, jax.nn.sigmoid(x))
    x = both_signs(1e-3, 60)
    made = cells.legalize(f, RECIPROCAL)
    names = primitives(made, x)
    # One for the quotient and the power, one for the logistic function.
    self.assertEqual(names.count('div'), 2)
    self.assertNotIn('rsqrt', names)
    np.testing.assert_allclose(made(x), double(f, x), rtol=1e-5)


class ValueNumbersTest(parameterized.TestCase):

  @parameterized.parameters(
      (lambda x, y: (x + y, x + y, y + x), '001'),
      (lambda x, y: (x, y, x), '010'),
      (lambda x, y: (x, x + 0, 0.0 + x, x * 0), '0001'),
      (lambda x, y: (x + jnp.zeros_like(y), x - y, x - y), '011'),
      (lambda x, y: (jnp.tanh(x), jnp.tanh(y), jnp.tanh(x)), '010'),
      (lambda x, y: (2 * x, 3 * x, 2 * x), '010'),
      (lambda x, y: (x.astype(jnp.bfloat16), x), '01'),
      (lambda x, y: jax.jit(lambda u: (u * y, u))(x) + (x * y, x), '0101'),
      (lambda x, y: (x > y, x > y, x < y), '001'),
      (lambda x, y: (jnp.where(x > y, x, y), jnp.where(x > y, y, x)), '01'),
  )
  def test_equal(self, f, expected):
    x = np.ones(4, np.float32)
    numbers = cells.value_numbers(f, x, x)
    seen: dict[int, int] = {}
    found = [seen.setdefault(n, len(seen)) for n in numbers]
    self.assertEqual(''.join(map(str, found)), expected)

  def test_of_arguments(self):
    x = np.ones(4, np.float32)
    one, two = cells.value_numbers(lambda x, y: (y, x), x, x)
    self.assertNotEqual(one, two)


def steps():
  """Yields each layer's equations, and their arguments."""
  for name in rnnzoo.LAYERS:
    for candidate in ('linear', 'positive')[: 1 + name.startswith('Min')]:
      options = {'candidate': candidate} if name.startswith('Min') else {}
      tag = '_'.join([name, *options.values()])
      yield {'testcase_name': tag, 'layer': name, 'options': options}


def rows(param):
  """A parameter as a kernel has it: arrays like a gate, in nested tuples."""
  if param.ndim < 2:
    return np.broadcast_to(param, (3, 128))
  return tuple(map(rows, param))


class CellsTest(parameterized.TestCase):

  @parameterized.named_parameters(*steps())
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_agrees(self, layer, options):
    made = random_layers.make(layer, 4, 128, **options)
    cell = made.cell
    rng = np.random.default_rng(0)
    draw = lambda n: tuple(rng.standard_normal((n, 3, 128)).astype(np.float32))
    args = (
        {k: rows(np.asarray(v[...])) for k, v in made.cell_params.items()},
        draw(cell.input_gates + getattr(cell, 'reads_starts', False)),
        draw(cell.recurrent_gates),
        random_layers.carry(made, 3),
    )
    f = cell.update
    if isinstance(cell, rnnzoo.LinearCell):
      f = lambda *args: tuple(jax.tree.leaves(cell.coefficients(*args)))
      args = args[:2]
    value, pullback = vjp(f, *args)
    cotangent = draw(len(value))
    pulled = cells.pull(pullback, cotangent)
    got = cells.legalize(f)(*args), value, pulled

    def want(args, cotangent):
      value, pull = jax.vjp(f, *args)
      return value, value, pull(cotangent)

    jax.tree.map(
        lambda x, y: self.assertLess(
            comparison.relative_error(x, y), 2 * TOLERANCE
        ),
        got,
        double(want, args, cotangent),
    )


if __name__ == '__main__':
  absltest.main()
