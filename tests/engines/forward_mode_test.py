"""Forward mode and second derivatives in every order, against plain autodiff.

The reference is reference.py in float64, of which JAX derives everything.
"""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo.engines import scan
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 2, 5, 2, 4
TOLERANCE = 1e-11

# Of the call or of the layer.
OPTIONS = {
    'plain': {},
    'without_flags': {'flags': False},
    'reverse': {'reverse': True},
    'two_heads': {'num_heads': 2},
    'stop': {'stop_recurrent_gradient': True, 'reverse': True},
}

_rng = np.random.default_rng(0)
RESET = _rng.random((BATCH, TIME)) < 0.3
MASK = _rng.random((BATCH, TIME)) < 0.7


def is_linear(name):
  return random_layers.make(name, IN, FEATURES).recurrent_kernel is None


def cases():
  """Yields (layer, path, option) for all that can be combined."""
  for name in rnnzoo.LAYERS:
    for option in OPTIONS:
      if is_linear(name):
        if option in ('two_heads', 'stop'):
          continue
        yield name, 'associative_scan', option
      if (name, option) == ('IndRNN', 'two_heads'):
        continue  # It has a head for each feature.
      yield name, 'scan', option


def random_like(tree, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), tree)


class Problem:
  """A layer and the reference as functions of (state, x, initial carry)."""

  def __init__(self, name, path, *, flags=True, reverse=False, **options):
    self.flags, self.reverse = flags, reverse
    layer = random_layers.make(
        name,
        IN,
        FEATURES,
        learn_initial_carry=True,
        param_dtype=jnp.float64,
        implementation=path,
        **options,
    )
    self.graphdef, state = nnx.split(layer)
    carry = random_layers.carry(layer, BATCH)
    x = random_like(np.zeros((BATCH, TIME, IN)), 1)
    self.given = state, x, tuple(jnp.asarray(c, jnp.float64) for c in carry)
    self.tangents = random_like(self.given, 2)

  def ours(self, state, x, carry):
    final, y = nnx.merge(self.graphdef, state).unroll(
        x,
        initial_carry=carry,
        reverse=self.reverse,
        **({'reset': RESET, 'mask': MASK} if self.flags else {}),
    )
    return y, final

  def plain(self, state, x, carry):
    layer = nnx.merge(self.graphdef, state)
    flip = lambda a: jnp.flip(a, axis=1) if self.reverse else a
    reset = RESET if self.flags else np.zeros_like(RESET)
    mask = flip(MASK if self.flags else np.ones_like(MASK))
    if self.reverse:  # A boundary is between t-1 and t in either direction.
      reset = np.roll(reset, -1, axis=1)
      reset[:, -1] = False
    kernel = layer.recurrent_kernel
    kernel = None if kernel is None else kernel[...]
    if layer.recurrent_structure is not None:
      kernel = layer.recurrent_structure(kernel)
    x_gates = jnp.einsum('bti,gif->btgf', flip(x), layer.kernel[...])
    stop = layer.stop_recurrent_gradient
    final, carries = reference.unroll(
        layer.cell,
        {key: value[...] for key, value in layer.cell_params.items()},
        x_gates + layer.bias[...],
        kernel,
        carry,
        tuple(jnp.broadcast_to(c[...], carry[0].shape)
              for c in layer.learned_carry),
        flip(reset),
        mask,
        lax.stop_gradient if stop else lambda x: x,
    )
    return flip(jnp.where(mask[..., None], carries[0], 0)), final


def loss(function, *given):
  """A sum in which every output counts, and none linearly."""
  return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(function(*given)))


def derivatives(function, given, tangents):
  """The tangent of the outputs, and the loss's second derivative, twice."""
  of_loss = functools.partial(loss, function)
  gradient = jax.grad(of_loss, argnums=(0, 1, 2))
  slope = lambda *given: jax.jvp(of_loss, given, tangents)[1]
  return (
      jax.jvp(function, given, tangents)[1],
      jax.jvp(gradient, given, tangents)[1],
      jax.grad(slope, argnums=(0, 1, 2))(*given),
  )


class ForwardModeTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))
    # In two chunks, with a remainder.
    self.enter_context(mock.patch.object(scan, 'chunk_length', lambda *_: 3))

  def assert_close(self, got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)

  def check(self, name, path, option):
    problem = Problem(name, path, **OPTIONS[option])
    ours = functools.partial(derivatives, problem.ours)
    plain = functools.partial(derivatives, problem.plain)
    run = reference.jit(lambda *given: (ours(*given), plain(*given)))
    self.assert_close(*run(problem.given, problem.tangents))


class QuickTest(ForwardModeTestCase):

  @parameterized.parameters(
      ('AGRU', 'scan', 'plain'), ('MinGRU', 'associative_scan', 'reverse')
  )
  def test_agrees_with_reference(self, name, path, option):
    self.check(name, path, option)


@pytest.mark.slow
class LayersTest(ForwardModeTestCase):

  @parameterized.parameters(*cases())
  def test_agrees_with_reference(self, name, path, option):
    self.check(name, path, option)


if __name__ == '__main__':
  absltest.main()
