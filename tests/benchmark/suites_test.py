"""Suites of paths, stacks, loops and devices run, on shapes that are small."""

import re

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from rnnzoo.benchmark import cases
from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import peers
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import program
from rnnzoo.benchmark import timing
from tests.benchmark import benchmark_test

# Instructions of XLA that are no kernel.
FREE = {'bitcast', 'constant', 'get-tuple-element', 'parameter', 'tuple'}


def kernels_of_loop(built: timing.Program) -> int:
  """Counts the kernels in the body of a program's first loop."""
  text = built.call.as_text()
  found = re.search(r'while\(.*body=(%[\w.\-]+)', text)
  body = text.partition(f'\n{found[1]} (')[2].partition('\n}')[0]
  names = re.findall(r'= .*? ([a-z\-]+)\(', body)
  return sum(name not in FREE for name in names)


class SuitesTest(parameterized.TestCase):

  def rows(self, suite, *arguments):
    """Returns the rows of a suite, none of which fails."""
    flags = f'--suite={suite}', *arguments, '--repeats=1'
    rows = benchmark_test.result(self, *flags)[0]['rows']
    for row in rows:
      self.assertContainsSubset(measurement.LABELS, row)
      if row['status'] == 'cannot':
        self.assertIn('GPU', row['reason'])
      elif '--check_only' not in arguments:
        self.assertGreater(row['ms'], 0)
    return rows

  def test_every_suite_has_cases(self):
    for name, suite in program.SUITES.items():
      with self.subTest(name):
        shapes = {key: suite.shapes[key] for key in suite.default_shapes}
        found = list(suite.timed(shapes, suite.layers, None, None))
        if name != 'cudnn' or peers.PEERS['cudnn'].installed:
          self.assertNotEmpty(found)
        keys = [
            tuple(case.row(way, direction).values())
            for case in found
            for way in case.implementations
            for direction in case.directions
        ]
        self.assertLen(set(keys), len(keys))

  @pytest.mark.slow
  def test_stacks(self):
    rows = self.rows('stacks', '--shapes=small', '--layers=2 x LSTM')
    found = {row['program']: row['status'] for row in rows}
    cannot = dict.fromkeys(('in turn', 'at once'), 'cannot')
    self.assertEqual(found, cannot | {'scan': 'ok'})

  @pytest.mark.slow
  def test_memory(self):
    rows = self.rows('memory', '--shapes=small', '--layers=LSTM')
    found = {row['program']: row for row in rows}
    self.assertLen(found, 4)
    self.assertEqual({row['direction'] for row in rows}, {'forward+backward'})
    kept = lambda keep: found[f"Scan(keep='{keep}')"]['kept_mib']
    self.assertGreater(kept('gates'), kept('carries'))
    self.assertGreater(kept('carries'), 0)

  @pytest.mark.slow
  def test_newton_long(self):
    layers = 'IndRNN_tanh_small,IndRNN,linear_scan'
    rows = self.rows(
        'newton_long',
        '--shapes=small',
        f'--layers={layers}',
        '--implementations=scan',
        '--check_only',
    )
    self.assertLen(rows, 3 * 2)

  @pytest.mark.slow
  def test_resets(self):
    self.assertLen(
        self.rows('resets', '--shapes=small', '--implementations=scan'), 8
    )

  @parameterized.parameters(('1,3,32,32', 'GRU'), ('40,3,32,32', '2 x LSTM'))
  @pytest.mark.slow
  def test_steps_have_no_more_kernels_than_flax(self, shape, name):
    suite, (_, sizes) = program.SUITES['steps'], cases.parse_shape(shape)
    given = {'own': sizes}, [f'{name} step'], None, ['float32']
    (case,) = suite.timed(*given)
    self.assertEqual(case.implementations, ['rnnzoo', 'flax'])
    problem = problems.build(case)
    ours, flax = (
        kernels_of_loop(
            timing.build(problem.function(way, 'forward'), *problem.arguments)
        )
        for way in case.implementations
    )
    self.assertGreaterEqual(ours, 3)  # Two products a layer.
    self.assertLessEqual(ours, flax)
    flags = f'--shape={shape}', f'--layers={name} step', '--dtypes=float32'
    self.assertLen(self.rows('steps', *flags), 2)

  @pytest.mark.slow
  def test_rollouts(self):
    rows = self.rows('rollouts', '--shapes=small', '--layers=ScannedRNN')
    found = {row['program'] for row in rows if row['status'] == 'ok'}
    self.assertEqual(found, {'scan', 'flax'})

  @pytest.mark.slow
  def test_time_devices(self):
    arguments = '--shapes=small', '--layers=linear_scan_slow_resets'
    rows = self.rows('time_devices', *arguments, '--dtypes=float32')
    self.assertLen(rows, 4)
    self.assertEqual([row['error'] for row in rows[1::2]], [0.0, 0.0])
    self.assertTrue(all(row['times'] > 0 and row['mib'] > 0 for row in rows))

  @pytest.mark.slow
  def test_peers_of_elman_and_both_cells_of_flax(self):
    rows = self.rows(
        'peers',
        '--shapes=small',
        '--layers=Elman,LSTM',
        '--implementations=rnnzoo,flax.nnx,flax.nnx.LSTMCell',
        '--check_only',
    )
    self.assertLen(rows, 2 * (2 + 3))
    self.assertEqual({row['status'] for row in rows}, {'ok'})


if __name__ == '__main__':
  absltest.main()
