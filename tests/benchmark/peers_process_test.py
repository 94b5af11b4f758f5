"""Work in another process, pieces of which hang or crash."""

import os
import time

from absl.testing import absltest
import pytest

from rnnzoo.benchmark import peers


def work(argument, lost, begins):
  """Returns squares of numbers; 'hangs' and 'crashes' do as they say."""
  done = {}
  for name, number in argument.items():
    if (name,) in lost:
      continue
    begins((name,))
    if name == 'hangs':
      time.sleep(600)
    if name == 'crashes':
      os._exit(5)
    done[name] = number**2
  return done, lost


def dead(*_):
  os._exit(4)


class PeersProcessTest(absltest.TestCase):

  @pytest.mark.exhaustive
  def test_what_hangs_or_crashes_is_left_out(self):
    process = peers.Process(work, seconds=1)
    self.addCleanup(process.stop)
    numbers = {'one': 1, 'hangs': 2, 'two': 3, 'crashes': 4, 'three': 5}
    done, lost = process(numbers)
    self.assertEqual(done, {'one': 1, 'two': 9, 'three': 25})
    self.assertEqual(
        lost,
        {
            ('hangs',): 'did not end within 1 s',
            ('crashes',): 'ended its process: exit code 5',
        },
    )
    # The last process goes on, and nothing is lost for the next argument.
    self.assertEqual(process({'four': 6}), ({'four': 36}, {}))

  @pytest.mark.slow
  def test_a_process_that_ends_before_its_work_begins(self):
    process = peers.Process(dead, seconds=1)
    self.addCleanup(process.stop)
    with self.assertRaisesRegex(ChildProcessError, 'exit code 4'):
      process(None)


if __name__ == '__main__':
  absltest.main()
