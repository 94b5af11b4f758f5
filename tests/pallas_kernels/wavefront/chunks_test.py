"""Chunks of time cover all steps, in the order of the loop."""

from absl.testing import absltest
from absl.testing import parameterized

from tests.testing import abstract_gpu

if abstract_gpu.RUNS:
  from pallas_kernels.wavefront import chunks as chunks_lib


class ChunksTest(parameterized.TestCase):

  @parameterized.product(
      time=(1, 3, 4, 13, 16), reverse=(False, True), steps=(4, 8)
  )
  def test_steps(self, time, reverse, steps):
    if not abstract_gpu.RUNS:
      return
    chunks = chunks_lib.Chunks(time, reverse, steps)
    done, last = 0, -1
    for step in range(time):
      at = time - 1 - step if reverse else step
      chunk, first = map(int, chunks.of_step(step))
      start = int(chunks.start(chunk))
      self.assertBetween(at, start, start + steps - 1)
      self.assertEqual(bool(first), step == done)
      if first:
        self.assertEqual(chunk, last + 1)
        done = int(chunks.end(chunk))
      last = chunk
    self.assertEqual((done, last), (time, chunks.count - 1))


if __name__ == '__main__':
  absltest.main()
