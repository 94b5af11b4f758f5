"""The training examples of a seed, in the order of each epoch, on the devices.

An epoch comes in pieces: some steps, and the batches that they see. One device
holds the whole split and picks the batches itself, and a generator makes them:
then the epoch is one piece. Several devices get their parts of all batches of
an epoch while the epoch before it runs, so that no step sends examples from one
device to another. Data that stay on the host have pieces of a few batches, and
the examples may lie on a disk (numpy's memmap). A thread gathers the next piece
while the devices train, so they hold two pieces, however large the data are.

Dimensions: S steps of an epoch, K steps of a piece, B batch.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
import functools
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from rnnzoo.tasks import protocol
from rnnzoo.training import experiment as experiments
from rnnzoo.training import placement as placements
from rnnzoo.training import step as step_lib
from rnnzoo.training import visits

# Seconds that one compiled call should take on a CPU: long enough for Python's
# share to vanish, short enough for the progress bar to move.
_SHORT_CALL, _LONG_CALL = 0.3, 1.5


class Piece(NamedTuple):
  """Some steps of an epoch."""

  examples: Any  # The examples for `Visits.visit`.
  order: Any  # The order that belongs to them.
  num_steps: int  # The number of steps; gathered batches may be more.


def training_split(experiment: experiments.Experiment) -> Any:
  """Returns the training split: on the device, if one holds the whole of it."""
  split = experiment.task.splits['train']
  if (
      isinstance(split, protocol.Generator)
      or experiment.config.keep_data_on == 'host'
      or experiment.placement.mesh
  ):
    return split
  return experiment.program.load(split)


class Feed:
  """The training examples of one seed, up to the last of `num_epochs`.

  They are as `training_split` returns them. The key is that of permutations.
  Pieces have a few batches if the data are kept on the host.
  """

  def __init__(
      self,
      program: step_lib.Program,
      placement: placements.Placement,
      examples: Any,
      key: jax.Array,
      num_epochs: int,
      keep_data_on: str = 'device',
  ):
    self._program, self._placement = program, placement
    self._examples, self._key = examples, key
    self._num_epochs, self._keep_data_on = num_epochs, keep_data_on
    self._blanks: dict[int, Any] = {}
    self._worker = futures.ThreadPoolExecutor(1)
    self._calls: Iterator[Callable[[], Piece]] | None = None
    self._ready: collections.deque[futures.Future[Piece]] = collections.deque()

  def epoch(self, epoch: int) -> Iterator[Piece]:
    """Yields the pieces of an epoch.

    Args:
      epoch: the epoch's number; after the first call, the last number plus 1.
        The last epoch's pieces have to be used up.
    """
    program, examples = self._program, self._examples
    steps = program.steps_per_epoch
    is_generator = isinstance(examples, protocol.Generator)
    is_here = self._keep_data_on == 'device' and self._placement.mesh is None
    if is_generator or is_here:
      if is_generator:
        examples = visits.Lesson(examples.lesson(epoch))
      order = self._placement.replicate(program.shuffle(self._key, epoch))
      yield Piece(examples, order, steps)
      return
    if self._calls is None:
      self._calls = self._of_epochs(epoch)
    while steps:
      while len(self._ready) < 2 and (call := next(self._calls, None)):
        self._ready.append(self._worker.submit(call))
      piece = self._ready.popleft().result()
      steps -= piece.num_steps
      yield piece

  def _of_epochs(self, first: int) -> Iterator[Callable[[], Piece]]:
    """Yields functions that gather the pieces from an epoch on."""
    steps = self._program.steps_per_epoch
    for epoch in range(first, self._num_epochs + 1):
      # The order is known before the devices are busy with an epoch.
      order = jax.tree.map(np.asarray, self._program.shuffle(self._key, epoch))
      if self._keep_data_on == 'device':
        length = steps
      elif isinstance(self._examples, Mapping):
        length = placements.batches_of_piece(self._examples, *order.shape)
      else:
        length = 1
      for start in range(0, steps, length):
        yield functools.partial(self._gather, order, start, length)

  def _gather(self, order: Any, start: int, length: int) -> Piece:
    """Returns a piece, whose examples are on the devices."""
    examples: Any
    if isinstance(order, visits.BucketOrder):
      examples, of_buckets = self._of_buckets(order, start, length)
    else:
      rows = placements.rows_of_piece(order, start, length)
      examples = self._placement.batches(self._examples, rows)
      of_buckets = None
    num_steps = min(length, self._program.steps_per_epoch - start)
    here = visits.PieceOrder(np.int32(start), of_buckets)
    return Piece(jax.block_until_ready(examples), here, num_steps)

  def _of_buckets(
      self, order: visits.BucketOrder, start: int, length: int
  ) -> tuple[tuple[Any, ...], visits.BucketOrder]:
    """Returns the batches of each bucket, and in which steps they are seen."""
    steps = slice(start, start + length)
    bucket, place = order.bucket[steps], np.zeros(length, np.int32)
    found = []
    for index, rows in enumerate(order.orders):
      here = bucket == index
      place[here] = np.arange(here.sum())
      examples, batches = self._examples[index], self._placement.batches
      if here.any():
        found.append(batches(examples, rows[order.place[steps][here]]))
        continue
      # Even so, the compiled step has a branch for it.
      if index not in self._blanks:
        self._blanks[index] = batches(examples, rows[:1])
      found.append(self._blanks[index])
    empty = (None,) * len(found)
    return tuple(found), visits.BucketOrder(bucket, place, empty)


def run_epoch(
    program: step_lib.Program,
    state: step_lib.TrainState,
    pieces: Iterable[Piece],
    scale: jax.typing.ArrayLike,
    key: jax.Array,
    on_progress: Callable[[int], None],
) -> step_lib.TrainState:
  """Returns the state an epoch later: one call a piece, or several on a CPU.

  `state` is donated. `scale` is the factor of the learning rate, `key` the key
  of dropout; `on_progress` gets, at times, the number of steps done.
  """
  # An epoch may take minutes on a CPU, and another call costs next to nothing.
  # Several processes have to make equal calls, however long a call takes.
  is_short = jax.default_backend() == 'cpu' and jax.process_count() == 1
  done, call_steps = 0, 1
  for examples, order, num_steps in pieces:
    end = done + num_steps
    while done < end:
      steps = min(call_steps, end - done) if is_short else num_steps
      is_epoch = not is_short and steps == program.steps_per_epoch
      given = examples, order, None if is_epoch else steps, scale, key
      start = time.monotonic()
      state = jax.block_until_ready(program.train_steps(state, *given))
      seconds = time.monotonic() - start
      done += steps
      on_progress(done)
      if seconds < _SHORT_CALL:
        call_steps = 2 * steps
      elif seconds > _LONG_CALL:
        call_steps = max(steps // 2, 1)
  return state
