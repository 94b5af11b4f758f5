"""Endings of a program: one sentence on stderr, and an exit code."""

import os
import sys
from typing import NoReturn

from absl import logging

from rnnzoo.training import processes

# The name of the program, before its messages.
_NAME = ['train.py']


def name() -> str:
  """Returns the program's name, which its messages begin with."""
  return _NAME[0]


def set_name(name: str) -> None:
  """Sets it."""
  _NAME[0] = name


def give_up(message: object) -> NoReturn:
  """Ends with one sentence on stderr: the caller's mistake needs no trace.

  Args:
    message: the sentence, or an error that is one.

  Raises:
    BrokenPipeError: `message` is one, which is nobody's mistake.
  """
  if isinstance(message, BrokenPipeError):
    raise message
  logging.info('The error was:', exc_info=True)  # For --verbosity=0.
  tell(' '.join(str(message).split()))
  _exit(2)


def tell_loss(error: Exception, workdir: object) -> NoReturn:
  """Ends, since another process of the run has ended."""
  tell(
      'this process lost another one of the run'
      f' ({" ".join(str(error).split())[:300]}); start all of them again with'
      f' --workdir={workdir}, and the run goes on'
  )
  _exit(4, common=False)


def tell(message: str) -> None:
  """Prints a message on stderr, after the program's name."""
  print(f'{_NAME[0]}: {message}', file=sys.stderr)


def stop_printing() -> None:
  """Lets go of stdout, which nobody reads: Python must not try once more."""
  if sys.stdout is not None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def needs_data(error: OSError) -> str:
  """Returns the message where `evaluate` does not find the data set."""
  return (
      f'{error}; evaluate tests models on the data set of their run, which'
      ' predict and sample do without'
  )


def needs_memory(error: MemoryError) -> str:
  """Returns the message where this process gets no more memory."""
  return (
      'this machine has not enough memory; less data, a smaller'
      ' --config.batch_size or --config.model.features needs less'
      f' ({error!r:.200})'
  )


def _exit(code: int, common: bool = True) -> NoReturn:
  """Ends, without waiting for other processes, which may wait for this one.

  Args:
    code: the exit code.
    common: whether they all end for the same reason.
  """
  if processes.are_connected():
    processes.leave(code, common)
  sys.exit(code)
