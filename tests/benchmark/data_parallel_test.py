"""The arithmetic of docs/benchmarks/planning.md."""

import pathlib
import runpy

from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class DataParallelTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.program = runpy.run_path(str(ROOT / 'benchmarks/data_parallel.py'))

  def test_reductions(self):
    ring, tree, link = (
        self.program[name] for name in ('ring_ms', 'tree_ms', 'NETWORK')
    )
    # 3/2 of 40 MB at 40 GB/s, and 6 messages of 10 us.
    self.assertAlmostEqual(ring(40e6, 4, link), 1.5 + 0.06)
    self.assertAlmostEqual(tree(40e6, 4, link), 2 + 0.04)
    self.assertEqual(ring(40e6, 1, link), 0)
    self.assertEqual(tree(40e6, 1, link), 0)

  def test_agrees_with_two_and_four_devices(self):
    overhead = self.program['overhead_ms'](self.program['models']())
    self.assertGreater(overhead, 0)
    for count in (2, 4):
      models = self.program['models'](count)
      self.assertLen(models, 3)
      for model in models:
        by_formula = self.program['step_ms'](
            model, count, overhead, self.program['ring_ms']
        )
        self.assertAlmostEqual(by_formula / model.many_ms, 1, delta=0.05)


if __name__ == '__main__':
  absltest.main()
