"""Training examples that stay on the host: a few batches at a time.

A thread gathers the batches of the next piece and sends them to the devices
while these train on the last one. So a device holds three pieces at most,
however large the data are, and their examples may lie on a disk (numpy's
memmap). Order and batches are those of data on the device.

Dimensions: S steps of an epoch, K steps of a piece, B batch.
"""

import collections
from collections.abc import Callable, Iterator
from concurrent import futures
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from rnnzoo.training import placement as placements
from rnnzoo.training import program as programs
from rnnzoo.training import visits

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
      program: programs.Program,
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
