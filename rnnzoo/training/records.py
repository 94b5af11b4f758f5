"""The records of a seed while it trains, kept by the first process.

An epoch is on the terminal, in TensorBoard's events, in metrics.csv and in
seconds.csv, a sample of text in sample_<epoch>.txt. All records are written
before the epoch's checkpoint: an epoch that a checkpoint counts as done is done
for good.
"""

from collections.abc import Mapping, Sequence
import contextlib
import os
import pathlib
import sys
import time
from typing import Any

from flax import nnx
import jax
import numpy as np
import tqdm

from rnnzoo.tasks import protocol
from rnnzoo.training import experiment as experiments
from rnnzoo.training import files
from rnnzoo.training import processes
from rnnzoo.training import step as step_lib

# Seconds between lines where no terminal shows a moving bar.
_LINE_INTERVAL = 10.0


class Progress:
  """The progress of one seed on stderr: a bar, or lines where there is none.

  Both show the mean rate and the time left. The time left assumes that all
  epochs are run, which early stopping can only shorten, and that later lessons
  of a generator take no longer than the lessons so far. An earlier process did
  `done` of the `num_steps` steps.
  """

  def __init__(
      self,
      label: str,
      num_steps: int,
      metrics: Sequence[protocol.Metric],
      done: int = 0,
  ):
    self._label, self._num_steps, self._metrics = label, num_steps, metrics
    self._step = self._first_step = done
    self._start = self._last_line = time.monotonic()
    self._bar = tqdm.tqdm(
        desc=label,
        total=num_steps,
        initial=done,
        unit='step',
        dynamic_ncols=True,
        disable=not sys.stderr.isatty(),
    )

  def compiling(self) -> None:
    """Tells that the next step is the first one of its kind."""
    self._message('compiling')

  def update(self, step: int) -> None:
    """Tells that `step` steps are done."""
    self._bar.update(step - self._step)
    self._step = step
    if self._bar.disable and (
        time.monotonic() - self._last_line > _LINE_INTERVAL
    ):
      self._message('')

  def epoch(self, row: files.Row, num_epochs: int, is_best: bool) -> None:
    """Tells the results of an epoch."""
    train, validation = (
        ' '.join(
            f'{m.name.replace("_", " ")} {m.text(row[f"{split}_{m.name}"])}'
            for m in self._metrics
        )
        for split in ('train', 'validation')
    )
    self._message(
        f'epoch {row["epoch"]}/{num_epochs} train {train}'
        f' gradient norm {row["gradient_norm"]:.2g} validation {validation}'
        + (' (best)' if is_best else '')
    )

  def close(self, text: str) -> None:
    """Ends the bar with a last message."""
    self._bar.close()
    self._message(text)

  def _message(self, text: str) -> None:
    if not self._bar.disable:
      if text:
        self._bar.write(f'{self._label}: {text}', file=sys.stderr)
      return
    self._last_line = time.monotonic()
    meter = tqdm.tqdm.format_meter(
        self._step,
        self._num_steps,
        self._last_line - self._start,
        initial=self._first_step,
        unit='step',
        bar_format='{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]',
    )
    words = [f'{self._label}:', *([text] if text else []), meter]
    print(*words, file=sys.stderr, flush=True)


class EpochTimes:
  """The seconds of each epoch of one seed, as a CSV file.

  It is apart from metrics.csv, which does not vary. Its columns: `seconds`, all
  of the epoch; `training` and `validation`, parts of it, the rest being
  checkpoints and reports; `compiled`, 1 for the first epoch of a process and
  the first of each lesson of a generator, which may include compilation;
  `sequences_per_second`, examples of the seed over the seconds of training.
  Seeds that train at once share the times.

  Lines of an earlier process are kept, but those after the epochs done.
  """

  def __init__(
      self, path: pathlib.Path, dataset: str, done: int, num_examples: int = 0
  ):
    self._path, self._dataset = path, dataset
    self._num_examples = num_examples
    # The lessons of this process.
    self._lessons: set[int] = set()
    self._is_first = False
    self._laps: dict[str, float] = {}
    self._start = self._last = time.monotonic()
    self._rows: list[dict[str, Any]] = []
    self._earlier: list[str] = []
    if path.exists():
      text = path.read_text(encoding='utf-8', errors='replace')
      self._earlier = text.splitlines()[1 : done + 1]

  def start(self, lesson: int = 0) -> bool:
    """An epoch begins; returns whether it is the first one of its lesson."""
    self._is_first = lesson not in self._lessons
    self._lessons.add(lesson)
    self._start = self._last = time.monotonic()
    return self._is_first

  def lap(self, name: str) -> None:
    """Names the time from the start, or from the last lap, until now."""
    now = time.monotonic()
    self._laps[name] = round(now - self._last, 6)
    self._last = now

  def elapsed(self) -> float:
    """Returns the seconds since the epoch began."""
    return time.monotonic() - self._start

  def write(self, epoch: int) -> None:
    """Writes the file, once more when the epoch's checkpoint is written."""
    seconds = self._laps.get('training')
    rate = round(self._num_examples / seconds, 1) if seconds else None
    self._rows = [row for row in self._rows if row['epoch'] < epoch]
    row = {
        'epoch': epoch,
        'seconds': round(self.elapsed(), 6),
        **self._laps,
        'compiled': int(self._is_first),
        'sequences_per_second': rate,
    }
    self._rows.append(row)
    files.write_csv(self._path, self._dataset, self._rows, self._earlier)

  def summary(self) -> str:
    """Returns the mean times in words; '' if every epoch may have compiled."""
    rows = [row for row in self._rows if not row['compiled']]
    if not rows:
      return ''
    seconds, training, validation = (
        float(np.mean([row[name] for row in rows]))
        for name in ('seconds', 'training', 'validation')
    )
    text = (
        f'{seconds:.3f} s an epoch, of which {training:.3f} training and'
        f' {validation:.3f} validation (mean of {len(rows)}, without'
        ' compilation)'
    )
    if self._num_examples and training:
      text += f', {self._num_examples / training:,.0f} sequences a second'
    return text


class Events(contextlib.AbstractContextManager):
  """TensorBoard events of one seed. Use as a context manager.

  Every write is on disk when it returns: a kill must not lose an epoch that a
  checkpoint counts as done. tensorboardX's own SummaryWriter, which writes in a
  thread, does not promise this.

  Events of an earlier process are void from the first epoch on.
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
    told = {'summary': summary.text('dataset', dataset)}
    self._write(first_epoch, {'session_log': start}, told)

  def __exit__(self, *unused_exception) -> None:
    self._writer.close()

  def write(self, row: files.Row, **more: float) -> None:
    """Writes one event for each number of an epoch."""
    # tensorboardX's own function logs a warning of its own of NaN.
    scalars = (
        {'summary': {'value': [{'tag': name, 'simple_value': value}]}}
        for name, value in {**row, **more}.items()
        if name != 'epoch'
    )
    self._write(int(row['epoch']), *scalars)

  def write_text(self, epoch: int, name: str, text: str) -> None:
    """Writes a text of an epoch."""
    self._write(epoch, {'summary': self._summary.text(name, text)})

  def _write(self, step: int, *contents: Mapping[str, Any]) -> None:
    with files.naming(self._path):
      for content in contents:
        event = self._event_type(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)
      self._writer.flush()


# Steps of training, by which dropout's key is folded in, stay below this.
_STREAM = 2**31


class Records(contextlib.AbstractContextManager):
  """The records of one seed. Use as a context manager.

  Every process has them and calls them alike; the first one alone writes. An
  earlier process did `done` epochs. A damaged file raises RunFileError.
  """

  def __init__(self, experiment: experiments.Experiment, seed: int, done: int):
    self._task, self._label = experiment.task, f'seed {seed}'
    self._directory = experiment.workdir / self._label.replace(' ', '_')
    self._num_epochs = experiment.config.num_epochs
    self._saved = time.monotonic()
    self._stack = contextlib.ExitStack()
    processes.from_first(lambda: self._open(done, experiment.steps_per_epoch))

  def _open(self, done: int, steps: int) -> None:
    task, directory = self._task, self._directory
    self._progress = Progress(
        self._label,
        self._num_epochs * steps,
        protocol.epoch_metrics(task),
        done * steps,
    )
    self._times = EpochTimes(
        directory / 'seconds.csv', task.dataset, done, steps * task.batch_size
    )
    self._events = self._stack.enter_context(
        Events(directory, task.dataset, done + 1)
    )

  def __exit__(self, *exception) -> None:
    self._stack.__exit__(*exception)

  def start(self, lesson: int = 0) -> None:
    """An epoch begins; the step is compiled for each lesson."""
    if processes.is_first() and self._times.start(lesson):
      self._progress.compiling()

  def update(self, step: int) -> None:
    """Tells that `step` steps are done since the start of training."""
    if processes.is_first():
      self._progress.update(step)

  def lap(self, name: str) -> None:
    """Names the time from the start, or from the last lap, until now."""
    if processes.is_first():
      self._times.lap(name)

  def sample(
      self, epoch: int, parameters: tuple[Any, Any], key: jax.Array
  ) -> None:
    """Writes a sample of the model after an epoch, without a prompt.

    It is a function of the parameters (with statistics, whole on each device),
    of dropout's key and of the epoch.
    """

    def write():
      # On one device of this process: no other process samples.
      here = jax.tree.map(lambda x: jax.device_put(np.asarray(x)), parameters)
      model = nnx.merge(step_lib.abstract(self._task)[0], *here)
      own_key = jax.random.fold_in(jax.random.fold_in(key, _STREAM), epoch)
      text = ''.join(self._task.sample(model, '', own_key))
      path = self._directory / f'sample_{epoch}.txt'
      files.write_atomically(path, f'{self._task.dataset}\n\n{text}\n')
      self._events.write_text(epoch, 'sample', text)

    processes.from_first(write)

  def epoch(self, history: Sequence[files.Row], is_best: bool) -> float:
    """Tells and writes the results of the last epoch of a history.

    Returns:
      The seconds since the last checkpoint, equal in all processes.
    """

    def write():
      row = history[-1]
      self._progress.epoch(row, self._num_epochs, is_best)
      self._events.write(row, epoch_seconds=self._times.elapsed())
      path = self._directory / 'metrics.csv'
      files.write_csv(path, self._task.dataset, history)
      self._times.write(len(history))
      return time.monotonic() - self._saved

    return processes.from_first(write)

  def saved(self, epoch: int) -> None:
    """The epoch's checkpoint was written."""
    self._saved = time.monotonic()
    if processes.is_first():
      self._times.write(epoch)

  def close(self, text: str) -> None:
    """Ends the progress with a last message."""
    self._progress.close(text)
    if summary := self._times.summary():
      processes.say(f'{self._label}: {summary}')
