"""`--fail_on_skip`, with which .ci/run runs the tests."""

import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

PASSES = 'def test_passes():\n  pass\n'
SKIPS = {
    'a_test': "import pytest\ndef test_skips():\n  pytest.skip('why')\n",
    'a_file': "import pytest\npytest.skip('why', allow_module_level=True)\n",
    'unittest': """import unittest
class SomeTest(unittest.TestCase):
  @unittest.skip('why')
  def test_skips(self):
    pass
""",
}


class SkipsTest(parameterized.TestCase):

  def run_pytest(self, source, *options):
    path = self.create_tempfile('skips_test.py', source).full_path
    return subprocess.run(
        [sys.executable, '-m', 'pytest', '-p', 'tests.conftest', '-p']
        + ['no:xdist', '-o', 'addopts=', '-q', *options, path],
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )

  @parameterized.parameters(*SKIPS)
  def test_a_skip_fails(self, kind):
    result = self.run_pytest(PASSES + SKIPS[kind], '--fail_on_skip')
    self.assertNotEqual(result.returncode, 0, result.stdout)
    self.assertIn('why', result.stdout)

  def test_others_pass(self):
    result = self.run_pytest(PASSES, '--fail_on_skip')
    self.assertEqual(result.returncode, 0, result.stdout)


if __name__ == '__main__':
  absltest.main()
