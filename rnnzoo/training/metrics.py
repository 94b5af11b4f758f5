"""Turns results of examples into the numbers of an epoch and of a test."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

import numpy as np

from rnnzoo.tasks import protocol


def of_examples(
    evaluation: protocol.Evaluation, metrics: Sequence[protocol.Metric]
) -> dict[str, float]:
  """Returns the metrics of all examples by name, without those `at_test`."""
  weights = None
  if evaluation.weights is not None:
    weights = np.asarray(evaluation.weights, np.float64)

  def mean(x):
    with np.errstate(all='ignore'):
      return float(
          np.mean(x, dtype=np.float64)
          if weights is None
          else np.sum(x * weights) / np.sum(weights)
      )

  means = {name: mean(x) for name, x in evaluation.scores.items()}
  return of_means(means | {'loss': mean(evaluation.losses)}, metrics)


def of_means(
    means: Mapping[str, float], metrics: Sequence[protocol.Metric]
) -> dict[str, float]:
  """Returns the metrics of means by name, without those `at_test`."""
  found = {}
  for metric in (metric for metric in metrics if not metric.at_test):
    if not metric.of:
      found[metric.name] = means[metric.name]
      continue
    try:
      found[metric.name] = float(metric.of(means))
    except OverflowError:  # The loss makes no sense.
      found[metric.name] = math.inf
  return found


def monitored(
    name: str, value: float, metrics: Sequence[protocol.Metric]
) -> float:
  """Returns a monitored value as one that is to become small.

  Early stopping and the plateau rule take such a value, and the latter's
  relative threshold means nothing below zero. `name` is the metric's, as
  'validation_accuracy', and `metrics` are the task's.
  """
  metric = {f'validation_{metric.name}': metric for metric in metrics}[name]
  return metric.greatest - value if metric.higher_is_better else value


def of_test(
    evaluation: protocol.Evaluation,
    measured: Mapping[str, Any],
    task: protocol.Task,
) -> dict[str, Any]:
  """Returns the entries of a split in result.json, the loss last.

  They are of all its examples; `Task.measure` gave the measured ones.
  """
  values = of_examples(evaluation, protocol.all_metrics(task))
  values |= measured
  # After all that belongs to the task.
  if task.metrics[0].name != protocol.LOSS.name:
    values['loss'] = values.pop('loss')
  for metric in task.metrics:
    if metric.name not in values:
      raise ValueError(
          f'{type(task).__name__}.measure must give {metric.name!r}, which is a'
          f' metric at_test; got {sorted(measured)}'
      )
  return values
