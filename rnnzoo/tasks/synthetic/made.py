"""Tasks whose data are made from a seed: a run's config says all of them."""

import abc
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections
import numpy as np

from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol

RULES: fields.Rules = {
    'steps_per_epoch': fields.integer(1, 10**6),
    'num_validation': fields.integer(1, 10**4),
    'num_test': fields.integer(1, 10**4),
    'seed': fields.seed(),
}


class MadeTask(protocol.ConfigTask):
  """A task that makes its data: batches on the device, all else by numpy."""

  # Lessons of the `Generator`.
  lessons: tuple[Any, ...] = ()

  def __init__(self, config: ml_collections.ConfigDict):
    """Makes the splits of a config as in `configs/base_<task>.py`."""
    self._set_up(config)
    rng = np.random.default_rng(self._data.seed)
    self.splits: Mapping[str, protocol.Split] = {
        'train': protocol.Generator(
            self._make_batch, self._data.steps_per_epoch, self.lessons
        ),
        **self._make_fixed(rng),
    }

  def describe(self):
    return {}

  @abc.abstractmethod
  def _make_batch(self, key: jax.Array) -> dict[str, jax.Array]:
    """Returns a batch, made by JAX; see `splits`."""

  def _make_fixed(self, rng: np.random.Generator) -> dict[str, Any]:
    """Returns the splits that are no `Generator`."""
    return {
        'validation': self._make_examples(rng, self._data.num_validation),
        'test': self._make_examples(rng, self._data.num_test),
    }

  def _make_examples(
      self, rng: np.random.Generator, count: int
  ) -> dict[str, np.ndarray]:
    """Returns examples like `_make_batch`'s, made by numpy."""
    raise NotImplementedError
