"""Answers of a sequence model: classes or numbers, with losses and metrics.

Both kinds can be asked of a sequence or of each of its steps: the leading axes
are [B] or [B, T]. Both kinds have

  metrics       the metrics, the main one first
  out_features  numbers that the model gives for an answer
  shift         numbers taken off answers before float32 rounds them, [D]
  known         (answers, with something finite where there is none; whether
                there is one, with the leading axes)
  evaluate      losses, scores and predictions, with the leading axes, of
                outputs [..., out_features], answers and a smoothing of labels
  predict       predictions from the model's outputs
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
  shift = np.zeros(1)

  def __init__(self, names: Sequence[str]):
    self.names = tuple(names)
    self.out_features = len(self.names)

  def known(self, y) -> tuple[jax.Array, jax.Array]:
    known = y != sequence_arrays.NO_LABEL
    return jnp.where(known, y, 0), known

  def evaluate(self, outputs, y, smoothing) -> protocol.Evaluation:
    return classification.evaluation(outputs, y, smoothing)

  def predict(self, outputs) -> jax.Array:
    return jnp.argmax(outputs, axis=-1).astype(jnp.int32)

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
  """Numbers; y is float32 [..., D], less the shift.

  The model's outputs count in deviations from the mean of the training answers,
  and so does the loss; scores and metrics are in the units of the data.

  Args:
    mean: mean of the training answers less the shift, [D]; zeros for outputs in
      units of the data.
    deviation: their standard deviation, [D]; ones for units of the data.
    shift: numbers taken off answers before float32 rounds them, [D].
  """

  metrics = tuple(
      protocol.Metric(name, higher_is_better=False, form='.4g')
      for name in ('mse', 'mae')
  )

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

  def known(self, y) -> tuple[jax.Array, jax.Array]:
    known = ~jnp.any(jnp.isnan(y), axis=-1)
    return jnp.where(known[..., None], y, self.mean), known

  def evaluate(self, outputs, y, smoothing) -> protocol.Evaluation:
    del smoothing
    y = sequence_arrays.standardized(y, self.mean, self.deviation)
    errors = outputs.astype(jnp.float32) - y
    in_units = errors * self.deviation
    scores = {'mse': in_units**2, 'mae': jnp.abs(in_units)}
    return protocol.Evaluation(
        jnp.mean(errors**2, axis=-1),
        {name: jnp.mean(score, axis=-1) for name, score in scores.items()},
        predictions=self.predict(outputs),
    )

  def predict(self, outputs) -> jax.Array:
    return outputs.astype(jnp.float32) * self.deviation + self.mean

  def given(self, y, valid) -> np.ndarray:
    size, are_steps = len(self.mean), valid.ndim > 1
    y = array_checks.numbers(
        y, 'y', (*valid.shape, size), kinds='iufb', needs_last=size > 1
    )
    array_checks.finite(y, valid, 'y', allow_nan=are_steps)
    return sequence_arrays.centre(y, self.shift, valid)

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
