"""`seq_lengths` and `mask`: padding has no effect and gets no gradient."""

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
from rnnzoo import models
from tests.testing import random_layers
from tests.testing import reference

TIME, IN, FEATURES = 5, 2, 4
LENGTHS = np.array([5, 3, 1, 0], np.int32)
BATCH = len(LENGTHS)

VARIANTS = {name: (name, {}) for name in rnnzoo.LAYERS} | {
    'MinGRU_parallel': ('MinGRU', {'implementation': 'associative_scan'}),
    'MinLSTM_parallel': ('MinLSTM', {'implementation': 'associative_scan'}),
}

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
valid = np.arange(TIME) < LENGTHS[:, None]
# A reset in padding is none: a row of length 0 keeps its carry.
reset = rng.random((BATCH, TIME)) < 0.5


def loss(layer, x, carry, reverse, **padding):
  final, y = layer.unroll(
      x, initial_carry=carry, reset=reset, reverse=reverse, **padding
  )
  total = sum(jnp.sum(jnp.sin(a)) for a in (y, *final))
  return total, (final, y)


@functools.cache
def runs(variant, reverse):
  """Values and gradients, with NaN for padding and without."""
  name, options = VARIANTS[variant]
  layer = random_layers.make(
      name, IN, FEATURES, learn_initial_carry=True, **options
  )
  carry = random_layers.carry(layer, BATCH)

  @reference.jit
  def run(layer, x, carry):
    grad = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    return grad(layer, x, carry, reverse, seq_lengths=LENGTHS)

  @reference.jit
  def run_prefix(layer, x, carry):
    return [
        layer.unroll(
            x[row, :n],
            initial_carry=jax.tree.map(lambda c, row=row: c[row], carry),
            reset=reset[row, :n],
            reverse=reverse,
        )
        for row, n in enumerate(LENGTHS)
    ]

  given = x, np.where(valid[..., None], x, np.nan)
  clean, bad = (run(layer, each, carry) for each in given)
  return clean, bad, run_prefix(layer, x, carry), carry


class SeqLengthsTest(parameterized.TestCase):

  @parameterized.product(variant=tuple(VARIANTS), reverse=(False, True))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_prefixes_run_alone(self, variant, reverse):
    ((_, (final, y)), _), _, prefixes, carry = runs(variant, reverse)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    for row, (n, (last, outputs)) in enumerate(
        zip(LENGTHS, prefixes, strict=True)
    ):
      close(y[row, :n], outputs)
      np.testing.assert_array_equal(y[row, n:], np.zeros((TIME - n, FEATURES)))
      jax.tree.map(lambda a, b, row=row: close(a[row], b), final, last)
    # All padding: the carry is what it was.
    jax.tree.map(lambda a, b: close(a[3], b[3]), final, carry)

  @parameterized.product(variant=tuple(VARIANTS), reverse=(False, True))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_padding_has_no_effect(self, variant, reverse):
    zeros, nans, _, _ = runs(variant, reverse)
    chex.assert_trees_all_equal(nans, zeros)
    gradients = nans[1]
    d_x = np.asarray(gradients[1])
    np.testing.assert_array_equal(d_x[~valid], 0)
    chex.assert_tree_all_finite(gradients)
    # d sum(sin(carry)) / d carry, passed through unchanged.
    for d, c in zip(gradients[2], runs(variant, reverse)[3], strict=True):
      np.testing.assert_allclose(d[3], np.cos(c[3]), rtol=1e-5)

  @pytest.mark.slow
  def test_known_lengths_inside_jit(self):
    # Only x is traced: the lengths are a constant of the program.
    layer = rnnzoo.GRU(IN, FEATURES, rngs=nnx.Rngs(0))
    run = lambda lengths: jax.jit(lambda x: layer(x, seq_lengths=lengths))(x)
    y = run(jnp.asarray(LENGTHS))
    np.testing.assert_allclose(y, layer(x, seq_lengths=LENGTHS), rtol=1e-6)
    with self.assertRaisesRegex(ValueError, 'from 0 to the number of steps'):
      run(jnp.asarray(LENGTHS) + TIME)

  @parameterized.parameters(np.int8, np.uint8)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_lengths_too_narrow_for_all_steps(self, dtype):
    model = models.SequenceModel(
        rnnzoo.MinGRU(IN, FEATURES, rngs=nnx.Rngs(0)), 1, rngs=nnx.Rngs(0)
    )
    # The last step, 299, is 43 in 8 bits.
    steps = jnp.ones((2, 300, IN))
    lengths = np.array([100, 0])
    np.testing.assert_array_equal(
        model(steps, seq_lengths=lengths.astype(dtype)),
        model(steps, seq_lengths=lengths),
    )

  def test_lengths_of_other_dtypes(self):
    layer = rnnzoo.MinGRU(IN, FEATURES, rngs=nnx.Rngs(0))
    model = models.SequenceModel(layer, 1, rngs=nnx.Rngs(0))
    run = jax.jit(lambda lengths: model(x[:1], seq_lengths=lengths))
    whole = run(jnp.full(1, TIME, jnp.int32))
    # Beyond int32 it counts as all steps, too.
    found = run(jnp.full(1, 4_000_000_000, jnp.uint32))
    np.testing.assert_array_equal(found, whole)
    with jax.numpy_dtype_promotion('strict'):
      jax.eval_shape(run, jnp.full(1, TIME, jnp.uint8))


class MaskTest(parameterized.TestCase):

  def test_mask_and_lengths_combine(self):
    layer = random_layers.make('GRU', IN, FEATURES)
    mask = np.random.default_rng(1).random((BATCH, TIME)) < 0.6

    @reference.jit
    def run(layer):
      both = layer.unroll(x, mask=mask, seq_lengths=LENGTHS)
      return both, layer.unroll(x, mask=mask & valid)

    chex.assert_trees_all_equal(*run(layer))


if __name__ == '__main__':
  absltest.main()
