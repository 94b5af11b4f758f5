"""Answers of a sequence model: classes or numbers, with losses and metrics.

Both kinds can be asked of a sequence or of each of its steps: the leading axes
are [B] or [B, T]. Both kinds have

  metrics       the metrics, the main one first
  out_features  numbers that the model gives for an answer
  known         (answers, with something finite where there is none; whether
                there is one, with the leading axes)
  evaluate      losses, scores and predictions, with the leading axes, of
                outputs [..., out_features], answers and a smoothing of labels
  predict       predictions from the model's outputs
  in_units      predictions in the units of the data, for the user
  encoded       answers of `Sequences` as in the splits, by which of them count
  given         a user's y as in the splits, by which of it is no padding
  measure       results that are no means, of arrays of one leading axis
  describe      numbers about answers of one leading axis
  report        their part in the report of a run
  arguments     the argument of `restore`, which JSON can hold

Dimensions: B batch, T time, D numbers of an answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo.tasks import array_checks
from rnnzoo.tasks import classification
from rnnzoo.tasks import protocol
from rnnzoo.tasks.series import sequence_arrays


class Classes:
  """One of several classes; y is int32."""

  metrics = classification.METRICS

  def __init__(self, names: Sequence[str]):
    self.names = tuple(names)
    self.out_features = len(self.names)

  def encoded(self, y, valid) -> np.ndarray:
    del valid
    return y

  def known(self, y) -> tuple[jax.Array, jax.Array]:
    known = y != sequence_arrays.NO_LABEL
    return jnp.where(known, y, 0), known

  def evaluate(self, outputs, y, smoothing) -> protocol.Evaluation:
    return classification.evaluation(outputs, y, smoothing)

  def predict(self, outputs) -> jax.Array:
    return jnp.argmax(outputs, axis=-1).astype(jnp.int32)

  def in_units(self, predictions) -> jax.Array:
    return predictions

  def given(self, y, valid) -> np.ndarray:
    y = array_checks.one(y, 'y must be one array')
    if y.shape == valid.shape and valid.ndim > 1:
      is_label = valid & (y != sequence_arrays.NO_LABEL)
      if is_label.any():
        y = np.where(is_label, y, y[is_label][0])
        found = classification.labels_of(y, self.names, valid.shape)
        return np.where(is_label | ~valid, found, sequence_arrays.NO_LABEL)
    return classification.labels_of(y, self.names, valid.shape)

  def measure(self, y, predictions) -> dict[str, Any]:
    return classification.confusion_metrics(y, predictions, len(self.names))

  def describe(self, y) -> dict[str, Any]:
    counts = np.bincount(y, minlength=len(self.names))
    return {'classes': dict(zip(self.names, counts.tolist(), strict=True))}

  def report(self, results) -> protocol.Report:
    return classification.confusions_report(results, self.names)

  def arguments(self) -> dict[str, Any]:
    return {'names': list(self.names)}


class Numbers:
  """Numbers; y and the model's outputs are float32 [..., D], in deviations.

  So is the loss; scores and metrics are in the units of the data.

  Args:
    mean: mean of the training answers, [D]; zeros for units of the data.
    deviation: their standard deviation, [D]; ones for units of the data.
  """

  metrics = tuple(
      protocol.Metric(name, higher_is_better=False, form='.4g')
      for name in ('mse', 'mae')
  )

  def __init__(self, mean: np.ndarray, deviation: np.ndarray):
    self.mean = np.asarray(mean, np.float64)
    self.deviation = np.asarray(deviation, np.float64)
    self.out_features = len(self.mean)

  def encoded(self, y, valid) -> np.ndarray:
    # A missing answer stays NaN.
    return sequence_arrays.standardized(y, valid, self.mean, self.deviation)

  def known(self, y) -> tuple[jax.Array, jax.Array]:
    known = ~jnp.any(jnp.isnan(y), axis=-1)
    return jnp.where(known[..., None], y, 0), known

  def evaluate(self, outputs, y, smoothing) -> protocol.Evaluation:
    del smoothing
    predictions = self.predict(outputs)
    errors = predictions - y
    in_units = errors * self.deviation.astype(np.float32)
    scores = {'mse': in_units**2, 'mae': jnp.abs(in_units)}
    return protocol.Evaluation(
        jnp.mean(errors**2, axis=-1),
        {name: jnp.mean(score, axis=-1) for name, score in scores.items()},
        predictions=predictions,
    )

  def predict(self, outputs) -> jax.Array:
    return outputs.astype(jnp.float32)

  def in_units(self, predictions) -> Any:
    if isinstance(predictions, jax.core.Tracer):
      return predictions * self.deviation + self.mean
    return np.asarray(predictions, np.float64) * self.deviation + self.mean

  def given(self, y, valid) -> np.ndarray:
    size, are_steps = len(self.mean), valid.ndim > 1
    y = array_checks.numbers(
        y, 'y', (*valid.shape, size), kinds='iufb', needs_last=size > 1
    )
    array_checks.finite(y, valid, 'y', allow_nan=are_steps)
    return self.encoded(y, valid)

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
    }


Answers = Classes | Numbers


def restore(arguments: Mapping[str, Any]) -> Answers:
  """Returns the answers of which `arguments` returned this."""
  return (Classes if 'names' in arguments else Numbers)(**arguments)
