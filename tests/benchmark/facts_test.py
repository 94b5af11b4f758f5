"""Suites that ask whether `None` takes the fastest path."""

import contextlib
import io
import itertools
import json
import pathlib
from unittest import mock

from absl.testing import absltest
import pytest

from benchmarks import figures
from benchmarks import path_tables
from benchmarks import pivots
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import facts
from rnnzoo.benchmark import suites
from tests.benchmark import benchmark_test


class FactsTest(absltest.TestCase):

  def output(self):
    return pathlib.Path(self.create_tempdir().full_path) / 'out.json'

  @pytest.mark.slow
  def test_batches(self):
    path = self.output()
    arguments = (
        '--suite=batches',
        '--shape=2,3,4,4',
        '--shape=5,2,4,4,2',
        '--layers=GRU',
        '--repeats=1',
        '--compile_threads=2',
        f'--output={path}',
    )
    code, out, _ = benchmark_test.run(*arguments)
    self.assertEqual(code, 0, out)
    rows = json.loads(path.read_text())['rows']
    # 2 shapes, 2 paths, 2 directions.
    self.assertLen(rows, 8)
    for row in rows:
      self.assertEqual(row['path_of_none'], 'scan')
      taken = row['program'] == 'scan'
      self.assertEqual('of_best' in row, taken)
      if taken:
        self.assertEqual(row['compiled_together'], 2)
        self.assertGreater(row['compile_s'], 0)
        self.assertIn('mib', row)

  @pytest.mark.slow
  def test_lengths(self):
    found, _ = benchmark_test.result(
        *(self, '--suite=lengths', '--shape=1,4,8,8', '--repeats=1'),
        '--layers=linear_scan,MinGRU',
    )
    rows = [row for row in found['rows'] if row['status'] == 'ok']
    self.assertLen(rows, 8)
    for row in rows:
      self.assertGreater(row['with_copy_ms'], 0)

  def test_a_slower_choice_is_told(self):
    times = {'scan': 2.0, 'pallas': 1.0}
    names = {'layer': 'GRU', 'shape': '2x3x4x4', 'dtype': 'bfloat16'}
    names |= {'direction': 'forward', 'path_of_none': 'scan'}
    rows = [names | {'program': k, 'ms': v} for k, v in times.items()]
    facts.compare(rows)
    self.assertEqual(rows[0]['of_best'], 2.0)
    self.assertNotIn('of_best', rows[1])

  @pytest.mark.slow
  def test_table_of_lengths(self):
    shapes = list(map(cases.parse_shape, ('1,1024,8,8', '1,4,8,8')))
    rows = []
    times = {'pallas': 1.0, 'associative_scan': 2.0, 'scan': 0.5}
    for layer, shape in itertools.product(('linear_scan', 'MinGRU'), shapes):
      case = cases.Case(layer, *shape, 'float32', 'with', ())
      for direction in cases.DIRECTIONS:
        own = [
            case.row(way, direction) | {'ms': ms, 'with_copy_ms': 4 * ms}
            for way, ms in times.items()
        ]
        own = [row | {'path_of_none': 'pallas'} for row in own]
        facts.compare(own)
        rows += own
    result = {
        'suite': 'lengths',
        'device': {'kind': 'NVIDIA H200', 'platform': 'gpu'},
        'versions': {'jax': '1'},
        'date': '2026-01-01T',
        'commit': '12345678',
        'rows': rows,
    }
    text = self.table('lengths', result)
    self.assertIn(
        "| `MinGRU` | 1 x 1,024 | `'pallas'` | 1.000 / 1.000 | 2.000 / 2.000 |"
        ' 0.500 / 0.500 | 2.00 / 2.00 | 4.000 / 4.000 |\n',
        text,
    )
    self.assertNotIn('1 x 4 |', text)

  def table(self, name, result):
    """Returns the table of a result; draws its figure."""
    path = self.output()
    path.write_text(json.dumps(result))
    with contextlib.redirect_stdout(io.StringIO()):
      figures.main([str(path)])
      other = path.with_name('other.json')
      cpu = {**result, 'device': {'kind': 'CPU', 'platform': 'cpu'}}
      other.write_text(json.dumps(cpu))
      figures.main([str(other), str(path)])
    self.assertTrue(path.with_suffix('.png').exists())
    self.assertTrue(path.with_name('devices.png').exists())
    with mock.patch.object(pivots, 'load', lambda _: result):
      return getattr(path_tables, name)()

  def test_files_that_are_not_drawn(self):
    result = self.output()
    result.write_text('{"suite": "batches", "rows": []}')
    with self.assertRaisesRegex(SystemExit, 'has no rows of the suite'):
      figures.main([str(result)])

  def test_shapes(self):
    suite = suites.SUITES['batches']
    for name, shape in suite.shapes.items():
      numbers = 4 * shape.batch * shape.time * shape.features
      self.assertLessEqual(numbers, 2**31, name)
    selected = list(suite.timed(suite.shapes, suite.layers, None, None))
    self.assertLen(selected, 2 * len(suite.shapes))
    # A part of a run has each number of features with three batches.
    first = list(suite.shapes.values())[:27]
    self.assertEqual({s.batch for s in first}, {16, 256, 1024, 4096})
    for size in (64, 128, 256, 512, 768, 1024, 2048):
      batches = {s.batch for s in first if s.features == size}
      self.assertGreaterEqual(batches, {16, 256, 1024})
    large = cases.Shape(16384, 64, 512, 512)
    for shape, dtype in ((large, 'float32'), (cases.heads(1, 768), 'float64')):
      case = cases.Case('GRU', '', shape, 'bfloat16', 'with', ())
      self.assertEqual(case.exact_dtype, dtype)


if __name__ == '__main__':
  absltest.main()
