"""Rows of `jax.vmap` under Newton's method: one batch, one bound of memory."""

import functools
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rnnzoo
from rnnzoo.engines.time import newton
from rnnzoo.engines.time import plan as newton_plan
from tests.testing import comparison
from tests.testing import reference

IN, FEATURES, ROWS, BATCH, TIME = 3, 4, 3, 2, 19
PATHS = 'associative_scan', 'scan'


def layers(name, paths=PATHS, features=FEATURES, dtype='float64'):
  """Returns (parameters, x, ...) -> results by each path, and parameters."""
  graphs = []
  for path in paths:
    options = {'param_dtype': jnp.dtype(dtype), 'implementation': path}
    layer = rnnzoo.LAYERS[name](IN, features, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(layer)
    graphs.append(graph)

  def unroll(graph, state, x, carry=None, reset=None, lengths=None):
    return nnx.merge(graph, state).unroll(
        x, initial_carry=carry, reset=reset, seq_lengths=lengths
    )

  return [functools.partial(unroll, graph) for graph in graphs], state


def arrays(name):
  """Returns x, an initial carry, resets and lengths of all rows."""
  rng = np.random.default_rng(0)
  count = len(rnnzoo.LAYERS[name](IN, 1, rngs=nnx.Rngs(0)).cell.carry_names)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
  carry = tuple(abs(draw(ROWS, BATCH, FEATURES)) for _ in range(count))
  reset = jnp.asarray(rng.random((ROWS, BATCH, TIME)) < 0.1)
  lengths = jnp.asarray(rng.integers(0, TIME + 1, (ROWS, BATCH)))
  return draw(ROWS, BATCH, TIME, IN), carry, reset, lengths


def several(state):
  """Returns parameters of as many layers as there are rows."""
  stack = lambda p: jnp.stack([p * (1 + i / 9) for i in range(ROWS)])
  return jax.tree.map(stack, state)


def loss(run, *args):
  return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(run(*args)))


class Ways:
  """Maps of a run over rows; each method returns results of a run."""

  def __init__(self, name, state):
    self._state, self._own = state, several(state)
    self._x, self._carry, self._reset, self._lengths = arrays(name)
    self._short = self._x[..., :5, :]

  def flags(self, run):
    own = self._x, self._carry, self._reset, self._lengths
    return jax.vmap(functools.partial(run, self._state))(*own)

  def nested(self, run):
    return jax.vmap(jax.vmap(lambda x: run(self._state, x)))(self._x)

  def parameters_and_x(self, run):
    x = jnp.moveaxis(self._x, 0, 1)
    return jax.vmap(run, in_axes=(0, 1))(self._own, x)

  def parameters_of_rows(self, run):
    each = lambda state: jax.vmap(lambda x: run(state, x))(self._x)
    return jax.vmap(each)(self._own)

  def rows_of_parameters(self, run):
    each = lambda x: jax.vmap(lambda state: run(state, x))(self._own)
    return jax.vmap(each)(self._x)

  def gradient(self, run):
    each = jax.vmap(functools.partial(loss, run), (None, 0, 0, 0))
    total = lambda *args: jnp.sum(each(*args, self._reset))
    return jax.grad(total, (0, 1, 2))(self._state, self._x, self._carry)

  def gradients(self, run):
    each = jax.grad(functools.partial(loss, run), (0, 1, 2))
    own = self._x, self._carry, self._reset
    return jax.vmap(each, (None, 0, 0, 0))(self._state, *own)

  def own_gradients(self, run):
    each = jax.grad(functools.partial(loss, run), (0, 1))
    return jax.vmap(each)(self._own, self._x)

  def tangents(self, run):
    f = functools.partial(run, self._state)
    return jax.vmap(lambda x: jax.jvp(f, (x,), (jnp.cos(x),)))(self._x)

  def linearized(self, run):
    f = jax.vmap(functools.partial(run, self._state))
    return jax.linearize(f, self._x)[1](jnp.cos(self._x))

  def second(self, run):
    each = jax.vmap(functools.partial(loss, run, self._state))
    first = jax.grad(lambda x: jnp.sum(each(x)))
    return jax.grad(lambda x: jnp.sum(jnp.sin(first(x))))(self._short)

  def hessians(self, run):
    each = lambda carry: loss(run, self._state, self._short[0], carry)
    return jax.vmap(jax.hessian(each))(self._carry)

  def checkpointed(self, run):
    each = jax.checkpoint(functools.partial(loss, run, self._state))
    return jax.grad(lambda x: jnp.sum(jax.vmap(each)(x)))(self._x)


WAYS = tuple(name for name in vars(Ways) if not name.startswith('_'))


class RowsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  @parameterized.parameters(*WAYS)
  @pytest.mark.slow
  @pytest.mark.few(4)
  def test_is_scan_in_every_way(self, way):
    runs, state = layers('AGRU')
    function = getattr(Ways('AGRU', state), way)
    both = reference.jit(lambda: [function(run) for run in runs])
    comparison.assert_near(*both(), 1e-10)

  @parameterized.parameters('v', 'vv')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_plans_see_rows_that_share_parameters(self, around):
    plans = []
    make = newton_plan.make_plan

    def noted(*args, **options):
      plans.append(make(*args, **options))
      return plans[-1]

    (run, _), state = layers('GRU', dtype='float32')
    function = h = lambda x: run(state, x)[1]
    for _ in around:
      function = jax.vmap(function)
    lead = (3, 2, 1) if around == 'vv' else (6, 1)
    with (
        mock.patch.object(newton_plan, 'make_plan', noted),
        mock.patch.object(newton_plan, 'BYTES', 2**17),
    ):
      jax.eval_shape(h, jnp.zeros((6, 500, IN)))
      wanted = plans[-1].steps.chunk
      plans.clear()
      jax.eval_shape(function, jnp.zeros((*lead, 500, IN)))
    self.assertLess(wanted, 500)
    self.assertEqual(plans[-1].steps.chunk, wanted)

  def test_says_that_a_jacobian_does_not_fit_all_rows(self):
    exact = rnnzoo.AssociativeScan(jacobian='exact')
    (run,), state = layers('GRU', [exact], 64, 'float32')
    x = jnp.zeros((5000, 1, 20, IN), jnp.float32)
    message = r"'exact' needs .* of 5000 sequences"
    jax.eval_shape(run, state, x[0])
    with self.assertRaisesRegex(NotImplementedError, message):
      jax.eval_shape(jax.vmap(run, (None, 0)), state, x)

  @pytest.mark.slow
  def test_nan_stays_in_its_row(self):
    (run, by_scan), state = layers('GRU')
    x = arrays('GRU')[0].at[1, 0, 10].set(jnp.nan)
    found, wanted = (
        reference.jit(jax.vmap(lambda x, run=run: run(state, x)))(x)
        for run in (run, by_scan)
    )
    same = functools.partial(np.testing.assert_allclose, rtol=1e-10)
    jax.tree.map(same, found, wanted)
    self.assertFalse(np.isnan(found[1][np.array([0, 2])]).any())

  @parameterized.parameters('x', 'parameters')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_one_row_does_not_converge(self, mapped):
    # Only rows of small inputs, or of the first layer, forget.
    self.enter_context(mock.patch.object(newton, 'MOST_ITERATIONS', 1))
    path = rnnzoo.AssociativeScan(jacobian='diagonal')
    runs, state = layers('GRU', [path, 'scan'], 16)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 1, 60, IN)))
    wild = jax.tree.map(lambda p: 5 * p, state)
    states = jax.tree.map(lambda a, b: jnp.stack([a, b, a]), state, wild)
    x = x * jnp.array([0.0, 1.0, 0.0])[:, None, None, None]
    if mapped == 'x':
      axes, given = (None, 0), (state, x)
    else:
      axes, given = (0, 0), (states, x)
    gradients = []
    for run in runs:
      each = jax.value_and_grad(functools.partial(loss, run), (0, 1))
      gradients.append(reference.jit(jax.vmap(each, axes))(*given))
    comparison.assert_near(*gradients, 1e-10)

  @pytest.mark.slow
  def test_no_rows(self):
    (run, _), state = layers('GRU')
    x = jnp.zeros((0, BATCH, 5, IN))
    h = jax.vmap(lambda x: run(state, x)[1])(x)
    self.assertEqual(h.shape, (0, BATCH, 5, FEATURES))


if __name__ == '__main__':
  absltest.main()
