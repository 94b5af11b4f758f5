"""The adding problem: the sum of two marked numbers of a long sequence.

Every step shows a number, uniform in [0, 1), and a mark, 0 or 1. One mark is in
the first half of the sequence, one in the second. The answer, at the last step,
is the sum of the two marked numbers. To answer 1 always has a mean squared
error of 1/6 = .1667, the variance of the sum; papers often say .1767.

References:
  S. Hochreiter and J. Schmidhuber, 1997, "Long short-term memory", section 5.4.
  Q. V. Le, N. Jaitly and G. E. Hinton, 2015, "A simple way to initialize
  recurrent networks of rectified linear units", section 4.1.
"""

from collections.abc import Mapping
import functools
import types

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from rnnzoo import models
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol

_DATA_RULES: Mapping[str, fields.Rule] = types.MappingProxyType(
    {
        'length': fields.integer(2, 20_000),
        'steps_per_epoch': fields.integer(1, 10**6),
        'num_validation': fields.integer(1, 10**4),
        'num_test': fields.integer(1, 10**4),
        'seed': fields.seed(),
    }
)


class AddingProblem(protocol.Task):
  """Regression of a sum at the last step.

  Attributes:
    splits: 'train' is made on the device; 'validation' and 'test' are fixed,
      with 'inputs' float32 [N, T, 2], number and mark, and 'sum' float32 [N].
  """

  metrics = (protocol.Metric('mse', higher_is_better=False, form='.3g'),)

  def __init__(self, config: ml_collections.ConfigDict):
    """Makes the fixed splits.

    Args:
      config: a config with `data` and `model`, as in `configs/base_adding.py`.

    Raises:
      ValueError: a field has a value that does not exist.
    """
    self._set_up(config)
    self.batch_size = config.batch_size
    data = config.data
    self.dataset = f'adding problem of {data.length:,} steps'
    rng = np.random.default_rng(data.seed)
    self.splits: Mapping[str, protocol.Split] = {
        'train': protocol.Generator(
            functools.partial(
                make_batch, batch_size=config.batch_size, length=data.length
            ),
            data.steps_per_epoch,
        ),
        'validation': make_examples(rng, data.num_validation, data.length),
        'test': make_examples(rng, data.num_test, data.length),
    }

  def _set_up(self, config: ml_collections.ConfigDict) -> None:
    fields.check(config.data, _DATA_RULES, 'config.data')
    backbones.check(config.model)
    self._model = config.model

  def describe(self):
    return {}

  @classmethod
  def restore(cls, config, described):
    del described
    task = cls.__new__(cls)
    task._set_up(config)
    return task

  def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
    backbone = backbones.build(self._model, 2, rngs)
    return models.SequenceModel(backbone, 1, rngs=rngs)

  def evaluate(
      self,
      model: nnx.Module,
      examples: protocol.Examples,
      rngs: nnx.Rngs | None = None,
  ) -> protocol.Evaluation:
    """Returns squared errors and predicted sums of a batch."""
    answers = _answers(model, examples['inputs'], rngs)
    squares = (answers - examples['sum']) ** 2
    return protocol.Evaluation(squares, {'mse': squares}, predictions=answers)

  def predict(self, model: nnx.Module, inputs: jax.Array) -> jax.Array:
    """Returns sums, float32 [B], of numbers and marks, [B, T, 2]."""
    return _answers(model, inputs)


def make_batch(
    key: jax.Array, batch_size: int, length: int
) -> dict[str, jax.Array]:
  """Returns a batch, made by JAX; see `AddingProblem.splits`."""
  of_values, of_first, of_second = jax.random.split(key, 3)
  draw = functools.partial(jax.random.randint, shape=(batch_size, 1))
  values = jax.random.uniform(of_values, (batch_size, length))
  first = draw(of_first, minval=0, maxval=length // 2)
  second = draw(of_second, minval=length // 2, maxval=length)
  time = jnp.arange(length)
  marked = (time == first) | (time == second)
  return {
      'inputs': jnp.stack([values, marked.astype(jnp.float32)], axis=-1),
      'sum': jnp.sum(jnp.where(marked, values, 0.0), axis=1),
  }


def make_examples(
    rng: np.random.Generator, num_examples: int, length: int
) -> dict[str, np.ndarray]:
  """Returns N examples like `make_batch`'s, made by numpy."""
  values = rng.random((num_examples, length), np.float32)
  first = rng.integers(0, length // 2, num_examples)
  second = rng.integers(length // 2, length, num_examples)
  rows = np.arange(num_examples)
  marks = np.zeros_like(values)
  marks[rows, first] = marks[rows, second] = 1.0
  return {
      'inputs': np.stack([values, marks], axis=-1),
      'sum': values[rows, first] + values[rows, second],
  }


def _answers(model, inputs, rngs=None) -> jax.Array:
  return model(inputs, rngs=rngs)[:, 0].astype(jnp.float32)
