"""The gradient through the recurrent kernel: clipped, or cut."""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo.engines.scan import loop as scan_loop
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 3, 4, 2, 4

CELLS = {
    'LSTM': (rnnzoo.LSTMCell(), 2),
    'GRU': (rnnzoo.GRUCell(), 1),
    'AGRU': (rnnzoo.AGRUCell(), 2),
    'IndRNN': (rnnzoo.ElmanCell('relu'), FEATURES),
    'SLSTM': (rnnzoo.SLSTMCell(), 1),
}
CLIP = 0.1
OPTIONS = {
    'clip': {'recurrent_gradient_clip': CLIP},
    'stop': {'stop_recurrent_gradient': True},
}

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
reset = np.array([[0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
mask = np.array([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]], bool)


@jax.custom_vjp
def clipped(x):
  return x


clipped.defvjp(lambda x: (x, None), lambda _, d: (jnp.clip(d, -CLIP, CLIP),))

SEEN = {'clip': clipped, 'stop': lax.stop_gradient}


def oracle(cell, seen, reverse, *given):
  """Runs a cell whose recurrent kernel multiplies seen(h), step by step."""
  final, (h, *_) = reference.unroll(cell, *given, reset, mask, seen, reverse)
  return final, h


def ours(cell, options, reverse, *given, path='scan'):
  *given, restart = given
  flags = {'reset': reset, 'mask': mask, 'reverse': reverse}
  return rnnzoo.unroll(
      *(cell, *given),
      restart_carry=restart,
      implementation=path,
      **flags,
      **options,
  )


def arguments(name):
  """Returns params, x_gates, R, a carry and a restart of a cell, float64."""
  cell, heads = CELLS[name]
  rng = np.random.default_rng(1)
  size = FEATURES // heads
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
  carry = lambda: random_layers.as_carry(
      cell, [draw(BATCH, FEATURES) for _ in cell.carry_names]
  )
  return (
      {name: draw(FEATURES) for name in cell.param_names},
      draw(BATCH, TIME, cell.input_gates, FEATURES),
      draw(cell.recurrent_gates, heads, size, size),
      carry(),
      carry(),
  )


def loss(run, weights, *given):
  final, h = run(*given)
  return sum(jnp.vdot(w, y) for w, y in zip(weights, (h, *final), strict=True))


def gradients(name, run):
  """Gradients of a random sum of outputs, in float64."""
  cell, _ = CELLS[name]
  rng = np.random.default_rng(2)
  carries = [(BATCH, FEATURES)] * len(cell.carry_names)
  shapes = [(BATCH, TIME, FEATURES), *carries]
  weights = [rng.standard_normal(shape) for shape in shapes]
  return jax.grad(functools.partial(loss, run, weights), argnums=range(5))


@functools.cache
def run_layer(name, steps=False, **options):
  """Returns the output and the gradients of a layer."""
  heads = {} if name == 'IndRNN' else {'num_heads': 2}
  layer = random_layers.make(name, IN, FEATURES, **heads, **options)

  def run(layer, x):
    if not steps:
      return layer(x, reset=reset)
    carry, outputs = layer.initial_carry((BATCH,)), []
    for t in range(TIME):
      carry, y = layer.step(carry, x[:, t], reset=reset[:, t])
      outputs.append(y)
    return jnp.stack(outputs, axis=1)

  def loss(layer, x):
    y = run(layer, x)
    return jnp.sum(3 * y**2), y

  grad = reference.jit(jax.grad(loss, (0, 1), has_aux=True))
  gradient, y = grad(layer, x)
  return y, jax.tree.map(np.asarray, gradient)


class RecurrentGradientTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    # In two chunks.
    self.enter_context(
        mock.patch.object(scan_loop, 'chunk_length', lambda *_: 2)
    )

  def assert_close(self, got, want, tolerance=1e-12):
    chex.assert_trees_all_close(got, want, rtol=tolerance, atol=tolerance)

  def compare(self, name, option, reverse, of=gradients, path='scan'):
    """Returns what `of` makes of a run, and of the same by plain autodiff."""
    cell, _ = CELLS[name]
    run = functools.partial(ours, cell, OPTIONS[option], reverse, path=path)
    plain = functools.partial(oracle, cell, SEEN[option], reverse)
    both = reference.jit(
        lambda given: [of(name, each)(*given) for each in (run, plain)]
    )
    return both(arguments(name))

  @parameterized.product(name=tuple(CELLS), option=tuple(OPTIONS))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_gradients(self, name, option):
    reverse = list(CELLS).index(name) % 2 == (option == 'clip')
    self.assert_close(*self.compare(name, option, reverse))

  @parameterized.parameters(('LSTM', 'clip'), ('AGRU', 'stop'))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gradients_by_newton(self, name, option):
    found = self.compare(name, option, True, path='associative_scan')
    self.assert_close(*found)

  @parameterized.parameters(('clip', True), ('stop', False))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_second_derivatives(self, option, saved):
    # That of the clipped gradient, whose own cotangents are not clipped.
    if not saved:
      self.enter_context(mock.patch.object(scan_loop, '_SAVED_ELEMENTS', 0))

    def slope(name, run):
      square = lambda *given: sum(
          jnp.sum(jnp.sin(d))
          for d in jax.tree.leaves(gradients(name, run)(*given))
      )
      return jax.grad(square, argnums=range(5))

    found = self.compare('AGRU', option, False, slope)
    self.assert_close(*found, tolerance=1e-11)

  @pytest.mark.slow
  def test_second_derivatives_by_newton(self):
    # The iteration's own derivative is not clipped either.
    def slope(name, run):
      del name

      def loss(params, x_gates, *fixed):
        return jnp.sum(jnp.sin(run(params, x_gates, *fixed)[1]))

      first = jax.grad(loss, 1)
      return jax.grad(lambda *given: jnp.sum(jnp.sin(first(*given))), 1)

    got, want = self.compare('GRU', 'clip', False, slope, 'associative_scan')
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


class LayerTest(parameterized.TestCase):

  def assert_trees_close(self, a, b):
    chex.assert_trees_all_close(a, b, rtol=1e-5, atol=1e-5)

  @parameterized.product(name=('LSTM', 'AGRU', 'IndRNN'), option=tuple(OPTIONS))
  @pytest.mark.few(1)
  @pytest.mark.slow
  def test_changes_gradients_only(self, name, option):
    y, (_, d_x) = run_layer(name)
    same_y, (_, other_d_x) = run_layer(name, **OPTIONS[option])
    np.testing.assert_array_equal(same_y, y)
    self.assertGreater(np.abs(other_d_x - d_x).max(), 1e-3)

  @parameterized.product(name=('LSTM', 'AGRU'), option=tuple(OPTIONS))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_steps_are_an_unroll(self, name, option):
    whole = run_layer(name, **OPTIONS[option])
    self.assert_trees_close(
        run_layer(name, steps=True, **OPTIONS[option]), whole
    )


if __name__ == '__main__':
  absltest.main()
