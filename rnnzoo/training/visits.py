"""Which examples each step of an epoch sees, whatever the training split is.

  arrays     batches in an order that is a function of (seed, epoch);
  buckets    each is ordered as arrays are, and so are the batches of all: the
             compiled step has one branch a bucket;
  generator  made in the step, by a key that is a function of (seed, step); the
             step is compiled for each of the generator's lessons.

Dimensions: N examples of a split, S steps of an epoch, B batch.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.tasks import protocol
from rnnzoo.training import placement as placements

T = TypeVar('T')


class BucketOrder(NamedTuple):
  """The order of an epoch over buckets."""

  bucket: Any  # The bucket of each step's batch, int32 [S].
  place: Any  # The index of the batch in its bucket, int32 [S].
  # int32 [S of the bucket, B] of each bucket, which examples its batches have;
  # None where the buckets are arrays [S of the bucket, B, ...].
  orders: tuple[Any, ...]


class PieceOrder(NamedTuple):
  """The order of a piece of an epoch, whose batches are arrays [K, B, ...]."""

  # int32 [], the steps of the epoch before the piece.
  first: jax.typing.ArrayLike
  # The order of buckets in the K steps of the piece; None for arrays.
  order: BucketOrder | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Lesson:
  """The examples of a generator in an epoch: a constant for the compiler."""

  # The lesson's index, or the number of lessons in epochs after all.
  index: int


class Visits:
  """The steps of an epoch over a training split."""

  def __init__(
      self,
      split: protocol.Split,
      batch_size: int,
      placement: placements.Placement,
  ):
    self._batch_size, self._placement = batch_size, placement
    self._generator = split if isinstance(split, protocol.Generator) else None
    if isinstance(split, protocol.Generator):
      self.steps_per_epoch = split.steps_per_epoch
      return
    self._are_buckets = not isinstance(split, Mapping)
    self._sizes = tuple(map(protocol.num_examples, protocol.buckets(split)))
    self._counts = [-(-size // batch_size) for size in self._sizes]
    self.steps_per_epoch = sum(self._counts)

  def order(self, key: jax.Array, epoch: jax.typing.ArrayLike) -> Any:
    """Returns the order of an epoch: int32 [S, B], or a `BucketOrder`.

    The last batch is filled up with the first examples of the order, so every
    example is seen in every epoch. A generator has the key itself, the seed's.
    """
    if self._generator:
      return key
    key = jax.random.fold_in(key, epoch)
    if not self._are_buckets:
      return self._shuffle(key, 0)
    count = len(self._sizes)
    orders = tuple(
        self._shuffle(jax.random.fold_in(key, i), i) for i in range(count)
    )
    bucket = np.repeat(np.arange(count), self._counts)
    place = np.concatenate([np.arange(count) for count in self._counts])
    visits = jax.random.permutation(
        jax.random.fold_in(key, count), self.steps_per_epoch
    )
    return BucketOrder(
        jnp.asarray(bucket, jnp.int32)[visits],
        jnp.asarray(place, jnp.int32)[visits],
        orders,
    )

  def _shuffle(self, key: jax.Array, bucket: int) -> jax.Array:
    size, count = self._sizes[bucket], self._counts[bucket]
    order = jax.random.permutation(key, size)
    wrapped = jnp.arange(count * self._batch_size) % size
    return order[wrapped].reshape(count, self._batch_size)

  def visit(
      self,
      function: Callable[[Mapping[str, jax.Array]], T],
      examples: Any,
      order: Any,
      step: jax.Array,
  ) -> T:
    """Returns a function's value for the batch of a step; it is traced.

    Args:
      function: function of a batch, arrays [B, ...] by name.
      examples: arrays [N, ...] by name, or arrays [K, B, ...] with a
        `PieceOrder`; buckets of such arrays; the `Lesson` of a generator.
      order: a result of `order`, or a `PieceOrder`.
      step: the number of steps before.
    """
    if self._generator:
      makers = [make for _, make in self._generator.lessons]
      makers.append(self._generator.make_batch)
      given: tuple[jax.Array, ...] = order, step
      if not self._generator.is_ordered:
        given = (jax.random.fold_in(order, step),)
      return function(self._placement.split(makers[examples.index](*given)))
    place = step % self.steps_per_epoch
    if isinstance(order, PieceOrder):
      place, order = place - order.first, order.order
    if not self._are_buckets:
      return function(_pick(examples, order, place))

    def branch(bucket, place):
      return function(_pick(examples[bucket], order.orders[bucket], place))

    buckets = range(len(self._sizes))
    branches = [functools.partial(branch, bucket) for bucket in buckets]
    return jax.lax.switch(order.bucket[place], branches, order.place[place])


def _pick(
    examples: Mapping[str, jax.Array],
    order: jax.Array | None,
    index: jax.Array,
) -> dict[str, jax.Array]:
  """Returns the batch of that index."""
  if order is not None:
    indices = order[index]
    return {name: array[indices] for name, array in examples.items()}
  take = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
  return {name: take(array, index) for name, array in examples.items()}
