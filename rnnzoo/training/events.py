"""Events for TensorBoard, none of which is lost by a kill."""

import os
import pathlib
import time
from typing import Any

from rnnzoo.training import files


class Events:
  """TensorBoard events of one seed. Use as a context manager.

  Every write is on disk when it returns, as tensorboardX's own SummaryWriter,
  which has a thread for it, does not promise: what a checkpoint counts as done
  must not be lost by a kill.

  Args:
    directory: where the event files go.
    dataset: the name of the data set, written as a text.
    first_epoch: events of an earlier process from this epoch on are void.
  """

  def __init__(self, directory: pathlib.Path, dataset: str, first_epoch: int):
    # Slow to import.
    from tensorboardX import event_file_writer
    from tensorboardX import summary
    from tensorboardX.proto import event_pb2

    self._summary, self._event_type = summary, event_pb2.Event
    self._path = directory
    with files.naming(directory):
      # Files are read in the order of their names, which begin with the second:
      # a process that goes on waits for the next one.
      while any(directory.glob(f'events.*.{int(time.time())}.*')):
        time.sleep(0.05)
      self._writer = event_file_writer.EventsWriter(
          str(directory / 'events'), f'.{os.getpid()}'
      )
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._write(first_epoch, session_log=start)
      self._write(first_epoch, summary=summary.text('dataset', dataset))
      self._writer.flush()

  def __enter__(self) -> 'Events':
    return self

  def __exit__(self, *unused_exception) -> None:
    self._writer.close()

  def write(self, row: files.Row, **more: float) -> None:
    """Writes one event for each number of an epoch."""
    with files.naming(self._path):
      for name, value in {**row, **more}.items():
        if name != 'epoch':
          # tensorboardX's own function logs a warning of its own of NaN.
          scalar = {'tag': name, 'simple_value': value}
          self._write(int(row['epoch']), summary={'value': [scalar]})
      self._writer.flush()

  def write_text(self, epoch: int, name: str, text: str) -> None:
    """Writes a text of an epoch."""
    with files.naming(self._path):
      self._write(epoch, summary=self._summary.text(name, text))
      self._writer.flush()

  def _write(self, step: int, **content: Any) -> None:
    self._writer.write_event(
        self._event_type(wall_time=time.time(), step=step, **content)
    )
