"""The directory of one run: created for a config, resumed with an equal one.

It belongs to one config, which config.json holds, and to one process at a time,
which holds a lock on it.
"""

from collections.abc import Mapping
import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import platform
import re
import socket
from typing import Any, TextIO

import flax
from flax import traverse_util
import jax
import ml_collections

from rnnzoo.tasks import fields
from rnnzoo.training import checkpointing
from rnnzoo.training import files
from rnnzoo.training import processes
from rnnzoo.training import run_data

# The place of data and the number of devices that share the work say nothing
# about the result.
NOT_COMPARED = (
    'data.data_dir',
    'data.manual_dir',
    'keep_data_on',
    'num_devices',
)

# Fields that only say how a trained model is tested, or samples, by the tasks
# that have them; none for all tasks. In a test of a run that is there, they may
# have other values.
_OF_TESTS: Mapping[str, tuple[str, ...]] = {
    'eval_batch_size': (),
    'data.test_samplings': ('skeletons',),
    'data.test_context': ('text', 'text_stream'),
    'data.sample_length': ('text', 'text_stream'),
    'data.sample_temperature': ('text', 'text_stream'),
    'data.num_beams': ('translation',),
    'data.length_penalty': ('translation',),
    'data.output_length': ('translation',),
    'data.decode_batch_size': ('translation',),
    'data.test_lengths': ('state_tracking',),
    'data.num_test': ('state_tracking',),
}

# The locks of this process, by directory. They are never let go: the system
# does that when the process ends, in whatever way.
_LOCKS: dict[pathlib.Path, TextIO] = {}

# orbax reads these characters of a path as a pattern, or as the address of a
# remote file system, and may not find the checkpoints that it wrote there.
_NOT_IN_PATHS = re.compile(r'[*?\[\\]|:/')


def open_or_create(
    config: ml_collections.ConfigDict,
    data: run_data.Data,
    workdir: str,
    name: str,
    prefix: str = '',
    mode: str = 'train',
) -> pathlib.Path:
  """Returns the run directory, locked, with its first files written.

  Args:
    config: the resolved config.
    data: the data here. Parameters belong to the data that they were trained
      on: a run with checkpoints goes on with equal data only.
    workdir: the directory; '' for a new one, `runs/<prefix>-<time>`. Such a
      name is never an old run's: to resume is to name the directory.
    name: the name of the experiment.
    prefix: begins a new directory's name; '' for the experiment's name.
    mode: why it is opened, see `check_same`.
  """
  _check_path(fields.expand(workdir or pathlib.Path('runs') / (prefix or name)))
  if workdir:
    path = files.make_directory(workdir, '--workdir')
  else:
    path = _new_directory(prefix or name)
  _lock(path)
  content = as_json(config)
  lacks = [n for n in ('run.json', 'config.json') if not (path / n).is_file()]
  if lacks and mode == 'train':
    _check_free(path, lacks[0])
    _write(path, name, content, data)
    return path
  there, run = read(path)
  check_same(path, config, data.dataset, mode)
  began = run['taken'].get
  if others := [k for k, v in data.taken.items() if v != began(k)]:
    raise ValueError(
        f'config.init_from has other weights than seed {", ".join(others)} of'
        f' {path} began with; put them back, or pass another --workdir'
    )
  if mode == 'train' and not _outcomes(path):  # It takes the data here.
    _write(path, name, content, data)
    return path
  check_data(path, run, data, mode == 'train')
  if content['num_epochs'] != there.num_epochs:
    _change_epochs(path, content, there.num_epochs)
    files.write_json(path / 'config.json', content)
  return path


def _outcomes(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns the checkpoints and results of seeds, by their files."""
  checkpoints = path.glob(f'seed_*/checkpoints/*/{checkpointing.MANIFEST}')
  return [*checkpoints, *path.glob('seed_*/result.json')]


def _check_free(path: pathlib.Path, lacks: str) -> None:
  """Raises ValueError unless the first files of a run may be written.

  `lacks` is a file of a run that is not there.
  """
  names = ['report.json']
  if lacks == 'run.json':
    names.append('config.json')
  else:  # A process may have been killed before it wrote the rest.
    files.read_signed(path / 'run.json')
  there = [path / name for name in names if (path / name).exists()]
  if found := _outcomes(path) + there:
    raise ValueError(
        f'--workdir={path} holds {found[0].relative_to(path)}, but no {lacks};'
        ' put that back, or pass another --workdir'
    )


def _write(
    path: pathlib.Path,
    name: str,
    config: Mapping[str, Any],
    data: run_data.Data,
) -> None:
  """Writes the first files of a run."""
  run = {
      'experiment': name,
      'dataset': data.dataset,
      'described': data.described,
      'data_digest': data.digest,
      'config_digest': files.digest(_compared(config)),
      'taken': dict(data.taken),
      'python': platform.python_version(),
      'jax': jax.__version__,
      'flax': flax.__version__,
      'device': jax.devices()[0].device_kind,
  }
  files.write_json(path / 'run.json', files.signed(run))
  # It comes last: a directory that has both files is complete.
  files.write_json(path / 'config.json', config)


def owner(path: pathlib.Path, seed: int) -> dict[str, Any]:
  """Returns the digests and the seed that a seed's checkpoints name."""
  run = files.read_signed(path / 'run.json')
  digests = {'config': run['config_digest'], 'data': run['data_digest']}
  return {'seed': seed, **digests}


def checkpoints(path: pathlib.Path, seed: int) -> checkpointing.Checkpoints:
  """Returns the checkpoints of a seed of a run; all processes call it."""
  whose = processes.from_first(lambda: owner(path, seed))
  directory = path / f'seed_{seed}' / 'checkpoints'
  return checkpointing.Checkpoints(directory, whose)


def restore_best(path: pathlib.Path, seed: int, like: Any = None) -> Any:
  """Returns the best (parameters, statistics) of a seed so far.

  `like` has their shapes; None for arrays by path. FileNotFoundError: the seed
  has no checkpoint.
  """
  directory = path / f'seed_{seed}' / 'checkpoints'
  if not directory.is_dir():
    parents = [found.parent for found in path.glob('seed_*/checkpoints')]
    names = sorted(parent.name.removeprefix('seed_') for parent in parents)
    there = f'those of seeds {", ".join(names)}' if names else 'none at all'
    raise FileNotFoundError(
        f'there is no checkpoint of seed {seed!r} in {path}; there are {there}'
    )
  with checkpoints(path, seed) as found:
    restored = found.restore_best(like)
  if restored is None:
    raise FileNotFoundError(f'there is no checkpoint in {directory}')
  return restored[0]


def last_epoch(directory: pathlib.Path) -> int:
  """Returns the epoch of a seed's last checkpoint; 0 for none."""
  path, file = directory / 'checkpoints', checkpointing.MANIFEST
  return max(checkpointing.list_epochs(path, file), default=0)


def _change_epochs(
    path: pathlib.Path, content: Mapping[str, Any], before: int
) -> None:
  """Makes room for results of another number of epochs, or refuses it.

  The report goes first, then the results, and the caller writes the config. A
  kill leaves seeds to be tested again from their checkpoints.

  `before` is the number of epochs so far.
  """
  seeds, num_epochs = sorted(path.glob('seed_*')), content['num_epochs']
  results = {
      seed: files.read_signed(seed / 'result.json')
      for seed in seeds
      if (seed / 'result.json').is_file()
  }
  counts = [result['num_epochs'] for result in results.values()]
  done = max([*map(last_epoch, seeds), *counts])
  ends = {result['stopped'] for result in results.values()}
  are_whole = any(end.startswith('all ') for end in ends)
  why = ''
  if done > num_epochs:
    why = f'its seeds have up to {done} epochs'
  elif not are_whole and len(results) == content['num_seeds']:
    why = f'training has ended by itself ({", ".join(sorted(ends))})'
  elif not all(map(last_epoch, results)):
    why = 'a seed has a result, but no checkpoint'
  if why:
    raise ValueError(
        f'--workdir={path} cannot go on to config.num_epochs={num_epochs}:'
        f' {why}; pass another --workdir'
    )
  print(f'{path}: from here on num_epochs is {num_epochs}, not {before}')
  old = [path / 'report.json', path / 'report.txt']
  for file in old + [seed / 'result.json' for seed in seeds]:
    file.unlink(missing_ok=True)


def _compared(content: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a config that say something about the result."""
  flat = flatten(content)
  ignored = set(NOT_COMPARED)
  if flat.get('optimizer.schedule') != 'cosine':
    ignored.add('num_epochs')
  return {k: v for k, v in flat.items() if k not in ignored}


def check_same(
    path: pathlib.Path,
    config: ml_collections.ConfigDict,
    dataset: str | None = None,
    mode: str = 'train',
) -> None:
  """Raises ValueError if a run has another config, or another data set.

  `dataset` is the name of the data set; None is not compared. Fields that only
  say how models are tested may differ for the mode 'evaluate'.
  """
  there = flatten(files.read_json(path / 'config.json'))
  here = flatten(as_json(config))
  if dataset is not None:
    run = files.read_signed(path / 'run.json')
    there['dataset'] = run['dataset']
    here['dataset'] = dataset
  ignored = set(NOT_COMPARED)
  is_fixed = here.get('optimizer.schedule') == 'cosine'
  if mode == 'train' and not is_fixed:
    ignored.add('num_epochs')
  if mode == 'evaluate':
    ignored.update(of_tests(here['task']))
  if text := files.differences(there, here, ignored):
    remedy = 'pass another --workdir, or the flags that it was trained with'
    if is_fixed and 'num_epochs' in text:
      text += "; by schedule 'cosine' the rate of every step depends on it"
    if mode != 'train':
      remedy = f'take its own config, by rnnzoo {mode} {path}'
    raise ValueError(
        f'--workdir={path} holds a run with another config ({text}); {remedy}'
    )


def check_data(
    path: pathlib.Path,
    run: Mapping[str, Any],
    data: run_data.Data,
    goes_on: bool,
) -> None:
  """Raises an error if a run was on other data; see `run_data.check`."""
  there = run_data.Data(run['dataset'], run['described'], run['data_digest'])
  whose = f'{path} holds a run on {run["dataset"]!r}'
  run_data.check(there, data, whose, goes_on)


def of_tests(task: str) -> tuple[str, ...]:
  """Returns the fields that may differ in a test of a run of a task."""
  return tuple(name for name, of in _OF_TESTS.items() if task in of or not of)


def read(
    path: pathlib.Path,
) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
  """Returns the config of a run, and the content of run.json."""
  for name in ('config.json', 'run.json'):
    if not (path / name).is_file():
      raise FileNotFoundError(f'{path} holds no run: it has no {name}')
  run = files.read_signed(path / 'run.json')
  config = files.read_json(path / 'config.json')
  if files.digest(_compared(config)) != run['config_digest']:
    raise files.RunFileError(
        f'{path}/config.json is damaged: it was changed; put back what the run'
        ' wrote'
    )
  return ml_collections.ConfigDict(_with_tuples(config)), run


def _with_tuples(tree: Any) -> Any:
  """Returns a config's content with tuples, which JSON has as lists."""
  if isinstance(tree, Mapping):
    return {name: _with_tuples(value) for name, value in tree.items()}
  return tuple(map(_with_tuples, tree)) if isinstance(tree, list) else tree


def as_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns a config as config.json holds it."""
  try:
    return json.loads(config.to_json())
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
        'a config holds what JSON can: numbers, strings, True, False, None,'
        f' lists and sections; this one has something else ({error})'
    ) from error


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
  """Returns {'a.b': value} for {'a': {'b': value}}."""
  return traverse_util.flatten_dict(tree, sep='.')


def _check_path(path: pathlib.Path) -> None:
  """Raises ValueError where orbax could not read its own checkpoints."""
  path = path.absolute()
  if found := _NOT_IN_PATHS.search(str(path)):
    raise ValueError(
        f'the run directory {path} has {found[0]!r} in its path, where'
        ' checkpoints are written but may not be readable; pass a --workdir'
        " without '*', '?', '[', '\\' and ':/'"
    )


def _new_directory(prefix: str) -> pathlib.Path:
  """Makes a directory under runs/ that nobody had, whoever asks meanwhile."""
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
  runs = pathlib.Path('runs')
  name, count = f'{prefix}-{now}', 1
  while True:
    with contextlib.suppress(FileExistsError):
      (runs / name).mkdir(parents=True)
      return runs / name
    count += 1
    name = f'{prefix}-{now}-{count}'


def _lock(path: pathlib.Path) -> None:
  """Takes the directory for this process, until its end."""
  path = path.resolve()
  if path in _LOCKS:
    return
  lock_path = path / 'lock'
  try:
    file = lock_path.open('a+', encoding='utf-8', errors='replace')
  except OSError:
    if lock_path.is_dir() or os.access(path, os.W_OK):
      raise
    return  # A finished run, to be read: nothing can be written here.
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    file.seek(0)
    holder = file.read(200).strip() or 'another process'
    file.close()
    raise ValueError(
        f'--workdir={path} is in use by {holder}; wait for its end, or pass'
        ' another --workdir'
    ) from error
  except OSError as error:
    # Some network file systems have no locks.
    print(
        f'WARNING: {path} cannot be locked ({error}); no other process may use'
        ' it now.',
        flush=True,
    )
  file.truncate(0)
  since = datetime.datetime.now().isoformat(' ', 'seconds')
  file.write(
      f'process {os.getpid()} on {socket.gethostname()}, since {since}\n'
  )
  file.flush()
  _LOCKS[path] = file
