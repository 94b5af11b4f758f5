"""Long sequences on all paths: the program runs, here on a CPU."""

import json
import pathlib
import runpy
import types
from unittest import mock

from absl import flags
from absl.testing import absltest
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class NewtonLongTest(absltest.TestCase):

  @pytest.mark.slow
  def test_rows(self):
    path = pathlib.Path(self.create_tempdir().full_path) / 'out.json'
    path.write_text(json.dumps({'before': {'commit': 'abc'}, 'rows': []}))
    values = {
        'output': str(path),
        'commit': 'def',
        'only': ['IndRNN, tanh, x'],
        'quick': True,
        'iterations': False,
        'grid': False,
        'gradients': True,
    }
    # Other programs of these tests define flags of the same names.
    holder = lambda name, *_: types.SimpleNamespace(value=values[name])
    with (
        mock.patch.object(flags, 'DEFINE_string', holder),
        mock.patch.object(flags, 'DEFINE_multi_string', holder),
        mock.patch.object(flags, 'DEFINE_bool', holder),
    ):
      program = runpy.run_path(str(ROOT / 'benchmarks/newton_long.py'))
    program['main']([''])
    result = json.loads(path.read_text())
    self.assertEqual(result['before'], {'commit': 'abc'})
    self.assertEqual(result['commit'], 'def')
    kernel, at_once = result['rows']
    self.assertEqual(kernel['status'], 'cannot')
    self.assertIn('GPU', kernel['reason'])
    self.assertEqual(at_once['status'], 'ok', at_once)
    self.assertGreaterEqual(at_once['ms'], at_once['least_ms'])
    self.assertEqual(at_once['time'], 32)
    self.assertEqual(at_once['gradient']['status'], 'ok', at_once)
    self.assertIn('joints', at_once)  # There are none on a CPU.


if __name__ == '__main__':
  absltest.main()
