"""Forward mode and second derivatives in every order, against plain autodiff.

The reference is reference.py in float64, of which JAX derives everything.
"""

import functools
import itertools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo.engines.scan import loop as scan_loop
from tests.testing import abstract_gpu
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 2, 5, 2, 4
TOLERANCE = 1e-11

# Of the call or of the layer.
OPTIONS = {
    'plain': {},
    'without_flags': {'flags': False},
    'reverse': {'reverse': True},
    'two_heads': {'num_heads': 2, 'reverse': True},
    'stop': {'stop_recurrent_gradient': True, 'reverse': True},
}

_rng = np.random.default_rng(0)
RESET = _rng.random((BATCH, TIME)) < 0.3
MASK = _rng.random((BATCH, TIME)) < 0.7


def cases():
  """Yields (layer, path, option) for all that can be combined."""
  for name in rnnzoo.LAYERS:
    kernel = random_layers.make(name, IN, FEATURES).recurrent_kernel
    paths = ['scan'] if kernel is not None else ['scan', 'associative_scan']
    if kernel is None:
      without = {'two_heads', 'stop'}
    elif kernel.shape[-1] == 1:
      without = {'two_heads'}  # There is a head for each feature.
    else:
      without = {'reverse'}  # Heads run in reverse.
      if name not in ('LSTM', 'AGRU'):
        without |= {'without_flags'}  # The cell does not see them.
    for option, path in itertools.product(OPTIONS, paths):
      if option not in without:
        yield name, path, option


def random_like(tree, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), tree)


class Problem:
  """A layer and the reference as functions of (state, x, initial carry)."""

  def __init__(self, name, path, *, flags=True, reverse=False, **options):
    self.flags, self.reverse = flags, reverse
    layer = random_layers.make(
        *(name, IN, FEATURES),
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
    reset = RESET if self.flags else np.zeros_like(RESET)
    mask = MASK if self.flags else np.ones_like(MASK)
    kernel = layer.recurrent_kernel
    kernel = None if kernel is None else kernel[...]
    if layer.recurrent_structure is not None:
      kernel = layer.recurrent_structure(kernel)
    x_gates = jnp.einsum('bti,gif->btgf', x, layer.kernel[...])
    restart = (
        jnp.broadcast_to(c[...], carry[0].shape) for c in layer.learned_carry
    )
    stop = layer.stop_recurrent_gradient
    final, carries = reference.unroll(
        layer.cell,
        {key: value[...] for key, value in layer.cell_params.items()},
        x_gates + layer.bias[...],
        *(kernel, carry, tuple(restart), reset, mask),
        lax.stop_gradient if stop else lambda x: x,
        self.reverse,
    )
    return jnp.where(mask[..., None], carries[0], 0), final


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
    self.enter_context(
        mock.patch.object(scan_loop, 'chunk_length', lambda *_: 3)
    )

  def assert_close(self, got, want):
    got, want = map(jax.tree.leaves, (got, want))
    chex.assert_trees_all_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)

  def check(self, name, path, option):
    problem = Problem(name, path, **OPTIONS[option])
    ours = functools.partial(derivatives, problem.ours)
    plain = functools.partial(derivatives, problem.plain)
    run = reference.jit(lambda *given: (ours(*given), plain(*given)))
    self.assert_close(*run(problem.given, problem.tangents))

  def check_transformations(self, name, path):
    """One layer through all of JAX's transformations."""
    problem = Problem(name, path)
    state, x, carry = problem.given
    _, d_x, _ = problem.tangents

    def run(function):
      f = lambda x: loss(function, state, x, carry)
      in_a_loop = lambda x: lax.scan(lambda s, _: (s + f(x), s), 0.0, length=2)
      rows = jnp.stack([x, 2 * x])
      tangent = lambda g, x: jax.jvp(g, (x,), (d_x,))[1]
      return {
          'linearize': jax.linearize(f, x)[1](d_x),
          'twice forward': tangent(lambda x: tangent(f, x), x),
          'vmap over x': jax.vmap(functools.partial(tangent, f))(rows),
          'vmap over tangents': jax.vmap(lambda d: jax.jvp(f, (x,), (d,))[1])(
              rows
          ),
          'grad of vmap': jax.grad(lambda x: jax.vmap(f)(x).sum())(rows),
          'jvp of grad of checkpoint': tangent(jax.grad(jax.checkpoint(f)), x),
          'jvp of a loop': tangent(lambda x: in_a_loop(x)[0], x),
          'grad of a loop': jax.grad(lambda x: in_a_loop(x)[0])(x),
          'grad of grad': jax.grad(
              lambda x: jnp.vdot(jax.grad(jax.jit(f))(x), d_x)
          )(x),
      }

    both = reference.jit(lambda: (run(problem.ours), run(problem.plain)))
    self.assert_close(*both())


class QuickTest(ForwardModeTestCase):

  @pytest.mark.slow
  def test_agrees_with_reference(self):
    self.check('AGRU', 'scan', 'plain')

  @pytest.mark.slow
  def test_transformations(self):
    self.check_transformations('MinGRU', 'associative_scan')

  @pytest.mark.slow
  def test_hessian_of_linear_scan(self):
    a, b, h0 = random_like((RESET[..., None], MASK[..., None], RESET[:, :1]), 3)
    a = a.at[0, 1].set(0)  # Forgets, and has a derivative all the same.

    hessian = lambda f: jax.hessian(functools.partial(loss, f), (0, 1, 2))
    linear_scan = functools.partial(rnnzoo.linear_scan, reset=RESET)
    steps = functools.partial(linear_scan, implementation='scan')
    parallel = functools.partial(linear_scan, implementation='associative_scan')
    plain = functools.partial(reference.linear_scan, reset=RESET)
    run = reference.jit(
        lambda *given: [hessian(f)(*given) for f in (steps, parallel, plain)]
    )
    got, in_parallel, want = run(a, b, h0)
    self.assert_close(got, want)
    self.assert_close(in_parallel, want)

  @pytest.mark.slow
  def test_bfloat16(self):
    # In forward and reverse mode the same sums, rounded elsewhere.
    layer = random_layers.make('GRU', IN, FEATURES, dtype=jnp.bfloat16)
    x, d_x = np.float32(random_like(np.zeros((2, BATCH, TIME, IN)), 4))
    f = lambda x: layer(x, reset=RESET, mask=MASK).astype(jnp.float32).sum()
    run = reference.jit(
        lambda x, d_x: (
            jax.jvp(f, (x,), (d_x,))[1],
            jnp.vdot(jax.grad(f)(x), d_x),
        )
    )
    forward, reverse = run(x, d_x)
    np.testing.assert_allclose(forward, reverse, rtol=0.02)


class RefusedTest(parameterized.TestCase):
  """Forward mode where there is none: a sentence."""

  def test_clip(self):
    options = {'recurrent_gradient_clip': 0.1, 'implementation': 'scan'}
    layer = random_layers.make('GRU', IN, FEATURES, **options)
    x = jnp.ones((BATCH, TIME, IN))
    carry = layer.initial_carry((BATCH,))
    step = lambda carry: layer.step(carry, x[:, 0])[1]
    message = r'recurrent_gradient_clip=0\.1 has no forward mode'
    with self.assertRaisesRegex(NotImplementedError, message):
      jax.jvp(layer, (x,), (x,))
    with self.assertRaisesRegex(NotImplementedError, message):
      jax.jit(lambda x: jax.jvp(layer, (x,), (x,))).lower(x)
    with self.assertRaisesRegex(NotImplementedError, message):
      jax.jvp(step, (carry,), (carry,))

  def test_kernels(self):
    x = jnp.ones((1, 4, 8))

    def tangent(path):
      scan = lambda a: rnnzoo.linear_scan(a, x, implementation=path)
      return jax.jvp(scan, (x,), (x,))[1]

    message = "reverse mode only.*implementation='scan' has forward mode"
    with self.assertRaisesRegex(NotImplementedError, message):
      tangent('pallas')
    np.testing.assert_allclose(tangent(('pallas', 'scan')), tangent('scan'))
    if abstract_gpu.RUNS:  # Within jit, the kernel is traced first.
      with (
          abstract_gpu.device(self, 'NVIDIA H200'),
          self.assertRaisesRegex(NotImplementedError, message),
      ):
        jax.jit(lambda: tangent('pallas')).lower()


@pytest.mark.exhaustive
class NewtonTest(ForwardModeTestCase):

  @parameterized.product(
      name=('AGRU', 'LSTM', 'IRevRNN'), option=('plain', 'reverse', 'stop')
  )
  def test_agrees_with_reference(self, name, option):
    self.check(name, 'associative_scan', option)

  def test_transformations(self):
    self.check_transformations('GRU', 'associative_scan')


@pytest.mark.exhaustive
class LayersTest(ForwardModeTestCase):

  @parameterized.parameters(*cases())
  def test_agrees_with_reference(self, name, path, option):
    self.check(name, path, option)

  @parameterized.parameters(('GRU', 'scan'), ('MinGRU', 'scan'))
  def test_transformations(self, name, path):
    self.check_transformations(name, path)


if __name__ == '__main__':
  absltest.main()
