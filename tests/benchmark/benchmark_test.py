"""The benchmark program, on shapes too small to say anything about speed."""

import contextlib
import dataclasses
import io
import json
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import flagsaver
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import pivots
from benchmarks import time_tables
from rnnzoo.benchmark import cases
from rnnzoo.benchmark import peers
from rnnzoo.benchmark import problems
from rnnzoo.benchmark import program
from rnnzoo.benchmark import report
from rnnzoo.benchmark import suites
from rnnzoo.benchmark import timing
from rnnzoo.engines.time import maps

ROOT = pathlib.Path(program.__file__).parents[2]


def run(*arguments):
  """Runs the program; returns its exit code and what it printed."""
  # Copying 64 MiB says nothing here.
  copy = {'gb_per_s': 10.0, 'array_bytes': 8}
  with (
      flagsaver.flagsaver(),
      contextlib.redirect_stdout(io.StringIO()) as out,
      contextlib.redirect_stderr(io.StringIO()) as err,
      mock.patch.object(timing, 'copy_bandwidth', lambda *_: copy),
  ):
    try:
      code = program.main(program.parse_flags(['benchmark', *arguments]))
    except SystemExit as stop:
      code = stop.code
  return code, out.getvalue().strip(), err.getvalue().strip()


def rows_of(path):
  return json.loads(path.read_text())['rows']


def result(test, *arguments):
  """Returns the file of a run that succeeds, and what it printed."""
  path = pathlib.Path(test.create_tempdir().full_path) / 'new' / 'out.json'
  code, out, err = run(*arguments, f'--output={path}')
  test.assertEqual(code, 0, out + err)
  return json.loads(path.read_text()), out


def case(layer, shape, dtype='float32', projection='without', **options):
  """A case that is computed by 'scan'."""
  return cases.Case(
      layer, 'small', shape, dtype, projection, ('scan',), **options
  )


def doubling(case):
  """A problem whose implementations double their input, more or less."""
  # With random signs, so that sums do not cancel by accident.
  x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 4)))

  def make(implementation, dtype):
    if implementation == 'cannot':
      raise NotImplementedError('not yet')
    if implementation == 'broken':
      raise TypeError('no such instruction')
    off = {'scan': 2e-6, 'as good': 2.2e-6, 'worse': 4e-6, 'wrong': 1e-3}
    factor = 2 if dtype == 'float64' else 2 * (1 + off[implementation])
    return lambda arrays: factor * arrays['x_gates']

  return problems.Problem(case, ({'x_gates': x}, x + 1), make)


class BenchmarkTest(absltest.TestCase):

  def output(self):
    return pathlib.Path(self.create_tempdir().full_path) / 'new' / 'out.json'

  @pytest.mark.slow
  def test_wrong_result_fails(self):
    right = maps.unroll
    wrong = lambda *args: tuple(h * 1.001 for h in right(*args))
    path = self.output()
    with mock.patch.object(maps, 'unroll', wrong):
      code, out, _ = run(
          '--layers=MinGRU',
          '--implementations=scan,associative_scan',
          '--shapes=small',
          '--repeats=1',
          f'--output={path}',
      )
    self.assertEqual(code, 1)
    self.assertIn('from the float64 scan, 1.0e-03, is above', out)
    for row in rows_of(path):
      failed = row['program'] == 'associative_scan'
      self.assertEqual(row['status'], 'failed' if failed else 'ok')
      self.assertEqual('ms' in row, not failed)

  @pytest.mark.slow
  def test_linear_suite(self):
    found, out = result(
        *(self, '--suite=linear', '--layers=linear_scan,MinGRU'),
        *('--implementations=scan,pallas', '--shapes=small'),
        *('--dtypes=float32', '--repeats=1'),
    )
    self.assertEqual(found['suite'], 'linear')
    # Two on gates and a layer, both directions, both paths.
    self.assertLen(found['rows'], 8 + 4)
    size = 4 * 12 * 8 * 4
    moved = {
        ('linear_scan', 'forward'): 3,
        ('linear_scan', 'forward+backward'): 8,
        ('MinGRU', 'forward'): 3,
        ('MinGRU', 'forward+backward'): 9,
    }
    for row in found['rows']:
      if row['program'] == 'pallas':
        self.assertEqual(row['status'], 'cannot')
        self.assertIn('GPU kernels need', row['reason'])
        continue
      self.assertEqual(row['status'], 'ok', row)
      self.assertLessEqual(row['error'], row['tolerance'])
      self.assertGreater(row['ms'], 0)
      self.assertEqual(row['sets'], 2)
      if row['projection'] == 'without':
        tensors = moved.pop((row['layer'], row['direction']))
        self.assertEqual(row['bytes_moved'], tensors * size)
        self.assertGreater(row['copy_fraction'], 0)
    self.assertEmpty(moved)
    self.assertIn('GPU kernels need', out)

  @pytest.mark.slow
  def test_dense_suite_at_sizes_of_ones_own(self):
    found, out = result(
        *(self, '--suite=dense', '--layers=GRU', '--shape=4,12,16,16,2'),
        *('--implementations=scan,pallas', '--dtypes=bfloat16', '--repeats=1'),
    )
    self.assertIn('4x12x16x16x2 (batch 4, time 12, in_features 16', out)
    self.assertEqual(found['suite'], 'dense')
    self.assertEqual({row['num_heads'] for row in found['rows']}, {2})
    # On gates and on x, both directions, both paths.
    self.assertLen(found['rows'], 8)
    for row in found['rows']:
      if row['program'] == 'pallas':
        self.assertEqual(row['status'], 'cannot')
        self.assertIn('GPU kernels', row['reason'])
        continue
      self.assertEqual(row['status'], 'ok', row)
      self.assertGreater(row['ms'], 0)
      self.assertGreater(row['compile_s'], 0)
      self.assertEqual(row['ratio'], 1)
      self.assertEqual(row['errors'], row['scan_errors'])
      backward = row['direction'] != 'forward'
      self.assertEqual(
          'gradient.kernel' in row['errors'],
          backward and row['projection'] == 'without',
      )
    self.assertIn('GPU kernels', out)
    load = pivots.load
    own = lambda name: load(name) if name == pivots.PUBLISHED else found
    with mock.patch.object(pivots, 'load', own):
      lines = time_tables.dense().splitlines()
    (row,) = [line for line in lines if line.startswith('| `GRU`')]
    self.assertIn('| 4 x 12 x 2 x 8 | bfloat16 |', row)

  def check_rows(self, suite, layers, *labels):
    """Returns the rows of a suite's checks, which all pass."""
    table = tuple(map(cases.check, labels))
    changed = dataclasses.replace(suites.SUITES[suite], checks=table)
    flags = f'--suite={suite}', '--check_only', f'--layers={layers}'
    with mock.patch.dict(program.SUITES, {suite: changed}):
      rows = result(self, *flags, '--implementations=scan')[0]['rows']
    self.assertLen(rows, 4)
    for row in rows:
      self.assertEqual(row['status'], 'ok', row)
      self.assertNotIn('ms', row)
    return rows

  @pytest.mark.slow
  def test_dense_checks(self):
    title = 'GRU 2x8 B3 T5 bfloat16 reset mask reverse'
    rows = self.check_rows(
        'dense',
        'GRU,Elman',
        title,
        'Elman 1x24 B3 T1 float16 layer reset',
        'LSTM 1x24 B3 T1 bfloat16 reset mask reverse',
    )
    self.assertEqual(rows[0]['layer'], title)
    own = 'restart.0', 'carry.0', 'params.recurrent_bias'
    names = 'y.h', 'y.carry.0', *(f'gradient.{name}' for name in own)
    self.assertContainsSubset(names, rows[1]['errors'])

  @pytest.mark.slow
  def test_linear_checks(self):
    title = 'MinGRU 1x8 B3 T5 float32 layer reset mask reverse'
    rows = self.check_rows(
        'linear',
        'MinGRU,IRevRNN',
        title,
        'IRevRNN 1x8 B2 T3 bfloat16 layer reset',
        'MinLSTM 1x8 B3 T1 bfloat16 layer reset',
    )
    self.assertEqual(rows[1]['layer'], title)
    self.assertIn('gradient.state.learned_carry.0', rows[1]['errors'])

  @pytest.mark.slow
  def test_hang_ends_with_a_message(self):
    path = self.output()
    hanging = f"""
import sys, time
from rnnzoo.benchmark import problems, program
problems._make_unroll = lambda *_: lambda arrays: time.sleep(60)
sys.exit(program.main(program.parse_flags([
    'benchmark', '--suite=dense', '--layers=Elman', '--check_only',
    '--shapes=small', '--timeout=0.5', '--output={path}',
])))
"""
    ended = subprocess.run(
        [sys.executable, '-c', hanging],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(ended.returncode, timing.EXIT_CODE)
    self.assertIn(
        'Elman pallas without forward: did not end within 0.5 s', ended.stderr
    )

  @pytest.mark.slow
  def test_bad_flags_are_one_sentence(self):
    path = self.output()
    path.parent.mkdir()
    path.write_text('[]')
    folder = path.parent / 'folder.json'
    folder.mkdir()
    for argument, expected in {
        '--layers=Elman,GRUU': "'GRUU' is given, and the suite 'cells' has El",
        '--implementations=': "and the suite 'cells' has scan, associative",
        '--shapes=tiny': "'tiny' is given, and the suite 'cells' has small",
        '--dtypes=float64': 'has float32, bfloat16, float16',
        '--shape=16,1024': "'16,1024' is not batch,time,in_features,features",
        '--shape=1,2,3,x': 'as in 16,1024,64,768,12',
        '--shape=1,2,3,8,3': '8 features are not divisible by 3 heads',
        '--repeats=0': 'repeats',
        '--suite=cell': 'cells',
        '--layers=linear_scan': "the suite 'cells' has Elman",
        '--no_such_flag': 'no_such_flag',
        'GRU': "unknown argument 'GRU'",
        '--output=x.txt': 'must be the name of a .json file',
        f'--output={folder}': 'Is a directory',
        '--output=/proc/no/x.json': 'No such file or directory',
        '--layers=': 'nothing is given',
    }.items():
      with self.subTest(argument):
        code, _, err = run(argument)
        self.assertEqual(code, 2)
        self.assertIn(expected, err)
        self.assertLen(err.splitlines(), 1)

  @pytest.mark.slow
  def test_runs_as_a_module_and_lists_its_flags(self):
    ended = subprocess.run(
        [sys.executable, '-m', 'rnnzoo.benchmark', '--help'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    for flag in ('--suite', '--shape:', '--[no]check_only'):
      self.assertIn(flag, ended.stdout)

  def test_rows_are_kept_as_they_come(self):
    path = self.output()
    arguments = (
        '--suite=dense',
        '--layers=Elman',
        '--implementations=scan',
        '--shape=2,3,4,8,2',
        '--shape=2,1,4,8',
        '--check_only',
        f'--output={path}',
    )
    self.enter_context(mock.patch.object(problems, 'build', doubling))
    written, right = [], report.Table.row

    def row(table, title, row):
      right(table, title, row)
      written.append(len(rows_of(path)))

    with mock.patch.object(report.Table, 'row', row):
      code, out, _ = run(*arguments)
    self.assertEqual(code, 0, out)
    # Each row is printed when those before it are in the file.
    self.assertEqual(written, list(range(8)))
    self.assertEmpty(list(path.parent.glob('*.part')))
    self.assertLen(rows_of(path), 8)

  @pytest.mark.slow
  def test_a_case_that_memory_does_not_hold(self):
    path = self.output()
    arguments = (
        '--layers=Elman',
        '--implementations=scan',
        '--shape=1,100000000000000,1,1',
        '--shape=2,1,4,8',
        '--check_only',
        f'--output={path}',
    )
    for suite, number in ('dense', 4), ('lengths', 2), ('newton', 2):
      with self.subTest(suite):
        own = (f'--suite={suite}', *arguments)
        if suite == 'lengths':
          own = (*own, '--layers=MinGRU')
        if suite == 'newton':
          own = (*own, '--implementations=associative_scan')
        code, out, err = run(*own)
        self.assertEqual(code, 1, out)
        self.assertIn(f'FAILED: {number} of {2 * number} rows', err)
        rows = rows_of(path)
        for row in rows[:number]:
          self.assertEqual(row['status'], 'failed')
          self.assertRegex(row['reason'], '[Mm]emory|Overflow')
        for row in rows[number:]:
          self.assertEqual(row['status'], 'ok')
    shape = cases.Shape(2**20, 2**20, 64, 64)
    case = cases.Case('GRU', 'x', shape, 'float32', 'with', ('rnnzoo',))
    of_peers = peers.measure([case], timing.Timer(), timing.Watchdog(60))
    self.assertEqual([row['status'] for row in of_peers], ['failed'] * 2)


if __name__ == '__main__':
  absltest.main()
