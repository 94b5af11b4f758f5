"""The progress of training on the terminal."""

from collections.abc import Sequence
import sys
import time

import tqdm

from rnnzoo.tasks import protocol
from rnnzoo.training import files

# Where no terminal shows a moving bar, a line this many seconds apart.
_LINE_INTERVAL = 10.0


class Progress:
  """The progress of one seed on stderr: a bar, or lines where there is none.

  Both show the mean rate and the time left. The time left assumes that all
  epochs are run, which early stopping can only shorten, and that later lessons
  of a generator take no longer than those so far.

  Args:
    label: what is in progress.
    num_steps: how many steps there are in all.
    metrics: that an epoch has.
    done: how many of them an earlier process did.
  """

  def __init__(
      self,
      label: str,
      num_steps: int,
      metrics: Sequence[protocol.Metric],
      done: int = 0,
  ):
    self._label, self._metrics = label, metrics
    self._num_steps = num_steps
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
    is_first = self._step == self._first_step
    self._message(
        f'compiling the first step{"" if is_first else " of the next lesson"}'
    )

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
            f'{metric.name.replace("_", " ")}'
            f' {metric.text(row[f"{split}_{metric.name}"])}'
            for metric in self._metrics
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
    separator = ' ' if text else ''
    print(
        f'{self._label}: {text}{separator}{meter}', file=sys.stderr, flush=True
    )
