"""The training examples of each epoch, on the devices, in that epoch's order.

One device holds the whole split and picks the batches itself. Several devices
get their parts of all batches once an epoch, while the epoch before it runs: so
no step has to send examples from one device to another, and no device or
process holds more than its part.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import functools
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from rnnzoo.tasks import protocol
from rnnzoo.training import placement as placements
from rnnzoo.training import step
from rnnzoo.training import step as step_lib
from rnnzoo.training import visits


class Feed:
  """The training examples of one seed.

  Args:
    program: the compiled functions.
    placement: the devices.
    examples: the training split: on one device, what it holds; else on the
      host.
    key: of all permutations.
    num_epochs: the last epoch.
  """

  def __init__(
      self,
      program: step.Program,
      placement: placements.Placement,
      examples: Any,
      key: jax.Array,
      num_epochs: int,
  ):
    self._program = program
    self._placement = placement
    self._examples = examples
    self._key = key
    self._num_epochs = num_epochs
    self._worker = futures.ThreadPoolExecutor(1)
    self._next: futures.Future | None = None

  def epoch(self, epoch: int) -> tuple[Any, Any]:
    """Returns what `step.train_epoch` takes as examples and order.

    Args:
      epoch: which one; after the first call, the one after the last.
    """
    if isinstance(self._examples, protocol.Generator):
      drawn = visits.generated(self._examples, self._key, epoch)
      return self._placement.replicate(drawn), None
    if self._placement.mesh is None:
      return self._examples, self._program.shuffle(self._key, epoch)
    batches = (self._next or self._prepare(epoch)).result()
    self._next = None
    if epoch < self._num_epochs:
      self._next = self._prepare(epoch + 1)
    return batches

  def _prepare(self, epoch: int) -> futures.Future[Any]:
    # The order is known before the devices are busy with an epoch.
    order = jax.tree.map(np.asarray, self._program.shuffle(self._key, epoch))
    return self._worker.submit(self._place, order)

  def _place(self, order: Any) -> tuple[Any, Any]:
    place = lambda *given: self._placement.batches(*given).examples
    if not isinstance(order, visits.BucketOrder):
      return place(self._examples, order), None
    examples = tuple(map(place, self._examples, order.orders))
    # The examples are in this order now; which bucket is next, is still one.
    return examples, order._replace(orders=(None,) * len(examples))


# Training examples that stay on the host: a few batches at a time.
#
# A thread gathers the batches of the next piece and sends them to the devices
# while these train on the last one. So a device holds three pieces at most,
# however large the data are, and their examples may lie on a disk (numpy's
# memmap). Order and batches are those of data on the device.
#
# Dimensions: S steps of an epoch, K steps of a piece, B batch.


# Pieces that are prepared ahead of the one in use.
_AHEAD = 2


class Piece(NamedTuple):
  """Some steps of an epoch.

  Attributes:
    examples: arrays [K, B, ...] by name, or buckets of them, on the devices.
    order: says so.
    num_steps: how many of the K batches are to be used.
  """

  examples: Any
  order: visits.PieceOrder
  num_steps: int


class Pieces:
  """The training examples of one seed, from the host.

  Args:
    program: the compiled functions.
    placement: the devices.
    examples: the training split: arrays, or buckets of them.
    key: of all permutations.
    num_epochs: the last epoch.
  """

  def __init__(
      self,
      program: step_lib.Program,
      placement: placements.Placement,
      examples: Any,
      key: jax.Array,
      num_epochs: int,
  ):
    self._program, self._placement = program, placement
    self._examples, self._key = examples, key
    self._num_epochs = num_epochs
    self._blanks: list[Any] = []
    self._worker = futures.ThreadPoolExecutor(1)
    self._calls: Iterator[Callable[[], Piece]] | None = None
    self._ready: collections.deque[futures.Future[Piece]] = collections.deque()

  def epoch(self, epoch: int) -> Iterator[Piece]:
    """Yields the pieces of an epoch.

    Args:
      epoch: which one; after the first call, the one after the last. The pieces
        of the last one have to be used up.
    """
    if self._calls is None:
      self._calls = self._of_epochs(epoch)
    steps = 0
    while steps < self._program.steps_per_epoch:
      while len(self._ready) <= _AHEAD and (call := next(self._calls, None)):
        self._ready.append(self._worker.submit(call))
      piece = self._ready.popleft().result()
      steps += piece.num_steps
      yield piece

  def _of_epochs(self, first: int) -> Iterator[Callable[[], Piece]]:
    for epoch in range(first, self._num_epochs + 1):
      order = jax.tree.map(np.asarray, self._program.shuffle(self._key, epoch))
      if isinstance(order, visits.BucketOrder):
        for step in range(self._program.steps_per_epoch):
          yield functools.partial(self._of_bucket, order, step)
      else:
        length = placements.batches_of_piece(self._examples, *order.shape)
        for step in range(0, len(order), length):
          yield functools.partial(self._of_arrays, order, step, length)

  def _of_arrays(self, order: np.ndarray, first: int, length: int) -> Piece:
    # The last piece is as long as the others: one program is compiled for all.
    steps = np.arange(first, first + length)
    rows = order[np.minimum(steps, len(order) - 1)]
    examples = self._placement.batches(self._examples, rows).examples
    num_steps = min(length, len(order) - first)
    here = visits.PieceOrder(np.int32(first), None)
    return Piece(jax.block_until_ready(examples), here, num_steps)

  def _of_bucket(self, order: visits.BucketOrder, step: int) -> Piece:
    bucket, place = int(order.bucket[step]), int(order.place[step])
    examples = list(self._blanks or self._make_blanks(order))
    examples[bucket] = self._placement.batches(
        self._examples[bucket], order.orders[bucket][place][None]
    ).examples
    only = visits.BucketOrder(
        np.full(1, bucket, np.int32),
        np.zeros(1, np.int32),
        (None,) * len(examples),
    )
    here = visits.PieceOrder(np.int32(step), only)
    return Piece(jax.block_until_ready(tuple(examples)), here, 1)

  def _make_blanks(self, order: visits.BucketOrder) -> list[Any]:
    """Keeps a batch of each bucket, for the steps that use another one."""
    self._blanks = [
        self._placement.batches(examples, rows[:1]).examples
        for examples, rows in zip(self._examples, order.orders, strict=True)
    ]
    return self._blanks


# The calls of compiled functions in which an epoch is trained.


# Seconds that one compiled call should take on a CPU: long enough for Python's
# share to vanish, short enough for the progress bar to move.
_SHORT_CALL, _LONG_CALL = 0.3, 1.5


def run_epoch(
    program: step.Program,
    state: step.TrainState,
    examples: Any,
    order: Any,
    scale: jax.typing.ArrayLike,
    key: jax.Array,
    on_progress: Callable[[int], None],
) -> step.TrainState:
  """Returns the state an epoch later: after one call, or on a CPU several.

  Args:
    program: the compiled functions.
    state: is donated: it cannot be used afterwards.
    examples: the training split, on the devices, as the feed gives it.
    order: of the epoch, likewise.
    scale: multiplies the learning rate.
    key: of dropout.
    on_progress: is told, from time to time, how many steps are done.
  """
  num_steps = program.steps_per_epoch
  # Several processes have to make the same calls, however long these take.
  if jax.default_backend() != 'cpu' or jax.process_count() > 1:
    state = jax.block_until_ready(
        program.train_epoch(state, examples, order, scale, key)
    )
    on_progress(num_steps)
    return state
  # An epoch may take minutes here, and another call costs next to nothing.
  done, call_steps = 0, 1
  while done < num_steps:
    call_steps = min(call_steps, num_steps - done)
    start = time.monotonic()
    state = jax.block_until_ready(
        program.train_steps(state, examples, order, call_steps, scale, key)
    )
    seconds = time.monotonic() - start
    done += call_steps
    on_progress(done)
    if seconds < _SHORT_CALL:
      call_steps *= 2
    elif seconds > _LONG_CALL:
      call_steps = max(call_steps // 2, 1)
  return state


def run_pieces(
    program: step.Program,
    state: step.TrainState,
    pieces: Iterable[Piece],
    scale: jax.typing.ArrayLike,
    key: jax.Array,
    on_progress: Callable[[int], None],
) -> step.TrainState:
  """Returns the state an epoch later, after one call for each of its pieces.

  Args:
    program: the compiled functions.
    state: is donated: it cannot be used afterwards.
    pieces: of the epoch.
    scale: multiplies the learning rate.
    key: of dropout.
    on_progress: is told, from time to time, how many steps are done.
  """
  done = 0
  for piece in pieces:
    # The next pieces are on their way meanwhile, and no more than these.
    state = jax.block_until_ready(
        program.train_steps(
            state, piece.examples, piece.order, piece.num_steps, scale, key
        )
    )
    done += piece.num_steps
    on_progress(done)
  return state
