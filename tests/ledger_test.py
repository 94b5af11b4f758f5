"""The ledger: how many lines and files each folder may have.

A change that needs more says so here and in CHANGELOG.md. PLACES are folders
and the Python files in them, with all folders below.
"""

import pathlib

from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Folder: the most lines, the most files.
PLACES = {
    'rnnzoo': (40480, 185),
    'rnnzoo/benchmark': (3360, 16),
    'rnnzoo/cells': (3405, 20),
    'rnnzoo/command': (1095, 5),
    'rnnzoo/convert': (2130, 11),
    'rnnzoo/doors': (515, 3),
    'rnnzoo/engines': (7685, 30),
    'rnnzoo/inspect': (675, 4),
    'rnnzoo/layers': (3965, 14),
    'rnnzoo/models': (1655, 6),
    'rnnzoo/tasks': (8795, 47),
    'rnnzoo/training': (5375, 22),
    'pallas_kernels': (17150, 63),
    'pallas_kernels/dense': (5310, 15),
    'pallas_kernels/mosaic': (2355, 13),
    'pallas_kernels/streaming': (2930, 9),
    'pallas_kernels/tiled': (4500, 16),
    'tests': (34870, 176),
    'benchmarks': (1895, 10),
}

# The most lines of a file, and files that are still longer.
LINES = 600
LONGER: dict[str, int] = {}


class LedgerTest(absltest.TestCase):

  def test_folders(self):
    for folder, (most_lines, most_files) in PLACES.items():
      files = list((ROOT / folder).rglob('*.py'))
      lines = sum(len(path.read_text('utf-8').splitlines()) for path in files)
      with self.subTest(folder):
        self.assertLessEqual(lines, most_lines)
        self.assertLessEqual(len(files), most_files)

  def test_files(self):
    for package in ('rnnzoo', 'pallas_kernels'):
      for path in (ROOT / package).rglob('*.py'):
        name = path.relative_to(ROOT).as_posix()
        lines = len(path.read_text('utf-8').splitlines())
        with self.subTest(name):
          self.assertLessEqual(lines, LONGER.get(name, LINES))


if __name__ == '__main__':
  absltest.main()
