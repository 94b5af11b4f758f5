"""Answers of a sequence model: classes or numbers, with losses and metrics.

Both kinds can be asked of a sequence or of each of its steps: the leading axes
are [B] or [B, T]. Both kinds have

  metrics       the metrics, the main one first
  out_features  numbers that the model gives for an answer
  shift         numbers taken off answers before float32 rounds them, [D]
  evaluate      losses, scores and predictions, with the leading axes, of
                outputs [..., out_features], answers and a smoothing of labels
  predict       predictions from the model's outputs
  measure       results that are no means, of arrays of one leading axis
  describe      numbers about answers of one leading axis
  report        their part in the report of a run
  arguments     the argument of `restore`, which JSON can hold

Dimensions: B batch, T time, D numbers of an answer.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.tasks import protocol
from rnnzoo.tasks.series import sequence_arrays


class Classes:
  """One of several classes; y is int32.

  Args:
    names: names of the classes.
  """

  metrics = protocol.METRICS
  shift = np.zeros(1)

  def __init__(self, names: Sequence[str]):
    self.names = tuple(names)
    self.out_features = len(self.names)

  def evaluate(self, outputs, y, smoothing) -> protocol.Evaluation:
    return protocol.evaluation(outputs, y, smoothing)

  def predict(self, outputs) -> jax.Array:
    return jnp.argmax(outputs, axis=-1).astype(jnp.int32)

  def measure(self, y, predictions) -> dict[str, Any]:
    return protocol.confusion_metrics(y, predictions, len(self.names))

  def describe(self, y) -> dict[str, Any]:
    counts = np.bincount(y, minlength=len(self.names))
    return {'classes': dict(zip(self.names, counts.tolist(), strict=True))}

  def report(self, results) -> protocol.Report:
    return protocol.confusions_report(results, self.names)

  def arguments(self) -> dict[str, Any]:
    return {'names': list(self.names)}


class Numbers:
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
    metric = functools.partial(
        protocol.Metric, higher_is_better=False, form='.4g'
    )
    self.metrics = (
        metric('mse', unit=self._unit**2),
        metric('mae', unit=self._unit),
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

  def predict(self, outputs) -> jax.Array:
    return outputs.astype(jnp.float32) * self.deviation + self.mean

  def measure(self, y, predictions) -> dict[str, Any]:
    del y, predictions
    return {}

  def describe(self, y) -> dict[str, Any]:
    return {'answers': sequence_arrays.statistics(y)}

  def report(self, results) -> protocol.Report:
    del results
    return protocol.Report()

  def arguments(self) -> dict[str, Any]:
    return {
        'mean': self.mean.tolist(),
        'deviation': self.deviation.tolist(),
        'shift': self.shift.tolist(),
    }


Answers = Classes | Numbers


def restore(arguments: Mapping[str, Any]) -> Answers:
  """Returns the answers of which `arguments` returned this."""
  return (Classes if 'names' in arguments else Numbers)(**arguments)
