"""Training on several devices and in several processes, on a CPU.

The number of devices is fixed once in a process, so all of this runs in
subprocesses.
"""

import contextlib
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from rnnzoo.training import placement as placements
from rnnzoo.training import processes
from tests.testing import compilation

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Seconds after which a process without news from another one ends.
HEARTBEAT = 10

# Epochs of a run in which each of two processes is killed once.
FEW = '--config.num_epochs=3'


def start(
    module, *arguments, devices=1, xla_flags='', **environment
) -> subprocess.Popen:
  """Starts a program of tests.testing with so many devices."""
  return subprocess.Popen(
      [sys.executable, '-m', f'tests.testing.{module}', *map(str, arguments)],
      cwd=ROOT,
      env=os.environ
      | environment
      | {
          'JAX_PLATFORMS': 'cpu',
          'PYTHONPATH': str(ROOT),
          'XLA_FLAGS': (
              f'--xla_force_host_platform_device_count={devices} {xla_flags}'
          ),
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
  )


class StepsTest(absltest.TestCase):

  def train(self, *counts, xla_flags='', kind=''):
    """Returns what devices_program says of each count."""
    arguments = [f'{kind}:{count}' if kind else count for count in counts]
    options = {'devices': 4, 'xla_flags': xla_flags}
    process = start('devices_program', *arguments, **options)
    output, errors = process.communicate()
    self.assertEqual(process.returncode, 0, msg=errors[-3000:])
    results = [json.loads(line) for line in output.splitlines()]
    self.assertEqual([r['count'] for r in results], list(counts))
    self.assertEqual([r['devices'] for r in results], list(counts))
    return results

  def check_same(self, one, several):
    """The same to rounding: BatchNorm and dropout are those of the batch."""
    for x, y in zip(one['leaves'], several['leaves'], strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)

  def check_collectives(self, result):
    """Sums of gradients, statistics, loss and accuracy: nothing else."""
    found = result['collectives']
    if result['count'] == 1:
      self.assertEmpty(found)
      return
    self.assertEqual({kind for kind, *_ in found}, {'all-reduce'})
    # Once in a step, not in each step of time.
    self.assertLen({where for *_, where in found}, 1)
    # BatchNorm has two sums a level and pass, each of 4 features.
    most = sum(result['sizes']) + 2 + 2 * 2 * 2 * 4
    self.assertBetween(sum(n for _, n, _ in found), sum(result['sizes']), most)

  def check_kind(self, kind):
    one, four = self.train(1, 4, xla_flags=compilation.XLA_FLAGS, kind=kind)
    self.check_same(one, four)
    self.assertEqual({name for name, *_ in four['collectives']}, {'all-reduce'})

  @pytest.mark.slow
  def test_generator(self):
    self.check_kind('generator')

  @pytest.mark.exhaustive
  def test_buckets(self):
    self.check_kind('buckets')

  @pytest.mark.exhaustive
  def test_every_number_twice(self):
    first = self.train(1, 2, 4)
    again = self.train(4, 2, 1)[::-1]
    self.assertEqual(first, again)  # Bit by bit.
    for result in first:
      self.check_same(first[0], result)
      self.check_collectives(result)


class ChoiceTest(parameterized.TestCase):

  def choose(self, devices, *given, **options):
    here = lambda: jax.local_devices() * devices
    with mock.patch.object(jax, 'devices', here):
      return placements.choose(*given, **options)

  @parameterized.parameters(
      (1, 8, 3, 'must be at most 1, the number of devices here; got 3'),
      (2, 7, 2, r'must divide the batch of 7 .*; got 2; possible .* \[1\]'),
  )
  def test_refused(self, devices, batch, count, message):
    with self.assertRaisesRegex(ValueError, f'num_devices {message}'):
      self.choose(devices, batch, count)

  def test_one_device_has_no_mesh(self):
    for placement, text in (
        (self.choose(1, 8, None), ''),
        (self.choose(1, 8, 1), ''),
        (
            self.choose(4, 8, None, seeds_at_once=2),
            '(1 of 4 devices: 2 seeds at once have one)',
        ),
        (
            self.choose(2, 7, None),
            '(1 of 2 devices: a batch of 7 cannot be split evenly over more)',
        ),
    ):
      self.assertIsNone(placement.mesh)
      self.assertIn(text, placement.text)


class FlagsTest(parameterized.TestCase):

  @parameterized.parameters(
      (
          (None, None, 0),
          '--coordinator_address and --num_processes are missing',
      ),
      (('a:1', None, None), '--num_processes and --process_id are missing'),
      (('a:1', 2, 2), '--process_id must be from 0, below --num_processes=2'),
      (('a:1', 2, -1), '--process_id must be .*; got -1'),
      (('a:1', 0, 0), 'below --num_processes=0'),
      (('a', 2, 0), "must be a host and a port.*got 'a'"),
      (('a:b', 2, 0), "must be a host and a port.*got 'a:b'"),
      (('a:1', 2, 0, True), 'pass either the one or the other'),
  )
  def test_impossible(self, given, message):
    with self.assertRaisesRegex(ValueError, message):
      processes.initialize(*(*given, False)[:4], heartbeat_seconds=100)

  def test_a_wrong_address_is_told_before_the_wait(self):
    def fail(*unused, **unused_options):
      self.assertIn('process 1 of 2 waits for the others at a:1, 300 s', told())
      raise RuntimeError('DEADLINE_EXCEEDED')

    with contextlib.redirect_stderr(io.StringIO()) as errors:
      told = errors.getvalue
      with mock.patch.object(jax.distributed, 'initialize', fail):
        with self.assertRaisesRegex(
            ConnectionError, 'same --coordinator_address, .*DEADLINE_EXCEEDED'
        ):
          processes.initialize('a:1', 2, 1, False, heartbeat_seconds=100)

  @pytest.mark.slow
  def test_nobody_is_there(self):
    # JAX aborts here, by a trace and minutes later, without an exception.
    code = (
        'from rnnzoo.training import processes as p; p._CONNECT_SECONDS = 2;'
        " p.initialize('localhost:9', 2, 1, False, heartbeat_seconds=100)"
    )
    process = subprocess.run(
        [sys.executable, '-c', code],
        cwd=ROOT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(process.returncode, 2, msg=process.stderr)
    waits, told = process.stderr.splitlines()
    self.assertIn('process 1 of 2 waits for the others at localhost:9', waits)
    self.assertRegex(told, 'train.py: .* cannot be connected: .*2 s have pass')

  def test_none(self):
    processes.initialize(None, None, None, detect=False, heartbeat_seconds=100)
    self.assertFalse(processes.are_connected())


class ProcessesTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'

  def run_alone(self, *flags, devices=1, workdir=None):
    """Returns (exit code, stdout, stderr) of one process."""
    place = f'--workdir={workdir or self.workdir}'
    process = start('process_program', 0, place, *flags, devices=devices)
    output, errors = process.communicate()
    return process.returncode, output, errors

  def run_two(self, *flags, kill=(0, 0), workdir=None, environments=({}, {})):
    """Returns (exit code, stdout, stderr) of two processes, two devices each.

    Args:
      *flags: of both.
      kill: the epoch at whose start each is killed.
      workdir: of the run.
      environments: of each.
    """
    with socket.socket() as free:
      free.bind(('localhost', 0))
      port = free.getsockname()[1]
    running = [
        start(
            'process_program',
            kill[index],
            f'--workdir={workdir or self.workdir}',
            f'--coordinator_address=localhost:{port}',
            '--num_processes=2',
            f'--process_id={index}',
            f'--heartbeat_seconds={HEARTBEAT}',
            *flags,
            devices=2,
            **environments[index],
        )
        for index in (0, 1)
    ]
    outputs = [process.communicate() for process in running]
    return [
        (process.returncode, *output)
        for process, output in zip(running, outputs, strict=True)
    ]

  def check_same_files(self, one, other):
    for name in (
        'config.json',
        'report.json',
        'seed_0/metrics.csv',
        'seed_0/result.json',
    ):
      self.assertEqual(
          (one / name).read_bytes(), (other / name).read_bytes(), msg=name
      )


@pytest.mark.slow
class SeveralProcessesTest(ProcessesTestCase):

  def test_killed_and_started_again_and_on_another_number(self):
    whole = self.workdir.with_name('whole')
    ends = self.run_two(FEW, workdir=whole)
    for code, _, errors in ends:
      self.assertEqual(code, 0, msg=errors)
    self.assertIn(
        'devices: 4 x cpu, 2 of 8 on each, in 2 processes', ends[0][1]
    )
    # One talks for both.
    self.assertNotIn('accuracy', ends[1][1])
    self.assertRegex(ends[1][2], '^process 1 of 2 waits for the others .*\n$')
    self.assertLen(list((whole / 'seed_0').glob('events.*')), 1)
    self.check_equals_one_process(whole)

    # Each process is killed once, and the run goes on to its end.
    for killed, kill in ((1, (0, 2)), (0, (3, 0))):
      begin = time.monotonic()
      ends = self.run_two(FEW, kill=kill)
      self.assertEqual(ends[killed][0], -signal.SIGKILL)
      code, _, errors = ends[1 - killed]
      self.assertIn(code, (4, -signal.SIGABRT), msg=errors)
      self.assertRegex(errors, 'lost another one of the run|another task died')
      self.assertLess(time.monotonic() - begin, 180)
      self.assertFalse((self.workdir / 'report.json').exists())
    for code, _, errors in self.run_two(FEW):
      self.assertEqual(code, 0, msg=errors)
    self.check_same_files(whole, self.workdir)
    # Another run begins with its weights, and it goes on to four epochs.
    source = f'--config.init_from={self.workdir}'
    for flags, place, told in (
        ((FEW, source), self.workdir.with_name('tuned'), '82 numbers taken of'),
        ((), self.workdir, 'resumed after epoch 3'),
    ):
      ends = self.run_two(*flags, workdir=place)
      self.assertEqual([code for code, *_ in ends], [0, 0], ends)
      self.assertIn(f'seed 0: {told}', ends[0][1])

  def check_equals_one_process(self, workdir):
    """One process with as many devices has the same results."""
    alone = self.workdir.with_name('alone')
    flags = FEW, '--config.num_devices=4'
    code, output, errors = self.run_alone(*flags, devices=5, workdir=alone)
    self.assertEqual(code, 0, msg=errors)
    more = '(4 of 5 devices: config.num_devices is 4)'
    self.assertIn(f'devices: 4 x cpu, 2 of 8 on each {more}\n', output)
    one, other = (
        json.loads((path / 'seed_0/result.json').read_text())
        for path in (workdir, alone)
    )
    (alone / 'seed_0/result.json').unlink()
    # Another number goes on with it, and says so.
    code, output, errors = self.run_alone(FEW, workdir=alone)
    self.assertEqual(code, 0, msg=errors)
    self.assertIn('device: cpu\n', output)
    self.assertIn(
        'seed 0: devices so far 4, from here 1; the last bits', output
    )
    self.assertEqual(one['best_epoch'], other['best_epoch'])
    for row, same in zip(one['history'], other['history'], strict=True):
      self.assertEqual(row.keys(), same.keys())
      for name, value in row.items():
        np.testing.assert_allclose(value, same[name], rtol=1e-4, err_msg=name)

  @parameterized.parameters(
      ({'OTHER_DATA': '1'}, (), 'process 1 has data other than'),
      ({}, ('--config.num_devices=3',), 'num_devices must divide the batch'),
      ({}, ('--config.batch_size=7',), 'cannot be split over 2 processes'),
  )
  @pytest.mark.few(1)
  def test_refused_by_both(self, environment, flags, message):
    ends = self.run_two(*flags, environments=({}, environment))
    for code, _, errors in ends:
      self.assertEqual(code, 2, msg=errors)
      self.assertRegex(errors.splitlines()[-1], f'^train.py: .*{message}')

  def test_the_same_directory_for_two_runs(self):
    (self.workdir / 'seed_0').mkdir(parents=True)
    (self.workdir / 'seed_0' / 'result.json').write_text('{}')
    for code, _, errors in self.run_two():
      self.assertEqual(code, 2, msg=errors)
      self.assertRegex(errors.splitlines()[-1], 'result.json, but no run.json')


@pytest.mark.slow
class OneProcessTest(ProcessesTestCase):

  def test_no_cluster(self):
    code, _, errors = self.run_alone('--distributed')
    self.assertEqual(code, 2, msg=errors)
    self.assertRegex(errors, '^train.py: --distributed finds no cluster that')


if __name__ == '__main__':
  absltest.main()
