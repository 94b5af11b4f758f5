"""Work in a process of its own, which another one replaces when it hangs.

A library of others may hang, in a kernel or while it tunes one, and may end its
process. Either costs only the piece of work that was under way.
"""

from collections.abc import Callable, Mapping
import multiprocessing
import sys
from typing import Any, TypeAlias

# Names a piece of work: a library and a direction, say.
Piece: TypeAlias = tuple[str, ...]
Work: TypeAlias = Callable[
    [Any, Mapping[Piece, str], Callable[[Piece], None]], Any
]


class Process:
  """Runs a function in another process, as often as it takes."""

  def __init__(self, work: Work, seconds: float):
    """Creates it; the process starts with the first call.

    Args:
      work: a function of a module, of an argument, the pieces to leave out with
        the reason of each, and a function to be called with each piece before
        it begins.
      seconds: how long a piece may take.
    """
    self._work = work
    self._seconds = seconds
    self._process: Any = None

  def __call__(self, argument: Any) -> Any:
    """Returns what the function returns, for all pieces that end in time.

    Args:
      argument: can be pickled, as its result can.

    Raises:
      ChildProcessError: if the process ends before the first piece.
    """
    lost: dict[Piece, str] = {}
    while True:
      if self._process is None:
        self._start()
      self._pipe.send((argument, lost))
      piece = None
      try:
        while True:
          if piece is not None and not self._pipe.poll(self._seconds):
            reason = f'did not end within {self._seconds:g} s'
            break
          piece, result = self._pipe.recv()
          if piece is None:
            return result
      except (EOFError, ConnectionResetError):
        self._process.join()
        reason = f'ended its process: exit code {self._process.exitcode}'
      self.stop()
      if piece is None or piece in lost:
        raise ChildProcessError(f'the work of another process {reason}')
      lost[piece] = reason
      print(f'{" ".join(piece)} {reason}', file=sys.stderr, flush=True)

  def _start(self) -> None:
    context = multiprocessing.get_context('spawn')
    self._pipe, theirs = context.Pipe()
    self._process = context.Process(
        target=_serve, args=(self._work, theirs), daemon=True
    )
    self._process.start()
    theirs.close()  # The child has its own; its end is the pipe's.

  def stop(self) -> None:
    """Ends the process, if there is one."""
    if self._process is not None:
      self._process.kill()
      self._process.join()
      self._process = None


def _serve(work: Work, pipe: Any) -> None:
  """Answers one argument after the other, in the other process."""
  while True:
    argument, lost = pipe.recv()
    result = work(argument, lost, lambda piece: pipe.send((piece, None)))
    pipe.send((None, result))
