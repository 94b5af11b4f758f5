"""How long epochs take: in a file apart from results, which do not vary."""

from collections.abc import Callable
import pathlib
import time
from typing import Any

import jax
import numpy as np

from rnnzoo.training import files

_number = lambda text: float(text) if text else None
_COLUMNS: dict[str, Callable[[str], Any]] = {
    'epoch': int,
    'seconds': float,
    'training': float,
    'validation': float,
    'compiled': int,
    'sequences_per_second': _number,
    'peak_memory_mib': _number,
}


class EpochTimes:
  """The seconds of each epoch of one seed, as a CSV file.

  Its columns: `seconds`, all of the epoch; `training` and `validation`, parts
  of it, the rest being checkpoints and reports; `compiled`, 1 for the first
  epoch of a process, and for the first one of each lesson of a generator, which
  may include compilation; `sequences_per_second`,
  examples of the seed over the seconds of training; `peak_memory_mib`, the most
  memory of the first device that the process has used so far, in MiB, empty
  where the device does not say, as a CPU. Seeds that train at once share the
  times and the memory.

  Args:
    path: the file; rows of an earlier process are kept.
    dataset: the name of the data set.
    done: how many epochs are done; rows of later ones are void.
    num_examples: examples of an epoch.

  Raises:
    RunFileError: the file is not what was written there.
  """

  def __init__(
      self, path: pathlib.Path, dataset: str, done: int, num_examples: int = 0
  ):
    self._path, self._dataset = path, dataset
    self._num_examples = num_examples
    self._rows: list[dict[str, Any]] = []
    self._epoch = done + 1
    self._lessons: set[int] = set()
    # Those that have epochs without compilation.
    self._timed: set[int] = set()
    self._is_first = False
    self._laps: dict[str, float] = {}
    self._start = self._last = time.monotonic()
    if path.exists():
      rows = files.read_csv(path, _COLUMNS)
      self._rows = [row for row in rows if row['epoch'] <= done]

  def start(self, lesson: int = 0) -> bool:
    """An epoch begins; returns whether it is the first one of its lesson.

    Args:
      lesson: which one, where a step is compiled for each.
    """
    self._is_first = lesson not in self._lessons
    (self._lessons if self._is_first else self._timed).add(lesson)
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

  def stop(self) -> None:
    """All of the epoch but its checkpoint is done: writes the file."""
    self._rows.append({'epoch': self._epoch})
    self._epoch += 1
    self.extend()

  def extend(self) -> None:
    """The checkpoint is done as well: counts its time to the same epoch."""
    epoch = self._rows[-1]['epoch']
    seconds = self._laps.get('training')
    self._rows[-1] = {
        'epoch': epoch,
        'seconds': round(self.elapsed(), 6),
        **self._laps,
        'compiled': int(self._is_first),
        'sequences_per_second': (
            round(self._num_examples / seconds, 1) if seconds else None
        ),
        'peak_memory_mib': _peak_memory(),
    }
    files.write_csv(self._path, self._dataset, self._rows)

  def summary(self) -> str:
    """Returns the mean times in words; '' if every epoch may have compiled."""
    rows = [row for row in self._rows if not row['compiled']]
    if not rows:
      return ''
    mean = {
        name: float(np.mean([row[name] for row in rows]))
        for name in ('seconds', 'training', 'validation')
    }
    text = (
        f'{mean["seconds"]:.3f} s an epoch, of which {mean["training"]:.3f}'
        f' training and {mean["validation"]:.3f} validation (mean of'
        f' {len(rows)}, without compilation'
        f'{", over lessons of unlike steps" if len(self._timed) > 1 else ""})'
    )
    if self._num_examples and mean['training']:
      text += (
          f', {self._num_examples / mean["training"]:,.0f} sequences a second'
      )
    if peak := self._rows[-1]['peak_memory_mib']:
      text += f', peak memory {peak:,.0f} MiB'
    return text


def _peak_memory() -> float | None:
  """Returns the MiB of a device's memory that were used at most, or None."""
  stats = jax.local_devices()[0].memory_stats() or {}
  peak = stats.get('peak_bytes_in_use')
  return None if peak is None else round(peak / 2**20, 1)
