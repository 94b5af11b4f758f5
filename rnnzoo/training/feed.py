"""The training examples of each epoch, on the devices, in that epoch's order.

One device holds the whole split and picks the batches itself. Several devices
get their parts of all batches once an epoch, while the epoch before it runs: so
no step has to send examples from one device to another, and no device or
process holds more than its part.
"""

from concurrent import futures
from typing import Any

import jax
import numpy as np

from rnnzoo.tasks import protocol
from rnnzoo.training import placement as placements
from rnnzoo.training import program as programs
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
      program: programs.Program,
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
    """Returns what `program.train_epoch` takes as examples and order.

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
