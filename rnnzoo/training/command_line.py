"""The command line of train.py: flags, and one sentence on each mistake.

A user's mistake ends the program with exit code 2 and one sentence on stderr,
without a trace. `--verbosity=0` logs the trace as well.
"""

from collections.abc import Mapping
import difflib
import os
import pathlib
import re
import sys
import sysconfig
import traceback
from typing import Any, NoReturn

from absl import flags
from absl import logging
import ml_collections
from ml_collections import config_flags

from rnnzoo.training import experiment as experiments
from rnnzoo.training import files
from rnnzoo.training import loop
from rnnzoo.training import processes


def _give_up(message: object) -> NoReturn:
  """Ends with one sentence on stderr: the caller's mistake needs no trace."""
  logging.info('The error was:', exc_info=True)  # For --verbosity=0.
  print(f'train.py: {" ".join(str(message).split())}', file=sys.stderr)
  _exit(2)


def _exit(code: int, common: bool = True) -> NoReturn:
  """Ends, without waiting for other processes, which may wait for this one.

  Args:
    code: the exit code.
    common: whether they all end for the same reason.
  """
  if processes.are_connected():
    processes.leave(code, common)
  sys.exit(code)


def _define_config() -> flags.FlagHolder:
  try:
    return config_flags.DEFINE_config_file(
        'config',
        None,
        'What to train, as configs/agru_smnist.py.',
        # configs/base_smnist.py locks all but the options of layers, where any
        # name may be new.
        lock_config=False,
        accept_new_attributes=True,
    )
  except flags.Error as error:  # It reads --flagfile already.
    _give_up(error)


_CONFIG = _define_config()
_WORKDIR = flags.DEFINE_string(
    'workdir', '', 'The run directory; a new one under runs/ by default.'
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
    'process_id', None, 'Which of them this is, from 0.'
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


def _config_path() -> pathlib.Path:
  return pathlib.Path(config_flags.get_config_filename(flags.FLAGS['config']))


def _chain(error: BaseException) -> list[BaseException]:
  """Returns the error and those that it was raised for, the first one first."""
  errors = [error]
  while inner := errors[0].__cause__ or errors[0].__context__:
    errors.insert(0, inner)
  return errors


def _shorten(error: BaseException) -> str:
  """Returns an error's text; a field that is missing gets a near one named."""
  while error.args and isinstance(error.args[0], BaseException):
    error = error.args[0]
  # A KeyError's own text is in quotes.
  text = str(
      error.args[0] if isinstance(error, KeyError) and error.args else error
  )
  # ml_collections lists the whole config.
  text, *config = text.split(' Other fields present:')
  if config and (name := re.search(r'"(\w+)"', text)):
    known = re.findall(r'(\w+)\'?:', config[0])
    close = difflib.get_close_matches(name[1], known, n=1)
    text = repr(name[1]) + (f'. Did you mean {close[0]!r}?' if close else '')
  return text


def _describe(error: Exception) -> str:
  """Says what is wrong with the command line, or with the config's file."""
  chain = _chain(error)
  libraries = tuple(
      os.path.realpath(path)
      for path in (*sysconfig.get_paths().values(), __file__)
  )
  for inner in chain:
    if isinstance(inner, SyntaxError) and os.path.isfile(inner.filename or ''):
      return (
          f'{inner.filename}, line {inner.lineno}, is not Python: {inner.msg}'
      )
    for frame in reversed(traceback.extract_tb(inner.__traceback__)):
      place = os.path.realpath(frame.filename)
      if os.path.isfile(place) and not place.startswith(libraries):
        return (
            f'the config cannot be read: {place}, line {frame.lineno}:'
            f' {type(inner).__name__}: {_shorten(inner)}'
        )
  cause = chain[0]
  if 'Error whilst parsing config file' in str(error) or (
      getattr(cause, 'name', None) == 'get_config'
  ):
    return (
        'the config file must have a function get_config() without arguments,'
        f' which returns a ConfigDict ({type(cause).__name__}: {cause})'
    )
  if isinstance(cause, (OSError, SyntaxError)):
    return f'the config cannot be read: {error}'
  if isinstance(cause, (AttributeError, KeyError)):
    return (
        f'the config has no field {_shorten(cause)}'
        ' (configs/base_smnist.py explains the fields)'
    )
  if isinstance(error, flags.Error):
    return str(error)
  return f'an override does not fit the config: {error}'


def parse_flags(argv: list[str]) -> list[str]:
  """Parses the command line, and gives up where it cannot be obeyed.

  Args:
    argv: the command line with the program's name.

  Returns:
    What is left of it: the program's name.
  """
  # The program prints what matters; libraries log much besides.
  logging.get_absl_logger().setLevel('ERROR')
  try:
    rest = flags.FLAGS(argv)
  except Exception as error:  # The config's file may raise any.
    _give_up(_describe(error))
  if flags.FLAGS['verbosity'].using_default_value:
    flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
    # Where orbax fails, it logs a trace of what is told here in one sentence.
    logging.get_absl_handler().addFilter(
        lambda record: '/orbax/' not in pathlib.Path(record.pathname).as_posix()
    )
    # So do TensorStore's threads, by errors that nobody can catch.
    sys.unraisablehook = lambda unused_unraisable: None
  if rest[1:]:
    _give_up(f'unknown argument {rest[1]!r}; a config is --config=<file>')
  if not flags.FLAGS['config'].present:
    known = sorted(pathlib.Path(argv[0]).parent.glob('configs/*_smnist.py'))
    names = ', '.join(path.stem for path in known if 'base' not in path.stem)
    _give_up(f'pass --config=configs/<name>.py; there are {names}')
  if not _config_path().is_file():
    _give_up(f'there is no config file {_config_path()}')
  if not isinstance(_CONFIG.value, ml_collections.ConfigDict):
    try:
      # Raises what kept the file from being read, if something did.
      getattr(_CONFIG.value, 'task', None)
    except OSError as error:
      _give_up(_describe(error))
    _give_up(
        f'get_config() of {_config_path()} must return a ConfigDict; got a'
        f' {type(_CONFIG.value).__name__}'
    )
  return rest


def prepare() -> experiments.Experiment:
  """Returns the experiment of the flags; gives up where it cannot be run."""
  try:
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
    )
  except (ValueError, NotImplementedError, OSError) as error:
    _give_up(error)
  except Exception as error:  # Layers get any option that a config has.
    if processes.is_loss(error):
      _tell_loss(error, _WORKDIR.value or '...')
    _give_up(f'this config cannot be run: {type(error).__name__}: {error}')


def train(experiment: experiments.Experiment) -> Mapping[str, Any]:
  """Returns the report of a run; gives up where disk or memory are short."""
  try:
    return loop.train_and_evaluate(experiment)
  except (OSError, files.RunFileError) as error:
    _give_up(error)
  except RuntimeError as error:  # JAX's own.
    if 'RESOURCE_EXHAUSTED' not in str(error):
      if processes.is_loss(error):
        _tell_loss(error, experiment.workdir)
      raise
    _give_up(
        'the device has not enough memory; a smaller --config.batch_size or'
        f' --config.model.features needs less ({str(error)[:200]})'
    )


def _tell_loss(error: Exception, workdir: object) -> NoReturn:
  """Ends, since another process of the run has ended."""
  print(
      'train.py: this process lost another one of the run'
      f' ({" ".join(str(error).split())[:300]}); start all of them again with'
      f' --workdir={workdir}, and the run goes on',
      file=sys.stderr,
  )
  _exit(4, common=False)
