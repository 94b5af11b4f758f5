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
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np
import pytest

from rnnzoo import training
from rnnzoo.training import placement as placements
from rnnzoo.training import processes
from rnnzoo.training import run_directory
from rnnzoo.training import seed_state
from tests.testing import compilation
from tests.testing import forked_program
from tests.testing import process_program
from tests.testing import several_devices
from tests.training import made_up_runs

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Seconds after which a process without news from another one ends.
HEARTBEAT = 10

PROGRAM = 'from tests.testing import process_program; process_program.main()'


class StepsTest(absltest.TestCase):

  def train(self, *counts, xla_flags='', kind=''):
    """Returns what devices_program says of each count."""
    arguments = [f'{kind}:{count}' if kind else count for count in counts]
    output = several_devices.run(
        self,
        *('devices_program', *map(str, arguments)),
        devices=4,
        xla_flags=xla_flags,
    )
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

  def test_an_error_of_the_first_is_raised_by_all(self):
    function, sent = mock.Mock(side_effect=ValueError('no place')), []
    for index in (0, 1):
      with (
          mock.patch.object(jax, 'process_count', lambda: 2),
          mock.patch.object(jax, 'process_index', lambda index=index: index),
          mock.patch.object(
              processes, '_broadcast', lambda x: sent.append(x) or sent[0]
          ),
          self.assertRaisesRegex(ValueError, 'no place'),
      ):
        processes.from_first(function)
    function.assert_called_once_with()

  def test_none(self):
    processes.initialize(None, None, None, detect=False, heartbeat_seconds=100)
    self.assertFalse(processes.are_connected())


@pytest.mark.slow
class SeveralProcessesTest(made_up_runs.RunsTestCase):
  TASKS = {'sign': process_program.Task}

  def program(self, kill, *flags, devices, **environment):
    """Returns a run of process_program; see there."""
    count = f'--xla_force_host_platform_device_count={devices}'
    environment['XLA_FLAGS'] = f'{count} {compilation.XLA_FLAGS}'
    return forked_program.Run([str(kill), *flags], PROGRAM, environment)

  def two(self, *flags, run='run', kill=(0, 0), environments=({}, {})):
    """Returns runs of two processes, two devices each.

    Args:
      *flags: of both.
      run: its directory.
      kill: the epoch at whose start each is killed.
      environments: of each.
    """
    with socket.socket() as free:
      free.bind(('localhost', 0))
      port = free.getsockname()[1]
    return [
        self.program(
            kill[index],
            f'--workdir={self.workdir / run}',
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

  def test_killed_and_started_again_and_on_another_number(self):
    # All runs begin with the weights of another one.
    source = self.prepare('sign', 'source', batch_size=8)
    state = seed_state.begin(source, jax.random.key(100))
    with run_directory.checkpoints(source.workdir, 0) as checkpoints:
      state.save(checkpoints)
    source = f'--config.init_from={source.workdir}'
    # One run is whole, and one has as many devices in one process. In another
    # one, each process is killed once, and it goes on to more epochs.
    alone = f'--workdir={self.workdir / "alone"}', '--config.num_devices=4'
    few = source, '--config.num_epochs=2'
    whole, (alone,), *killed, resumed = forked_program.run(
        self.two(source, run='whole'),
        [self.program(0, source, *alone, devices=5)],
        self.two(*few, kill=(0, 2)),
        self.two(*few, kill=(2, 0)),
        self.two(source),
    )
    for code, _, errors in (*whole, alone, *resumed):
      self.assertEqual(code, 0, msg=errors)
    told = 'devices: 4 x cpu, 2 of 8 on each, in 2 processes'
    self.assertIn(told, whole[0].output)
    self.assertIn('seed 0: 82 numbers taken of', whole[0].output)
    # One talks for both.
    self.assertNotIn('accuracy', whole[1].output)
    waits = '^process 1 of 2 waits for the others .*\n$'
    self.assertRegex(whole[1].errors, waits)
    self.assertLen(list((self.workdir / 'whole/seed_0').glob('events.*')), 1)
    for index, ends in zip((1, 0), killed, strict=True):
      self.assertEqual(ends[index].code, -signal.SIGKILL)
      code, _, errors = ends[1 - index]
      self.assertIn(code, (4, -signal.SIGABRT), msg=errors)
      self.assertRegex(errors, 'lost another one of the run|another task died')
    self.assertIn('seed 0: resumed after epoch 1', resumed[0].output)
    names = 'seed_0/metrics.csv', 'seed_0/result.json'
    self.check_same('whole', 'run', 'config.json', 'report.json', *names)
    told = '4 x cpu, 2 of 8 on each (4 of 5 devices: config.num_devices is 4)\n'
    self.assertIn(told, alone.output)
    self.check_equals_one_process()

  def check_equals_one_process(self):
    """One process with as many devices has the same results."""
    one, other = self.result('whole'), self.result('alone')
    self.assertEqual(one['best_epoch'], other['best_epoch'])
    for row, same in zip(one['history'], other['history'], strict=True):
      self.assertEqual(row.keys(), same.keys())
      for name, value in row.items():
        np.testing.assert_allclose(value, same[name], rtol=1e-4, err_msg=name)
    # Another number goes on with it, and says so.
    alone = self.workdir / 'alone'
    (alone / 'seed_0/result.json').unlink()
    config, _ = run_directory.read(alone)
    config.num_devices = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
      training.train_and_evaluate(
          training.prepare(config, str(alone), 'base_smnist')
      )
    self.assertIn('device: cpu\n', out.getvalue())
    self.assertIn(
        'seed 0: devices so far 4, from here 1; the last bits', out.getvalue()
    )

  @parameterized.parameters(
      ({'OTHER_DATA': '1'}, (), 'process 1 has data other than'),
      ({}, ('--config.num_devices=3',), 'num_devices must divide the batch'),
      ({}, ('--config.batch_size=7',), 'cannot be split over 2 processes'),
  )
  @pytest.mark.few(1)
  def test_refused_by_both(self, environment, flags, message):
    (ends,) = forked_program.run(
        self.two(*flags, environments=({}, environment))
    )
    for code, _, errors in ends:
      self.assertEqual(code, 2, msg=errors)
      self.assertRegex(errors.splitlines()[-1], f'^train.py: .*{message}')

  @pytest.mark.exhaustive
  def test_the_same_directory_for_two_runs(self):
    (self.workdir / 'run/seed_0').mkdir(parents=True)
    (self.workdir / 'run/seed_0/result.json').write_text('{}')
    (ends,) = forked_program.run(self.two())
    for code, _, errors in ends:
      self.assertEqual(code, 2, msg=errors)
      self.assertRegex(errors.splitlines()[-1], 'result.json, but no run.json')


if __name__ == '__main__':
  absltest.main()
