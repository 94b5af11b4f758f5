"""The directory of one run: created for a config, resumed with the same one.

It belongs to one config, which config.json holds, and to one process at a time,
which holds a lock on it.
"""

from collections.abc import Mapping, Sequence
import datetime
import fcntl
import json
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

# Fields that configs once did not have, and what was done without them. A
# config.json without such a field is one with this value.
DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
    {
        'data.scaling': 'minmax',
        'data.source': 'files',
        'data.sequence': 'row',
        'data.data_dir': '',
        'data.curriculum': [],
        'data.input_noise': 0.0,
        'data.clean_epochs': 0,
        'data.validation_noise': 0.0,
        'model.mlp': None,
        'model.conv_width': 0,
        'model.dropconnect_rate': 0.0,
        'model.label_smoothing': 0.0,
        'model.dense': False,
        'data.test_context': None,
        'model.mlp_features': None,
        'seeds_at_once': 1,
        'sample_every': 0,
        'keep_data_on': 'device',
        'optimizer.nesterov': False,
        'optimizer.accumulate_steps': 1,
        'optimizer.step_factor': 0.1,
        'optimizer.step_epochs': 10,
        'optimizer.plateau_min_delta': 0.0,
        'optimizer.plateau_floor': 0.0,
        'optimizer.stop_rate': 0.0,
        'optimizer.loss_scale_interval': 2000,
    }
)

# The tasks whose `config.data` once had no such field.
_OF_TASKS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        'data.scaling': ('smnist',),
        'data.source': ('sequences',),
        'data.sequence': ('sequences',),
        'data.data_dir': ('sequences', 'translation'),
        'data.curriculum': ('selective_copying',),
        'data.input_noise': ('state_tracking',),
        'data.clean_epochs': ('state_tracking',),
        'data.validation_noise': ('state_tracking',),
        'data.test_context': ('characters',),
        'model.mlp': ('copying', 'selective_copying'),
        'model.conv_width': ('copying', 'selective_copying'),
        'model.mlp_features': ('characters',),
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


# The line in a lock; none where a process was killed before it wrote one.
_HOLDER = re.compile(r'(process \d+ on [^\n]*\n)?')

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
    described: what `Task.describe` returned, for task.json. It is written with
      a new run alone: parameters belong to the data that they were trained on.
    mode: why it is opened, see `check_same`.

  Raises:
    ValueError: the directory is in use, holds a run with another config or on
      another data set, or does not say which run it holds; its path cannot hold
      checkpoints; or JSON cannot hold what the task described.
    OSError: the directory cannot be made or written to.
  """
  _check_path(files.expand(workdir or pathlib.Path('runs') / (prefix or name)))
  if workdir:
    path = files.make_directory(workdir, '--workdir')
  else:
    path = _new_directory(prefix or name)
  _lock(path)
  config_path, run_path = path / 'config.json', path / 'run.json'
  if config_path.exists() and run_path.exists():
    check_same(path, config, dataset, mode)
    run = files.read_json(run_path, dict)
    # A test may have other data than that of the run.
    same = mode == 'train' or not _differ(path, config, of_tests(config.task))
    if same and run.get('data_digest', data_digest) != data_digest:
      print(
          f'WARNING: {path} holds a run on {dataset!r} as it was; the data here'
          ' are not the same in every bit',
          flush=True,
      )
    return path
  if any(path.glob('seed_*')):
    lacks = 'config.json' if run_path.exists() else 'run.json'
    raise ValueError(
        f'--workdir={path} holds seeds but no {lacks}, so nothing says which'
        ' config they were trained with; put the file back, delete the seeds or'
        ' pass another --workdir'
    )
  if not run_path.exists():
    for name_of_file in ('config.json', 'report.json'):
      if (path / name_of_file).exists():
        raise ValueError(
            f'--workdir={path} holds a {name_of_file} but no run.json, so it is'
            ' no run; it would be overwritten: pass another --workdir, or move'
            ' the file'
        )
  elif not _may_be_ours(run_path):
    raise ValueError(
        f'--workdir={path} holds a run.json that no run wrote; it would be'
        ' overwritten: pass another --workdir, or move the file'
    )
  if described is not None:
    files.write_json(path / 'task.json', _as_described(described))
  files.write_json(
      run_path,
      {
          'experiment': name,
          'dataset': dataset,
          'data_digest': data_digest,
          'python': platform.python_version(),
          'jax': jax.__version__,
          'flax': flax.__version__,
          'device': jax.devices()[0].device_kind,
      },
  )
  # The config last: where it is, the directory is complete.
  files.write_json(config_path, as_json(config))
  return path


def _differ(
    path: pathlib.Path, config: ml_collections.ConfigDict, names: Sequence[str]
) -> bool:
  """Returns whether a run has other values of some fields."""
  there = flatten(as_json(read_config(path / 'config.json')))
  here = flatten(as_json(config))
  return any(there.get(name) != here.get(name) for name in names)


def _may_be_ours(run_path: pathlib.Path) -> bool:
  """Returns whether a run may have begun to write its run.json."""
  try:
    return 'experiment' in files.read_json(run_path, dict)
  except files.RunFileError:
    return True  # Not written to the end.


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
  there, here = (
      {**defaults(content), **flatten(content)}
      for content in (
          files.read_json(path / 'config.json', dict),
          as_json(config),
      )
  )
  if dataset is not None:
    there['dataset'] = files.read_json(path / 'run.json', dict).get('dataset')
    here['dataset'] = dataset
  ignored = set(NOT_COMPARED)
  if mode == 'evaluate':
    ignored.update(of_tests(config.task))
  differences = [
      f'{key}: {there.get(key)!r} there, {here.get(key)!r} here'
      for key in sorted(there.keys() | here.keys())
      if there.get(key) != here.get(key) and key not in ignored
  ]
  if len(differences) > 3:
    differences[3:] = [f'and {len(differences) - 3} more']
  if differences:
    raise ValueError(
        f'--workdir={path} holds a run with another config'
        f' ({"; ".join(differences)}); {_REMEDIES[mode].format(path)}'
    )


def of_tests(task: str) -> tuple[str, ...]:
  """Returns the fields that may differ in a test of a run of a task."""
  return tuple(name for name, of in _OF_TESTS.items() if task in of or not of)


def defaults(content: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields that configs of a task once did not have.

  Args:
    content: of config.json.
  """
  task, model = content.get('task'), content.get('model')
  found = {
      name: value
      for name, value in DEFAULTS.items()
      if task in _OF_TASKS.get(name, (task,))
  }
  is_batch = isinstance(model, Mapping) and model.get('norm') == 'batch'
  return found | {'model.norm_momentum': 0.99 if is_batch else None}


def read(
    path: pathlib.Path,
) -> tuple[ml_collections.ConfigDict, dict[str, Any]]:
  """Returns the config of a run, and what run.json holds.

  Raises:
    FileNotFoundError: the directory holds no run.
    RunFileError: a file is not what was written there.
  """
  for name in ('config.json', 'run.json'):
    if not (path / name).is_file():
      raise FileNotFoundError(f'{path} holds no run: it has no {name}')
  run = files.read_json(path / 'run.json', dict)
  return read_config(path / 'config.json'), run


def read_config(path: pathlib.Path) -> ml_collections.ConfigDict:
  """Returns the config of a run, with fields that it did not have yet.

  Raises:
    RunFileError: the file is not what was written there.
  """
  content = files.read_json(path, dict)
  for name, value in defaults(content).items():
    *sections, field = name.split('.')
    part: Any = content
    for section in sections:
      part = part.get(section)
    if isinstance(part, dict):
      part.setdefault(field, value)
  return ml_collections.ConfigDict(content)


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


def _as_described(described: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns what a task described, if it is the same after a round trip."""
  try:
    json.dumps(described, allow_nan=False)
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
        'Task.describe must return what JSON holds: finite numbers, strings,'
        f' True, False, None, lists and dicts; this one has more ({error})'
    ) from error
  return described


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
  if not _HOLDER.fullmatch(file.read(1000)):
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
