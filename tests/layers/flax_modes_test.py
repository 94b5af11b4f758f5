"""Layers under the transformations of flax.nnx and of JAX."""

import functools
import pickle

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from tests.testing import comparison
from tests.testing import random_layers
from tests.testing import reference

BATCH, TIME, IN, FEATURES = 2, 4, 3, 4

rng = np.random.default_rng(0)
x = rng.standard_normal((BATCH, TIME, IN)).astype(np.float32)
reset = rng.random((BATCH, TIME)) < 0.3

# One cell of one stage, one of two, one linear: on each path.
LAYERS = {
    'LSTM': ('LSTM', {}),
    'AGRU': ('AGRU', {'learn_epsilon': False}),
    'MinGRU_parallel': ('MinGRU', {'implementation': 'associative_scan'}),
}


# As close as two orders of float32 sums are; see layers_test.TOLERANCE.
close = functools.partial(comparison.assert_near, limit=2e-6)


def make(variant, **options):
  name, own = LAYERS[variant]
  return random_layers.make(name, IN, FEATURES, **(own | options))


def forward(layer, x):
  return layer(x, reset=reset)


def loss(layer, x):
  return jnp.sum(forward(layer, x) ** 2)


def arrays(tree):
  """The arrays of a layer's parameters, or of their gradients, by path."""
  state = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
  return {
      '.'.join(map(str, path)): np.asarray(leaf[...])
      for path, leaf in nnx.to_flat_state(state)
      if isinstance(leaf, nnx.Param)
  }


@functools.cache
def expected(variant):
  """Output, loss and gradients by nnx.split and plain jax.jit."""
  graphdef, params, rest = nnx.split(make(variant), nnx.Param, ...)

  @reference.jit
  def run(params, x):
    f = lambda params: loss(nnx.merge(graphdef, params, rest), x)
    y = forward(nnx.merge(graphdef, params, rest), x)
    return y, *jax.value_and_grad(f)(params)

  return run(params, x)


class ModesTest(chex.TestCase):

  def assert_gradients(self, variant, gradients):
    want = arrays(expected(variant)[2])
    got = arrays(gradients)
    self.assertContainsSubset(want, got)
    close({k: got[k] for k in want}, want)

  @parameterized.product(variant=tuple(LAYERS), graph=(True, False))
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_nnx(self, variant, graph):
    # graph=False is tree mode: modules are pytrees, and shared references and
    # state that changes are not followed.
    layer = make(variant)
    y = nnx.jit(forward, graph=graph)(layer, x)
    close(y, expected(variant)[0])

    @functools.partial(nnx.jit, graph=graph)
    def step(layer, x):
      return nnx.value_and_grad(loss, graph=graph)(layer, x)

    value, gradients = step(layer, x)
    close(value, expected(variant)[1])
    self.assert_gradients(variant, gradients)

  @parameterized.parameters(*LAYERS)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_vmap_over_data(self, variant):
    layer = make(variant)
    f = lambda x, reset: layer(x, reset=reset)
    y, gradient = reference.jit(
        jax.vmap(
            lambda x, r: (f(x, r), jax.grad(lambda x: jnp.sum(f(x, r) ** 2))(x))
        )
    )(x, reset)
    want = reference.jit(jax.grad(lambda x: loss(layer, x)))(x)
    close(y, expected(variant)[0])
    close(gradient, want)

  @parameterized.parameters(*LAYERS)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_vmap_over_parameters(self, variant):
    layers = [make(variant, seed=seed) for seed in range(2)]
    graphdef, _ = nnx.split(layers[0])
    states = [nnx.split(layer)[1] for layer in layers]
    of_state = lambda state: loss(nnx.merge(graphdef, state), x)
    f = jax.value_and_grad(of_state, allow_int=True)
    stack = lambda *leaves: jnp.stack(leaves)
    together = reference.jit(jax.vmap(f))(jax.tree.map(stack, *states))
    one_by_one = [reference.jit(f)(state) for state in states]
    for i, want in enumerate(one_by_one):
      close(jax.tree.map(lambda a, i=i: a[i], together), want)


class StaticPartTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    chex.clear_trace_counter()

  @parameterized.parameters(*rnnzoo.LAYERS)
  def test_equal_layers_share_a_compilation(self, name):
    make = lambda seed: nnx.split(
        rnnzoo.LAYERS[name](IN, FEATURES, rngs=nnx.Rngs(seed))
    )
    (first, state), (second, other_state) = make(0), make(1)
    self.assertEqual(first, second)
    self.assertEqual(hash(first), hash(second))
    self.assertEqual(first, pickle.loads(pickle.dumps(first)))
    lengths = TIME, TIME - 1

    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(n=len(lengths))  # One a shape.
    def run(graphdef, state, x, reset):
      return nnx.merge(graphdef, state)(x, reset=reset)

    for layer in ((first, state), (second, other_state)):
      for time in lengths:
        run.trace(*layer, x[:, :time], reset[:, :time])

  def test_options_tell_layers_apart(self):
    make = lambda **options: nnx.graphdef(
        rnnzoo.AGRU(IN, FEATURES, rngs=nnx.Rngs(0), **options)
    )
    for options in ({'gamma': 2.0}, {'dtype': jnp.bfloat16}, {'num_heads': 2}):
      self.assertNotEqual(make(), make(**options))

  def test_unroll_retraces_for_no_equal_cell(self):
    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(n=1)
    def run(cell, gates):
      return rnnzoo.unroll(cell, {}, gates, None, (x[:, 0],))[1]

    gates = jnp.ones((BATCH, TIME, 2, IN))
    run(rnnzoo.MinGRUCell(), gates)
    run(rnnzoo.MinGRUCell('linear'), gates)


if __name__ == '__main__':
  absltest.main()
