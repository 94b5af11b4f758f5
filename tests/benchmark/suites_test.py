"""Suites of paths, stacks, loops and devices run, on shapes that are small."""

from absl.testing import absltest
from absl.testing import parameterized
import pytest

from rnnzoo.benchmark import measurement
from rnnzoo.benchmark import peers
from rnnzoo.benchmark import program
from tests.benchmark import benchmark_test


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
    ours, flax = self.rows(
        'steps', f'--shape={shape}', f'--layers={name} step', '--dtypes=float32'
    )
    self.assertEqual((ours['program'], flax['program']), ('rnnzoo', 'flax'))
    self.assertGreaterEqual(ours['kernels'], 3)  # Two products a layer.
    self.assertLessEqual(ours['kernels'], flax['kernels'])

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
