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

# The thread needs the interpreter's lock. If the work that hangs holds it, the
# process ends after so many seconds more, with a trace instead of a message.
GRACE_S = 15


class Watchdog:
  """Watches one piece of work after the other.

  Args:
    seconds: how long each piece may take.
    save: called before the process ends, with the work that hung and the reason
      to state; keeps the results so far.
  """

  def __init__(self, seconds: float, save: Callable[[str, str], None]):
    self.seconds = seconds
    self._save = save
    self._timer = threading.Timer(seconds, self._end)

  @contextlib.contextmanager
  def __call__(self, work: str) -> Iterator[None]:
    """Ends the process with `EXIT_CODE` if the block does not end in time."""
    self.start(work)
    try:
      yield
    finally:
      self.stop()

  def start(self, work: str) -> None:
    """Watches `work` from now on, instead of any before."""
    self.stop()
    if sys.__stderr__ is not None:
      limit = self.seconds + GRACE_S
      faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
    self._timer = threading.Timer(self.seconds, self._end, (work,))
    self._timer.daemon = True
    self._timer.start()

  def stop(self) -> None:
    """Watches nothing."""
    self._timer.cancel()
    faulthandler.cancel_dump_traceback_later()

  def _end(self, work: str) -> None:
    reason = f'did not end within {self.seconds:g} s'
    try:
      text = (
          f'rnnzoo.benchmark: {work}: {reason}; giving up. --timeout allows'
          ' more, and --shape and --layers take less work.'
      )
      print(text, file=sys.stderr, flush=True)
      self._save(work, reason)
    finally:
      os._exit(EXIT_CODE)
