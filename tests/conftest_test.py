"""`--fail_on_skip`, with which .ci/run runs the tests, and `few` cases."""

import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import pytest

PASSES = 'def test_passes():\n  pass\n'
FEW = """import pytest
@pytest.mark.parametrize('i', range(5))
@pytest.mark.few(2)
def test_case(i):
  assert i in (0, 4)
"""
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
  @pytest.mark.slow
  @pytest.mark.few(2)
  def test_a_skip_fails(self, kind):
    result = self.run_pytest(PASSES + SKIPS[kind], '--fail_on_skip')
    self.assertNotEqual(result.returncode, 0, result.stdout)
    self.assertIn('why', result.stdout)

  @pytest.mark.slow
  def test_others_pass(self):
    result = self.run_pytest(PASSES, '--fail_on_skip')
    self.assertEqual(result.returncode, 0, result.stdout)

  @pytest.mark.slow
  def test_other_cases_are_exhaustive(self):
    ended = self.run_pytest(FEW, '-m', 'not exhaustive')
    self.assertIn('2 passed, 3 deselected', ended.stdout)


if __name__ == '__main__':
  absltest.main()
