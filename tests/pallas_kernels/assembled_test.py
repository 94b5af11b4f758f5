"""Tests that kernels compile for cards that are not here, as they are now."""

import json
import pathlib

from absl.testing import absltest

from benchmarks import sources

_PATH = pathlib.Path(sources.__file__).parent / 'assembled.json'


class AssembledTest(absltest.TestCase):

  def test_the_kernels_are_those_that_were_assembled(self):
    data = json.loads(_PATH.read_text('utf-8'))
    self.assertEqual(
        data['sources'],
        sources.digest(),
        'The kernels have changed: run `uv run --extra cuda13 python -m'
        ' benchmarks.assemble`, which needs no GPU.',
    )
    self.assertNotIn('failed', {row['status'] for row in data['rows']})


if __name__ == '__main__':
  absltest.main()
