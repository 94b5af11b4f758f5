"""Errors are judged beside 'scan', and calls that are timed take turns."""

import dataclasses
import time
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnzoo.benchmark import cases
from rnnzoo.benchmark import checks
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import suites
from rnnzoo.benchmark import timing
from tests.benchmark import benchmark_test


def measure(*selected, repeats=0):
  """Returns the rows of cases."""
  watchdog = timing.Watchdog(60)
  timer = timing.Timer(repeats)
  return list(measurement.measure(selected, timer, watchdog))


class MeasurementTest(absltest.TestCase):

  def test_errors_are_judged_beside_scan(self):
    ways = ('scan', 'as good', 'worse', 'wrong', 'cannot', 'broken')
    shape = cases.Shape(2, 8, 4, 4)
    double = benchmark_test.case('double', shape, drawn=True)
    double = dataclasses.replace(double, implementations=ways)
    with mock.patch.object(problems, 'build', benchmark_test.doubling):
      rows = measure(double, repeats=1)
    found = {row['program']: row for row in rows}
    self.assertLen(rows, 2 * len(found))
    self.assertEqual(
        [found[way]['status'] for way in ways],
        ['ok', 'ok', 'failed', 'failed', 'cannot', 'failed'],
    )
    self.assertIn("times that of 'scan'", found['worse']['reason'])
    self.assertAlmostEqual(found['worse']['ratio'], 2, delta=0.2)
    self.assertIn('relative error of y from', found['wrong']['reason'])
    self.assertIn('no such instruction', found['broken']['reason'])
    timed = [name for name, row in found.items() if 'ms' in row]
    self.assertEqual(timed, ['scan', 'as good', 'worse'])

  def test_errors(self):
    expected = {'y': np.ones(4), 'gradient': [np.ones(2), np.zeros(1)]}
    wrong = {'gradient': [np.array([1, np.nan]), np.full(1, 0.5)]}
    found = checks.errors([{'y': np.ones(4)}, {'y': 2 * np.ones(4)}], expected)
    self.assertEqual(found, {'y': (1.0, 4)})
    found = checks.errors([wrong, {'gradient': expected['gradient']}], expected)
    self.assertTrue(np.isnan(found['gradient.0'][0]))
    self.assertEqual(found['gradient.1'], (0.5, 1))

  def test_tables_of_checks(self):
    for suite in ('linear', 'dense'):
      layers, sizes = set(), set()
      for check in suites.SUITES[suite].checks:
        self.assertIn(check.layer, suites.SUITES[suite].layers)
        self.assertTrue(check.drawn)
        if suite == 'linear':
          self.assertEqual(check.projection, 'with')
        shape = check.shape
        layers.add(check.layer)
        sizes.add((shape.features // shape.num_heads, shape.time))
      if suite == 'linear':
        self.assertEqual(layers, {'MinGRU', 'MinLSTM', 'IRevRNN'})
      else:
        self.assertLen(layers, len(suites.SUITES[suite].layers))
        off_grid = [(24, 127), (40, 1), (96, 127), (200, 127), (64, 1023)]
        self.assertContainsSubset(off_grid, sizes)

  @pytest.mark.slow
  def test_a_check_of_one_step_has_outputs(self):
    (check,) = [
        check
        for check in suites.SUITES['linear'].checks
        if check.shape.time == 1
    ]
    problem = problems.build(check)
    outputs = problem.make('scan', 'float32')(problem.arguments[0])
    self.assertGreater(np.linalg.norm(np.asarray(outputs)), 0)

  def test_variants_are_layers_with_options(self):
    case = benchmark_test.case('IndRNN_tanh_small', cases.Shape(1, 2, 3, 4))
    arrays, _ = problems.build(case).arguments
    self.assertLess(np.abs(arrays['x_gates']).max(), 0.1)
    # A layer's own number of heads, as SLSTM's, gives way to the shape's.
    for name in suites.SUITES['dense'].layers:
      case = benchmark_test.case(name, cases.Shape(1, 2, 3, 4))
      arrays, _ = problems.build(case).arguments
      self.assertEqual(arrays['kernel'].shape[1:], (1, 4, 4), name)

  def test_limits(self):
    # Tighter than any wrong equation; a change here needs a derivation.
    shape = cases.Shape(2, 4, 3, 8)
    limits = lambda case, implementation='pallas', traffic=(): checks.limits(
        problems.Problem(case, ((), ()), None, traffic), implementation
    )
    Limits = checks.Limits
    streaming = benchmark_test.case('IndRNN', shape)
    self.assertEqual(limits(streaming, traffic=(1, 1)), Limits(2e-5, 2e-3))
    drawn = benchmark_test.case('Elman', shape, 'bfloat16', drawn=True)
    self.assertEqual(limits(drawn), Limits(1e-2, 2e-2, 5, 1.25))
    self.assertEqual(limits(drawn, 'lax_scan_8'), Limits(2e-2, 0.2, 5))
    layer = dataclasses.replace(drawn, projection='with')
    self.assertEqual(limits(layer), Limits(1e-2, 2e-2, 5))
    float32 = dataclasses.replace(layer, dtype='float32')
    exact = checks.rounding('float32', 4)
    self.assertEqual(limits(float32), Limits(exact, exact, 5, 1.25))
    self.assertLess(exact, 2e-5)


class TimingTest(absltest.TestCase):

  def test_sets_are_distinct_and_each_is_used(self):
    x = jnp.arange(6.0).reshape(1, 3, 2)
    kernel = jnp.arange(3.0)
    sets = timing.input_sets(({'x': x, 'kernel': kernel}, x), 8)
    self.assertLen(sets, 2)
    self.assertFalse(np.array_equal(sets[0][0]['x'], sets[1][0]['x']))
    np.testing.assert_array_equal(sets[1][0]['kernel'], kernel)
    results = timing.in_turn(lambda arrays, w: arrays['x'] + w, sets)
    for (_, w), result in zip(sets, results, strict=True):
      np.testing.assert_array_equal(result, 2 * w)

  def test_takes_turns(self):
    order = []
    calls = [lambda: order.append('a'), lambda: order.append('b')]
    with mock.patch.object(timing, 'MAX_CALLS', 1):
      times = timing.interleave(calls, repeats=3)
    # Two calls each to warm up, then one to settle and one to time, in turn.
    self.assertEqual(''.join(order), 'aabb' + 'aabb' * 3)
    self.assertEqual([t['samples'] for t in times], [3, 3])
    self.assertLessEqual(times[0]['low_ms'], times[0]['ms'])

  def test_long_calls_have_few_samples(self):
    count = []
    call = lambda: count.append(0) or time.sleep(0.03)
    paces = timing.Pace(program=0.05), timing.Pace(enough=0.02)
    with mock.patch.object(jax, 'default_backend', lambda: 'gpu'):
      few, once = (timing.interleave([call], 9, pace=p)[0] for p in paces)
    self.assertEqual([few['samples'], once['samples']], [3, 1])
    # Two calls each to begin with; none to settle before a sample.
    self.assertLen(count, 2 + 3 + 2)


if __name__ == '__main__':
  absltest.main()
