"""Newton's method over time gives the trajectory of 'scan', and says how."""

import dataclasses
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
from rnnzoo.engines import call as call_lib
from rnnzoo.engines.scan import loop as scan_loop
from rnnzoo.engines.time import maps
from rnnzoo.engines.time import newton
from rnnzoo.engines.time import path as newton_path
from rnnzoo.engines.time import plan as newton_plan
from tests.testing import comparison
from tests.testing import compilation
from tests.testing import random_layers
from tests.testing import reference

IN = 4

# In these a small change of the carry dies out, or at least does not grow.
CONTRACTIVE = {'LSTM': {}, 'GRU': {}, 'AGRU': {'gamma': 2.0}, 'IndRNN': {}}


@dataclasses.dataclass(frozen=True)
class Case:
  """A layer and its arrays.

  Attributes:
    layer: its name.
    options: of the layer.
    sizes: batch, time, features.
    flags: whether there are resets and a mask.
    reverse: whether time runs backwards.
    scale: what the recurrent kernel is multiplied by.
    inputs: what x is multiplied by.
    dtype: of everything.
    path: settings of the path.
  """

  layer: str
  options: dict = dataclasses.field(default_factory=dict)
  sizes: tuple[int, int, int] = (2, 37, 8)
  flags: bool = False
  reverse: bool = False
  scale: float = 1.0
  inputs: float = 1.0
  dtype: str = 'float64'
  path: rnnzoo.AssociativeScan = rnnzoo.AssociativeScan()

  def operands(self):
    batch, time, features = self.sizes
    dtype = jnp.dtype(self.dtype)
    layer = rnnzoo.LAYERS[self.layer](
        IN, features, param_dtype=dtype, rngs=nnx.Rngs(0), **self.options
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, time, IN)) * self.inputs
    operands = layer._operands(jnp.asarray(x, dtype))
    if self.flags:
      operands = operands._replace(
          reset=jnp.asarray(rng.random((time, batch)) < 0.05),
          mask=jnp.asarray(rng.random((time, batch)) < 0.8),
      )
    kernel = operands.recurrent_kernel * self.scale
    return layer.cell, operands._replace(recurrent_kernel=kernel)

  def plan(self, cell, operands):
    call = call_lib.Call(reverse=self.reverse)
    return newton_plan.make_plan(
        cell, call_lib.Dense(), operands, call, self.path
    )


def run(case, change=lambda operands: operands):
  """Returns carries by Newton's method, those of 'scan', and the report."""
  cell, operands = case.operands()
  plan = case.plan(cell, operands)

  def both(operands):
    _, found, report = newton_path.unroll_with_report(plan, operands)
    _, wanted = scan_loop.carries(plan.steps, operands)
    return found, wanted, report

  return reference.jit(both)(change(operands))


def gradients(case):
  """Returns gradients of a sum over all results, by Newton and by 'scan'."""
  cell, operands = case.operands()
  plan = case.plan(cell, operands)

  def loss(operands, unroll):
    final, (h,) = unroll(plan, operands)
    return sum(jnp.sum(jnp.sin(x)) for x in (h, *final))

  grad = jax.grad(loss, allow_int=True)
  both = lambda operands: [
      grad(operands, unroll) for unroll in (newton_path.unroll, by_scan)
  ]
  return reference.jit(both)(operands)


def newton_gru():
  path = 'associative_scan'
  return rnnzoo.GRU(IN, 4, implementation=path, rngs=nnx.Rngs(0))


def by_scan(plan, operands):
  return scan_loop.unroll(plan.steps, operands)


class NewtonTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(jax.enable_x64(True))

  def check(self, case, limit):
    found, wanted, report = run(case)
    self.assertFalse(report.fell_back)
    self.assertLessEqual(report.iterations, 8)
    comparison.assert_near(found, wanted, limit)
    comparison.assert_near(*gradients(case), limit)

  @parameterized.parameters(('GRU', 37), ('IndRNN', 37), ('AGRU', 1))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_is_scan(self, name, time):
    case = Case(name, CONTRACTIVE[name], (2, time, 8), flags=True)
    self.check(case, 1e-10)

  @parameterized.parameters(('GRU', 1), ('LSTM', 64))
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_few_iterations(self, name, features):
    case = Case(name, sizes=(2, 1000, features), dtype='float32')
    found, wanted, report = run(case)
    self.assertFalse(report.fell_back)
    self.assertLessEqual(report.iterations, 6)
    comparison.assert_near(found, wanted, 2e-6)

  @parameterized.parameters(
      # (case, whether it is chaotic)
      (Case('GRU', sizes=(2, 200, 32), scale=5), True),
      (Case('LSTM', sizes=(2, 200, 8), scale=5), False),
      (Case('AGRU', {'gamma': 0.0}, (2, 500, 16)), False),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_hard_weights(self, case, chaotic):
    found, wanted, report = run(case)
    self.assertEqual(bool(report.fell_back), chaotic)
    # The parts ran nearly as often as there are parts of time.
    self.assertGreater(report.in_turn, case.sizes[1])
    # It is the sequential run, which XLA compiles once more, in a branch: it
    # may round in another order, and these weights amplify differences.
    comparison.assert_near(found, wanted, 1e-11)

  @parameterized.parameters(-1.01, 1.01)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_growing_relu_needs_no_fallback(self, u):
    options = {'recurrent_range': (u, u)}
    # Rounding decides, so XLA compiles as users have it.
    jit = functools.partial(jax.jit, compiler_options=compilation.USUAL)
    with mock.patch.object(reference, 'jit', jit):
      found, wanted, report = run(Case('IndRNN', options, (2, 5000, 8)))
    self.assertFalse(report.fell_back)
    self.assertLessEqual(report.iterations, 1)
    comparison.assert_near(found, wanted, 2e-14)

  @parameterized.parameters({'window': 16}, {'jacobian': 'diagonal'}, {})
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_settings(self, **settings):
    path = rnnzoo.AssociativeScan(**settings)
    case = Case('GRU', path=path, flags=True)
    few = 32 if settings else 1
    with mock.patch.object(newton, 'MOST_ITERATIONS', few):
      found, wanted, report = run(case)
    self.assertEqual(bool(report.fell_back), not settings)
    comparison.assert_near(found, wanted, 1e-12)

  @parameterized.parameters('AGRU', 'LSTM')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_diagonal_gradients(self, name):
    path = rnnzoo.AssociativeScan(jacobian='diagonal')
    case = Case(name, CONTRACTIVE[name], (2, 9, 8), path=path)
    comparison.assert_near(*gradients(case), 1e-10)

  @parameterized.parameters('LSTM', 'AGRU')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_one_bad_window(self, name):
    """A window that does not converge runs in turn; the others stay."""
    path = rnnzoo.AssociativeScan(window=20)
    case = Case(name, CONTRACTIVE[name], (2, 60, 8), path=path)
    solve = newton.solve

    def fails_once(problem, init, errors, guess, **options):
      before, errors, report, right = solve(
          problem, init, errors, guess, **options
      )
      right &= jnp.all(init[0] == 0)
      return before, errors, report._replace(fell_back=~right), right

    with mock.patch.object(newton, 'solve', fails_once):
      found, wanted, report = run(case)
    self.assertTrue(report.fell_back)
    self.assertGreater(report.sensitivity, 0)
    comparison.assert_near(found, wanted, 1e-12)

  @parameterized.parameters(np.nan, np.inf)
  @pytest.mark.slow
  def test_not_finite(self, value):
    found, wanted, report = run(
        Case('GRU'),
        lambda given: given._replace(x=given.x.at[20, 0, 0].set(value)),
    )
    # Gates take an infinity to 0 or 1.
    self.assertEqual(bool(report.fell_back), np.isnan(value))
    same = functools.partial(np.testing.assert_allclose, rtol=1e-10)
    jax.tree.map(same, found, wanted)

  @parameterized.parameters('reset', 'head')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_large_numbers_hide_no_error(self, hides):
    # Neither those before a reset nor those of another head.
    options = {'activation': 'relu', 'num_heads': 2}
    layers = [
        rnnzoo.Elman(IN, 8, implementation=p, rngs=nnx.Rngs(0), **options)
        for p in ('scan', 'associative_scan')
    ]
    x = np.random.default_rng(0).standard_normal((1, 100, IN))
    reset, own = None, np.s_[..., 4:]
    if hides == 'reset':
      x[:, :50] *= 1e6
      reset, own = jnp.zeros((1, 100), bool).at[:, 50].set(True), np.s_[:, 50:]
    else:
      for layer in layers:
        kernel = layer.kernel[...]
        layer.kernel.set_value(kernel.at[..., :4].multiply(1e6))
    x = jnp.asarray(x, jnp.float32)
    wanted, found = (
        reference.jit(layer)(x, reset=reset)[own] for layer in layers
    )
    comparison.assert_near(found, wanted, 1e-6)

  @pytest.mark.slow
  def test_a_large_feature_hides_no_error_of_others(self):
    # It is in their head, and they do not see it.
    def run(path):
      options = {'gamma': 0.5, 'epsilon': 0.05, 'implementation': path}
      layer = rnnzoo.AGRU(IN, 4, rngs=nnx.Rngs(0), **options)
      kernel = layer.recurrent_kernel[...].at[..., 0, :].set(0)
      layer.recurrent_kernel[...] = kernel.at[..., 0].set(0)
      layer.kernel[...] = layer.kernel[...].at[..., 0].set(0)
      x = np.random.default_rng(0).standard_normal((1, 300, IN))
      carry = jax.tree.map(
          lambda c: c.at[:, 0].set(1e5), layer.initial_carry((1,))
      )

      def loss(x):
        y = layer(x, initial_carry=carry)[..., 1:]
        return jnp.sum(jnp.sin(y)), y

      grad = jax.value_and_grad(loss, has_aux=True)
      (_, y), dx = reference.jit(grad)(jnp.float32(x))
      return y, dx

    comparison.assert_near(run('associative_scan'), run('scan'), 2e-6)

  def test_no_sequence(self):
    layer = newton_gru()
    x = jnp.zeros((0, 5, IN))
    self.assertEqual(layer(x).shape, (0, 5, 4))
    with self.assertRaisesRegex(ValueError, 'at least one sequence'):
      rnnzoo.verify(layer, x)

  def test_products_have_all_digits(self):
    kernel, state = random_layers.pure(newton_gru())
    text = str(jax.make_jaxpr(kernel)(state, jnp.zeros((2, 9, IN))))
    self.assertIn('precision=(Precision.HIGHEST, Precision.HIGHEST)', text)

    # Of the adjoint too, or all its steps run one by one.
    precisions = []
    solve_linear = newton.solve_linear

    def solve(problem, init):
      precisions.append(jax.config.jax_default_matmul_precision)
      return solve_linear(problem, init)

    with mock.patch.object(newton, 'solve_linear', solve):
      x = jnp.zeros((2, 9, IN))
      jax.make_jaxpr(jax.grad(lambda x: kernel(state, x).sum()))(x)
    self.assertEqual(precisions, ['highest'])

  def test_says_how_much_memory_matrices_need(self):
    x = jax.ShapeDtypeStruct((64, 100, IN), jnp.float32)

    def shape(path):
      make = lambda: rnnzoo.GRU(IN, 2048, implementation=path, rngs=nnx.Rngs(0))
      call, state = random_layers.pure(nnx.eval_shape(make))
      return jax.eval_shape(call, state, x).shape

    message = r"'exact' needs .* MiB for 16 steps .*'diagonal' needs"
    with self.assertRaisesRegex(NotImplementedError, message):
      shape(rnnzoo.AssociativeScan(jacobian='exact'))
    self.assertEqual(shape('associative_scan'), (64, 100, 2048))

  @parameterized.parameters(None, 1000)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_memory_is_that_of_a_window(self, window):
    def temporary(time):
      path = rnnzoo.AssociativeScan(window=window)
      case = Case('GRU', sizes=(2, time, 16), dtype='float32', path=path)
      operands = jax.eval_shape(lambda: case.operands()[1])
      plan = case.plan(rnnzoo.GRUCell(), operands)
      unroll = functools.partial(newton_path.unroll, plan)
      program = reference.jit(unroll).lower(operands).compile()
      return program.memory_analysis().temp_size_in_bytes

    whole = temporary(100_000)
    self.assertLess(whole, newton_plan.BYTES)
    if window:
      # Time itself costs a few copies of h, and a step's matrix is 16 of them.
      h = 2 * 16 * 4
      self.assertLess(whole - temporary(50_000), 50_000 * 8 * h)

  @pytest.mark.slow
  def test_branches_stay_branches_under_vmap(self):
    case = Case('GRU', sizes=(2, 9, 8))
    cell, operands = case.operands()
    plan = case.plan(cell, operands)
    xs = jnp.stack([operands.x, 2 * operands.x, -operands.x])

    def loss(x, unroll):
      final, (h,) = unroll(plan, operands._replace(x=x))
      return jnp.sum(jnp.sin(h)) + jnp.sum(final[0])

    def program(unroll):
      return reference.jit(
          jax.vmap(jax.grad(loss), (0, None)), static_argnums=1
      )

    run = program(newton_path.unroll)
    text = run.lower(xs, newton_path.unroll).as_text()
    one = jax.jit(jax.grad(loss), static_argnums=1)
    alone = one.lower(xs[0], newton_path.unroll).as_text()
    for operation in ('stablehlo.case', 'stablehlo.while'):
      self.assertEqual(text.count(operation), alone.count(operation))
    comparison.assert_near(
        run(xs, newton_path.unroll), program(by_scan)(xs, by_scan), 1e-12
    )

  @parameterized.parameters(12, 300)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_a_large_carry_that_is_forgotten(self, time):
    # A residual that is small beside 1e6 was taken for rounding.
    def run(path):
      layer = rnnzoo.GRU(3, 8, implementation=path, rngs=nnx.Rngs(0))
      layer.recurrent_kernel[...] *= 2.5
      x = np.random.default_rng(0).normal(size=(2, time, 3))
      carry = jax.tree.map(
          lambda c: jnp.full(c.shape, 1e6), layer.initial_carry((2,))
      )
      run = nnx.jit(lambda layer, *args: layer(args[0], initial_carry=args[1]))
      return np.asarray(run(layer, jnp.float32(x), carry))

    wanted, found = run('scan'), run('associative_scan')
    sizes = np.abs(wanted).max(-1, keepdims=True)
    self.assertLess(np.max(np.abs(found - wanted) / sizes), 3e-5)

  @parameterized.parameters('GRU', 'IndRNN', 'IRevRNN')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_by_associative_scans(self, name):
    with (
        mock.patch.object(maps, 'over_time', lax.associative_scan),
        mock.patch.object(maps, 'on_cpu', lambda: False),
    ):
      found, wanted, report = run(Case(name, flags=True))
    self.assertFalse(report.fell_back)
    comparison.assert_near(found, wanted, 1e-12)


if __name__ == '__main__':
  absltest.main()
