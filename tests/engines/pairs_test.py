"""Linear cells of two numbers a feature, on every path, against plain loops."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from tests.testing import abstract_gpu
from tests.testing import comparison
from tests.testing import reference

BATCH, TIME, FEATURES = 2, 13, 5

# Two runs in float32: 2^-24 for each of some eighty roundings of a number.
SINGLE = 5e-6


@dataclasses.dataclass(frozen=True)
class Turning(rnnzoo.LinearCell):
  """A complex number that depends on the input."""

  input_gates = 4
  carry_names = ('re', 'im')

  def coefficients(self, params, x_gates):
    p, q, *b = x_gates
    return (0.7 * jnp.tanh(p), 0.7 * jnp.tanh(q)), tuple(b)


@dataclasses.dataclass(frozen=True)
class Mixing(rnnzoo.LinearCell):
  """A matrix that depends on the input, and on a parameter."""

  input_gates = 3
  carry_names = ('p', 'q')
  param_names = ('k',)

  def coefficients(self, params, x_gates):
    p, q, gate = x_gates
    a, k = jax.nn.sigmoid(gate), 0.3 * params['k']
    return ((a, -k), (k * a, 0.9 * a)), (p, q)


@dataclasses.dataclass(frozen=True)
class Starting(rnnzoo.LinearCell):
  """A number, whose input counts in full where a sequence starts."""

  input_gates = 2
  reads_starts = True

  def coefficients(self, params, x_gates):
    gate, x, starts = x_gates
    a = jax.nn.sigmoid(gate)
    return a, jnp.where(starts > 0, 1, 1 - a) * x


CELLS = {
    'LRU': rnnzoo.LRUCell(),
    'S5': rnnzoo.S5Cell(),
    'bilinear': rnnzoo.S5Cell('bilinear'),
    'LinOSS': rnnzoo.LinOSSCell(),
    'explicit': rnnzoo.LinOSSCell('implicit_explicit'),
    'turning': Turning(),
    'mixing': Mixing(),
    'starting': Starting(),
}


def draw(cell, dtype, flags=True, features=FEATURES):
  """Returns params, gates, carry and restart; and reset and mask."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(dtype)
  params = {name: 0.5 * normal(features) for name in cell.param_names}
  carry = lambda: tuple(normal(BATCH, features) for _ in cell.carry_names)
  gates = normal(BATCH, TIME, cell.input_gates, features)
  reset = mask = None
  if flags:
    reset = rng.random((BATCH, TIME)) < 0.2
    mask = rng.random((BATCH, TIME)) < 0.8
  return (params, gates, carry(), carry()), (reset, mask)


def loop(cell, flags, reverse, params, gates, carry, restart):
  """Returns the last carry and all, step by step."""
  none = np.zeros((BATCH, TIME), bool), np.ones((BATCH, TIME), bool)
  flags = [n if f is None else f for f, n in zip(flags, none, strict=True)]
  given = params, gates, None, carry, restart, *flags
  return reference.unroll(cell, *given, reverse=reverse)


def engine(cell, flags, reverse, path, params, gates, carry, restart):
  reset, mask = flags
  flags = {'reset': reset, 'mask': mask, 'restart_carry': restart}
  options = {'reverse': reverse, 'implementation': path}
  return rnnzoo.unroll_carries(
      cell, params, gates, None, carry, **flags, **options
  )


def with_gradient(run):
  """Returns results, and gradients by all operands of a function of them."""

  def loss(operands):
    results = run(*operands)
    terms = [jnp.sum(jnp.sin(x + 1)) for x in jax.tree.leaves(results)]
    return sum(terms), results

  return reference.jit(jax.value_and_grad(loss, has_aux=True))


class PairsTest(parameterized.TestCase):

  @parameterized.parameters(*CELLS)
  def test_by_xla(self, name):
    cell = CELLS[name]
    reverse = list(CELLS).index(name) % 2 == 1  # And with flags.
    with jax.enable_x64(True):
      operands, flags = draw(cell, np.float64, flags=reverse)
      run = lambda f, *more: with_gradient(
          lambda *given: f(cell, flags, reverse, *more, *given)
      )(operands)
      want = jax.tree.leaves(run(loop))
      for path in ('scan', 'associative_scan'):
        got = jax.tree.leaves(run(engine, path))
        comparison.assert_near(got, want, 1e-12)

  @parameterized.parameters('LRU', 'LinOSS', 'turning', 'mixing', 'starting')
  @pytest.mark.slow
  def test_interpreted(self, name):
    cell = CELLS[name]
    operands, flags = draw(cell, np.float32, features=130)
    run = lambda path: with_gradient(
        lambda *given: engine(cell, flags, True, path, *given)
    )(operands)
    want = jax.tree.leaves(run('scan'))
    with abstract_gpu.interpreted(self):
      got = jax.tree.leaves(run('pallas'))
      comparison.assert_near(got, want, SINGLE)

  def test_forward_mode_and_second_derivatives(self):
    with jax.enable_x64(True):
      cell = CELLS['mixing']
      operands, flags = draw(cell, np.float64)
      loss = lambda f, *more: lambda *given: sum(
          jnp.sum(jnp.sin(x)) for x in f(cell, flags, False, *more, *given)[0]
      )
      both = lambda f: jax.jvp(
          lambda *given: jax.grad(f)(*given)['k'], operands, operands
      )
      want = both(loss(loop))
      for path in ('scan', 'associative_scan'):
        comparison.assert_near(both(loss(engine, path)), want, 1e-11)


class StartsTest(parameterized.TestCase):

  @parameterized.product(
      path=('scan', 'associative_scan'), reverse=(False, True)
  )
  def test_first_step_that_is_not_held(self, path, reverse):
    layer = rnnzoo.RecurrentLayer(
        Starting(), 3, 4, implementation=path, rngs=nnx.Rngs(0)
    )
    x = np.random.default_rng(0).normal(size=(3, 6, 3)).astype(np.float32)
    lengths = np.array([6, 3, 0])
    got = layer(x, seq_lengths=lengths, reverse=reverse)
    carry, want = layer.initial_carry((3,)), np.zeros_like(got)
    for t in reversed(range(6)) if reverse else range(6):
      valid = t < lengths
      first = t == (lengths - 1 if reverse else 0)
      after, y = layer.step(carry, x[:, t], reset=valid & first)
      carry = jax.tree.map(
          lambda a, b, v=valid: jnp.where(v[:, None], a, b), after, carry
      )
      want[:, t] = np.where(valid[:, None], y, 0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    given = layer(x, initial_carry=layer.initial_carry((3,)), reverse=reverse)
    self.assertGreater(np.abs(given[0] - got[0]).max(), 1e-3)


class PartsTest(parameterized.TestCase):
  """Time in four parts, which `jax.vmap` names as devices would be."""

  @parameterized.product(name=('RGLRU', 'LRU'), time=(4, 16))
  def test_first_part_without_a_valid_step_and_parts_of_one(self, name, time):
    x = np.random.default_rng(0).normal(size=(3, time, 4)).astype(np.float32)
    lengths = np.array([time // 2, time - 2, time])
    options = {'implementation': 'associative_scan'}

    def run(x, **more):
      layer = rnnzoo.LAYERS[name](4, 4, rngs=nnx.Rngs(0), **options, **more)
      given = lengths if time > 4 else None
      return layer(x, seq_lengths=given, reverse=True)

    parts = np.moveaxis(x.reshape(3, 4, -1, 4), 1, 0)
    part = lambda x: run(x, time_axis_name='time')
    got = jax.vmap(part, axis_name='time')(parts)
    got = np.moveaxis(got, 0, 1).reshape(x.shape)
    np.testing.assert_allclose(got, run(x), rtol=1e-5, atol=1e-6)

  def test_reset_in_a_held_step(self):
    x = np.random.default_rng(0).normal(size=(1, 8, 4)).astype(np.float32)
    mask = np.array([[1, 0, 1, 0, 0, 0, 1, 1]], bool)
    reset = np.arange(8)[None] % 4 == 3
    make = lambda **more: rnnzoo.RGLRU(4, 4, rngs=nnx.Rngs(0), **more)
    layer = make()
    # The episodes are of steps 0 and 2, of 6, and of 7.
    first = layer(x[:, ::2])
    want = np.concatenate([first[:, :2], first[:, :1] * 0, first[:, :1] * 0], 1)
    for i, t in enumerate((6, 7), 2):
      want[:, i] = layer(x[:, t : t + 1])[:, 0]
    flags = {'reset': reset, 'mask': mask}
    check = lambda y, start=0: np.testing.assert_allclose(
        y[:, mask[0]][:, start:], want[:, start:], rtol=1e-5, atol=1e-6
    )
    check(layer(x, **flags))
    check(layer(x, initial_carry=layer.initial_carry((1,)), **flags), 2)
    parts = lambda a: np.moveaxis(a.reshape(1, 4, 2, *a.shape[2:]), 1, 0)
    part = lambda x, flags: make(time_axis_name='time')(x, **flags)
    y = jax.vmap(part, axis_name='time')(parts(x), jax.tree.map(parts, flags))
    check(np.moveaxis(y, 0, 1).reshape(x.shape))
    back = layer(x, reverse=True, **flags)
    np.testing.assert_allclose(back[:, 0], layer(x[:, 2::-2])[:, -1], rtol=1e-5)


class ComplexScanTest(parameterized.TestCase):

  @parameterized.product(is_free=(True, False), reverse=(True, False))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_agrees_with_loop(self, is_free, reverse):
    rng = np.random.default_rng(0)
    shape = BATCH, TIME, 130

    def draw(*shape):
      z = rng.normal(size=shape) + 1j * rng.normal(size=shape)
      return z.astype(np.complex64)

    a = 0.5 * draw(*shape[is_free * 2 :])
    operands = a, draw(*shape), draw(BATCH, 130)
    reset = None if reverse else rng.random(shape[:2]) < 0.2

    def run(f):
      loss = lambda given: (lambda h: jnp.sum(h.real**2 + h.imag))(f(*given))
      return jax.tree.leaves(reference.jit(jax.value_and_grad(loss))(operands))

    flags = {'reset': reset, 'reverse': reverse}
    want = run(functools.partial(reference.linear_scan, **flags))
    scan = lambda path: functools.partial(
        rnnzoo.linear_scan, implementation=path, **flags
    )
    for path in ('scan', 'associative_scan'):
      comparison.assert_near(run(scan(path)), want, SINGLE)
    with abstract_gpu.interpreted(self):
      comparison.assert_near(run(scan('pallas')), want, SINGLE)

  def test_gradient_in_complex128(self):
    rng = np.random.default_rng(0)
    a, b, w = rng.normal(size=(3, 2, BATCH, 9, 4))
    a, b, w = 0.6 * (a[0] + 1j * a[1]), b[0] + 1j * b[1], w[0] + 1j * w[1]
    maps = lambda f, s: (s[0] * f[0], s[0] * f[1] + s[1])
    ways = (
        rnnzoo.linear_scan,
        lambda a, b: jax.lax.associative_scan(maps, (a, b), axis=1)[1],
    )
    with jax.enable_x64(True):
      own, want = (
          jax.grad(lambda a, b, f=f: jnp.sum((w * f(a, b)).real), (0, 1))(a, b)
          for f in ways
      )
    self.assertEqual(own[0].dtype, np.complex128)
    comparison.assert_near(own, want, 1e-13)

  def test_too_large_for_the_kernels(self):
    # Their indices have 32 bits.
    z = jax.ShapeDtypeStruct((1024, 4096, 512), jnp.complex64)
    scan = lambda b: rnnzoo.linear_scan(b, b, implementation='pallas')
    with abstract_gpu.device(self, 'NVIDIA H200'):
      with self.assertRaisesRegex(NotImplementedError, 'fewer than 2.31'):
        jax.eval_shape(scan, z)

  def test_lowering(self):
    z = jnp.zeros((4, 200, 130), jnp.complex64)
    with abstract_gpu.device(self, 'NVIDIA H200'):
      f = lambda a, b: rnnzoo.linear_scan(a, b, implementation='pallas')
      loss = lambda a, b: jnp.sum(jnp.abs(f(a, b)))
      for a in (z[0, 0], z):
        text = abstract_gpu.lower(jax.grad(loss, (0, 1)), a, z)
        self.assertEqual(text.count('custom_call @mosaic_gpu'), 2)


class LayersTest(parameterized.TestCase):

  @parameterized.parameters('LRU', 'S5', 'LinOSS')
  def test_steps_lengths_and_readout(self, name):
    layer = rnnzoo.LAYERS[name](3, 4, state_features=6, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    carry, y = layer.unroll(x)
    self.assertEqual({c.shape for c in carry}, {(2, 6)})
    state, want = layer.initial_carry((2,)), []
    for t in range(5):
      state, y_t = layer.step(state, x[:, t])
      want.append(y_t)
    np.testing.assert_allclose(y, np.stack(want, 1), rtol=1e-5, atol=1e-6)
    x[1, 3:] = np.nan
    short = layer(x, seq_lengths=np.array([5, 3]))
    np.testing.assert_array_equal(short[1, 3:], 0)
    np.testing.assert_allclose(short[1, :3], y[1, :3], rtol=1e-5, atol=1e-6)

  @parameterized.parameters(
      ({'input_map': 3}, 'input_map must be a function or None'),
      ({'input_map': lambda x: x}, r'a tuple of 2 arrays \(2, 5, 4\)'),
      ({'readout': lambda x, h: h[0][..., 1:]}, r'an array \(2, 5, 4\)'),
      ({'readout': lambda x, h: None}, 'got None'),
  )
  def test_maps_and_readouts_that_do_not_fit(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      layer = rnnzoo.RecurrentLayer(
          rnnzoo.MinGRUCell(), 3, 4, rngs=nnx.Rngs(0), **options
      )
      layer(np.zeros((2, 5, 3), np.float32))


if __name__ == '__main__':
  absltest.main()
