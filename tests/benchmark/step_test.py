"""Steps beside flax: the program runs, and has no more kernels than flax."""

import pathlib
import runpy
import types
from unittest import mock

from absl import flags
from absl.testing import absltest
from absl.testing import parameterized
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class StepTest(parameterized.TestCase):

  @parameterized.parameters((1, 'float32', 'GRU'), (40, 'float32', 'LSTM'))
  @pytest.mark.slow
  def test_kernels(self, batch, dtype, name):
    holder = lambda *_: types.SimpleNamespace(value=None)
    # Other programs of these tests define flags of the same names.
    with mock.patch.object(flags, 'DEFINE_string', holder):
      program = runpy.run_path(str(ROOT / 'benchmarks/step.py'))
    measure = program['measure']
    with mock.patch.dict(measure.__globals__, {'STEPS': 3, 'FEATURES': 32}):
      ours, flax = measure(name, dtype, batch)
    self.assertEqual(ours['program'], f'rnnzoo.{name}')
    self.assertGreater(ours['us_per_step'], 0)
    self.assertGreaterEqual(ours['kernels'], 6)  # Two products a layer.
    self.assertLessEqual(ours['kernels'], flax['kernels'])


if __name__ == '__main__':
  absltest.main()
