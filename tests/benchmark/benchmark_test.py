"""The benchmark program, on shapes too small to say anything about speed."""

import json
import pathlib
import subprocess
import sys
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import flagsaver
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.benchmark import cases as benchmark_cases
from rnnzoo.benchmark import dense as benchmark_dense
from rnnzoo.benchmark import linear as benchmark_linear
from rnnzoo.benchmark import program as benchmark_program
from rnnzoo.benchmark import report
from rnnzoo.benchmark import rotation
from rnnzoo.benchmark import steps as benchmark_steps
from rnnzoo.benchmark import timing as benchmark_timing
from rnnzoo.benchmark import watchdog as benchmark_watchdog
from rnnzoo.engines import associative
from tests import documents_test


def run(*arguments):
  """Runs the program; returns its exit code and what it printed."""
  printed = []
  keep = lambda *values, file=None, **_: printed.append((file, *values))
  # Copying 64 MiB says nothing here.
  copy = {'gb_per_s': 10.0, 'array_bytes': 8}
  with (
      flagsaver.flagsaver(),
      mock.patch('builtins.print', keep),
      mock.patch.object(benchmark_timing, 'copy_bandwidth', lambda _: copy),
  ):
    try:
      code = benchmark_program.main(
          benchmark_program.parse_flags(['benchmark', *arguments])
      )
    except SystemExit as stop:
      code = stop.code
  err = [str(v) for file, *values in printed if file for v in values]
  out = [str(v) for file, *values in printed if not file for v in values]
  return code, '\n'.join(out), '\n'.join(err)


class BenchmarkTest(absltest.TestCase):

  def output(self):
    return pathlib.Path(self.create_tempdir().full_path) / 'new' / 'out.json'

  def test_table_json_and_plot(self):
    path = self.output()
    code, out, _ = run(
        '--layers=Elman,MinGRU',
        '--shapes=small',
        '--repeats=2',
        f'--output={path}',
    )
    self.assertEqual(code, 0, out)

    result = json.loads(path.read_text())
    for field in ('suite', 'command', 'date', 'commit', 'host_cores'):
      self.assertIn(field, result)
    self.assertContainsSubset(
        ('jax', 'jaxlib', 'flax', 'python'), result['versions']
    )
    self.assertEqual(result['shapes']['small']['time'], 12)
    # 2 layers, 3 implementations, 2 directions, 2 projections.
    self.assertLen(result['rows'], 24)
    status = {}
    for row in result['rows']:
      key = row['layer'], row['implementation']
      status.setdefault(key, set()).add(row['status'])
    self.assertEqual(status['Elman', 'scan'], {'ok'})
    self.assertEqual(status['Elman', 'associative_scan'], {'cannot'})
    self.assertEqual(status['MinGRU', 'associative_scan'], {'ok'})
    for row in result['rows']:
      if row['status'] == 'cannot':
        self.assertNotEmpty(row['reason'])
        self.assertNotIn('median_ms', row)
        continue
      self.assertGreater(row['median_ms'], 0)
      self.assertLessEqual(row['low_ms'], row['high_ms'])
      self.assertGreater(row['compile_s'], 0)
      self.assertLessEqual(row['error'], row['tolerance'])
      linear = row['layer'] == 'MinGRU' and row['projection'] == 'without'
      self.assertEqual('copy_fraction' in row, linear)

    lines = out.splitlines()
    (head,) = [line for line in lines if line.startswith('layer ')]
    body = [line for line in lines if line.startswith(('Elman', 'MinGRU'))]
    # What an implementation cannot do at all is one line instead of four.
    lengths = [1 if each == {'cannot'} else 4 for each in status.values()]
    self.assertLen(body, sum(lengths))
    column = head.index('direction')
    for line in body:
      self.assertIn(
          line[column:].split()[0], (*benchmark_cases.DIRECTIONS, 'any')
      )
    self.assertIn('not linear in its carry', out)
    self.assertTrue(
        path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')
    )

  def test_wrong_result_fails(self):
    right = associative.unroll
    wrong = lambda *args: right(*args) * 1.001
    path = self.output()
    with mock.patch.object(associative, 'unroll', wrong):
      code, out, _ = run(
          '--layers=MinGRU',
          '--implementations=scan,associative_scan',
          '--shapes=small',
          '--repeats=1',
          f'--output={path}',
      )
    self.assertEqual(code, 1)
    self.assertIn('relative error 1.0e-03 from the float64 scan', out)
    for row in json.loads(path.read_text())['rows']:
      failed = row['implementation'] == 'associative_scan'
      self.assertEqual(row['status'], 'failed' if failed else 'ok')
      self.assertEqual('median_ms' in row, not failed)

  def test_linear_suite(self):
    path = self.output()
    copy = {'gb_per_s': 10.0, 'jax_gb_per_s': 10.0, 'torch_gb_per_s': None}
    with mock.patch.object(
        rotation,
        'copy_bandwidth',
        lambda _: {**copy, 'array_bytes': 8},
    ):
      code, out, _ = run(
          '--suite=linear',
          '--layers=linear_scan,MinGRU',
          '--implementations=scan,pallas',
          '--shapes=small',
          '--dtypes=float32',
          '--repeats=1',
          f'--output={path}',
      )
    self.assertEqual(code, 0, out)
    result = json.loads(path.read_text())
    self.assertEqual(result['suite'], 'linear')
    # Two on gates, both directions, both paths; a layer; its products.
    self.assertLen(result['rows'], 8 + 2 + 2)
    size = 4 * 12 * 8 * 4
    moved = {
        ('linear_scan', 'forward'): 3,
        ('linear_scan', 'forward+backward'): 8,
        ('MinGRU', 'forward'): 3,
        ('MinGRU', 'forward+backward'): 9,
    }
    for row in result['rows']:
      if row['implementation'] == 'pallas':
        self.assertEqual(row['status'], 'cannot')
        self.assertIn('GPU kernels need', row['reason'])
        continue
      self.assertEqual(row['status'], 'ok', row)
      self.assertLessEqual(row['error'], row['tolerance'])
      self.assertGreater(row['median_ms'], 0)
      self.assertEqual(row['sets'], 2)
      if row['projection'] == 'without':
        tensors = moved.pop((row['layer'], row['direction']))
        self.assertEqual(row['bytes_moved'], tensors * size)
        self.assertGreater(row['copy_fraction'], 0)
    self.assertEmpty(moved)
    self.assertIn('GPU kernels need', out)
    self.assertTrue(
        path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')
    )

  def test_linear_suite_memory(self):
    rows = benchmark_linear.memory('small', 'float32', ['scan', 'pallas'])
    self.assertEqual([row['inner_steps'] for row in rows], [1, 1, 8, 8])
    for row in rows:
      if row['implementation'] == 'scan':
        self.assertGreater(row['temp_bytes'], 0)
      else:
        self.assertEqual(row['status'], 'cannot')
    self.assertIn('R = 8', report.memory_table(rows))

  def test_dense_suite(self):
    path = self.output()
    code, out, _ = run(
        '--suite=dense',
        '--cells=GRU',
        '--implementations=scan,pallas',
        '--shapes=small',
        '--dtypes=bfloat16',
        '--repeats=1',
        f'--output={path}',
    )
    self.assertEqual(code, 0, out)
    result = json.loads(path.read_text())
    self.assertEqual(result['suite'], 'dense')
    self.assertEqual(result['shapes']['small']['num_heads'], 2)
    self.assertIn('12x64', result['published_ms']['FlashRNN fused, bfloat16'])
    # On gates and on x, both directions, both paths.
    self.assertLen(result['rows'], 8)
    for row in result['rows']:
      if row['implementation'] == 'pallas':
        self.assertEqual(row['status'], 'cannot')
        self.assertIn('GPU kernels', row['reason'])
        continue
      self.assertEqual(row['status'], 'ok', row)
      self.assertGreater(row['median_ms'], 0)
      self.assertGreater(row['compile_s'], 0)
      self.assertEqual(row['ratio'], 1)
      self.assertEqual(row['errors'], row['scan_errors'])
      backward = row['direction'] != 'forward'
      self.assertEqual(
          'gradient.kernel' in row['errors'],
          backward and row['projection'] == 'without',
      )
    self.assertIn('GPU kernels', out)
    tables = documents_test.readme_tables()
    with mock.patch.object(tables, 'load', lambda _: result):
      lines = tables.dense_h200().splitlines()
    (row,) = [line for line in lines if line.startswith('| `GRU`')]
    self.assertIn('| 4 x 12 x 2 x 8 | bfloat16 |', row)
    self.assertTrue(
        path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')
    )

  def check_rows(self, suite, module, layers, table):
    """Returns the rows of a suite's checks, which all pass."""
    path = self.output()
    with mock.patch.object(module, 'CHECKS', table):
      code, out, _ = run(
          f'--suite={suite}',
          '--check_only',
          f'--layers={layers}',
          '--implementations=scan',
          f'--output={path}',
      )
    self.assertEqual(code, 0, out)
    rows = json.loads(path.read_text())['rows']
    self.assertLen(rows, 4)
    for row in rows:
      self.assertEqual(row['status'], 'ok', row)
      self.assertNotIn('median_ms', row)
    return rows

  def test_dense_checks(self):
    table = """
    layer heads x size batch time dtype options
    GRU   2x8  3 5 bfloat16 reset mask reverse
    Elman 1x24 3 1 float16  layer reset
    LSTM  1x24 3 1 bfloat16 -
    """
    rows = self.check_rows('dense', benchmark_dense, 'GRU,Elman', table)
    self.assertEqual(
        rows[0]['layer'], 'GRU 2x8 B3 T5 bfloat16 reset mask reverse'
    )
    self.assertContainsSubset(
        (
            'y.h',
            'y.carry.0',
            'gradient.restart.0',
            'gradient.carry.0',
            'gradient.params.recurrent_bias',
        ),
        rows[1]['errors'],
    )

  def test_linear_checks(self):
    table = """
    layer heads x size batch time dtype options
    MinGRU  1x8 3 5 float32 layer reset mask reverse
    IRevRNN 1x8 2 3 bfloat16 layer reset
    MinLSTM 1x8 3 1 bfloat16 layer reset
    """
    rows = self.check_rows('linear', benchmark_linear, 'MinGRU,IRevRNN', table)
    title = 'MinGRU 1x8 B3 T5 float32 layer reset mask reverse'
    self.assertEqual(rows[1]['layer'], title)
    self.assertIn('gradient.state.learned_carry.0.value', rows[1]['errors'])

  def test_hang_ends_with_a_message(self):
    path = self.output()
    program = f"""
import sys, time
from rnnzoo.benchmark import problems, program
problems._make_unroll = lambda *_: lambda arrays: time.sleep(60)
sys.exit(program.main(program.parse_flags([
    'benchmark', '--suite=dense', '--layers=Elman', '--check_only',
    '--shapes=small', '--timeout=0.5', '--output={path}',
])))
"""
    ended = subprocess.run(
        [sys.executable, '-c', program],
        cwd=pathlib.Path(benchmark_program.__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(ended.returncode, benchmark_watchdog.EXIT_CODE)
    self.assertIn(
        'Elman pallas without forward: did not end within 0.5 s', ended.stderr
    )
    hung = json.loads(path.read_text())['hung']
    self.assertIn('Elman pallas', hung['what'])

  def test_relative_error(self):
    expected = {'y': np.ones(4), 'gradient': [np.ones(2), np.zeros(1)]}
    error = benchmark_cases.relative_error
    self.assertEqual(error({'y': np.ones(4)}, expected), 0)
    got = {'gradient': [np.array([1, np.nan]), np.zeros(1)]}
    self.assertTrue(np.isnan(error(got, expected)))
    got = {'gradient': [np.ones(2), np.full(1, 0.5)]}
    self.assertEqual(error(got, expected), 0.5)

  def test_plot_from_json_alone(self):
    row = {
        'layer': 'X',
        'implementation': 'scan',
        'projection': 'with',
        'direction': 'forward',
        'shape': 'small',
        'dtype': 'float32',
        'status': 'ok',
        'reason': '',
        'median_ms': 2.0,
        'low_ms': 1.0,
        'high_ms': 3.0,
    }
    result = {
        'date': '2026-01-01T00:00',
        'device': {'kind': 'some device'},
        'versions': {'jax': '0'},
        'rows': [row, {**row, 'layer': 'Y', 'status': 'cannot'}],
    }
    path = self.output()
    report.write(result, path)
    code, out, _ = run(f'--plot_from={path}')
    self.assertEqual(code, 0)
    self.assertEqual(out, str(path.with_suffix('.png')))
    self.assertTrue(path.with_suffix('.png').is_file())

  def test_bad_flags_are_one_sentence(self):
    path = self.output()
    path.parent.mkdir()
    path.write_text('[]')
    for argument, expected in {
        '--layers=Elman,GRUU': "'GRUU' is given, and there are Elman, LSTM",
        '--implementations=': 'there are scan, associative_scan, pallas',
        '--shapes=tiny': 'there are small, row_mnist',
        '--dtypes=float64': 'there are float32, bfloat16',
        '--repeats=0': 'repeats',
        '--suite=cell': 'cells',
        '--layers=linear_scan': 'is of another suite than',
        '--shapes=wide': "'wide' is of another suite than 'cells'",
        '--no_such_flag': 'no_such_flag',
        'GRU': "unknown argument 'GRU'",
        '--output=x.txt': 'must be the name of a .json file',
        '--plot_from=nowhere.json': "there is no file 'nowhere.json'",
        f'--plot_from={path}': 'is not what a benchmark wrote',
    }.items():
      with self.subTest(argument):
        code, _, err = run(argument)
        self.assertEqual(code, 2)
        self.assertIn(expected, err)
        self.assertLen(err.splitlines(), 1)

  def test_runs_as_a_module(self):
    ended = subprocess.run(
        [sys.executable, '-m', 'rnnzoo.benchmark', '--repeats=many'],
        cwd=pathlib.Path(benchmark_program.__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(ended.returncode, 2)
    self.assertLen(ended.stderr.splitlines(), 1)


class RotationTest(absltest.TestCase):

  def case(self, function, **options):
    x = jnp.arange(6.0)
    return benchmark_cases.Case(
        layer='double',
        implementation='ours',
        projection='without',
        direction='forward',
        function=lambda arrays, _: {'y': function(arrays)},
        arguments=(x, x),
        expected=lambda: {'y': 2 * np.arange(6.0)},
        tolerance=1e-6,
        **options,
    )

  def test_sets_are_distinct_and_each_is_used(self):
    x = jnp.arange(6.0)
    sets = rotation.input_sets((x, {'k': x[None, :]}))
    self.assertLen(sets, 2)
    self.assertFalse(np.array_equal(sets[0][0], sets[1][0]))
    results = rotation.rotate(lambda a, b: a + b['k'][0])(sets)
    for (a, _), result in zip(sets, results, strict=True):
      np.testing.assert_array_equal(result, 2 * a)

  def test_device_time(self):
    event = types.SimpleNamespace(duration_ns=250_000)
    line = lambda name, count: types.SimpleNamespace(
        name=name, events=[event] * count
    )
    plane = lambda name, *lines: types.SimpleNamespace(name=name, lines=lines)
    profile = types.SimpleNamespace(
        planes=[
            plane('/device:GPU:0', line('Stream #14', 3), line('XLA Ops', 5)),
            plane('/host:CPU', line('Stream', 7)),
        ]
    )
    with mock.patch.object(jax.profiler, 'ProfileData') as data:
      data.from_file.return_value = profile
      found = rotation.device_ms(lambda: jnp.ones(3))
    self.assertEqual(found, 0.75)
    self.assertTrue(data.from_file.call_args.args[0].endswith('.xplane.pb'))

  def test_wrong_or_broken_is_not_timed(self):
    def broken(x):
      raise TypeError('no such instruction')

    cases = [
        self.case(lambda x: 2 * x),
        self.case(lambda x: 2.1 * x),
        self.case(broken),
        # Wrong where the reference does not look.
        self.case(lambda x: (2 * x).at[5].set(0), part=lambda tree: got),
    ]
    got = {'y': 2 * np.arange(6.0)}
    rows = rotation.measure([cases], repeats=1)
    self.assertEqual(
        [row['status'] for row in rows], ['ok', 'failed', 'failed', 'failed']
    )
    self.assertIn('relative error', rows[1]['reason'])
    self.assertIn('no such instruction', rows[2]['reason'])
    self.assertIn('over all elements', rows[3]['reason'])
    self.assertEqual(['median_ms' in row for row in rows], [True] + 3 * [False])


class StepsTest(absltest.TestCase):

  def test_errors_are_judged_beside_scan(self):
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

    problem = benchmark_steps.Problem(
        layer='double',
        projection='without',
        dtype='float32',
        time=8,
        arguments=({'x_gates': x}, x + 1),
        make=make,
        implementations=(
            'scan',
            'as good',
            'worse',
            'wrong',
            'cannot',
            'broken',
        ),
    )
    watchdog = benchmark_watchdog.Watchdog(60, lambda *_: None)
    rows = list(benchmark_steps.measure([problem], 1, watchdog))
    found = {row['implementation']: row for row in rows}
    self.assertLen(rows, 2 * len(found))
    self.assertEqual(
        {name: row['status'] for name, row in found.items()},
        {
            'scan': 'ok',
            'as good': 'ok',
            'worse': 'failed',
            'wrong': 'failed',
            'cannot': 'cannot',
            'broken': 'failed',
        },
    )
    self.assertIn("times that of 'scan'", found['worse']['reason'])
    self.assertAlmostEqual(found['worse']['ratio'], 2, delta=0.2)
    self.assertIn('relative error of y, 1.0e-03', found['wrong']['reason'])
    self.assertIn('no such instruction', found['broken']['reason'])
    timed = [name for name, row in found.items() if 'median_ms' in row]
    self.assertEqual(timed, ['scan', 'as good', 'worse'])

  def test_table_of_linear_checks(self):
    layers = set()
    for line in benchmark_linear.CHECKS.strip().splitlines()[1:]:
      layer, size, _, _, dtype, *options = line.split()
      self.assertIn(layer, benchmark_linear.LAYERS)
      self.assertIn(dtype, benchmark_dense.DTYPES)
      self.assertStartsWith(size, '1x')
      self.assertEqual(options[0], 'layer')
      self.assertContainsSubset(options[1:], ('reset', 'mask', 'reverse'))
      layers.add(layer)
    self.assertEqual(layers, {'MinGRU', 'MinLSTM', 'IRevRNN'})

  def test_table_of_checks(self):
    layers, sizes = set(), set()
    for line in benchmark_dense.CHECKS.strip().splitlines()[1:]:
      layer, size, _, time, dtype, *options = line.split()
      self.assertIn(layer, benchmark_dense.LAYERS)
      self.assertIn(dtype, benchmark_dense.DTYPES)
      self.assertContainsSubset(
          options, ('-', 'reset', 'mask', 'reverse', 'layer', 'both')
      )
      layers.add(layer)
      sizes.add((int(size.split('x')[1]), int(time)))
    self.assertLen(layers, len(benchmark_dense.LAYERS))
    self.assertContainsSubset(
        [(24, 127), (40, 1), (96, 127), (200, 127), (64, 1023)], sizes
    )


class InterleaveTest(absltest.TestCase):

  def test_takes_turns(self):
    order = []
    calls = [lambda: order.append('a'), lambda: order.append('b')]
    with mock.patch.object(benchmark_timing, 'MAX_CALLS', 1):
      times = benchmark_timing.interleave(calls, repeats=3)
    # Two calls each to warm up, then one to settle and one to time, in turn.
    self.assertEqual(''.join(order), 'aabb' + 'aabb' * 3)
    self.assertEqual([t.samples for t in times], [3, 3])
    self.assertLessEqual(times[0].low_ms, times[0].median_ms)


if __name__ == '__main__':
  absltest.main()
