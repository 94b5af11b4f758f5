"""Promises of every layer, whatever its equations."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo.engines.scan import loop as scan_loop
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 3, 5, 2, 4

VARIANTS = {name: (name, {}) for name in rnnzoo.LAYERS} | {
    'GatedAntisymmetricRNN': ('AntisymmetricRNN', {'gated': True}),
    'MinGRU_parallel': ('MinGRU', {'implementation': 'associative_scan'}),
    'MinLSTM_parallel': ('MinLSTM', {'implementation': 'associative_scan'}),
}
FEW = ('AGRU', 'SLSTM', 'MinGRU', 'MinGRU_parallel')

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
reset = np.array([[0, 0, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)


def make(variant, **options):
  name, own = VARIANTS[variant]
  return random_layers.make(
      name, IN, FEATURES, learn_initial_carry=True, **(own | options)
  )


def flip(a):
  return np.flip(a, axis=1)


@functools.cache
def runs(variant):
  """Several runs of one layer, from a carry of their own, in one program."""
  layer = make(variant)

  @reference.jit
  def run(layer, x, carry):
    unroll = functools.partial(layer.unroll, initial_carry=carry)
    first, y1 = unroll(x[:, :2], reset=reset[:, :2])
    second, y2 = layer.unroll(x[:, 2:], initial_carry=first, reset=reset[:, 2:])
    # A boundary is between t-1 and t, whatever the direction.
    boundary = np.roll(flip(reset), 1, axis=1)
    boundary[:, 0] = False
    return {
        'whole': unroll(x, reset=reset),
        'parts': (second, jnp.concatenate([y1, y2], axis=1)),
        'time_major': unroll(
            x.swapaxes(0, 1), reset=reset.swapaxes(0, 1), time_major=True
        ),
        'reverse': unroll(x, reset=reset, reverse=True),
        'flipped': unroll(jnp.flip(x, axis=1), reset=boundary),
    }

  return run(layer, x, random_layers.carry(layer, BATCH))


class AnyLayerTest(parameterized.TestCase):

  def assert_close(self, a, b):
    # One carry may be the layer's own, with names, and one a plain tuple.
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)

  @parameterized.parameters(*VARIANTS)
  @pytest.mark.few(2)
  def test_steps_are_an_unroll(self, variant):
    layer = make(variant)
    carry = random_layers.carry(layer, BATCH)
    step = reference.jit(
        lambda layer, carry, x, r: layer.step(carry, x, reset=r)
    )
    outputs = []
    for t in range(TIME):
      carry, y = step(layer, carry, x[:, t], reset[:, t])
      outputs.append(y)
    self.assert_close(
        (carry, np.stack(outputs, axis=1)), runs(variant)['whole']
    )

  @parameterized.parameters(*VARIANTS)
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_ways_to_run_agree(self, variant):
    found = runs(variant)
    self.assert_close(found['parts'], found['whole'])
    carry, y = found['time_major']
    self.assert_close((carry, y.swapaxes(0, 1)), found['whole'])
    carry, y = found['flipped']
    self.assert_close((carry, flip(y)), found['reverse'])

  @parameterized.parameters(*VARIANTS)
  @pytest.mark.few(2)
  def test_batch_axes(self, variant):
    layer = make(variant)
    flags = np.stack([reset, ~reset])
    pair = np.stack([x, -x])
    run = lambda f, *args: reference.jit(f)(*args)
    if variant not in FEW:
      run = jax.eval_shape  # The axes belong to no cell: shapes will do.
    f = lambda x, r: layer.unroll(x, reset=r)
    none = run(f, x[0], reset[0])
    two = run(f, pair, flags)
    self.assertEqual(none[1].shape, (TIME, FEATURES))
    self.assertEqual(two[1].shape, (2, BATCH, TIME, FEATURES))
    for c in two[0]:
      self.assertEqual(c.shape, (2, BATCH, FEATURES))
    for c, d in zip(layer.initial_carry((2, BATCH)), two[0], strict=True):
      self.assertEqual((c.shape, c.dtype), (d.shape, d.dtype))
    if variant in FEW:
      one = run(f, x, reset)
      self.assert_close(none, jax.tree.map(lambda a: a[0], one))
      self.assert_close(jax.tree.map(lambda a: a[0], two), one)

  @parameterized.parameters(*VARIANTS)
  @pytest.mark.few(3)
  def test_no_steps(self, variant):
    layer = make(variant)
    for batch in ((), (BATCH,)):
      carry = random_layers.carry(layer, *batch)
      empty = np.zeros((*batch, 0, IN), np.float32)
      f = lambda c, x=empty: layer.unroll(x, initial_carry=c)
      (final, y), pull = jax.vjp(f, carry)
      self.assert_close(final, carry)
      self.assertEqual(y.shape, (*batch, 0, FEATURES))
      self.assert_close(pull((carry, y))[0], carry)

  @parameterized.parameters(*VARIANTS)
  def test_dtypes(self, variant):
    layer = make(variant, dtype=jnp.bfloat16)
    carry, y = jax.eval_shape(layer.unroll, x)
    step_carry, y_t = jax.eval_shape(layer.step, carry, x[:, 0])
    self.assertEqual((y.dtype, y_t.dtype), (jnp.bfloat16, jnp.bfloat16))
    for c in (*carry, *step_carry, *layer.initial_carry()):
      self.assertEqual(c.dtype, jnp.float32)
    for param in jax.tree.leaves(nnx.state(layer)):
      self.assertEqual(param.dtype, jnp.float32)


class EdgesTest(parameterized.TestCase):

  @parameterized.parameters('AGRU', 'MinGRU')
  @pytest.mark.slow
  def test_an_empty_batch(self, name):
    layer = rnnzoo.LAYERS[name](3, 4, rngs=nnx.Rngs(0))

    def loss(layer):
      carry, y = layer.unroll(jnp.ones((0, 5, 3)))
      self.assertEqual((y.shape, carry[0].shape), ((0, 5, 4), (0, 4)))
      return y.sum()

    for leaf in jax.tree.leaves(nnx.grad(loss)(layer)):
      np.testing.assert_array_equal(leaf, 0)

  @pytest.mark.slow
  def test_step_has_forward_mode(self):
    layer = rnnzoo.GRU(3, 4, rngs=nnx.Rngs(0))
    carry, x = layer.initial_carry((2,)), jnp.ones((2, 3))
    jacobian = jax.jacfwd(lambda x: layer.step(carry, x)[1])(x)
    self.assertEqual(jacobian.shape, (2, 4, 2, 3))


class ChunksTest(parameterized.TestCase):

  @parameterized.product(time=(1, 97, 784), width=(1, 512, 6144, 2**30))
  def test_length(self, time, width):
    length = scan_loop.chunk_length(time, width)
    self.assertBetween(length, 1, time)
    if jax.default_backend() == 'cpu':
      # At most 8 MiB in float32, and one chunk where 2 MiB hold all.
      if length > 1:
        self.assertLessEqual(length * width, 2**21)
      if time * width <= 2**19:
        self.assertEqual(length, time)
    if (time, width) == (784, 6144):  # Divided evenly where that is possible.
      self.assertEqual(time % length, 0)


class ResetTest(parameterized.TestCase):

  @parameterized.product(variant=tuple(VARIANTS), what=(np.inf, np.nan))
  @pytest.mark.few(1)
  @pytest.mark.slow
  def test_reset_stops_what_is_not_finite(self, variant, what):
    layer = make(variant)
    bad = x.copy()
    bad[0, :2] = what
    f = reference.jit(lambda layer, x: layer(x, reset=reset))
    good, got = f(layer, x), f(layer, bad)
    np.testing.assert_array_equal(got[0, 2:], good[0, 2:])
    self.assertFalse(np.isfinite(got[0, 0]).all())


class CarriesAndTablesTest(parameterized.TestCase):

  @parameterized.parameters('GRU', 'LSTM')
  @pytest.mark.slow
  def test_unroll_carries(self, name):
    layer = rnnzoo.LAYERS[name](3, 4, rngs=nnx.Rngs(0))
    x = np.random.RandomState(0).randn(2, 5, 3).astype(np.float32)
    reset = np.arange(10).reshape(2, 5) == 7
    lengths = np.array([5, 3])
    final, carries = layer.unroll_carries(x, reset=reset, seq_lengths=lengths)
    want = layer.initial_carry((2,))
    self.assertLen(carries, len(want))
    close = functools.partial(np.testing.assert_allclose, atol=1e-6)
    for t in range(5):
      new, _ = layer.step(want, x[:, t], reset=reset[:, t])
      is_valid = (t < lengths)[:, None]
      want = [np.where(is_valid, a, b) for a, b in zip(new, want, strict=True)]
      for found, one in zip(carries, want, strict=True):
        close(found[:, t], one)
    jax.tree.map(close, list(final), want)
    options = {'reset': reset.T, 'seq_lengths': lengths, 'time_major': True}
    _, turned = layer.unroll_carries(x.swapaxes(0, 1), **options)
    for found, one in zip(turned, carries, strict=True):
      close(found.swapaxes(0, 1), one)


class Mine(rnnzoo.LSTM):
  """A layer of another project, with an attribute of this name."""

  def __init__(self, in_features, features, *, rngs):
    super().__init__(in_features, features, rngs=rngs)
    self.features = [features, in_features]


class FeaturesTest(parameterized.TestCase):

  @parameterized.parameters(*rnnzoo.LAYERS, 'SLSTMBlock')
  def test_are_those_of_the_constructor(self, name):
    cls = getattr(rnnzoo, name)
    layer = nnx.eval_shape(lambda: cls(8, 8, rngs=nnx.Rngs(0)))
    self.assertEqual(layer.features, 8)
    both = nnx.eval_shape(
        lambda: rnnzoo.Bidirectional(cls, 8, 8, rngs=nnx.Rngs(0))
    )
    self.assertEqual((both.features, both.out_features), (8, 16))
    # No part of a state, nor of a graph's static part.
    self.assertNotIn('features', vars(layer))

  def test_of_a_layer_that_has_its_own(self):
    layer = Mine(2, 4, rngs=nnx.Rngs(0))
    self.assertEqual(layer.features, [4, 2])
    self.assertEqual(nnx.clone(layer).features, [4, 2])


if __name__ == '__main__':
  absltest.main()
