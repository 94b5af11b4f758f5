"""Parts of time, run side by side by kernels, give the trajectory of 'scan'.

Plain loops stand in for kernels, and some kernels are interpreted.
"""

import contextlib
import dataclasses
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import devices
import rnnzoo
from rnnzoo.engines import call as call_lib
from rnnzoo.engines.scan import loop as scan_loop
from rnnzoo.engines.time import joint_cells
from rnnzoo.engines.time import kernel_parts
from rnnzoo.engines.time import parts as time_parts
from rnnzoo.engines.time import path as newton_path
from tests.engines import newton_test
from tests.testing import abstract_gpu
from tests.testing import dense_loops
from tests.testing import several_devices
from tests.testing import streaming_loops

IN = newton_test.IN
H200, B200 = 'NVIDIA H200', 'NVIDIA B200'

# Rounding errors of a short sequence, of numbers near 1.
TOLERANCE = 2e-6


@contextlib.contextmanager
def on_gpu(test, fewest: int = 8):
  """Runs plain loops instead of kernels, in parts of so few steps."""
  test.assertTrue(abstract_gpu.RUNS)
  with contextlib.ExitStack() as stack:
    stack.enter_context(devices.interpreted())
    stack.enter_context(streaming_loops.instead())
    stack.enter_context(dense_loops.instead())
    stack.enter_context(
        mock.patch.object(kernel_parts, '_FEWEST_STEPS', fewest)
    )
    yield


@dataclasses.dataclass(frozen=True)
class Case(newton_test.Case):
  """A layer and its arrays, with carries; a part has the fewest steps."""

  sizes: tuple[int, int, int] = (2, 100, 4)
  dtype: str = 'float32'
  fewest: int = 32

  def operands(self):
    cell, operands = super().operands()
    rng = np.random.default_rng(1)
    carry = tuple(
        jnp.asarray(rng.random((self.sizes[0], self.sizes[2])), self.dtype)
        for _ in cell.carry_names
    )
    restart = tuple(c / 2 for c in carry)
    return cell, operands._replace(carry=carry, restart=restart)


def run(case: Case):
  """Returns the carries of 'scan', those of parts of time, and the report."""
  cell, operands = case.operands()
  plan = case.plan(cell, operands)
  windows = newton_path._Windows(plan)
  by_parts = lambda given: kernel_parts.unroll(plan.steps, given, windows)
  by_scan = lambda given: scan_loop.carries(plan.steps, given)
  found, wanted = jax.jit(by_parts)(operands), jax.jit(by_scan)(operands)
  return wanted, found[:2], found[2]


HEADS = {'num_heads': 4}
TANH = {'activation': 'tanh'}
FORGETFUL = (
    Case('GRU', HEADS),
    Case('GRU', HEADS, (2, 101, 4), flags=True, reverse=True),
    Case('GRU', {'num_heads': 1}, (16, 200, 1)),
    Case('GRU', {'num_heads': 130}, (2, 97, 130), reverse=True),
    Case('GRU', scale=0.3),
    Case('GRU', {'num_heads': 2}, (2, 101, 4), flags=True, scale=0.3),
    Case('Elman', HEADS, scale=0.3, fewest=24),
    Case('LSTM', HEADS, (2, 103, 4), reverse=True, scale=0.3),
    Case('IndRNN', TANH, (1, 100, 8), fewest=8),
    Case('IndRNN', {}, (3, 101, 5), flags=True, reverse=True, fewest=8),
    Case('IndRNN', {'recurrent_range': (-1, 1)}, (3, 101, 5), fewest=8),
)


def close(found, wanted):
  """Asserts that arrays are equal, in the scale of the second."""
  atol = TOLERANCE * np.abs(wanted).max()
  np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


class NewtonJointsTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_corrections_are_measured_by_their_own_feature(self):
    # Carries before four parts of two features; the third part resets one.
    starts = (jnp.array([[1e6, 1.0], [1e6, 1.0], [1e6, 1.0], [1.0, 1.0]]),)
    slope = jnp.array([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    small = jnp.full((3, 2), 1e-3)
    with on_gpu(self):
      sizes = [
          float(kernel_parts._size(slope, starts, (small.at[where].set(1),)))
          for where in ((1, 0), (1, 1), (2, 0))
      ]
      lost = small.at[0, 0].set(jnp.nan)
      self.assertEqual(kernel_parts._size(slope, starts, (lost,)), np.inf)
    np.testing.assert_allclose(sizes, [1e-3, 1, 1], rtol=1e-6)

  # Before jax 0.11 there are no kernels, and so no parts.
  __test__ = abstract_gpu.RUNS

  @parameterized.parameters(*FORGETFUL)
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_is_the_trajectory_of_scan(self, case):
    report = self.check(case, case.fewest)
    self.assertFalse(report.fell_back)
    self.assertGreaterEqual(report.parts, 2)

  def check(self, case, fewest=8):
    """Returns the report of a run that gives the trajectory of 'scan'."""
    with on_gpu(self, fewest):
      (last, wanted), (final, found), report = run(case)
    for a, b in zip((*found, *final), (*wanted, *last), strict=True):
      close(a, b)
    return report

  @pytest.mark.exhaustive
  def test_over_auto_axes(self):
    output = several_devices.run(self, 'joints_program')
    self.assertEqual(output.count('the same, and nothing is sent'), 3)

  @parameterized.parameters(
      Case('IndRNN', {**TANH, 'recurrent_range': (-20, 20)}, (1, 100, 8)),
      Case('SLSTM', HEADS),
      Case('AntisymmetricRNN', {'epsilon': 0.01}),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gives_up_where_parts_forget_nothing(self, case):
    self.assertTrue(self.check(case).fell_back)

  @pytest.mark.slow
  def test_numbers_that_are_not_finite(self):
    case = Case('IndRNN', TANH, (1, 100, 8))
    cell, operands = case.operands()
    operands = operands._replace(x=operands.x.at[60].set(jnp.nan))
    plan = case.plan(cell, operands)
    windows = newton_path._Windows(plan)
    with on_gpu(self):
      _, (found,), report = kernel_parts.unroll(plan.steps, operands, windows)
    self.assertTrue(report.fell_back)
    _, (wanted,) = scan_loop.carries(plan.steps, operands)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_allclose(found[:60], wanted[:60], atol=TOLERANCE)

  @pytest.mark.slow
  def test_relu_takes_few_runs_where_nothing_is_forgotten(self):
    options = {'recurrent_range': (0.99, 1.01)}
    with on_gpu(self):
      (_, (wanted,)), (_, (found,)), report = run(
          Case('IndRNN', options, (2, 1000, 4), inputs=0.1)
      )
    self.assertFalse(report.fell_back)
    self.assertLessEqual(report.runs, 2)
    np.testing.assert_allclose(
        found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max()
    )

  @pytest.mark.slow
  def test_layers_run_it_and_have_derivatives(self):
    layer = rnnzoo.GRU(IN, 4, num_heads=4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 100, IN))
    graph, state = nnx.split(layer)

    def loss(way, state, x):
      layer = nnx.merge(graph, state)
      layer.implementation = way
      return jnp.sum(jnp.sin(layer(x)))

    with on_gpu(self, 32):
      with mock.patch.object(
          kernel_parts, '_solve', wraps=kernel_parts._solve
      ) as solve:
        found = jax.jit(jax.value_and_grad(loss, (1, 2)), static_argnums=0)(
            'associative_scan', state, x
        )
        self.assertTrue(solve.called)
        each = jax.jit(
            jax.vmap(lambda x: loss('associative_scan', state, x[None]))
        )(x)
    wanted = jax.value_and_grad(loss, (1, 2))('scan', state, x)
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(each.sum(), wanted[0], rtol=1e-5)

  @pytest.mark.slow
  def test_settings_of_windows_ask_for_windows(self):
    path = rnnzoo.AssociativeScan(window=50)
    layer = rnnzoo.GRU(IN, 4, implementation=path, rngs=nnx.Rngs(0))
    with on_gpu(self):
      with mock.patch.object(kernel_parts, 'unroll') as unroll:
        layer(jnp.ones((2, 100, IN)))
    unroll.assert_not_called()

  def test_short_sequences_have_no_parts(self):
    case = Case('GRU')
    cell, operands = case.operands()
    with on_gpu(self, 51):
      with self.assertRaisesRegex(NotImplementedError, 'not be faster'):
        kernel_parts.unroll(case.plan(cell, operands).steps, operands, None)

  @parameterized.parameters(False, True)
  def test_folds_are_undone(self, in_features):
    for reverse in (False, True):
      sizes = {'batch': 2, 'time': 11, 'features': 3, 'count': 4}
      fold = time_parts.Fold(**sizes, reverse=reverse, in_features=in_features)
      x = jnp.arange(2 * 11 * 3.0).reshape(2, 11, 3)
      np.testing.assert_array_equal(fold.unfolded(fold.steps(x)), x)
      gates = jnp.stack([x, -x], 2)
      second = fold.steps(gates)[:, :, 1]
      np.testing.assert_array_equal(fold.unfolded(second), -x)
      # The first row is that of the loop's first part.
      first = fold.rows(fold.steps(x)[:, -1 if reverse else 0])[0]
      np.testing.assert_array_equal(
          first.reshape(2, 3), x[:, -1 if reverse else 0]
      )
      rows = jnp.arange(4 * 6.0).reshape(4, 6)
      np.testing.assert_array_equal(fold.rows(fold.carry(rows)), rows)

  @parameterized.parameters('tanh', 'relu')
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_kernels_run_the_cells(self, activation):
    # Interpreted, without outputs and with.
    cell = rnnzoo.ElmanCell(activation)
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    x, u, h = array(2, 9, 1, 4), array(1, 4, 1, 1), array(2, 4)
    ones, zeros = jnp.ones_like(h), jnp.zeros_like(h)
    free = zeros - jnp.inf, zeros + jnp.inf
    params = {joint_cells.WEIGHTS: u[..., 0, 0]}
    self.assertEqual(joint_cells.has_map(cell, params), activation == 'relu')

    def last(h):
      return rnnzoo.unroll(cell, {}, x, u, (h,), implementation='scan')[0][0]

    wanted, wanted_slope = jax.jvp(last, (h,), (ones,))
    call = call_lib.Call(outputs=0)
    with abstract_gpu.interpreted(self):
      (found, slope), none = pallas_kernels.recurrence(
          joint_cells.Tangent(cell), params, x, u, (h, ones), call=call
      )
      self.assertEqual(none, ())
      close(found, wanted)
      # 1 - h^2 loses digits where h is near 1.
      np.testing.assert_allclose(slope, wanted_slope, rtol=1e-4, atol=1e-6)
      if activation == 'relu':
        (a, b, low, high), _ = pallas_kernels.recurrence(
            *(joint_cells.Clipped(cell), params, x, u),
            (ones, zeros, *free),
            call=call,
        )
        _, (found,) = pallas_kernels.recurrence(
            joint_cells.Clip(),
            {},
            tuple(z[:, None] for z in (a, b, low, high)),
            jnp.zeros((1, 4, 1, 1)),
            (h,),
        )
        close(found[:, 0], wanted)

  @parameterized.parameters(
      (H200, Case('GRU', {'num_heads': 1}, (16, 1000, 1))),
      (H200, Case('GRU', {'num_heads': 256}, (2, 1000, 256), flags=True)),
      (B200, Case('GRU', {'num_heads': 128}, (2, 1000, 128))),
      (B200, Case('IndRNN', TANH, (1, 1000, 256), reverse=True)),
      (H200, Case('SLSTM', {'num_heads': 128}, (1, 1000, 128))),
      (B200, Case('AGRU', {}, (1, 1000, 16))),
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_lowers(self, kind, case):
    cell, operands = case.operands()
    steps = case.plan(cell, operands).steps
    given = lambda operands: (operands.carry, (operands.x @ wide,) * count)
    count = len(cell.carry_names)
    wide = jnp.ones((IN, case.sizes[-1]))
    with abstract_gpu.device(self, kind):
      text = abstract_gpu.lower(
          lambda operands: kernel_parts.unroll(steps, operands, given)[:2],
          operands,
      )
      self.assertTrue('mosaic_gpu' in text)

  @parameterized.product(name=['IndRNN', 'Elman'], reverse=[False, True])
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_gradients_of_scalars_run_in_a_kernel(self, name, reverse):
    """Heads of one unit: the adjoint is a recurrence of `linear_scan`."""
    options = TANH if name == 'IndRNN' else {'num_heads': 4}
    x = jax.random.normal(jax.random.key(0), (2, 50, IN))

    def gradient(path):
      layer = rnnzoo.LAYERS[name](
          IN, 4, implementation=path, rngs=nnx.Rngs(0), **options
      )
      loss = lambda x: jnp.sum(jnp.sin(layer(x, reverse=reverse)))
      return jax.grad(loss)

    wanted = gradient('scan')(x)
    calls = []
    real = pallas_kernels.linear_scan
    counted = lambda *args, **kw: calls.append(kw) or real(*args, **kw)
    with (
        on_gpu(self),
        mock.patch.object(pallas_kernels, 'linear_scan', counted),
    ):
      found = jax.jit(gradient('associative_scan'))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=TOLERANCE)
    way = {'reverse': not reverse, 'time_major': True}
    self.assertIn(way, calls)


if __name__ == '__main__':
  absltest.main()
