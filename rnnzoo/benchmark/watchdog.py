"""Ends a program that hangs, with a message.

A kernel whose blocks wait for each other may wait for ever, and nothing in the
process can stop it. So a thread watches the clock.
"""

from collections.abc import Callable, Iterator
import contextlib
import faulthandler
import os
import sys
import threading

EXIT_CODE = 3

# The thread needs the interpreter's lock. Should whatever hangs hold it, the
# process ends after so many seconds more, with a trace instead of a message.
GRACE_S = 15


class Watchdog:
  """Watches one thing after the other.

  Attributes:
    seconds: how long each may take.
    what: it is now; can be changed meanwhile, to be told in more detail.
  """

  def __init__(self, seconds: float, save: Callable[[str, str], None]):
    """Creates it.

    Args:
      seconds: how long each may take.
      save: keeps what has been found so far, before the process ends; called
        with what hung and the reason to state.
    """
    self.seconds = seconds
    self.what = ''
    self._save = save

  @contextlib.contextmanager
  def __call__(self, what: str) -> Iterator[None]:
    """Ends the process with `EXIT_CODE` if the block does not end in time."""
    self.what = what
    timer = threading.Timer(self.seconds, self._end)
    timer.daemon = True
    stream = sys.__stderr__
    if stream is not None:
      limit = self.seconds + GRACE_S
      faulthandler.dump_traceback_later(limit, exit=True, file=stream)
    timer.start()
    try:
      yield
    finally:
      timer.cancel()
      if stream is not None:
        faulthandler.cancel_dump_traceback_later()

  def _end(self) -> None:
    reason = f'did not end within {self.seconds:g} s'
    try:
      print(
          f'rnnzoo.benchmark: {self.what}: {reason}; giving up',
          file=sys.stderr,
          flush=True,
      )
      self._save(self.what, reason)
    finally:
      os._exit(EXIT_CODE)
