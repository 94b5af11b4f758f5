"""The arithmetic of docs/benchmarks/planning.md."""

from absl.testing import absltest

from benchmarks import data_parallel


class DataParallelTest(absltest.TestCase):

  def test_reductions(self):
    ring, tree = data_parallel.ring_ms, data_parallel.tree_ms
    link = data_parallel.NETWORK
    # 3/2 of 40 MB at 40 GB/s, and 6 messages of 10 us.
    self.assertAlmostEqual(ring(40e6, 4, link), 1.5 + 0.06)
    self.assertAlmostEqual(tree(40e6, 4, link), 2 + 0.04)
    self.assertEqual(ring(40e6, 1, link), 0)
    self.assertEqual(tree(40e6, 1, link), 0)

  def test_agrees_with_two_and_four_devices(self):
    overhead = data_parallel.overhead_ms(data_parallel.models())
    self.assertGreater(overhead, 0)
    for count in (2, 4):
      models = data_parallel.models(count)
      self.assertLen(models, 3)
      for model in models:
        by_formula = data_parallel.step_ms(
            model, count, overhead, data_parallel.ring_ms
        )
        self.assertAlmostEqual(by_formula / model.many_ms, 1, delta=0.05)


if __name__ == '__main__':
  absltest.main()
