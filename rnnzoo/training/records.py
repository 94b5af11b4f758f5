"""The records of a seed while it trains, kept by the first process.

An epoch is on the terminal, in TensorBoard's events, in metrics.csv and in
seconds.csv, a sample of text in samples.txt. All of these are written before
the epoch's checkpoint: an epoch that a checkpoint counts as done is done for
good.
"""

from collections.abc import Callable, Sequence
import contextlib
import pathlib
import time

from rnnzoo.tasks import protocol
from rnnzoo.training import events as events_lib
from rnnzoo.training import files
from rnnzoo.training import processes
from rnnzoo.training import progress as progress_lib
from rnnzoo.training import samples as samples_lib
from rnnzoo.training import timing


class Records:
  """The records of one seed. Use as a context manager.

  Args:
    directory: of the seed.
    dataset: the name of the data set.
    seed: for the terminal.
    num_epochs: epochs at most.
    steps_per_epoch: steps of one.
    batch_size: examples of a step.
    metrics: that an epoch has, the loss first.
    done: how many epochs an earlier process did.

  Raises:
    RunFileError: a file is not what was written there.
  """

  def __init__(
      self,
      directory: pathlib.Path,
      dataset: str,
      seed: int,
      num_epochs: int,
      steps_per_epoch: int,
      batch_size: int,
      metrics: Sequence[protocol.Metric],
      done: int,
  ):
    self._directory, self._dataset = directory, dataset
    self._metrics = metrics
    self._num_epochs, self._steps = num_epochs, steps_per_epoch
    self._num_examples = steps_per_epoch * batch_size
    self._label = f'seed {seed}'
    self._saved = time.monotonic()
    self._stack = contextlib.ExitStack()
    processes.from_first(lambda: self._open(done))

  def _open(self, done: int) -> None:
    self._progress = progress_lib.Progress(
        self._label,
        self._num_epochs * self._steps,
        self._metrics,
        done * self._steps,
    )
    self._times = timing.EpochTimes(
        self._directory / 'seconds.csv',
        self._dataset,
        done,
        self._num_examples,
    )
    self._samples = samples_lib.Samples(
        self._directory / 'samples.txt', self._dataset, done
    )
    self._events = self._stack.enter_context(
        events_lib.Events(self._directory, self._dataset, done + 1)
    )

  def __enter__(self) -> 'Records':
    return self

  def __exit__(self, *exception) -> None:
    self._stack.__exit__(*exception)

  def start(self, lesson: int = 0) -> None:
    """An epoch begins.

    Args:
      lesson: which one of the `Generator`; the step is compiled for each.
    """
    if processes.is_first():
      if self._times.start(lesson):
        self._progress.compiling()

  def update(self, step: int) -> None:
    """Tells that `step` steps are done since the start of training."""
    if processes.is_first():
      self._progress.update(step)

  def lap(self, name: str) -> None:
    """Names the time from the start, or from the last lap, until now."""
    if processes.is_first():
      self._times.lap(name)

  def sample(self, epoch: int, make: Callable[[], str]) -> None:
    """Writes a sample of the model as it is after an epoch.

    Args:
      epoch: which one.
      make: returns the sample; the first process alone calls it.
    """

    def write():
      text = make()
      self._samples.write(epoch, text)
      self._events.write_text(epoch, 'sample', text)

    processes.from_first(write)

  def epoch(self, history: Sequence[files.Row], is_best: bool) -> float:
    """Tells and writes the results of an epoch.

    Args:
      history: all epochs, this one last.
      is_best: whether it is the best one.

    Returns:
      The seconds since the last checkpoint, the same in all processes.
    """

    def write():
      row = history[-1]
      self._progress.epoch(row, self._num_epochs, is_best)
      self._events.write(row, epoch_seconds=self._times.elapsed())
      self.write_metrics(history)
      self._times.stop()
      return time.monotonic() - self._saved

    return processes.from_first(write)

  def saved(self) -> None:
    """A checkpoint was written."""
    self._saved = time.monotonic()

  def epoch_done(self) -> None:
    """The epoch's checkpoint, if it has one, is written."""
    if processes.is_first():
      self._times.extend()

  def write_metrics(self, history: Sequence[files.Row]) -> None:
    """Writes metrics.csv."""
    path = self._directory / 'metrics.csv'
    files.write_csv(path, self._dataset, history)

  def close(self, text: str) -> None:
    """Ends the progress with a last message."""
    self._progress.close(text)
    if summary := self._times.summary():
      processes.say(f'{self._label}: {summary}')
