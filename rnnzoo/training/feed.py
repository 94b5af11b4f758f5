"""The training examples of each epoch, on the devices, in that epoch's order.

One device holds the whole split and picks the batches itself. Several devices
get their parts of all batches once an epoch, while the epoch before it runs: so
no step has to send examples from one device to another, and no device or
process holds more than its part.
"""

from collections.abc import Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np

from rnnzoo import tasks
from rnnzoo.training import placement as placements
from rnnzoo.training import program as programs


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
      program: programs.Program,
      placement: placements.Placement,
      examples: tasks.Examples,
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

  def epoch(
      self, epoch: int
  ) -> tuple[Mapping[str, jax.Array | np.ndarray], jax.Array | None]:
    """Returns what `program.train_epoch` takes as examples and order.

    Args:
      epoch: which one; after the first call, the one after the last.
    """
    if self._placement.mesh is None:
      return self._examples, self._program.shuffle(self._key, epoch)
    batches = (self._next or self._prepare(epoch)).result()
    self._next = None
    if epoch < self._num_epochs:
      self._next = self._prepare(epoch + 1)
    return batches.examples, None

  def _prepare(self, epoch: int) -> futures.Future[Any]:
    # The order is known before the devices are busy with an epoch.
    order = np.asarray(self._program.shuffle(self._key, epoch))
    return self._worker.submit(self._placement.batches, self._examples, order)
