"""Tasks: what is learnt. How it is learnt is `rnnzoo.training`'s business.

A task owns its data, its model and its loss, and hands the training loop three
things: arrays that fit on the device, a way to build the model, and a function
from a batch of examples to one loss and one prediction an example. To add one,
write a file with a class that satisfies `Task` and name it in `TASKS`; a
config then chooses it with `config.task`.

Dimensions: N examples of a split, B batch, T time.
"""

from collections.abc import Callable, Mapping
import types
from typing import Protocol

from flax import nnx
import jax
import ml_collections
import numpy as np

from rnnzoo.tasks import smnist

# Arrays by name. All have the same leading axis, one entry an example.
Examples = Mapping[str, jax.Array | np.ndarray]


class Task(Protocol):
  """What the training loop asks of a task.

  Attributes:
    dataset: the name of the data that were really read. Every figure and every
      metric file carries it.
    splits: 'train', 'validation' and 'test', each a mapping of arrays [N, ...].
      The entry 'label' [N] holds what `predictions` is compared with.
    batch_size: examples of one training step.
    class_names: one name a class, for the report.
  """

  dataset: str
  splits: Mapping[str, Examples]
  batch_size: int
  class_names: tuple[str, ...]

  def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
    """Returns a freshly initialised model.

    Raises:
      ValueError: the config asks for a model that does not exist.
    """

  def evaluate(
      self, model: nnx.Module, examples: Examples, rngs: nnx.Rngs | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (losses [B], predictions [B]) of a batch.

    Args:
      model: what `build_model` returned, with trained parameters.
      examples: arrays [B, ...], rows of one of the `splits`.
      rngs: the source of dropout masks in training, None in evaluation.
    """


TASKS: Mapping[str, Callable[[ml_collections.ConfigDict], Task]] = (
    types.MappingProxyType({'smnist': smnist.SequentialMnist})
)
