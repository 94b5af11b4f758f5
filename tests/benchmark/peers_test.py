"""The suite 'peers': other libraries' layers, with our weights."""

from unittest import mock

from absl.testing import absltest
import numpy as np
import pytest

from rnnzoo.benchmark import cases
from rnnzoo.benchmark import peers
from rnnzoo.benchmark import suites
from rnnzoo.benchmark import timing
from tests.benchmark import benchmark_test

SMALL = cases.Shape(batch=2, time=3, in_features=4, features=4)


def measure(layer, *names, repeats=0, dtype='float32'):
  """Returns the rows of a small case."""
  case = cases.Case(layer, 'small', SMALL, dtype, 'with', names)
  timer, watchdog = timing.Timer(repeats), timing.Watchdog(60)
  return list(peers.measure([case], timer, watchdog))


def peer(program):
  return peers.Peer(program, 'numpy', peers.LAYERS)


def wrong(ours, arrays, dtype, backward):
  x, w = arrays
  return lambda: ((x if backward else w),), {'compile_s': 0.0}


def broken(*_):
  raise RuntimeError('no kernel')


def unable(*_):
  raise NotImplementedError('not here')


class PeersTest(absltest.TestCase):

  @pytest.mark.slow
  def test_ours_and_flax_are_the_same_function(self):
    rows = measure('LSTM', 'rnnzoo', 'flax.linen', repeats=1)
    self.assertLen(rows, 4)
    for row in rows:
      self.assertEqual(row['status'], 'ok', row)
      # The yardstick is of another precision.
      self.assertBetween(row['error'], 1e-9, 1e-6)
      self.assertGreater(row['ms'], 0)
      self.assertGreater(row['compile_s'], 0)
      self.assertNotEmpty(row['version'])

  def test_wrong_and_broken_peers(self):
    others = {'wrong': peer(wrong), 'broken': peer(broken), 'no': peer(unable)}
    with mock.patch.dict(peers.PEERS, others):
      rows = measure('MinGRU', 'wrong', 'broken', 'no', repeats=1)
    found = {row['program']: (row['status'], row['reason']) for row in rows}
    self.assertEqual(found['broken'], ('cannot', "RuntimeError('no kernel')"))
    self.assertEqual(found['no'], ('cannot', 'not here'))
    self.assertEqual(found['wrong'][0], 'failed')
    self.assertRegex(found['wrong'][1], 'from float64')

  def test_our_own_error_fails(self):
    with mock.patch.dict(peers.PEERS, {'rnnzoo': peer(broken)}):
      row, _ = measure('MinGRU', 'rnnzoo')
    self.assertEqual(row['status'], 'failed')

  def test_a_peer_without_the_layer_has_no_row(self):
    shapes = {'small': SMALL}
    (case,) = suites.SUITES['peers'].timed(
        shapes, ['MinGRU'], None, ['float32']
    )
    self.assertIn('rnnzoo', case.implementations)
    self.assertNotIn('flax.nnx', case.implementations)
    asked = suites.SUITES['peers'].timed(
        shapes, ['MinGRU'], ['flax.nnx'], ['float32']
    )
    self.assertEmpty(list(asked))

  def test_numbers_fit_the_dtype(self):
    case = cases.Case('GRU', 'small', SMALL, 'bfloat16', 'with', ())
    layer, arrays = peers._problem(case)
    for array in (*arrays, np.asarray(layer.kernel[...])):
      again = np.asarray(array.astype('bfloat16'), np.float32)
      np.testing.assert_array_equal(array, again)

  @pytest.mark.exhaustive
  def test_the_program_runs_all_that_are_installed(self):
    flags = '--suite=peers', '--shapes=small', '--repeats=1'
    rows = benchmark_test.result(self, *flags)[0]['rows']
    found = {(row['layer'], row['program']) for row in rows}
    some = {('LSTM', 'rnnzoo'), ('LSTM', 'flax.nnx'), ('GRU', 'flax.linen')}
    self.assertGreaterEqual(found, some | {('MinGRU', 'rnnzoo')})
    self.assertNotIn('failed', {row['status'] for row in rows})

  @pytest.mark.slow
  def test_sixteen_bits(self):
    for row in measure('GRU', 'rnnzoo', 'flax.nnx', dtype='bfloat16'):
      self.assertEqual(row['status'], 'ok', row)
      self.assertGreater(row['error'], 1e-5)


if __name__ == '__main__':
  absltest.main()
