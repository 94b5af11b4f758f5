"""The files of a run: damaged, deleted, unwritable, locked, of another version.

Whatever happens to them, a run ends as it would have, bit by bit, or with a
sentence that names the file.
"""

from collections.abc import Iterator
import contextlib
import csv
import errno
import functools
import io
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from rnnzoo import tasks
from rnnzoo import training
from rnnzoo.training import checkpointing
from rnnzoo.training import files
from rnnzoo.training import report
from rnnzoo.training import run_data
from rnnzoo.training import run_directory
from tests.testing import made_up_task

ROOT = pathlib.Path(__file__).resolve().parents[2]

# By name, what happens to the content of a file; None deletes it.
DAMAGES = {
    'deleted': lambda content, rng: None,
    'emptied': lambda content, rng: b'',
    'cut': lambda content, rng: content[: rng.randrange(len(content) or 1)],
    'flipped': lambda content, rng: flip(content, rng),
    'replaced': lambda content, rng: rng.randbytes(len(content) or 1),
    'longer': lambda content, rng: content + rng.randbytes(8),
    'text': lambda content, rng: b'{"a": [1, null, NaN, "x"]}\n',
    'list': lambda content, rng: b'[]',
}


def flip(content: bytes, rng: random.Random) -> bytes:
  """Returns the content with one bit changed."""
  if not content:
    return b'\1'
  changed = bytearray(content)
  changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
  return bytes(changed)


@contextlib.contextmanager
def sign_task() -> Iterator[None]:
  with mock.patch.object(tasks, 'TASKS', {'sign': made_up_task.DescribedTask}):
    yield


def config(**fields):
  config = made_up_task.base_config()
  config.update(task='sign', num_epochs=3, eval_batch_size=4)
  config.update(checkpoint_seconds=0.0, **fields)
  return config


@functools.cache
def finished() -> tuple[training.Experiment, pathlib.Path]:
  """Returns a run that is done, for copies."""
  directory = pathlib.Path(tempfile.mkdtemp()) / 'run'
  with sign_task(), contextlib.redirect_stdout(io.StringIO()):
    experiment = training.prepare(config(), str(directory), 'sign')
    training.train_and_evaluate(experiment)
  return experiment, directory


def killed_after(count: int):
  """Returns a `files.write_json` for a process that is killed after some."""
  write, left = files.write_json, iter(range(count))

  def write_some(*given):
    if next(left, None) is None:
      raise KeyboardInterrupt
    write(*given)

  return write_some


def start(*arguments: str) -> subprocess.Popen:
  return subprocess.Popen(
      [sys.executable, *arguments],
      cwd=ROOT,
      env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
  )


MADE_UP = run_data.Data('made up')


class RunFilesTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(sign_task())
    self.experiment, self.whole = finished()
    self.workdir = pathlib.Path(self.create_tempdir().full_path) / 'run'

  def copy(self, tested=True) -> None:
    """Makes `self.workdir` a copy of the finished run, as before its test."""
    shutil.rmtree(self.workdir, ignore_errors=True)
    shutil.copytree(self.whole, self.workdir)
    if not tested:
      (self.workdir / 'seed_0/result.json').unlink()

  def open(self, config=None, mode='train', **described):
    """Opens the copy as `prepare` does; fields change what is described."""
    data = run_data.of_task(self.experiment.task)
    if described:
      data = data._replace(described=data.described | described)
    return run_directory.open_or_create(
        config or self.experiment.config,
        data,
        str(self.workdir),
        'sign',
        mode=mode,
    )

  def resume(self) -> str:
    """Goes on with the copy, and returns the output.

    The compiled functions are those of the run that was copied.
    """
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
      self.open()
      training.train_and_evaluate(
          self.experiment._replace(workdir=self.workdir)
      )
    return output.getvalue()

  def check_same(self, *names: str) -> None:
    for name in (*names, 'report.json', 'seed_0/result.json'):
      self.assertEqual(
          (self.workdir / name).read_bytes(),
          (self.whole / name).read_bytes(),
          msg=name,
      )


class DamagedFilesTest(RunFilesTestCase):

  def check_damages(self, names, damages) -> None:
    """Damages one file of the finished run at a time, and goes on."""
    rng = random.Random(0)
    for name, damage in itertools.product(names, damages):
      with self.subTest(f'{name} {damage}'):
        # A run that still has to be tested reads all it has.
        self.copy(tested=name == 'seed_0/result.json')
        path = self.workdir / name
        content = DAMAGES[damage](path.read_bytes(), rng)
        if content is None:
          path.unlink()
        else:
          path.write_bytes(content)
        try:
          self.resume()
        except ValueError as error:
          self.assertIn(str(self.workdir), str(error))
        else:
          self.check_same()

  def names(self) -> list[str]:
    """Returns the files of the run, except what is written and never read."""
    return sorted(
        str(path.relative_to(self.whole))
        for path in self.whole.rglob('*')
        if path.is_file() and path.suffix != '.png'
    )

  @pytest.mark.slow
  def test_some(self):
    names = [name for name in self.names() if 'checkpoints/' not in name]
    self.assertContainsSubset(
        {'config.json', 'run.json', 'seed_0/result.json', 'seed_0/seconds.csv'},
        names,
    )
    self.check_damages(names, ('emptied', 'list'))

  @pytest.mark.slow
  def test_a_damaged_checkpoint(self):
    last = 'seed_0/checkpoints/3/'
    names = [name for name in self.names() if name.startswith(last)]
    self.assertIn(f'{last}manifest.json', names)
    self.assertGreater(len(names), 15)
    self.check_damages(names[::3], ('flipped',))

  @pytest.mark.exhaustive
  def test_all(self):
    # A manifest has the digests of all other files of its checkpoint.
    inner = [
        name
        for name in self.names()
        if 'checkpoints/' in name and not name.endswith('/manifest.json')
    ]
    names = [name for name in self.names() if name not in inner]
    self.assertNotEmpty(inner)
    self.check_damages(names, DAMAGES)
    self.check_damages(inner, ('deleted', 'flipped', 'longer'))


class CheckpointsTest(RunFilesTestCase):

  def checkpoint(self, epoch: int) -> pathlib.Path:
    return self.workdir / f'seed_0/checkpoints/{epoch}'

  def break_checkpoint(self, epoch: int) -> None:
    for path in (self.checkpoint(epoch) / 'state').rglob('manifest*'):
      path.write_bytes(b'')

  @pytest.mark.slow
  def test_an_older_one_is_used_with_a_warning(self):
    self.copy(tested=False)
    self.break_checkpoint(3)
    output = self.resume()
    self.assertRegex(output, r'WARNING: the checkpoint .*/3 is damaged')
    self.assertIn('resumed after epoch 2\n', output)
    self.check_same('seed_0/metrics.csv')
    self.assertTrue((self.workdir / 'seed_0/damaged_checkpoint_3').is_dir())
    # And the run is whole again.
    (self.workdir / 'seed_0/result.json').unlink()
    self.assertIn('resumed after epoch 3\n', self.resume())
    self.check_same()

  @pytest.mark.slow
  def test_no_good_one_left(self):
    self.copy(tested=False)
    for epoch in (2, 3):
      self.break_checkpoint(epoch)
    with self.assertRaisesRegex(
        training.RunFileError, r'checkpoints/3 is damaged .*; delete .*/seed_0 '
    ):
      self.resume()
    # Nothing was touched.
    self.assertTrue(self.checkpoint(3).is_dir())
    shutil.rmtree(self.workdir / 'seed_0')
    self.resume()
    self.check_same()

  def test_what_cannot_be_read_is_not_called_damaged(self):
    self.copy(tested=False)
    denied = PermissionError(errno.EACCES, 'Permission denied')
    elsewhere = {
        '_digest': mock.Mock(side_effect=denied),  # The files themselves.
        '_name': mock.Mock(side_effect=UnicodeError('ascii')),
    }
    for name, failing in elsewhere.items():
      with (
          mock.patch.object(checkpointing, name, failing),
          self.assertRaisesRegex(
              training.RunFileError, '3 cannot be read here .*; nothing says'
          ),
      ):
        self.resume()
      self.assertTrue(self.checkpoint(3).is_dir())
    self.assertIn('resumed after epoch 3\n', self.resume())

  @pytest.mark.slow
  def test_another_version(self):
    self.copy(tested=False)
    path = self.checkpoint(3) / 'manifest.json'
    self.assertEqual(json.loads(path.read_text())['version'], 3)
    with mock.patch.object(checkpointing, 'VERSION', 4):
      with self.assertRaisesRegex(
          training.RunFileError, 'is of version 3, but this rnnzoo reads .* 4;'
      ):
        self.resume()
      experiment = self.experiment._replace(workdir=self.workdir)
      with self.assertRaisesRegex(training.RunFileError, 'is of version 3'):
        training.best_model(experiment, seed=0)

  @pytest.mark.slow
  @pytest.mark.slow
  def test_a_kill_before_the_first_manifest(self):
    self.copy(tested=False)
    shutil.rmtree(self.checkpoint(2))
    self.checkpoint(3).rename(self.checkpoint(1))
    (self.checkpoint(1) / checkpointing.MANIFEST).unlink()
    for name in ('007', '٤', '9x'):  # No run wrote these.
      (self.checkpoint(3).parent / name).mkdir()
    output = self.resume()
    self.assertRegex(output, 'WARNING: .*/1 was not written to its end')
    self.assertEqual(output.count('WARNING'), 1)
    self.check_same('seed_0/metrics.csv')
    self.assertTrue((self.checkpoint(3).parent / '007').is_dir())

  def test_of_another_seed_or_run(self):
    """Directories of seeds that were copied from elsewhere."""
    self.copy()
    shutil.copytree(self.workdir / 'seed_0', self.workdir / 'seed_1')
    whose = {
        'seed': (1, 'of seed 0, not 1'),
        'config': (0, 'of a run with another config'),
        'data': (0, 'of a run on other data'),
    }
    for name, (seed, message) in whose.items():
      wanted = run_directory.owner(self.workdir, seed)
      if name != 'seed':
        wanted[name] = 'other'
      with mock.patch.object(run_directory, 'owner', return_value=wanted):
        with self.assertRaisesRegex(training.RunFileError, 'not the result of'):
          report.read_result(self.workdir, seed, 'made up')
        with run_directory.checkpoints(self.workdir, seed) as found:
          with self.assertRaisesRegex(training.RunFileError, message):
            found.restore_best({})
    experiment = self.experiment._replace(workdir=self.workdir)
    with self.assertRaisesRegex(training.RunFileError, 'of seed 0, not 1'):
      training.best_model(experiment, seed=1)

  def test_the_last_is_gone_or_of_another_epoch(self):
    self.copy()
    result = json.loads((self.workdir / 'seed_0/result.json').read_text())
    self.assertEqual(result['best_epoch'], 3)
    shutil.rmtree(self.checkpoint(3))
    experiment = self.experiment._replace(workdir=self.workdir)
    training.best_model(experiment, seed=0)
    self.checkpoint(2).rename(self.checkpoint(3))
    with self.assertRaisesRegex(training.RunFileError, 'that of epoch 2'):
      training.best_model(experiment, seed=0)


class KilledTest(RunFilesTestCase):

  @pytest.mark.slow
  def test_right_after_a_checkpoint(self):
    process = start('-m', 'tests.testing.killed_run', str(self.workdir))
    _, errors = process.communicate()
    self.assertEqual(process.returncode, -signal.SIGKILL, msg=errors)
    for name in ('seconds.csv', 'metrics.csv'):
      self.assertEqual(self.epochs(name), [1])
    self.assertIn('resumed after epoch 1\n', self.resume())
    self.assertEqual(self.epochs('seconds.csv'), [1, 2, 3])
    self.check_same('seed_0/metrics.csv')
    with (self.workdir / 'seed_0/metrics.csv').open() as file:
      rows = list(csv.DictReader(file))
    # Each number of each epoch is there, and once.
    events = self.events()
    for name in self.columns('metrics.csv'):
      if name != 'epoch':
        self.assertEqual(
            [(step, value) for tag, step, value in events if tag == name],
            [(k + 1, np.float32(row[name])) for k, row in enumerate(rows)],
            msg=name,
        )

  def columns(self, name: str) -> list[str]:
    text = (self.workdir / 'seed_0' / name).read_text()
    return text.splitlines()[0].split(',')[1:]

  def epochs(self, name: str) -> list[int]:
    text = (self.workdir / 'seed_0' / name).read_text()
    return [int(line.split(',')[1]) for line in text.splitlines()[1:]]

  def events(self) -> list[tuple[str, int, float]]:
    """Returns (tag, step, value) of all events, as TensorBoard shows them."""
    events = []
    for path in sorted((self.workdir / 'seed_0').glob('events.*')):
      content = path.read_bytes()
      while content:
        (size,) = struct.unpack('<Q', content[:8])
        event = event_pb2.Event.FromString(content[12 : 12 + size])
        content = content[16 + size :]
        if event.HasField('session_log'):
          # Later rows of an older file are void.
          events = [e for e in events if e[1] < event.step]
        for value in event.summary.value:
          if value.HasField('simple_value'):
            events.append((value.tag, event.step, value.simple_value))
    return events


class LostFilesTest(RunFilesTestCase):
  """run.json and config.json: lost, or of other data."""

  def test_what_is_lost_must_be_put_back(self):
    for name in ('run.json', 'config.json'):
      self.copy(tested=False)
      (self.workdir / 'report.json').unlink()
      (self.workdir / name).unlink()
      with self.assertRaisesRegex(ValueError, f'{self.workdir}.*{name}'):
        self.open()
      for use in (training.load, lambda path: self.open(mode='evaluate')):
        with self.assertRaisesRegex(
            (FileNotFoundError, training.RunFileError), str(self.workdir)
        ):
          use(self.workdir)
      shutil.copy(self.whole / name, self.workdir)
      self.open()

  def test_other_data(self):
    self.copy()
    self.open(mean=[0.5 + 1e-16, 2e-17])  # Rounding, on another machine.
    other = {'mean': [3.5, 1e-17]}
    far = r"\['mean'\]\[0\]: 0.5 there, 3.5 here.; put back the data"
    more = {'class_names': ['minus', 'plus', 'more']}
    for given, message in (
        (other, far),
        (other | {'mode': 'evaluate'}, far),
        ({'class_names': ['minus', 'no']}, r"\[1\]: 'plus' there, 'no' here"),
        (more, r"names'\]\[2\]: None there, 'more'"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        self.open(**given)
    # Nothing was trained yet: the files are those of the data here.
    shutil.rmtree(self.workdir / 'seed_0')
    self.open(class_names=['a', 'b', 'c'])
    _, run = run_directory.read(self.workdir)
    self.assertEqual(run['described']['class_names'], ['a', 'b', 'c'])

  def test_other_numbers(self):
    """Those that nothing describes: labels, a few inputs, a source of text."""
    self.copy()
    task = self.experiment.task

    def opened(mode='train'):
      with contextlib.redirect_stdout(io.StringIO()) as out:
        run_directory.open_or_create(
            self.experiment.config,
            run_data.of_task(other)._replace(described=task.describe()),
            str(self.workdir),
            'sign',
            mode=mode,
        )
      return out.getvalue()

    for name, change in {
        'label': lambda x: 1 - x,
        'inputs': lambda x: x * 1000 + 5000,
        'inputs of another order': lambda x: x[::-1],
        'inputs of which one is another': lambda x: np.where(x == x[3], 0, x),
        'inputs in float64': np.float64,
    }.items():
      other, name = type(task)(), name.split()[0]
      train = other.splits['train']
      train[name] = change(train[name])
      message = 'with other data .other numbers in its arrays'
      with self.assertRaisesRegex(ValueError, f'{message}.; put back'):
        opened()
      self.assertRegex(opened('evaluate'), f'WARNING: .*{message}')

  def test_killed_between_two_files(self):
    """Whichever file was the last one, the run goes on."""
    other = self.experiment.config.copy_and_resolve_references()
    other.data.data_dir = 'elsewhere'  # Says nothing about the result.

    def new():
      shutil.rmtree(self.workdir, ignore_errors=True)

    def with_other_data():
      new()
      self.open(class_names=['a', 'b'])

    for begin in (new, with_other_data):
      for count in range(2):
        begin()
        with mock.patch.object(files, 'write_json', killed_after(count)):
          with self.assertRaises(KeyboardInterrupt):
            self.open(other)
        self.open()
        run_directory.read(self.workdir)


class ReportFilesTest(RunFilesTestCase):

  def test_a_full_disk(self):
    for name in ('report.json', 'seed_0/metrics.csv', 'seed_0/seconds.csv'):
      with self.subTest(name):
        self.copy()
        (self.workdir / 'report.json').unlink()
        shutil.rmtree(self.workdir / 'seed_0')
        (self.workdir / 'seed_0').mkdir()
        (self.workdir / f'{name}.part').symlink_to('/dev/full')
        with self.assertRaisesRegex(OSError, f'No space left.*{name}'):
          self.resume()

  def test_a_finished_run_is_read_without_writing(self):
    self.copy()
    before = {
        path: path.stat().st_mtime_ns for path in self.workdir.rglob('*.*')
    }
    read_only = mock.patch.object(
        files, 'write_atomically', side_effect=OSError(30, 'Read-only')
    )
    with read_only:
      self.resume()
    for path, time in before.items():
      self.assertEqual(path.stat().st_mtime_ns, time, msg=path)


class RunDirectoryTest(RunFilesTestCase):

  def open(self, workdir='', **fields):
    return run_directory.open_or_create(
        config(**fields), MADE_UP, str(workdir), 'sign'
    )

  def test_names_of_one_second(self):
    folder = self.create_tempdir().full_path
    self.enter_context(contextlib.chdir(folder))
    paths = {self.open() for _ in range(3)}
    self.assertLen(paths, 3)
    for path in paths:
      self.assertTrue((path / 'config.json').is_file())

  def test_paths_that_cannot_be(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    self.enter_context(contextlib.chdir(folder))
    file = folder / 'runs'
    file.touch()
    for path, message in (
        (file, f'^--workdir={file} is a file, not a directory$'),
        (file / 'a', f'^--workdir={file}/a is below {file}, which is a file'),
        ('', 'Not a directory: .runs/'),
        (folder / ('a' * 300), '^--workdir=.* made: File name too long$'),
        # Training went on for hours there, and could not be resumed.
        (folder / 'rate[1e-3]', 'pass a --workdir without'),
        (folder / 'a*', 'pass a --workdir without'),
        (folder / 'a\\b', 'pass a --workdir without'),
        (folder / 'gs:/a', 'pass a --workdir without'),
    ):
      with self.assertRaisesRegex((ValueError, OSError), message):
        self.open(path)
    self.assertEqual([*folder.iterdir()], [file])

  def test_files_of_somebody_else_stay(self):
    self.workdir.mkdir()
    for name, message in {
        'config.json': 'holds config.json, but no run.json',
        'report.json': 'holds report.json, but no run.json',
        'run.json': 'run.json is damaged: it was changed',
    }.items():
      path = self.workdir / name
      path.write_text('{"mine": 1}')
      with self.assertRaisesRegex(ValueError, message):
        self.open(self.workdir)
      self.assertEqual(path.read_text(), '{"mine": 1}')
      path.unlink()
    self.open(self.workdir)
    self.open(self.workdir)

  def test_every_field_of_the_config_is_compared(self):
    self.open(self.workdir)
    flat = run_directory.flatten(run_directory.as_json(config()))
    for name, value in flat.items():
      # A run may go on to more epochs.
      if name in (*run_directory.NOT_COMPARED, 'num_epochs'):
        continue
      other = config()
      *sections, last = name.split('.')
      section = other
      for part in sections:
        section = section[part]
      section.unlock()
      del section[last]
      section[last] = f'not {value}'
      with self.subTest(name), self.assertRaisesRegex(ValueError, name):
        run_directory.open_or_create(other, MADE_UP, str(self.workdir), 'sign')

  @pytest.mark.slow
  def test_one_process_at_a_time(self):
    self.workdir.mkdir()
    # Holds the lock until it is killed.
    code = f"""if True:
        import pathlib, time
        from rnnzoo.training import run_directory
        run_directory._lock(pathlib.Path({str(self.workdir)!r}))
        print('locked', flush=True)
        time.sleep(1000)
    """
    process = start('-c', code)
    try:
      self.assertEqual(process.stdout.readline(), 'locked\n')
      with self.assertRaisesRegex(
          ValueError, f'in use by process {process.pid} on .*another --workdir'
      ):
        self.open(self.workdir)
    finally:
      process.kill()
      process.communicate()
    self.open(self.workdir)


if __name__ == '__main__':
  absltest.main()
