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

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo import models
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks.synthetic import made


class AddingProblem(made.MadeTask):
  """Regression of a sum at the last step.

  Attributes:
    splits: 'train' is made on the device; 'validation' and 'test' are fixed,
      with 'inputs' float32 [N, T, 2], number and mark, and 'sum' float32 [N].
  """

  metrics = (protocol.Metric('mse', higher_is_better=False, form='.3g'),)
  has_stream = True
  rules: fields.Rules = {**made.RULES, 'length': fields.integer(2, 20_000)}

  def _set_up(self, config):
    super()._set_up(config)
    self.dataset = f'adding problem of {config.data.length:,} steps'

  def build_model(self, rngs):
    backbone = backbones.build(self._model, 2, rngs)
    return models.SequenceModel(backbone, 1, rngs=rngs)

  def evaluate(self, model, examples, rngs=None) -> protocol.Evaluation:
    """Returns squared errors and predicted sums of a batch."""
    sums = _sums(model, examples['inputs'], rngs)
    squares = (sums - examples['sum']) ** 2
    return protocol.Evaluation(squares, {'mse': squares}, predictions=sums)

  def predict(self, model, inputs) -> jax.Array:
    """Returns sums, float32 [B], of numbers and marks, [B, T, 2]."""
    return _sums(model, inputs)

  def _make_batch(self, key):
    of_values, of_first, of_second = jax.random.split(key, 3)
    size, length = self.batch_size, self._data.length
    draw = functools.partial(jax.random.randint, shape=(size, 1))
    values = jax.random.uniform(of_values, (size, length))
    first = draw(of_first, minval=0, maxval=length // 2)
    second = draw(of_second, minval=length // 2, maxval=length)
    return _examples(values, first, second, jnp)

  def _make_examples(self, rng, count):
    length = self._data.length
    values = rng.random((count, length), np.float32)
    first = rng.integers(0, length // 2, (count, 1))
    second = rng.integers(length // 2, length, (count, 1))
    return _examples(values, first, second, np)


def _examples(values, first, second, array: types.ModuleType) -> dict[str, Any]:
  """Returns examples by the places [N, 1] of marks, of jax.numpy or numpy."""
  time = np.arange(values.shape[1])
  marked = (time == first) | (time == second)
  return {
      'inputs': array.stack([values, marked.astype(array.float32)], axis=-1),
      'sum': array.sum(array.where(marked, values, 0.0), axis=1),
  }


def _sums(model, inputs, rngs=None) -> jax.Array:
  return model(inputs, rngs=rngs)[:, 0].astype(jnp.float32)
