"""Tasks for tests, of all the kinds of data and metrics that there can be."""

import jax
import jax.numpy as jnp
import numpy as np

import rnnzoo
from rnnzoo import models
from rnnzoo import tasks

LENGTHS = (3, 5, 8)
BATCH = 4


def sums(key: jax.Array, count: int, length: int) -> dict[str, jax.Array]:
  """Returns sequences [count, length, 1] and their sums [count]."""
  x = jax.random.uniform(key, (count, length, 1), minval=-1.0)
  return {'x': x, 'y': jnp.sum(x, axis=(1, 2))}


class SumTask(tasks.Task):
  """The sum of a sequence, by regression: a loss with weights, no classes.

  Args:
    config: is not read.
    kind: of the training split: 'generator', 'lessons' (two come first, of 2
      epochs and 1) or 'buckets'.
  """

  dataset = 'made up sums'
  batch_size = BATCH
  metrics = (
      tasks.Metric('squared_error', higher_is_better=False, form='.3g'),
      tasks.Metric(
          'root', False, of=lambda means: means['squared_error'] ** 0.5
      ),
      tasks.Metric('within', at_test=True),
  )

  def __init__(self, config=None, kind='generator'):
    del config
    host = lambda *given: jax.tree.map(np.asarray, sums(*given))
    keys = jax.random.split(jax.random.key(5), 10)
    train = tasks.Generator(lambda key: sums(key, BATCH, 6), 7)
    if kind == 'lessons':
      lesson = lambda length: lambda key: sums(key, BATCH, length)
      train = train._replace(lessons=((2, lesson(3)), (1, lesson(4))))
    if kind == 'buckets':
      train = [host(k, 9, n) for k, n in zip(keys, LENGTHS, strict=False)]
    self.splits = {
        'train': train,
        'validation': [
            host(k, 5 + n, n) for k, n in zip(keys[3:], LENGTHS, strict=False)
        ],
        'test': host(keys[6], 10, 6),
        'test_40': host(keys[7], 6, 40),
    }

  def build_model(self, rngs):
    return models.SequenceClassifier(
        rnnzoo.Elman(1, 4, rngs=rngs), 1, rngs=rngs
    )

  def evaluate(self, model, examples, rngs=None):
    predictions = model(examples['x'], rngs=rngs)[:, 0]
    squares = (predictions - examples['y']) ** 2
    # Longer sequences count more.
    weights = 1.0 + jnp.abs(examples['y'])
    return tasks.Evaluation(
        squares / 2, {'squared_error': squares}, weights, predictions
    )

  def measure(self, model, split, predictions):
    again = model(self.splits[split]['x'])[:, 0]
    np.testing.assert_allclose(predictions, again, atol=1e-5)
    near = abs(predictions - self.splits[split]['y']) < 0.5
    return {'within': float(near.mean()), 'first': float(predictions[0])}

  def report(self, results, best_model):
    model = best_model(results[0]['seed'])
    value = float(model(np.ones((1, 2, 1), np.float32))[0, 0])
    return tasks.Report(
        {'of_ones': value},
        {'ones.txt': lambda path, title: path.write_text(f'{title}: {value}')},
    )
