"""How long epochs take: in a file apart from results, which do not vary."""

import pathlib
import time

import numpy as np

from rnnzoo.training import files

_COLUMNS = ('epoch', 'seconds', 'training', 'validation', 'compiled')
_INTEGERS = ('epoch', 'compiled')


class EpochTimes:
  """The seconds of each epoch of one seed, as a CSV file.

  Its columns: `seconds`, all of the epoch; `training` and `validation`, parts
  of it, the rest being checkpoints and reports; `compiled`, 1 for the first
  epoch of a process, which may include compilation.

  Args:
    path: the file; rows of an earlier process are kept.
    dataset: the name of the data set.
    done: how many epochs are done; rows of later ones are void.

  Raises:
    RunFileError: the file is not what was written there.
  """

  def __init__(self, path: pathlib.Path, dataset: str, done: int):
    self._path, self._dataset = path, dataset
    self._rows: list[dict[str, float]] = []
    self._epoch = self._first_epoch = done + 1
    self._laps: dict[str, float] = {}
    self._start = self._last = time.monotonic()
    if path.exists():
      rows = files.read_csv(
          path, {name: int if name in _INTEGERS else float for name in _COLUMNS}
      )
      self._rows = [row for row in rows if row['epoch'] <= done]

  def start(self) -> None:
    """An epoch begins."""
    self._start = self._last = time.monotonic()

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
    epoch = int(self._rows[-1]['epoch'])
    self._rows[-1] = {
        'epoch': epoch,
        'seconds': round(self.elapsed(), 6),
        **self._laps,
        'compiled': int(epoch == self._first_epoch),
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
    return (
        f'{mean["seconds"]:.3f} s an epoch, of which {mean["training"]:.3f}'
        f' training and {mean["validation"]:.3f} validation (mean of'
        f' {len(rows)}, without compilation)'
    )
