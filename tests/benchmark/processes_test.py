"""One process a device, one of them late: the program runs, here on CPUs."""

import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class ProcessesTest(absltest.TestCase):

  @pytest.mark.exhaustive
  def test_a_late_process_changes_no_bit(self):
    path = pathlib.Path(self.create_tempdir().full_path) / 'out.json'
    subprocess.run(
        [
            sys.executable,
            str(ROOT / 'benchmarks/processes.py'),
            '--small',
            '--late=1',
            '--steps=4',
            '--samples=1',
            '--stacks=4 x MinGRU',
            f'--output={path}',
        ],
        env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''},
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=200,
    )
    alone, row = json.loads(path.read_text())['rows']
    self.assertGreater(alone['ms'], 0)
    self.assertEqual(row['processes'], 2)
    self.assertTrue(row['same_bits'])
    self.assertGreaterEqual(row['seconds_with_late'], 1)
    self.assertGreater(row['weak_scaling'], 0)


if __name__ == '__main__':
  absltest.main()
