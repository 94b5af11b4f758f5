"""Trains a model of the zoo as a config says, and prints its test accuracy.

  python train.py --config=configs/agru_smnist.py
  python train.py --config=configs/gru_smnist.py --config.num_epochs=3
  python train.py --config=configs/gru_smnist.py --workdir=runs/mine

Every field of the config can be overridden as in the second line. The run goes
into a directory under runs/, or into --workdir; a run that was killed goes on
where its --workdir is passed again. The last line printed is the test accuracy,
the mean over the seeds: `test accuracy: 0.9863`.
"""

import pathlib
import sys
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    'config',
    None,
    'What to train, as configs/agru_smnist.py.',
    lock_config=True,
)
_WORKDIR = flags.DEFINE_string(
    'workdir', '', 'The run directory; a new one under runs/ by default.'
)


def _give_up(message: object) -> NoReturn:
  """Ends with one sentence on stderr: the caller's mistake needs no trace."""
  print(f'train.py: {" ".join(str(message).split())}', file=sys.stderr)
  sys.exit(2)


def _config_path() -> pathlib.Path:
  return pathlib.Path(config_flags.get_config_filename(flags.FLAGS['config']))


def parse_flags(argv: list[str]) -> list[str]:
  """Parses the command line, and gives up where it cannot be obeyed.

  Args:
    argv: the command line with the program's name.

  Returns:
    What is left of it: the program's name.
  """
  try:
    rest = flags.FLAGS(argv)
  except (AttributeError, KeyError) as error:
    # ml_collections wraps one error in the other.
    inner = error.args[0] if isinstance(error, AttributeError) else error
    text = str(inner.args[0]).replace('\n', '. ')
    _give_up(
        f'the config has no field {text} (configs/base_smnist.py explains the'
        ' fields)'
    )
  except TypeError as error:
    _give_up(f'an override does not fit the config: {error}')
  except (flags.Error, ValueError) as error:
    _give_up(error)
  if flags.FLAGS['verbosity'].using_default_value:
    # What matters is printed; JAX and orbax log much besides.
    flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
  if rest[1:]:
    _give_up(f'unknown argument {rest[1]!r}; a config is --config=<file>')
  if flags.FLAGS['config'].value is None:
    known = sorted(pathlib.Path(__file__).parent.glob('configs/*_smnist.py'))
    names = ', '.join(path.stem for path in known if 'base' not in path.stem)
    _give_up(f'pass --config=configs/<name>.py; there are {names}')
  if not _config_path().is_file():
    _give_up(f'there is no config file {_config_path()}')
  return rest


def main(unused_argv: list[str]) -> None:
  # Wrong flags should be told at once, and JAX takes seconds to import.
  from rnnzoo import training

  try:
    experiment = training.prepare(
        _CONFIG.value, _WORKDIR.value, _config_path().stem
    )
  except (ValueError, NotImplementedError, OSError) as error:
    _give_up(error)
  report = training.train_and_evaluate(experiment)
  print(f'test accuracy: {report["test"]["accuracy"]["mean"]:.4f}')


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
