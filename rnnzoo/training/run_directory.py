"""The directory of one run: created for a config, resumed with the same one."""

from collections.abc import Mapping
import datetime
import json
import pathlib
import platform
from typing import Any

import flax
import jax
import ml_collections

from rnnzoo.training import reporting

# Where data are found says nothing about the result.
_NOT_COMPARED = ('data.data_dir', 'data.manual_dir')


def open_or_create(
    config: ml_collections.ConfigDict, dataset: str, workdir: str, name: str
) -> pathlib.Path:
  """Returns the run directory, with its config.json and run.json written.

  Args:
    config: the resolved config.
    dataset: the name of the data set that was really read.
    workdir: the directory; '' for a new one, `runs/<name>-<time>`. A name with
      the time in it is never an old run's by accident: to resume is to name the
      directory.
    name: of the experiment.

  Raises:
    ValueError: the directory holds a run with another config, or on another
      data set.
  """
  if workdir:
    path = pathlib.Path(workdir).expanduser()
  else:
    now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
    path = pathlib.Path('runs') / f'{name}-{now}'
  if path.exists() and not path.is_dir():
    raise ValueError(f'--workdir={path} is a file, not a directory')
  config_path, run_path = path / 'config.json', path / 'run.json'
  if config_path.exists() and run_path.exists():
    there = _flatten(json.loads(config_path.read_text(encoding='utf-8')))
    there['dataset'] = json.loads(run_path.read_text(encoding='utf-8'))[
        'dataset'
    ]
    here = _flatten(json.loads(config.to_json())) | {'dataset': dataset}
    differences = [
        f'{key}: {there.get(key)!r} there, {here.get(key)!r} here'
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key) and key not in _NOT_COMPARED
    ]
    if len(differences) > 3:
      differences[3:] = [f'and {len(differences) - 3} more']
    if differences:
      raise ValueError(
          f'--workdir={path} holds a run with another config'
          f' ({"; ".join(differences)}); pass another --workdir'
      )
    return path
  path.mkdir(parents=True, exist_ok=True)
  reporting.write_json(
      run_path,
      {
          'experiment': name,
          'dataset': dataset,
          'python': platform.python_version(),
          'jax': jax.__version__,
          'flax': flax.__version__,
          'device': jax.devices()[0].device_kind,
      },
  )
  # The config last: where it is, the directory is complete.
  reporting.write_json(config_path, json.loads(config.to_json()))
  return path


def _flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns {'a.b': value} for {'a': {'b': value}}."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      flat |= _flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat
