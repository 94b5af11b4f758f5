"""The directory of one run: created for a config, resumed with the same one.

It belongs to one config, which config.json holds, and to one process at a time,
which holds a lock on it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import datetime
import fcntl
import json
import math
import os
import pathlib
import platform
import re
import socket
import types
from typing import Any, TextIO

import flax
import jax
import ml_collections

from rnnzoo.tasks import fields
from rnnzoo.training import checkpointing
from rnnzoo.training import files

# Where data are found or kept, and how many devices share the work, says
# nothing about the result.
NOT_COMPARED = (
    'data.data_dir',
    'data.manual_dir',
    'keep_data_on',
    'num_devices',
)

# Fields that only say how a trained model is tested, or samples, by the tasks
# that have them; none for all tasks. In a test of a run that is there, they may
# have other values.
_OF_TESTS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        'eval_batch_size': (),
        'data.test_samplings': ('skeletons',),
        'data.test_context': ('characters',),
        'data.sample_length': ('characters',),
        'data.sample_temperature': ('characters',),
        'data.num_beams': ('translation',),
        'data.length_penalty': ('translation',),
        'data.output_length': ('translation',),
        'data.decode_batch_size': ('translation',),
        'data.test_lengths': ('state_tracking',),
        'data.num_test': ('state_tracking',),
    }
)

# How to go on where a run has another config, by mode.
_REMEDIES: Mapping[str, str] = types.MappingProxyType(
    {
        'train': (
            'pass another --workdir, or, to go on with that run, the flags that'
            ' it was trained with'
        ),
        **{
            mode: (
                'pass the flags that it was trained with, or take its own'
                f' config, by rnnzoo {mode} {{}}'
            )
            for mode in ('evaluate', 'predict', 'sample')
        },
    }
)

# The locks of this process, by directory. They are never let go: the system
# does that when the process ends, in whatever way.
_LOCKS: dict[pathlib.Path, TextIO] = {}


# The line in a lock; its beginning where the disk was full.
_HOLDER = re.compile(r'process \d+ on [^\n]*\n?')

# How a run.json begins.
_BEGINNING = b'{\n  "experiment": '

# orbax reads these characters of a path as a pattern, or as the address of a
# remote file system, and may not find the checkpoints that it wrote there.
_NOT_IN_PATHS = re.compile(r'[*?\[\\]|:/')


def open_or_create(
    config: ml_collections.ConfigDict,
    dataset: str,
    workdir: str,
    name: str,
    prefix: str = '',
    data_digest: str = '',
    described: Mapping[str, Any] | None = None,
    mode: str = 'train',
) -> pathlib.Path:
  """Returns the run directory, locked, with its first files written.

  Args:
    config: the resolved config.
    dataset: the name of the data set that was really read.
    workdir: the directory; '' for a new one, `runs/<prefix>-<time>`. Such a
      name is never an old run's: to resume is to name the directory.
    name: of the experiment.
    prefix: of a new directory's name; '' for the experiment's name.
    data_digest: of the data. If those of the run had another one, a line warns;
      it may come from rounding on another machine, so the run goes on.
    described: what `Task.describe` returned, for task.json. Parameters belong
      to the data that they were trained on, so a run with checkpoints refuses
      another description.
    mode: why it is opened, see `check_same`. For 'train' alone files are
      written.

  Raises:
    ValueError: the directory is in use, holds a run with another config or on
      other data, or does not say which run it holds; its path cannot hold
      checkpoints; or JSON cannot hold what the task described.
    OSError: the directory cannot be made or written to.
  """
  _check_path(files.expand(workdir or pathlib.Path('runs') / (prefix or name)))
  if workdir:
    path = files.make_directory(workdir, '--workdir')
  else:
    path = _new_directory(prefix or name)
  _lock(path)
  described, content = as_described(described), as_json(config)
  owner = {
      'config': _digest(content),
      'described': None if described is None else files.digest(described),
      'data': data_digest,
  }
  if mode != 'train':
    read(path)
  try:
    run = files.read_signed(path / 'run.json')
    _read_listed(path, run, 'config.json')
  except (FileNotFoundError, files.RunFileError) as error:
    owner = _find_owner(path, owner, error)
  else:
    check_same(path, config, dataset, mode)
    if mode == 'evaluate' and _differ(path, content, of_tests(config.task)):
      data_digest = run['data_digest']  # That of the test may be another.
    try:
      check_data(path, run, described, data_digest)
      return path
    except ValueError as error:
      if mode != 'train':
        raise
      if any(_owners(path)):
        owner = _find_owner(path, owner, error)
  run = {
      'experiment': name,
      'dataset': dataset,
      'data_digest': owner['data'],
      'files': {'config.json': files.digest(content)}
      | ({} if described is None else {'task.json': owner['described']}),
      'python': platform.python_version(),
      'jax': jax.__version__,
      'flax': flax.__version__,
      'device': jax.devices()[0].device_kind,
  }
  # Where a config is, the directory is complete: it goes first and comes last.
  (path / 'config.json').unlink(missing_ok=True)
  files.write_json(path / 'run.json', files.signed(run))
  if described is not None:
    files.write_json(path / 'task.json', described)
  files.write_json(path / 'config.json', content)
  check_data(path, run, described, data_digest)
  return path


def _differ(
    path: pathlib.Path, content: Mapping[str, Any], names: Sequence[str]
) -> bool:
  """Returns whether a run has other values of some fields."""
  there = flatten(files.read_json(path / 'config.json', dict))
  here = flatten(content)
  return any(there.get(name) != here.get(name) for name in names)


def _find_owner(
    path: pathlib.Path, owner: Mapping[str, Any], error: Exception
) -> Mapping[str, Any]:
  """Returns whose the run is, whose files are lost, or raises an error.

  Args:
    path: of the run directory.
    owner: who asks for it: digests of config, description and data.
    error: what is wrong with its files.
  """
  run_path, names = path / 'run.json', ('config.json', 'report.json')
  lacks = [n for n in ('run.json', 'config.json') if not (path / n).exists()]
  if any(path.glob('seed_*')):
    owners = list(_owners(path))
    if owners and all(
        found[key] == owner[key]
        for found in owners
        for key in ('config', 'described')
    ):
      return owners[0]
    if not lacks and not isinstance(error, files.RunFileError):
      raise error
    raise ValueError(
        (
            f'--workdir={path} holds seeds but no {lacks[0]}'
            if lacks
            else f'{error}'
        )
        + (
            ', and their checkpoints are of another config or other data'
            if owners
            else ', so nothing says which config they were trained with'
        )
        + '; put the file back, delete the seeds or pass another --workdir'
    )
  if not run_path.exists():
    for name in (*names, 'task.json'):
      if (path / name).exists():
        raise ValueError(
            f'--workdir={path} holds a {name} but no run.json, so it is no'
            ' run; it would be overwritten: pass another --workdir, or move'
            ' the file'
        )
  elif not _BEGINNING.startswith(run_path.read_bytes()[: len(_BEGINNING)]):
    raise ValueError(
        f'--workdir={path} holds a run.json that no run wrote; it would be'
        ' overwritten: pass another --workdir, or move the file'
    )
  elif not lacks:
    raise files.RunFileError(f'{error}; pass another --workdir') from error
  return owner


def _owners(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields whose the checkpoints and results of a run are."""
  for pattern in (f'checkpoints/*/{checkpointing.MANIFEST}', 'result.json'):
    for place in sorted(path.glob(f'seed_*/{pattern}')):
      with contextlib.suppress(files.RunFileError):
        content = files.read_signed(place)
        yield {key: content.get(key) for key in ('config', 'described', 'data')}


def owner(path: pathlib.Path, seed: int) -> dict[str, Any]:
  """Returns what checkpoints and results of a seed name: whose they are.

  Args:
    path: of the run directory.
    seed: which of its seeds.
  """
  run = files.read_signed(path / 'run.json')
  return {
      'seed': seed,
      'config': _digest(_read_listed(path, run, 'config.json')),
      'described': run['files'].get('task.json'),
      'data': run['data_digest'],
  }


def _digest(content: Mapping[str, Any]) -> str:
  """Returns a digest of the fields that belong to a run's result."""
  flat = flatten(content)
  return files.digest({k: v for k, v in flat.items() if k not in NOT_COMPARED})


def check_same(
    path: pathlib.Path,
    config: ml_collections.ConfigDict,
    dataset: str | None = None,
    mode: str = 'train',
) -> None:
  """Raises ValueError if a run has another config, or was on other data.

  Args:
    path: of the run directory.
    config: the resolved config.
    dataset: the name of the data set; None not to compare it.
    mode: why they are compared: 'train', 'evaluate', 'predict' or 'sample'.
      Fields that only say how models are tested may differ for 'evaluate'.

  Raises:
    ValueError: they differ; the message says where.
    RunFileError: a file is not what was written there.
  """
  there = flatten(files.read_json(path / 'config.json', dict))
  here = flatten(as_json(config))
  if dataset is not None:
    there['dataset'] = files.read_json(path / 'run.json', dict).get('dataset')
    here['dataset'] = dataset
  ignored = set(NOT_COMPARED)
  if mode == 'evaluate':
    ignored.update(of_tests(config.task))
  if text := _differences(there, here, ignored):
    raise ValueError(
        f'--workdir={path} holds a run with another config ({text});'
        f' {_REMEDIES[mode].format(path)}'
    )


def check_data(
    path: pathlib.Path,
    run: Mapping[str, Any],
    described: Mapping[str, Any] | None,
    data_digest: str,
) -> None:
  """Raises ValueError if a run was on other data; other bits get a warning.

  Args:
    path: of the run directory.
    run: what run.json holds.
    described: what the task describes here, as `as_described` returns it.
    data_digest: of the data here.

  Raises:
    ValueError: the task describes them otherwise; the message says where.
    RunFileError: task.json is not what was written there.
  """
  there = None
  if 'task.json' in run['files']:
    there = _read_listed(path, run, 'task.json')
  if text := _differences(dict(_leaves(there)), dict(_leaves(described))):
    raise ValueError(
        f'{path} holds a run on {run["dataset"]!r} with other data ({text});'
        ' put back the data that it was trained on, or pass another --workdir'
    )
  if run['data_digest'] != data_digest:
    print(
        f'WARNING: {path} holds a run on {run["dataset"]!r} as it was; the data'
        ' here are not the same in every bit',
        flush=True,
    )


def _differences(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    ignored: Collection[str] = (),
) -> str:
  """Returns where values differ, by more than rounding; '' for nowhere."""
  found = [
      f'{key}: {fields.shorten(there.get(key))} there,'
      f' {fields.shorten(here.get(key))} here'
      for key in sorted(there.keys() | here.keys())
      if key not in ignored and not _alike(there.get(key), here.get(key))
  ]
  if len(found) > 3:
    found[3:] = [f'and {len(found) - 3} more']
  return '; '.join(found)


def _alike(a: Any, b: Any) -> bool:
  """Returns whether values are the same, but for float64's last digits."""
  if isinstance(a, float) and isinstance(b, float):
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-15)
  return a == b


def _leaves(tree: Any, name: str = '') -> Iterator[tuple[str, Any]]:
  """Yields path and value of all that a tree of JSON holds."""
  if not tree or not isinstance(tree, dict | list):
    yield name or 'description', tree
    return
  for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
    yield from _leaves(value, f'{name}[{key!r}]')


def of_tests(task: str) -> tuple[str, ...]:
  """Returns the fields that may differ in a test of a run of a task."""
  return tuple(name for name, of in _OF_TESTS.items() if task in of or not of)


def read(
    path: pathlib.Path,
) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
  """Returns the config of a run, and what run.json holds.

  Raises:
    FileNotFoundError: the directory holds no run.
    RunFileError: a file, task.json included, is not what was written there.
  """
  config_path, run_path = path / 'config.json', path / 'run.json'
  if not (config_path.is_file() or run_path.is_file()):
    raise FileNotFoundError(f'{path} holds no run: it has no config.json')
  try:
    if not run_path.is_file():
      raise files.RunFileError(f'{run_path} is missing')
    run = files.read_signed(run_path)
    contents = {name: _read_listed(path, run, name) for name in run['files']}
  except files.RunFileError as error:
    raise files.RunFileError(
        f'{error}; training that goes on there, with the same flags, writes it'
        ' again'
    ) from error
  return ml_collections.ConfigDict(contents['config.json']), run


def _read_listed(
    path: pathlib.Path, run: Mapping[str, Any], name: str
) -> dict[str, Any]:
  """Returns what is in a file of which run.json has the digest.

  Raises:
    RunFileError: it is not what was written there.
  """
  if not (path / name).is_file():
    raise files.RunFileError(f'{path / name} is missing')
  content = files.read_json(path / name, dict)
  if files.digest(content) != run['files'].get(name):
    raise files.RunFileError(f'{path / name} is damaged: it was changed')
  return content


def as_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns a config as config.json holds it.

  Raises:
    ValueError: JSON cannot hold one of its values.
  """
  try:
    return json.loads(config.to_json())
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
        'a config holds what JSON can: numbers, strings, True, False, None,'
        f' lists and sections; this one has something else ({error})'
    ) from error


def as_described(
    described: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
  """Returns what a task described as it is after a round trip.

  Raises:
    ValueError: JSON cannot hold it.
  """
  try:
    return json.loads(json.dumps(described, allow_nan=False))
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
        'Task.describe must return what JSON holds: finite numbers, strings,'
        f' True, False, None, lists and dicts; this one has more ({error})'
    ) from error


def flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns {'a.b': value} for {'a': {'b': value}}."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat


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
  if runs.exists() and not runs.is_dir():
    raise ValueError(
        f'a new run has a directory under {runs.absolute()}, which is a file;'
        ' pass --workdir'
    )
  first = path = runs / f'{prefix}-{now}'
  count = 1
  while True:
    try:
      path.mkdir(parents=True)
      return path
    except FileExistsError:
      count += 1
      path = first.with_name(f'{first.name}-{count}')


def _lock(path: pathlib.Path) -> None:
  """Takes the directory for this process, until its end.

  Raises:
    ValueError: another process has it.
  """
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
  file.seek(0)
  there = file.read(1000)
  if not (
      'process '.startswith(there)
      or _HOLDER.fullmatch(there)
      or (path / 'run.json').exists()  # A run had its lock here.
  ):
    file.close()
    raise ValueError(
        f'--workdir={path} holds a file {lock_path.name!r} that no run wrote;'
        ' it would be overwritten: pass another --workdir, or move the file'
    )
  file.truncate(0)
  since = datetime.datetime.now().isoformat(' ', 'seconds')
  file.write(
      f'process {os.getpid()} on {socket.gethostname()}, since {since}\n'
  )
  file.flush()
  _LOCKS[path] = file
