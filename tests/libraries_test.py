"""docs/libraries.json: the table of features is true.

In our column each row names the test that has it. Claims about flax, and about
other libraries that are installed, are tried.
"""

import ast
import importlib.util
import json
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest

from tests.testing import other_libraries

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = json.loads((ROOT / 'docs' / 'libraries.json').read_text('utf-8'))
ROWS = {row['key']: row for row in DATA['rows']}


class OurColumnTest(parameterized.TestCase):

  def test_every_claim_is_one(self):
    for key, row in ROWS.items():
      with self.subTest(key):
        self.assertLen(row['cells'], len(DATA['libraries']))
        self.assertNotIn(row['cells'][0], ('no', ''))

  @parameterized.parameters(*ROWS)
  def test_named_tests_exist(self, key):
    path, group, name = ROWS[key]['test'].split('::')
    tree = ast.parse((ROOT / path).read_text('utf-8'))
    (found,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == group
    )
    self.assertIn(name, [getattr(node, 'name', '') for node in found.body])


class OtherColumnsTest(parameterized.TestCase):

  @parameterized.parameters(
      name
      for name, (module, _) in other_libraries.LIBRARIES.items()
      if importlib.util.find_spec(module)
  )
  @pytest.mark.slow
  @pytest.mark.few(1)
  def test_claims(self, name):
    self.assertEqual(other_libraries.wrong(name), [])

  def test_every_library_is_tried_and_mistakes_are_found(self):
    tried = ['rnnzoo', *other_libraries.LIBRARIES]
    self.assertCountEqual(tried, DATA['libraries'])
    trials = {'step': lambda: (np.zeros(1), np.ones(1))}
    broken = {'flax.nnx.RNN': ('flax', lambda: trials)}
    with mock.patch.dict(other_libraries.LIBRARIES, broken):
      found = ' '.join(other_libraries.wrong('flax.nnx.RNN'))
    self.assertIn("flax.nnx.RNN, step, 'the cell': AssertionError", found)
    self.assertIn("flax.nnx.RNN, lengths, 'yes': KeyError", found)


if __name__ == '__main__':
  absltest.main()
