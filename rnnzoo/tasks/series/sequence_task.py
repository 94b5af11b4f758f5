"""Tasks on sequences of numbers: a class or numbers, at the end or every step.

A task that has its data as `sequence_arrays.Sequences` inherits `SequenceTask`
and reads them in its `__init__`; all else is here.

Dimensions: N sequences of a split, B batch, T time, F columns.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from rnnzoo import models
from rnnzoo.tasks import array_checks
from rnnzoo.tasks import backbones
from rnnzoo.tasks import classification
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks.series import answers as answers_lib
from rnnzoo.tasks.series import sequence_arrays
from rnnzoo.tasks.series import sequence_checks

# Rules of `config.data`, in every task of this kind.
RULES: fields.Rules = {
    'standardize': fields.flag(),
    'validation_fraction': fields.number(0, 1, above=True, below=True),
    'split_seed': fields.seed(),
}


class SequenceTask(protocol.ConfigTask):
  """Answers of sequences.

  Trained models of it load without the data. A subclass whose `predict` needs
  attributes of its own extends `describe` and `restore`.

  Attributes:
    splits: each with 'inputs' float32 [N, T, F], standardised x with zeros for
      NaN, 'lengths' int32 [N], and 'y': int32 [N] for classes, float32 [N, D]
      for numbers, in deviations, with an axis of time after N for answers at
      every step.
    answers: the kind of answers.
    class_names: names of classes, if any; a prediction is an index of it.
    summary: a summary of the data, for report.json.
    kind: 'classification' or 'regression', where `config.data` has no kind.
  """

  rules = RULES
  model_rules = classification.RULES
  kind = 'classification'
  class_names: tuple[str, ...]
  has_stream = True

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      dataset: str,
      splits: Mapping[str, sequence_arrays.Sequences],
      answers: answers_lib.Answers,
      *,
      every_step: bool = False,
  ):
    """Keeps the data, and prints their summary.

    `splits` are 'train', 'validation' and 'test'. The config has
    `data.standardize`, `model` and `batch_size`.
    """
    self._set_up(config)
    self._take(answers, every_step)
    self.dataset = dataset
    sequence_checks.check_splits(splits, answers, every_step)
    train = splits['train']
    columns = train.x.shape[-1]
    statistics = np.zeros(columns), np.ones(columns)
    if config.data.standardize:
      statistics = sequence_arrays.standardization(train.x, train.valid())
      make = lambda: self._backbone(columns, nnx.Rngs(0))
      made: Any = nnx.eval_shape(make)
      if made.layers[0].reads_timespans:
        # They stay as they are: shifted, times would be negative.
        statistics[0][-1], statistics[1][-1] = 0, 1
    self._mean, self._deviation = statistics
    self._have_missing = config.data.get('missing') == 'zero' or any(
        np.isnan(split.x).any() for split in splits.values()
    )
    self.splits: Mapping[str, protocol.Examples] = {
        name: {
            'inputs': self._standardized(split.x, split.valid()),
            'lengths': split.lengths,
            'y': answers.encoded(
                split.y, split.valid() if every_step else split.known(False)
            ),
        }
        for name, split in splits.items()
    }
    if not config.data.standardize:  # So a model sees them.
      splits = {
          name: split._replace(x=split.x.astype(np.float32))
          for name, split in splits.items()
      }
    self.summary = sequence_checks.summarize(splits, answers, every_step)
    for line in sequence_checks.lines(dataset, self.summary):
      print(line, flush=True)
    self.batch_size = min(config.batch_size, len(train.x))
    if self.batch_size < config.batch_size:
      print(f'data: training in batches of {self.batch_size}', flush=True)
    self._are_ragged = any(
        split.lengths.min() < split.x.shape[1] for split in splits.values()
    )

  def _set_up(self, config):
    super()._set_up(config)
    kind = config.data.get('kind', self.kind)
    if kind == 'regression' and self.label_smoothing:
      raise ValueError(
          'config.model.label_smoothing must be 0 for answers that are numbers;'
          f' got {self.label_smoothing}'
      )

  def _take(self, answers: answers_lib.Answers, every_step: bool) -> None:
    self.answers, self.every_step = answers, every_step
    self.metrics = answers.metrics
    if isinstance(answers, answers_lib.Classes):
      self.class_names = answers.names

  def describe(self):
    return {
        'answers': self.answers.arguments(),
        'every_step': self.every_step,
        'mean': self._mean.tolist(),
        'deviation': self._deviation.tolist(),
        'have_missing': bool(self._have_missing),
        'are_ragged': bool(self._are_ragged),
    }

  def _restore(self, described):
    answers = answers_lib.restore(described['answers'])
    self._take(answers, described['every_step'])
    self._mean = np.array(described['mean'])
    self._deviation = np.array(described['deviation'])
    self._have_missing = described['have_missing']
    self._are_ragged = described['are_ragged']

  def _backbone(self, columns: int, rngs: nnx.Rngs) -> Any:
    return backbones.build(self._model, columns, rngs, have_timespans=True)

  def build_model(self, rngs) -> models.SequenceModel:
    backbone = self._backbone(len(self._mean), rngs)
    return models.SequenceModel(
        backbone,
        self.answers.out_features,
        every_step=self.every_step,
        pooling=self.pooling,
        rngs=rngs,
    )

  def evaluate(self, model, examples, rngs=None) -> protocol.Evaluation:
    """Returns losses, scores and predictions of a batch.

    With answers at every step the losses and scores of a sequence are means
    over its steps with an answer, and it counts by their number.
    """
    # If no step of training is padding, a mask would only take time there.
    is_masked = self._are_ragged or rngs is None
    lengths = examples['lengths'] if is_masked else None
    outputs = model(examples['inputs'], seq_lengths=lengths, rngs=rngs)
    smoothing = self.label_smoothing if rngs is not None else 0.0
    y, known = self.answers.known(jnp.asarray(examples['y']))
    found = self.answers.evaluate(outputs, y, smoothing)
    if not self.every_step:
      return found
    lengths = jnp.asarray(examples['lengths'])
    valid = (jnp.arange(outputs.shape[1]) < lengths[:, None]) & known
    weights = jnp.sum(valid, 1).astype(jnp.float32)
    total = lambda values: jnp.sum(jnp.where(valid, values, 0), 1)
    mean = lambda values: total(values) / jnp.maximum(weights, 1)
    return protocol.Evaluation(
        mean(found.losses),
        {name: mean(score) for name, score in found.scores.items()},
        weights,
        found.predictions,
    )

  def measure(self, model, split, predictions) -> dict[str, Any]:
    """Returns the metrics of all test answers that are no means."""
    del model
    parts: Any = self.splits[split]
    whole = sequence_arrays.Sequences(*parts.values())
    known = whole.known(self.every_step)
    return self.answers.measure(whole.y[known], predictions[known])

  def report(self, results, best_model) -> protocol.Report:
    """Returns the summary of the data, and the confusions of classes."""
    del best_model
    found = self.answers.report(results)
    return protocol.Report({**found.numbers, 'data': self.summary}, found.files)

  def check_inputs(self, inputs):
    """Returns 'inputs' and, where they are given, 'lengths' as in `splits`.

    Args:
      inputs: x [B, T, F] in the units of the data, which the task standardises
        itself; T may differ from the T of the training data. Or, for sequences
        of several lengths, a mapping with 'x', padded to the longest, and
        'lengths', int [B], each from 1 to T:

            x, lengths = sequence_arrays.pad([first, second])
            trained.predict({'x': x, 'lengths': lengths})
    """
    given = array_checks.by_name(inputs, ('x', 'lengths'), ('x',))
    has_field, columns = 'missing' in self._data, len(self._mean)
    field = "a model trained with config.data.missing='zero'"
    x = array_checks.numbers(
        given['x'],
        'x',
        ('B', 'T', columns),
        kinds='iufb',
        why=' as in training',
    )
    if self._are_ragged and given.get('lengths') is None and x.shape[1] > 1:
      raise ValueError(
          'inputs must have lengths, since the model was trained on sequences'
          " of several; {'x': x, 'lengths': lengths} would work, with lengths"
          f' int [B] from 1 to {x.shape[1]}'
      )
    found, lengths = {}, np.full(len(x), x.shape[1], np.int32)
    if given.get('lengths') is not None:
      lengths = found['lengths'] = array_checks.integers(
          given['lengths'],
          'lengths',
          *x.shape[:2],
          of=', the steps of x',
          row='sequence',
      )
    valid = np.arange(x.shape[1]) < lengths[:, None]
    array_checks.finite(
        x,
        valid,
        'x',
        allow_nan=self._have_missing,
        advice=f'{field} takes NaN' * has_field,
    )
    sequence_arrays.warn_of_rounding(x, self._mean, self._deviation)
    return {'inputs': self._standardized(x, valid), **found}

  def predict(self, model, inputs) -> jax.Array:
    """Returns classes, int32 [B], or numbers in deviations, float32 [B, D].

    With answers at every step there is an axis of time after B.

    Inputs are as `check_inputs` takes or returns them.
    """
    return self.answers.predict(self._answers(model, inputs))

  def logits(self, model, inputs) -> jax.Array:
    """Returns the logits of classes; see `predict` for axes."""
    if isinstance(self.answers, answers_lib.Numbers):
      return super().logits(model, inputs)
    return self._answers(model, inputs)

  def model_inputs(self, inputs) -> jax.Array:
    """Returns standardised x, float32 [B, T, F], with zeros for NaN."""
    if isinstance(inputs, Mapping) and 'inputs' in inputs:
      return inputs['inputs']
    # Traced, as a user gave it: there is no float64.
    x = inputs['x'] if isinstance(inputs, Mapping) else inputs
    mean, deviation = map(jnp.float32, (self._mean, self._deviation))
    x = (jnp.asarray(x, jnp.float32) - mean) / deviation
    return jnp.where(jnp.isnan(x), 0, x) if self._have_missing else x

  def examples(self, inputs, y):
    """Returns inputs, lengths and y as in `splits`."""
    x = inputs['inputs']
    lengths = inputs.get('lengths', np.full(len(x), x.shape[1], np.int32))
    valid = np.arange(x.shape[1]) < lengths[:, None]
    valid = valid if self.every_step else np.ones(len(x), bool)
    y = self.answers.given(y, valid)
    found = sequence_arrays.Sequences(x, lengths, y)
    if not found.known(self.every_step).any():
      raise ValueError('y must have an answer; there is none')
    return {'inputs': x, 'lengths': lengths, 'y': y}

  def _answers(self, model, inputs) -> jax.Array:
    lengths = inputs.get('lengths') if isinstance(inputs, Mapping) else None
    return model(self.model_inputs(inputs), seq_lengths=lengths)

  def in_units(self, predictions):
    return self.answers.in_units(predictions)

  def _standardized(self, x: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Returns 'inputs' of x [N, T, F] and of which steps are no padding."""
    statistics = self._mean, self._deviation
    x = sequence_arrays.standardized(x, valid, *statistics)
    return np.nan_to_num(x) if self._have_missing else x
