"""Answers of a sequence model: classes or numbers, with losses and metrics.

Both kinds can be asked of a sequence or of each of its steps: the leading axes
are [B] or [B, T].

Dimensions: B batch, T time, D numbers of an answer.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.tasks import protocol
from rnnzoo.tasks.series import sequence_arrays

Array = jax.Array | np.ndarray

METRICS = (
    protocol.Metric('mse', higher_is_better=False, form='.4g'),
    protocol.Metric('mae', higher_is_better=False, form='.4g'),
)


class Answers(abc.ABC):
  """The kind of the answers.

  Attributes:
    metrics: the metrics, the main one first.
    out_features: numbers that the model gives for an answer.
    shift: numbers taken off answers before float32 rounds them, [D].
  """

  metrics: tuple[protocol.Metric, ...]
  out_features: int
  shift: np.ndarray = np.zeros(1)

  @abc.abstractmethod
  def evaluate(
      self, outputs: jax.Array, y: Array, smoothing: float
  ) -> protocol.Evaluation:
    """Returns losses, scores and predictions, each with the leading axes.

    Args:
      outputs: outputs of the model, [..., out_features].
      y: the right answers.
      smoothing: the smoothing of labels.
    """

  @abc.abstractmethod
  def predict(self, outputs: jax.Array) -> jax.Array:
    """Returns predictions from the model's outputs."""

  @abc.abstractmethod
  def describe(self, y: np.ndarray) -> dict[str, Any]:
    """Returns numbers about a split's answers, which have one leading axis."""

  @abc.abstractmethod
  def arguments(self) -> dict[str, list[Any]]:
    """Returns the argument of `restore`, which JSON can hold."""

  def measure(self, y: np.ndarray, predictions: np.ndarray) -> dict[str, Any]:
    """Returns results that are no means, from arrays of one leading axis."""
    del y, predictions
    return {}

  def report(self, results: Sequence[Mapping[str, Any]]) -> protocol.Report:
    """Returns the part of the answers in the report of a run."""
    del results
    return protocol.Report()


class Classes(Answers):
  """One of several classes; y is int32.

  Args:
    names: names of the classes.
  """

  metrics = protocol.METRICS

  def __init__(self, names: Sequence[str]):
    self.names = tuple(names)
    self.out_features = len(self.names)

  def evaluate(self, outputs, y, smoothing) -> protocol.Evaluation:
    return protocol.evaluation(outputs, y, smoothing)

  def arguments(self) -> dict[str, list[Any]]:
    return {'names': list(self.names)}

  def predict(self, outputs) -> jax.Array:
    return jnp.argmax(outputs, axis=-1).astype(jnp.int32)

  def measure(self, y, predictions) -> dict[str, Any]:
    return protocol.confusion_metrics(y, predictions, len(self.names))

  def describe(self, y) -> dict[str, Any]:
    counts = np.bincount(y, minlength=len(self.names))
    return {'classes': dict(zip(self.names, counts.tolist(), strict=True))}

  def report(self, results) -> protocol.Report:
    return protocol.confusions_report(results, self.names)


class Numbers(Answers):
  """Numbers; y is float32 [..., D], less the shift.

  The model's outputs count in deviations from the mean of the training answers,
  and so does the loss; metrics are in the units of the data. So are scores, but
  for answers so large or small that float32 has not their squares.

  Args:
    mean: mean of the training answers less the shift, [D]; zeros for outputs in
      units of the data.
    deviation: their standard deviation, [D]; ones for units of the data.
    shift: numbers taken off answers before float32 rounds them, [D].
  """

  def __init__(
      self,
      mean: np.ndarray,
      deviation: np.ndarray,
      shift: np.ndarray | float = 0.0,
  ):
    self.mean = np.asarray(mean, np.float32)
    self.shift = np.zeros(self.mean.shape) + shift
    self.deviation = np.asarray(deviation, np.float32)
    self.out_features = len(self.mean)
    exponent = int(np.frexp(self.deviation.max())[1])
    self._unit = 2.0 ** exponent if abs(exponent) > 40 else 1.0
    mse, mae = METRICS
    self.metrics = (
        mse._replace(unit=self._unit**2),
        mae._replace(unit=self._unit),
    )

  def evaluate(self, outputs, y, smoothing) -> protocol.Evaluation:
    del smoothing
    y = sequence_arrays.standardized(y, self.mean, self.deviation)
    deviations = jnp.asarray(outputs, jnp.float32) - y
    errors = deviations * (self.deviation / np.float32(self._unit))
    return protocol.Evaluation(
        jnp.mean(deviations**2, axis=-1),
        {
            'mse': jnp.mean(errors**2, axis=-1),
            'mae': jnp.mean(jnp.abs(errors), axis=-1),
        },
        predictions=self.predict(outputs),
    )

  def arguments(self) -> dict[str, list[Any]]:
    return {
        'mean': self.mean.tolist(),
        'deviation': self.deviation.tolist(),
        'shift': self.shift.tolist(),
    }

  def predict(self, outputs) -> jax.Array:
    return outputs.astype(jnp.float32) * self.deviation + self.mean

  def describe(self, y) -> dict[str, Any]:
    return {'answers': sequence_arrays.statistics(y)}


def restore(arguments: Mapping[str, Any]) -> Answers:
  """Returns the answers of which `Answers.arguments` returned this."""
  kind = Classes if 'names' in arguments else Numbers
  return kind(**arguments)
