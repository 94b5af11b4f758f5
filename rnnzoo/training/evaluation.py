"""The results of all examples of a split, batch by batch.

Dimensions: N examples of a split, S batches, B examples of a batch.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import numpy as np

from rnnzoo.tasks import protocol
from rnnzoo.training import placement as placements


class OnHost(NamedTuple):
  """A split that stays on the host.

  Attributes:
    examples: arrays [N, ...] by name.
    placement: the devices that evaluate.
  """

  examples: protocol.Examples
  placement: placements.Placement


def order(batch_size: int, num_devices: int, size: int) -> np.ndarray:
  """Returns the examples of each batch, int32 [S, B].

  The last batch is filled up with example 0, whose results are cut off.

  Args:
    batch_size: B, rounded up to a multiple of the number of devices.
    num_devices: that share a batch.
    size: N.
  """
  each = -(-min(size, batch_size) // num_devices)
  batch = each * num_devices
  num_batches = -(-size // batch)
  indices = np.zeros(num_batches * batch, np.int32)
  indices[:size] = np.arange(size)
  return indices.reshape(num_batches, batch)


def whole(
    evaluation_order: Callable[[int], np.ndarray],
    evaluate_batches: Callable[..., protocol.Evaluation],
    axis: int,
    params: nnx.State,
    statistics: nnx.State,
    split: Any,
    predict: bool = False,
) -> protocol.Evaluation:
  """Returns the results of all examples of a split.

  Args:
    evaluation_order: (N) -> int32 [S, B], the examples of each batch.
    evaluate_batches: the compiled function, which returns [..., S, B, ...].
    axis: which axis of its results is the first of these.
    params: the parameters.
    statistics: all else that the model stores.
    split: what `load` returned.
    predict: whether predictions are wanted.
  """

  def join(size, x):
    # Batches and the examples of each become one axis.
    x = np.asarray(x)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return x[(slice(None),) * axis + (slice(size),)]

  def run_on_host(split):
    # One piece is on its way while the results of the one before are read.
    size, running, parts = protocol.num_examples(split.examples), [], []
    indices = evaluation_order(size)
    length = placements.batches_of_piece(split.examples, *indices.shape)
    for first in range(0, len(indices), length):
      steps = np.minimum(np.arange(first, first + length), len(indices) - 1)
      piece = split.placement.batches(split.examples, indices[steps]).examples
      running.append(
          evaluate_batches(params, statistics, piece, None, predict=predict)
      )
      if len(running) > 1:
        parts.append(jax.tree.map(np.asarray, running.pop(0)))
    parts.append(jax.tree.map(np.asarray, running.pop()))
    whole = jax.tree.map(lambda *x: np.concatenate(x, axis), *parts)
    return jax.tree.map(functools.partial(join, size), whole)

  def run(examples):
    if isinstance(examples, OnHost):
      return run_on_host(examples)
    if isinstance(examples, placements.Batches):
      (examples, size), indices = examples, None
    else:
      size = protocol.num_examples(examples)
      indices = evaluation_order(size)
    return jax.tree.map(
        functools.partial(join, size),
        evaluate_batches(
            params, statistics, examples, indices, predict=predict
        ),
    )

  if isinstance(split, Mapping | placements.Batches | OnHost):
    return run(split)
  parts = [run(bucket) for bucket in split]
  predictions = [part.predictions for part in parts] if predict else None
  joined = jax.tree.map(
      lambda *arrays: np.concatenate(arrays, axis),
      *[part._replace(predictions=None) for part in parts],
  )
  return joined._replace(predictions=predictions)
