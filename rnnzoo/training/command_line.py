"""The command line of training: flags, and one sentence on each mistake.

A user's mistake ends the program with exit code 2 and one sentence on stderr,
without a trace. `--verbosity=0` logs the trace as well.
"""

from collections.abc import Callable, Mapping
import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import sys
import sysconfig
import traceback
import types
from typing import Any

from absl import flags
from absl import logging
import ml_collections
from ml_collections import config_flags

import rnnzoo
from rnnzoo import settings
from rnnzoo.tasks import fields
from rnnzoo.training import experiment as experiments
from rnnzoo.training import files
from rnnzoo.training import loop
from rnnzoo.training import processes
from rnnzoo.training import profile
from rnnzoo.training import report as report_lib
from rnnzoo.training import trained


def describe_error(error: BaseException) -> str:
  """Says where a config's fault is, and quotes the library that found it."""
  libraries = (*sysconfig.get_paths().values(), os.path.dirname(__file__), '<')
  chain = [error]
  while inner := chain[-1].__cause__ or chain[-1].__context__:
    chain.append(inner)
  # ml_collections tells a TypeError with its trace, others with all fields.
  found, where = chain[-1] if isinstance(chain[-1], TypeError) else error, ''
  for one in reversed(chain):  # The last one of the config's own.
    frames = traceback.extract_tb(one.__traceback__)
    for frame in frames:
      if not frame.filename.startswith(libraries):
        found, where = one, f' ({frame.filename}, line {frame.lineno})'
  text = str(found).partition(' Other fields present:')[0]
  return (
      f'the config{where}, or a flag --config.<field>=<value>, cannot be read:'
      f' {type(found).__name__}: {text}'
  )


# A checkout has its configs in configs/, a wheel in rnnzoo/configs/. Everywhere
# they import each other as `configs`, a name that a wheel does not take itself.
_PACKAGE = pathlib.Path(rnnzoo.__file__).resolve().parent


def config_directory() -> pathlib.Path:
  """Returns the directory of the configs that come with the project."""
  inside = _PACKAGE / 'configs'
  return inside if inside.is_dir() else _PACKAGE.parent / 'configs'


def config_names() -> list[str]:
  """Returns the configs' names, without the bases that others start from."""
  return sorted(
      path.stem
      for path in config_directory().glob('*.py')
      if not re.match('base$|base_|_', path.stem)
  )


def find_config(name: str) -> str:
  """Returns the path of a config's file.

  The name is a path, which comes first, or the name of a config that comes with
  the project, with or without `configs/` and `.py`; else it is returned as is.
  """
  if pathlib.Path(name).is_file():
    return name
  known = name.removeprefix('configs/').removesuffix('.py')
  path = config_directory() / f'{known}.py'
  is_known = '/' not in known and path.is_file()
  return str(path) if is_known else name


def check_config(name: str) -> None:
  """Raises ValueError unless `find_config` finds a file."""
  if pathlib.Path(find_config(name)).is_file():
    return
  if name in ('', '.'):
    raise ValueError('--config= names no file; `rnnzoo list` names the configs')
  known = pathlib.Path(name).name.removesuffix('.py')
  hint = fields.did_you_mean(known, config_names(), 3)
  raise ValueError(
      f'there is no config file {name}{hint and f" ({hint})"}; `rnnzoo list`'
      ' names the configs'
  )


def make_importable() -> None:
  """Lets configs import each other, and configs/ here, as `configs`.

  Nothing changes where Python finds a package of that name already.
  """
  if 'configs' in sys.modules or importlib.util.find_spec('configs'):
    return
  package = types.ModuleType('configs', 'The configs of rnnzoo.')
  here = pathlib.Path('configs').resolve()
  package.__path__ = [str(here), str(config_directory())]
  sys.modules['configs'] = package


def describe_config(name: str) -> tuple[str, str]:
  """Returns the task of a config, and the first line of its docstring.

  Its name is in `config_names()`; call `make_importable` first.
  """
  module = importlib.import_module(f'configs.{name}')
  title = (module.__doc__ or '').splitlines()[0]
  return module.get_config().task, title


_NO_CONFIG = {
    'train.py': 'pass --config=configs/<name>.py',
    'rnnzoo': 'name a config, as in rnnzoo train gru_smnist',
}


def _define_config() -> flags.FlagHolder:
  try:
    return config_flags.DEFINE_config_file(
        'config',
        None,
        'What to train, as configs/agru_smnist.py.',
        # configs/base.py locks all but the options of layers, where any
        # name may be new.
        lock_config=False,
        accept_new_attributes=True,
    )
  except flags.Error as error:  # It reads --flagfile already.
    processes.give_up(error)


_CONFIG = _define_config()
_WORKDIR = flags.DEFINE_string(
    'workdir', '', 'The run directory; a new one under runs/ by default.'
)
_MODE = flags.DEFINE_enum(
    'mode',
    'train',
    ['train', 'evaluate'],
    'evaluate tests the best models of a run that is there once more.',
)
_PROFILE = flags.DEFINE_bool(
    'profile',
    False,
    'Trains a few steps only, writes their trace to the run directory, and'
    ' prints where their time goes.',
)
_COORDINATOR_ADDRESS = flags.DEFINE_string(
    'coordinator_address',
    None,
    'For several processes: host and port where the one with --process_id=0'
    ' listens, as 10.0.0.1:1234.',
)
_NUM_PROCESSES = flags.DEFINE_integer(
    'num_processes', None, 'How many processes train together.'
)
_PROCESS_ID = flags.DEFINE_integer(
    'process_id', None, 'The number of this process, from 0.'
)
_DISTRIBUTED = flags.DEFINE_bool(
    'distributed',
    False,
    'Takes the three above from the environment of a cluster that JAX knows,'
    ' such as Slurm or Open MPI.',
)
_HEARTBEAT_SECONDS = flags.DEFINE_integer(
    'heartbeat_seconds',
    100,
    'After so many seconds of silence a process counts as ended, and the others'
    ' end as well.',
    lower_bound=1,
)


def _with_paths(argv: list[str]) -> list[str]:
  """Returns a command line in which a config's name has become its file."""
  words, before = [], ''
  for word in argv:
    flag, separator, value = word.partition('=')
    name, value = (flag, value) if separator else (before, word)
    if name in ('--config', '-config'):
      value = find_config(value)
    words.append(flag + separator + value if separator else value)
    before = word
  return words


def _config_path() -> pathlib.Path:
  return pathlib.Path(config_flags.get_config_filename(flags.FLAGS['config']))


def _is_not_told_here(record: Any) -> bool:
  path = pathlib.Path(record.pathname).as_posix()
  return not ('/orbax/' in path or '/asyncio/' in path)


def parse_flags(argv: list[str]) -> list[str]:
  """Parses a command line, and gives up where it cannot be obeyed.

  Returns the rest of it, the program's name.
  """
  # Libraries log much beside the program's own lines.
  logging.get_absl_logger().setLevel('ERROR')
  make_importable()
  given = [arg for arg in argv if re.match('--?config(=|$)', arg)]
  if len(given) > 1:
    processes.give_up(f'--config is given {len(given)} times; pass it once')
  try:
    rest = flags.FLAGS(_with_paths(argv))
  except Exception as error:  # The config's file may raise any.
    processes.give_up(describe_error(error))
  if flags.FLAGS['verbosity'].using_default_value:
    flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
    # Where orbax fails, it logs a trace beside the one sentence told here;
    # asyncio logs one more for each file that orbax was writing.
    logging.get_absl_handler().addFilter(_is_not_told_here)
    # TensorStore's threads do so, too, by errors that nobody can catch.
    sys.unraisablehook = lambda unused_unraisable: None
  if rest[1:]:
    processes.give_up(
        f'unknown argument {rest[1]!r}; a config is --config=<file>, a field'
        ' --config.<field>=<value>'
    )
  if _PROFILE.value and _MODE.value != 'train':
    processes.give_up('--profile is of training steps, with --mode=train')
  _check_config_flag()
  return rest


def _check_config_flag() -> None:
  """Gives up unless --config is a file whose get_config() can be used."""
  if not flags.FLAGS['config'].present:
    names = ', '.join(config_names())
    processes.give_up(f'{_NO_CONFIG[processes.name()]}; there are {names}')
  with processes.one_sentence():
    check_config(str(_config_path()))
  if not isinstance(_CONFIG.value, ml_collections.ConfigDict):
    try:
      # Raises the error that kept the file from being read, if one did.
      getattr(_CONFIG.value, 'task', None)
    except OSError as error:
      processes.give_up(describe_error(error))
    processes.give_up(
        f'get_config() of {_config_path()} must return a ConfigDict; got'
        f' {settings.a(type(_CONFIG.value))}'
    )


def prepare() -> experiments.Experiment:
  """Returns the experiment of the flags; gives up where it cannot be run."""
  is_training = _MODE.value == 'train'
  if not is_training:
    _check_run()
  # The output of other modes is for results alone.
  output = sys.stdout if is_training else sys.stderr
  try:
    with contextlib.redirect_stdout(output):
      processes.initialize(
          _COORDINATOR_ADDRESS.value,
          _NUM_PROCESSES.value,
          _PROCESS_ID.value,
          _DISTRIBUTED.value,
          _HEARTBEAT_SECONDS.value,
      )
      return experiments.prepare(
          _CONFIG.value,
          _WORKDIR.value,
          _config_path().stem,
          defaults=flags.FLAGS['config'].parser.parse(str(_config_path())),
          mode=_MODE.value,
      )
  except (FileNotFoundError, ConnectionError) as error:
    processes.give_up(error if is_training else processes.needs_data(error))
  except (ValueError, NotImplementedError, OSError) as error:
    processes.give_up(error)
  except MemoryError:
    raise
  except Exception as error:  # Layers get any option that a config has.
    if processes.is_loss(error):
      processes.tell_loss(error, _WORKDIR.value or '...')
    processes.give_up(
        f'this config cannot be run: {type(error).__name__}: {error}'
    )


def _check_run() -> None:
  """Gives up where --workdir holds no run."""
  with processes.one_sentence():
    workdir = fields.expand(_WORKDIR.value)
  if not _WORKDIR.value or not (workdir / 'config.json').is_file():
    processes.give_up(
        f'--mode={_MODE.value} needs the --workdir of a run; got'
        f' {_WORKDIR.value!r}'
    )


def main(
    unused_argv: list[str], on_workdir: Callable[[str], None] = lambda _: None
) -> None:
  """Trains, or does the work of --mode, after `parse_flags`.

  `on_workdir` gets the run directory, once it is known.
  """
  try:
    _main(on_workdir)
  except MemoryError as error:
    processes.give_up(processes.needs_memory(error))
  except BrokenPipeError:
    processes.stop_printing()
    processes.give_up(
        'nobody reads the output any more; a run goes on where its --workdir is'
        ' passed again'
    )


def _main(on_workdir: Callable[[str], None]) -> None:
  """Does the work of --mode."""
  experiment = prepare()
  on_workdir(str(experiment.workdir))
  if _PROFILE.value:
    with processes.one_sentence():
      processes.say(profile.profile(experiment), end='')
    return
  if _MODE.value == 'evaluate':
    with processes.one_sentence():
      processes.say(trained.evaluate(experiment))
    return
  report = train(experiment)
  processes.say(report_lib.main_result(report, experiment.task.metrics))
  if report['diverged']:
    if processes.is_first():
      processes.tell(
          f'the loss of seed {", ".join(map(str, report["diverged"]))} was not'
          ' finite; a smaller --config.optimizer.learning_rate or'
          ' --config.optimizer.clip_norm may help'
      )
    sys.exit(3)


def train(experiment: experiments.Experiment) -> Mapping[str, Any]:
  """Returns the report of a run; gives up where disk or memory are short."""
  try:
    return loop.train_and_evaluate(experiment)
  except (OSError, files.RunFileError) as error:
    processes.give_up(error)
  except RuntimeError as error:  # JAX's own.
    # A GPU says the one, a CPU the other.
    if not re.search('RESOURCE_EXHAUSTED|Out of memory', str(error)):
      if processes.is_loss(error):
        processes.tell_loss(error, experiment.workdir)
      raise
    processes.give_up(
        'the device has not enough memory; a smaller --config.batch_size or'
        f' --config.model.features needs less ({str(error)[:200]})'
    )
