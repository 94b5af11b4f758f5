"""The gradient through the recurrent kernel: clipped, or cut."""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
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
ARGUMENTS = ('params', 'x_gates', 'kernel', 'carry', 'restart')

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
reset = np.array([[0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
mask = np.array([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]], bool)


@jax.custom_vjp
def clipped(x):
  return x


clipped.defvjp(lambda x: (x, None), lambda _, d: (jnp.clip(d, -CLIP, CLIP),))

SEEN = {'clip': clipped, 'stop': lax.stop_gradient}


def oracle(cell, seen, reverse, params, x_gates, kernel, carry, restart):
  """Runs a cell whose recurrent kernel multiplies seen(h), step by step."""
  flip = lambda a: jnp.flip(a, axis=1) if reverse else a
  boundary = reset
  if reverse:  # A boundary is between t-1 and t, whatever the direction.
    boundary = np.roll(reset, -1, axis=1)
    boundary[:, -1] = False
  final, carries = reference.unroll(
      cell,
      params,
      flip(x_gates),
      kernel,
      carry,
      restart,
      flip(boundary),
      flip(mask),
      seen,
  )
  return final, flip(carries[0])


def ours(
    cell,
    options,
    reverse,
    params,
    x_gates,
    kernel,
    carry,
    restart,
    path='scan',
):
  return rnnzoo.unroll(
      cell,
      params,
      x_gates,
      kernel,
      carry,
      restart_carry=restart,
      reset=reset,
      mask=mask,
      reverse=reverse,
      implementation=path,
      **options,
  )


def arguments(name):
  """Returns `ARGUMENTS` of a cell in their order, float64."""
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
  shapes = [(BATCH, TIME, FEATURES)] + [(BATCH, FEATURES)] * len(
      cell.carry_names
  )
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
    for name, a, b in zip(ARGUMENTS, got, want, strict=True):
      for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(
            p, q, rtol=tolerance, atol=tolerance, err_msg=name
        )

  @parameterized.product(name=tuple(CELLS), option=tuple(OPTIONS))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_gradients(self, name, option):
    cell, _ = CELLS[name]
    reverse = list(CELLS).index(name) % 2 == (option == 'clip')
    run_ours = functools.partial(ours, cell, OPTIONS[option], reverse)
    run_oracle = functools.partial(oracle, cell, SEEN[option], reverse)
    run = reference.jit(
        lambda given: (
            gradients(name, run_ours)(*given),
            gradients(name, run_oracle)(*given),
        )
    )
    self.assert_close(*run(arguments(name)))

  @parameterized.parameters(('LSTM', 'clip'), ('AGRU', 'stop'))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gradients_by_newton(self, name, option):
    cell, _ = CELLS[name]
    path = functools.partial(ours, path='associative_scan')
    run_ours = functools.partial(path, cell, OPTIONS[option], True)
    run_oracle = functools.partial(oracle, cell, SEEN[option], True)
    run = reference.jit(
        lambda given: (
            gradients(name, run_ours)(*given),
            gradients(name, run_oracle)(*given),
        )
    )
    self.assert_close(*run(arguments(name)))

  @parameterized.parameters(('clip', True), ('stop', False))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_second_derivatives(self, option, saved):
    # That of the clipped gradient, whose own cotangents are not clipped.
    name = 'AGRU'
    cell, _ = CELLS[name]
    if not saved:
      self.enter_context(mock.patch.object(scan_loop, '_SAVED_ELEMENTS', 0))

    def slope(run, given):
      square = lambda given: sum(
          jnp.sum(jnp.sin(d))
          for d in jax.tree.leaves(gradients(name, run)(*given))
      )
      return jax.grad(square)(given)

    run_ours = functools.partial(ours, cell, OPTIONS[option], False)
    run_oracle = functools.partial(oracle, cell, SEEN[option], False)
    run = reference.jit(
        lambda given: (slope(run_ours, given), slope(run_oracle, given))
    )
    self.assert_close(*run(arguments(name)), tolerance=1e-11)

  @pytest.mark.slow
  def test_second_derivatives_by_newton(self):
    # The iteration's own derivative is not clipped either.
    cell, _ = CELLS['GRU']
    path = functools.partial(ours, path='associative_scan')
    given = arguments('GRU')
    _, _, *fixed = given

    def slope(run, x_gates):
      def loss(x_gates):
        _, h = run(given[0], x_gates, *fixed)
        return jnp.sum(jnp.sin(h))

      return jax.grad(lambda g: jnp.sum(jnp.sin(jax.grad(loss)(g))))(x_gates)

    run = reference.jit(
        lambda x_gates: (
            slope(
                functools.partial(path, cell, OPTIONS['clip'], False), x_gates
            ),
            slope(
                functools.partial(oracle, cell, SEEN['clip'], False), x_gates
            ),
        )
    )
    got, want = run(given[1])
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


class LayerTest(parameterized.TestCase):

  def assert_trees_close(self, a, b):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, jax.tree.leaves(a), jax.tree.leaves(b))

  @parameterized.product(name=('LSTM', 'AGRU', 'IndRNN'), option=tuple(OPTIONS))
  @pytest.mark.few(2)
  @pytest.mark.slow
  def test_changes_gradients_only(self, name, option):
    y, (_, d_x) = run_layer(name)
    same_y, (_, other_d_x) = run_layer(name, **OPTIONS[option])
    np.testing.assert_array_equal(same_y, y)
    self.assertGreater(np.abs(other_d_x - d_x).max(), 1e-3)

  @parameterized.parameters('LSTM', 'AGRU')
  @pytest.mark.slow
  def test_a_large_clip_is_none(self, name):
    _, plain = run_layer(name)
    _, clipped = run_layer(name, recurrent_gradient_clip=1e6)
    self.assert_trees_close(plain, clipped)

  @parameterized.product(name=('LSTM', 'AGRU'), option=tuple(OPTIONS))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_steps_are_an_unroll(self, name, option):
    whole = run_layer(name, **OPTIONS[option])
    self.assert_trees_close(
        run_layer(name, steps=True, **OPTIONS[option]), whole
    )

  def test_stopped_kernel_learns(self):
    _, (d_layer, _) = run_layer('LSTM', stop_recurrent_gradient=True)
    for d_gate in d_layer.recurrent_kernel[...]:
      self.assertGreater(np.abs(d_gate).max(), 1e-3)

  def test_stopped_operand(self):
    # A-GRU's r acts through the second product's operand and nothing else.
    _, (d_layer, _) = run_layer('AGRU', stop_recurrent_gradient=True)
    d_r, *others = d_layer.kernel[...]
    np.testing.assert_array_equal(d_r, 0)
    for d_gate in others:
      self.assertGreater(np.abs(d_gate).max(), 1e-3)


if __name__ == '__main__':
  absltest.main()
