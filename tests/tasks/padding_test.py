"""The bound on padding, in the tasks that pad."""

import pathlib
from unittest import mock

from absl.testing import absltest
import numpy as np

from rnnzoo.tasks import array_checks
from rnnzoo.tasks.series import npz
from rnnzoo.tasks.text import files as text_files


class PaddingTest(absltest.TestCase):

  def test_a_long_sequence_among_many(self):
    lengths = np.ones(100_000, np.int32)
    lengths[7] = 10**6
    with self.assertRaisesRegex(
        ValueError,
        r'^100,000 sequences, padded to the longest of 1,000,000 steps \(number'
        r' 7, from 0\), would have 800,000,000,000 bytes, of which 0.00% hold'
        ' data; half of the sequences have at most 1 steps; cut it$',
    ):
      array_checks.check_padding(lengths, 8, 'cut it')

  def test_bounds(self):
    with mock.patch.object(array_checks, '_MANY_BYTES', 80):
      # 80 bytes are not too many.
      array_checks.check_padding([10, *[0] * 7], 1, '')
      array_checks.check_padding([10, *[0] * 9], 1, '')  # A tenth is data.
      with self.assertRaises(ValueError):
        array_checks.check_padding([10, *[0] * 10], 1, '')

  def test_tasks(self):
    path = pathlib.Path(self.create_tempdir().full_path) / 'mine.npz'
    lengths = np.array([1] * 30 + [90])
    steps = np.ones((120, 2))
    np.savez(path, steps=steps, lengths=lengths, y=np.arange(31) % 2)
    form = npz.Form('classification')
    pairs = [[[5] * (n - 1) for n in lengths], [[5]] * 31]
    with mock.patch.object(array_checks, '_MANY_BYTES', 4 * 31 * 90 - 1):
      with self.assertRaisesRegex(
          ValueError, f'^{path}: 31 sequences, .* 90 steps .number 30, from'
      ):
        npz.read(path, form)
      for sides in (pairs, pairs[::-1]):
        with self.assertRaisesRegex(ValueError, 'config.data.max_length'):
          text_files.buckets(sides, [])
        text_files.buckets(sides, [1])  # The long one is by itself.


if __name__ == '__main__':
  absltest.main()
