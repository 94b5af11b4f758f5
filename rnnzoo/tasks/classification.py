"""Tasks in which each example is of one of several classes.

Such a task inherits `Classification`, names its classes, and returns
`evaluation(logits, labels)` from its `evaluate`. Its splits have an entry
'label' [N].

Dimensions: N examples of a split, B batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rnnzoo.models import sequence
from rnnzoo.tasks import array_checks
from rnnzoo.tasks import fields
from rnnzoo.tasks import figures
from rnnzoo.tasks import protocol

METRICS: tuple[protocol.Metric, ...] = (
    protocol.Metric('accuracy'),
    protocol.Metric('precision', at_test=True),
    protocol.Metric('recall', at_test=True),
    protocol.Metric('f1', at_test=True),
)


# Rules for `config.model` of tasks that smooth labels, and name one class for a
# sequence.
RULES: fields.Rules = {
    'label_smoothing': fields.number(0, 1, below=True),
    'pooling': fields.one_of(sequence.POOLINGS),
}


class Classification(protocol.Task):
  """A task with classes: its metrics, and the figure of confusions.

  Attributes:
    class_names: names of classes, one a class.
  """

  metrics = METRICS
  class_names: tuple[str, ...]

  def measure(self, model, split, predictions) -> dict[str, Any]:
    """Returns macro precision, recall and F1, and the confusions."""
    del model
    parts = protocol.buckets(self.splits[split])
    labels = np.concatenate([np.asarray(part['label']) for part in parts])
    if len(parts) > 1:
      predictions = np.concatenate(predictions)
    return confusion_metrics(labels, predictions, len(self.class_names))

  def report(self, results, best_model) -> protocol.Report:
    """Returns the confusions of all seeds together."""
    del best_model
    return confusions_report(results, self.class_names)

  def examples(self, inputs, y):
    """Returns inputs, named 'inputs' where they have no names, and labels."""
    if not isinstance(inputs, Mapping):
      inputs = {'inputs': inputs}
    count = len(next(iter(inputs.values())))
    return {**inputs, 'label': labels_of(y, self.class_names, (count,))}


def labels_of(
    y: Any, class_names: Sequence[str], shape: tuple[int, ...]
) -> np.ndarray:
  """Returns true classes as places in the names, int32.

  Args:
    y: names, what `str` makes names of, or, where no name is a number, places.
    class_names: names of the classes.
    shape: the shape that y must have.
  """
  given = array_checks.one(y, 'y must be one array')
  if given.shape != shape:
    raise ValueError(
        f'y must have the shape {list(shape)}, a class for each answer; its'
        f' shape is {list(given.shape)}'
    )
  places = {name: place for place, name in enumerate(class_names)}
  if given.dtype.kind in 'iu' and not any(map(str.isdecimal, class_names)):
    places = {str(place): place for place in range(len(class_names))}
  classes, index = np.unique(given, return_inverse=True)
  for name in map(str, classes.tolist()):
    if name not in places:
      raise ValueError(
          f'y must hold the classes {", ".join([*places][:8])}'
          f'{", ..." * (len(places) > 8)}; got {fields.shorten(name)}'
      )
  found = [places[name] for name in map(str, classes.tolist())]
  return np.array(found, np.int32)[index].reshape(shape)


def evaluation(
    logits: jax.Array, labels: jax.typing.ArrayLike, smoothing: float = 0.0
) -> protocol.Evaluation:
  """Returns cross entropies, hits and predicted classes.

  The arguments are logits [B, classes] and labels int [B]. `smoothing` is the
  share of each label that all classes get alike; zero in evaluation.
  """
  logits = logits.astype(jnp.float32)
  predictions = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  if smoothing:
    losses = optax.softmax_cross_entropy(
        logits,
        optax.smooth_labels(
            jax.nn.one_hot(labels, logits.shape[-1]), smoothing
        ),
    )
  else:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  hits = (predictions == labels).astype(jnp.float32)
  return protocol.Evaluation(
      losses, {'accuracy': hits}, predictions=predictions
  )


def confusion_metrics(
    labels: np.ndarray, predictions: np.ndarray, num_classes: int
) -> dict[str, Any]:
  """Returns macro precision, recall and F1, and the confusions.

  Labels and predictions are classes [N]; a class may occur in neither.

  Returns:
    Numbers by name; 'confusion_matrix' is a list of rows, one a true class.
  """
  from sklearn import metrics  # Slow to import, and needed once, at the end.

  classes = np.arange(num_classes)
  precision, recall, f1, _ = metrics.precision_recall_fscore_support(
      labels, predictions, labels=classes, average='macro', zero_division=0
  )
  return {
      'precision': float(precision),
      'recall': float(recall),
      'f1': float(f1),
      'confusion_matrix': metrics.confusion_matrix(
          labels, predictions, labels=classes
      ).tolist(),
  }


def confusions_report(
    results: Sequence[Mapping[str, Any]], class_names: Sequence[str]
) -> protocol.Report:
  """Returns the confusions of all seeds together, and their figure.

  The results of each seed have `confusion_metrics` in 'test'.
  """
  confusions = [result['test']['confusion_matrix'] for result in results]
  matrix = np.sum(confusions, axis=0).tolist()
  return protocol.Report(
      {'confusion_matrix': matrix},
      {
          'confusion_matrix.png': lambda path, title: figures.plot_confusions(
              path,
              f'{title}, test, {len(results)} seed(s)',
              matrix,
              class_names,
          )
      },
  )
