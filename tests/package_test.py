"""`import rnnzoo` alone has its modules, imported when they are used."""

import importlib.util
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
import pytest

import rnnzoo

MODULES = ('convert', 'linen', 'models', 'tasks', 'training')

PROGRAM = """
import sys
import rnnzoo
modules = ['rnnzoo.' + name for name in {modules}]
print([name for name in modules if name in sys.modules])
print(rnnzoo.linen.GRU.__name__, rnnzoo.training.load.__name__)
print(rnnzoo.tasks.__name__, rnnzoo.models.__name__, rnnzoo.convert.__name__)
"""


class PackageTest(absltest.TestCase):

  @pytest.mark.slow
  def test_modules_are_imported_when_they_are_used(self):
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM.format(modules=MODULES)],
        capture_output=True,
        check=False,
        text=True,
    )
    self.assertEqual(
        done.stdout.splitlines(),
        ['[]', 'GRU load', 'rnnzoo.tasks rnnzoo.models rnnzoo.convert'],
        msg=done.stderr,
    )

  def test_dir_lists_them(self):
    self.assertLessEqual({*MODULES, 'GRU', 'LAYERS'}, set(dir(rnnzoo)))

  def test_another_name(self):
    self.assertFalse(hasattr(rnnzoo, 'no_such_name'))
    with self.assertRaisesRegex(AttributeError, "'rnnzoo' has no attribute"):
      getattr(rnnzoo, 'no_such_name')  # noqa: B009

  def test_without_the_extra(self):
    modules = {k: v for k, v in sys.modules.items() if 'training' not in k}
    attributes = {k: v for k, v in vars(rnnzoo).items() if k != 'training'}
    with (
        mock.patch.dict(sys.modules, modules, clear=True),
        mock.patch.dict(vars(rnnzoo), attributes, clear=True),
        mock.patch.object(importlib.util, 'find_spec', lambda _: None),
    ):
      self.assertFalse(hasattr(rnnzoo, 'training'))
      with self.assertRaisesRegex(AttributeError, 'pip install'):
        rnnzoo.training  # noqa: B018
      with self.assertRaisesRegex(ModuleNotFoundError, 'pip install'):
        from rnnzoo import training  # noqa: F401


if __name__ == '__main__':
  absltest.main()
