"""`rnnzoo.linear_scan` and the linear cells against numpy in float64."""

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
from tests.testing import reference

BATCH, FEATURES = 2, 3
PATHS = ('scan', 'associative_scan')


def draw(time, seed=0):
  """Returns a, b, h0 and reset; a has negative numbers, zeros and ones."""
  rng = np.random.default_rng(seed)
  a = rng.uniform(-1.2, 1.2, (BATCH, time, FEATURES))
  a[rng.random(a.shape) < 0.15] = 0
  a[rng.random(a.shape) < 0.15] = 1
  b = rng.standard_normal(a.shape)
  h0 = rng.standard_normal((BATCH, FEATURES))
  reset = rng.random((BATCH, time)) < 0.3
  return a, b, h0, reset


def scan_all(time, dtype, *, reverse, with_reset):
  """All paths' h, and their gradients of a weighted sum, in one program."""
  *given, reset = draw(time)
  a, b, h0 = (x.astype(dtype) for x in given)
  w = np.random.default_rng(1).standard_normal(a.shape).astype(dtype)
  options = {'reset': reset if with_reset else None, 'reverse': reverse}
  functions = {
      path: functools.partial(
          rnnzoo.linear_scan, implementation=path, **options
      )
      for path in PATHS
  }
  functions['plain'] = functools.partial(reference.linear_scan, **options)

  @reference.jit
  def run(*args):
    results = {}
    for name, f in functions.items():
      loss = lambda *args, f=f: jnp.sum(w * f(*args))
      results[name] = f(*args), jax.grad(loss, (0, 1, 2))(*args)
    return results

  return run(a, b, h0)


def check_forgets_an_infinity(test, path, reverse):
  """A path forgets it by a reset in the first row, by a = 0 in the second."""
  a = np.ones((2, 6, 1), np.float32)
  b = np.ones_like(a)
  b[:, 4 if reverse else 1] = np.inf
  reset = np.zeros((2, 6), bool)
  reset[0, 3] = True
  a[1, 2 if reverse else 3] = 0
  after = np.arange(3)[::-1] if reverse else np.arange(3, 6)
  options = {'reset': reset, 'reverse': reverse, 'implementation': path}

  def loss(a, b):
    h = rnnzoo.linear_scan(a, b, **options)
    return jnp.sum(h[:1, after]), h

  (d_a, d_b), h = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(a, b)
  np.testing.assert_array_equal(np.asarray(h)[:, after, 0], [[1, 2, 3]] * 2)
  # Nor does it reach a gradient on the other side of a reset, or any of b.
  test.assertTrue(np.isfinite(d_a[0, after]).all())
  test.assertTrue(np.isfinite(d_b).all())


def check_nothing_passes_a_reset(test, path, reverse, poison, poisoned=(0, 1)):
  """Nothing of the step right before a reset passes it, be it in a or in b."""
  a = np.full((1, 9, 1), 0.5, np.float32)
  b = np.ones_like(a)
  reset = np.zeros((1, 9), bool)
  reset[0, 4] = True
  first = 4 if reverse else 3  # The last step before the reset.
  after = np.arange(4) if reverse else np.arange(4, 9)
  others = np.setdiff1d(np.arange(9), after)
  options = {'reset': reset, 'reverse': reverse, 'implementation': path}

  @jax.jit
  def scan(a, b, weights):
    run = lambda a, b: rnnzoo.linear_scan(a, b, **options)
    h, pull = jax.vjp(run, a, b)
    return h, *pull(weights)

  weights = np.ones_like(a)
  clean = scan(a, b, weights)
  for where in poisoned:
    bad = [a.copy(), b.copy()]
    bad[where][0, first] = poison
    found = scan(*bad, weights)
    test.assertFalse(np.isfinite(found[0][0, first]).all())
    for got, want in zip(found, clean, strict=True):
      np.testing.assert_array_equal(got[0, after], want[0, after])
    if where == 1:  # The gradient of b has a as a factor, and no b.
      np.testing.assert_array_equal(found[2], clean[2])
  weights[0, after] = poison
  for got, want in zip(scan(a, b, weights), clean, strict=True):
    np.testing.assert_array_equal(got[0, others], want[0, others])


def check_sums_in_float32(test, path):
  """1 + 1/256 is 1 in bfloat16: a sum in bfloat16 would stay at 1."""
  b = np.full((1, 257, 1), 2**-8, jnp.bfloat16)
  b[:, 0] = 1
  h = rnnzoo.linear_scan(np.ones_like(b), b, implementation=path)
  test.assertEqual(h.dtype, jnp.bfloat16)
  test.assertEqual(float(h[0, -1, 0]), 2)


class LinearScanTest(parameterized.TestCase):

  @parameterized.product(
      time=(1, 2, 5, 37), reverse=(False, True), with_reset=(False, True)
  )
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_agrees_with_loop(self, time, reverse, with_reset):
    with jax.enable_x64(True):
      results = scan_all(
          time, np.float64, reverse=reverse, with_reset=with_reset
      )
    want = results.pop('plain')
    for got in results.values():
      chex.assert_trees_all_close(got, want, rtol=1e-12, atol=1e-12)

  @parameterized.product(path=PATHS, zero=('a', 'h'))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_second_derivatives_at_zero(self, path, zero):
    with jax.enable_x64(True):
      a, b, h0, reset = map(jnp.asarray, draw(4))
      if zero == 'a':
        a = a.at[0, 1:3].set(0)
      else:  # Of h and of its cotangents.
        b, h0 = 0 * b, 0 * h0
      options = {'reset': reset, 'implementation': path}
      scan = functools.partial(rnnzoo.linear_scan, **options)
      by_hand = functools.partial(reference.linear_scan, reset=reset)
      got = self.second_derivatives(scan, (a, b, h0))
      want = self.second_derivatives(by_hand, (a, b, h0))
      for name, derivative in want.items():
        chex.assert_trees_all_close(
            got[name], derivative, atol=1e-12, custom_message=name
        )

  def second_derivatives(self, function, args):
    """Returns those of a sum of squares by all arguments, in three ways."""
    loss = lambda *args: (function(*args) ** 2).sum()
    every = tuple(range(len(args)))
    ways = {
        'forward over reverse': jax.jacfwd(jax.grad(loss, every), every),
        'reverse over reverse': jax.jacrev(jax.grad(loss, every), every),
        'forward over forward': jax.jacfwd(jax.jacfwd(loss, every), every),
    }
    return {name: jax.jit(way)(*args) for name, way in ways.items()}

  @parameterized.parameters(*PATHS)
  @pytest.mark.slow
  def test_low_precision_sums_in_float32(self, path):
    check_sums_in_float32(self, path)

  @parameterized.product(path=PATHS, reverse=(False, True))
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_forgets_an_infinity(self, path, reverse):
    check_forgets_an_infinity(self, path, reverse)

  @parameterized.product(
      path=PATHS, reverse=(False, True), poison=(np.nan, np.inf)
  )
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_nothing_passes_a_reset(self, path, reverse, poison):
    check_nothing_passes_a_reset(self, path, reverse, poison)

  @parameterized.product(
      path=PATHS, with_reset=(False, True), poison=(np.nan, np.inf)
  )
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_no_product_forgets(self, path, with_reset, poison):
    # Products of 64 of the factors are no float32: they underflow.
    a = np.full((1, 500, 1), 0.01, np.float32)
    a[0, 400] *= -1
    b = np.ones_like(a)
    b[0, 3] = poison
    reset = np.zeros((1, 500), bool) if with_reset else None
    scan = jax.jit(rnnzoo.linear_scan, static_argnames='implementation')
    h = scan(a, b, reset=reset, implementation=path)
    # Those that underflow keep their sign.
    want = np.repeat([poison, -poison], [397, 100])
    np.testing.assert_array_equal(h[0, 3:, 0], want)

  @parameterized.product(path=PATHS, with_reset=(False, True))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_keeps_a_zero_where_products_overflow(self, path, with_reset):
    a = np.full((1, 64, 1), 1e10, np.float32)
    b = np.zeros_like(a)
    b[0, -1] = 1
    reset = np.zeros((1, 64), bool) if with_reset else None
    scan = jax.jit(
        lambda a, b: rnnzoo.linear_scan(a, b, reset=reset, implementation=path)
    )
    h, pull = jax.vjp(scan, a, b)
    np.testing.assert_array_equal(h, b)
    d_a, d_b = pull(jnp.asarray(b[:, ::-1]))
    np.testing.assert_array_equal(d_b, b[:, ::-1])
    np.testing.assert_array_equal(d_a, np.zeros_like(a))

  @parameterized.product(
      layer=('MinGRU', 'MinLSTM'), path=PATHS, poison=(np.nan, np.inf)
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_nothing_passes_a_reset_of_a_layer(self, layer, path, poison):
    made = rnnzoo.LAYERS[layer](
        3, 4, implementation=path, learn_initial_carry=True, rngs=nnx.Rngs(0)
    )
    made.learned_carry[0][...] = jnp.arange(4.0)
    x = np.random.default_rng(0).standard_normal((1, 9, 3), np.float32)
    reset = np.zeros((1, 9), bool)
    reset[0, 4] = True
    bad = x.copy()
    bad[0, 3] = poison

    def loss(x):
      y = made(x, reset=reset)
      return jnp.sum(y[:, 4:] ** 2), y

    run = jax.jit(jax.grad(loss, has_aux=True))
    (gradient, y), (want, clean) = map(run, (bad, x))
    later = lambda x: made(x, reset=reset)[0, 4:]
    moved = jax.jit(lambda x: jax.jvp(later, (x,), (jnp.ones_like(x),))[1])
    np.testing.assert_array_equal(moved(bad), moved(x))
    np.testing.assert_array_equal(y[0, 4:], clean[0, 4:])
    np.testing.assert_array_equal(gradient[0, 4:], want[0, 4:])
    self.assertTrue(np.isnan(y[0, 3]).any())
    # The learned carry is where it starts again.
    np.testing.assert_allclose(y[0, 4:], made(x[0, 4:]), rtol=1e-5, atol=1e-6)


if __name__ == '__main__':
  absltest.main()
