"""The protocol between a task and the training loop.

A task hands over its data, a way to build the model, and a function from a
batch of examples to numbers for each example. All else, this module's hooks, is
there for tasks that need it and does nothing by default.

Dimensions: N examples of a split, B batch, T time.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import itertools
import math
import pathlib
import types
from typing import Any, NamedTuple, Self

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from rnnzoo.tasks import array_checks
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields

# Arrays by name. Their leading axes are alike, one entry an example.
Examples = Mapping[str, jax.Array | np.ndarray]


class Generator(NamedTuple):
  """A training split that is made on the device, batch by batch.

  Attributes:
    make_batch: (key) -> arrays [B, ...] by name, with B the task's batch size.
      It is traced into the training step, and its key is a function of the
      seed and the step.
    steps_per_epoch: the number of batches that count as an epoch.
    lessons: (epochs, make_batch) pairs that come first, in turn, such as
      lessons of shorter sequences.
    is_ordered: whether `make_batch` takes (key, step) instead, a key that is a
      function of the seed alone, and the number of steps before.
    source: arrays that batches are made of, such as a text. A run is resumed
      with equal arrays only.
  """

  make_batch: Callable[..., Mapping[str, jax.Array]]
  steps_per_epoch: int
  lessons: Sequence[
      tuple[int, Callable[[jax.Array], Mapping[str, jax.Array]]]
  ] = ()
  source: Examples = types.MappingProxyType({})
  is_ordered: bool = False

  def lesson(self, epoch: int) -> int:
    """Returns the index of an epoch's lesson, or how many there are after all.

    Epochs count from 1.
    """
    for index, (num_epochs, _) in enumerate(self.lessons):
      if epoch <= num_epochs:
        return index
      epoch -= num_epochs
    return len(self.lessons)


# Several mappings are buckets: ragged sequences by length, each with its own T.
Split = Examples | Sequence[Examples] | Generator


class Metric(NamedTuple):
  """A number by which models are compared.

  Without `of` and `at_test` it is the mean of the score of its name, computed
  after every epoch for training and validation, and at the end for the test.

  Attributes:
    name: its name in files: 'accuracy'.
    higher_is_better: whether a higher value is better.
    greatest: the greatest value that it can have, where higher is better.
    form: a format for people who read its numbers.
    of: function of the means of losses and scores by name, 'loss' being the
      loss: perplexity, say.
    at_test: whether it is no mean: `Task.measure` gives it, at the end.
  """

  name: str
  higher_is_better: bool = True
  greatest: float = 1.0
  form: str = '.4f'
  of: Callable[[Mapping[str, float]], float] | None = None
  at_test: bool = False

  def text(self, value: float | None) -> str:
    """Returns a value for people; files hold None where it is not finite."""
    return 'none' if value is None else format(value, self.form)


LOSS = Metric('loss', higher_is_better=False)
PERPLEXITY = Metric(
    'perplexity', False, form='.2f', of=lambda means: math.exp(means['loss'])
)
BITS_PER_CHARACTER = Metric(
    'bits_per_character',
    higher_is_better=False,
    of=lambda means: means['loss'] / math.log(2.0),
)
BYTES_PER_TOKEN = Metric('bytes_per_token', form='.3f')
# For tasks with the metric before, of UTF-8.
BITS_PER_BYTE = Metric(
    'bits_per_byte',
    higher_is_better=False,
    of=lambda means: (
        means['loss'] / math.log(2.0) / means[BYTES_PER_TOKEN.name]
    ),
)


class Evaluation(NamedTuple):
  """The results of a batch.

  The loss that is minimised, and every metric that is a mean, is the mean over
  the examples of a batch or split by these weights.

  Attributes:
    losses: losses of the examples, [B].
    scores: more numbers an example by name, each [B]; one for each metric that
      is their mean.
    weights: [B], how much an example counts, such as its number of targets;
      None for all alike.
    predictions: arrays [B, ...], in any structure, which `Task.measure` gets;
      None for nothing.
  """

  losses: jax.Array
  scores: Mapping[str, jax.Array] = types.MappingProxyType({})
  weights: jax.Array | None = None
  predictions: Any = None


class Report(NamedTuple):
  """A task's own part of the report of a run."""

  numbers: Mapping[str, Any] = types.MappingProxyType({})  # For report.json.
  # Functions by the name of a file, which write it: (path, title).
  files: Mapping[str, Callable[[pathlib.Path, str], None]] = (
      types.MappingProxyType({})
  )


class Task(abc.ABC):
  """Interface between a task and the training loop.

  Attributes:
    dataset: the name of the data that were really read. Every figure and every
      metric file carries it.
    splits: 'train', 'validation', 'test', and others, with sequences of other
      lengths say, on which the best model is evaluated as on the test. Each is
      a mapping of arrays [N, ...] or several mappings, buckets; 'train' may be
      a `Generator`.
    batch_size: examples of one training step.
    metrics: the metrics that compare models, the main one first. The loss need
      not be named.
    label_smoothing: `config.model.label_smoothing` of a task that smooths
      labels; else nothing but zero is allowed there.
    pooling: `config.model.pooling` of a task with one answer for a sequence;
      else nothing but 'last' is allowed there.
    every_step: whether `predict` answers every step, [B, T, ...].
    has_stream: whether the task can answer step by step: its `predict` calls
      the model once, with inputs [B, T, ...] of any T.
    y_is_input: whether `predict` takes an array 'y'.
    calls_model: whether the answers are `model(model_inputs(inputs))`.
  """

  dataset: str
  splits: Mapping[str, Split]
  batch_size: int
  metrics: tuple[Metric, ...]
  label_smoothing: float = 0.0
  pooling: str = 'last'
  every_step: bool = False
  has_stream: bool = False
  y_is_input: bool = False
  calls_model: bool = True

  @abc.abstractmethod
  def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
    """Returns a freshly initialised model."""

  @abc.abstractmethod
  def evaluate(
      self, model: nnx.Module, examples: Examples, rngs: nnx.Rngs | None = None
  ) -> Evaluation:
    """Returns the results of a batch; it is traced.

    Examples are arrays [B, ...], rows of one of the `splits`. `rngs` is the
    source of dropout masks in training, None in evaluation.
    """

  def measure(
      self, model: nnx.Module, split: str, predictions: Any
  ) -> Mapping[str, Any]:
    """Returns the results of a whole split that are no means.

    They are a number for each metric `at_test`, and all else that result.json
    is to hold. It is called once a seed with its best model, for every split
    but 'train' and 'validation'; in a run of several processes, by each.
    `predictions` are `Evaluation.predictions`, as numpy arrays [N, ...]; for
    buckets, a list of such arrays.
    """
    del model, split, predictions
    return {}

  def report(
      self,
      results: Sequence[Mapping[str, Any]],
      best_model: Callable[[int], nnx.Module],
  ) -> Report:
    """Returns the part of a run's report beside its metrics.

    It is called at the end of a run; in one of several processes, by each. Its
    files are written by the first, where `best_model`, (seed) -> its best
    model, is not to be called. Results are the content of each seed's
    result.json.
    """
    del results, best_model
    return Report()

  def describe(self) -> Mapping[str, Any] | None:
    """Returns all that `restore` needs of the data, for a run's run.json.

    JSON holds it: sizes, names, a vocabulary. It is empty where the config
    says everything, and None for a task whose runs load by way of their data.
    """
    return None

  @classmethod
  def restore(
      cls, config: ml_collections.ConfigDict, described: Mapping[str, Any]
  ) -> Self:
    """Returns a task that answers, made without its data.

    It begins with `task = cls.__new__(cls)` instead of `__init__`, and gets the
    run's config and the result of `describe`, tuples as lists.
    """
    del config, described
    raise NotImplementedError(f'{cls.__name__} must define restore as well')

  def check_inputs(self, inputs: Any) -> Any:
    """Returns a user's inputs as `predict` takes them; they are concrete.

    Raises:
      ValueError: the inputs cannot be used.
    """
    return array_checks.check(inputs)

  def predict(self, model: nnx.Module, inputs: Any) -> jax.Array:
    """Returns predictions for inputs [B, ...] as in `splits`; it is traced.

    It and the methods that follow raise NotImplementedError where the task has
    no such thing; the message says so.
    """
    if type(self).logits is Task.logits:
      raise self._lacks(
          'no predictions for arrays: it defines no predict(model, inputs)'
      )
    return jnp.argmax(self.logits(model, inputs), axis=-1).astype(jnp.int32)

  def logits(self, model: nnx.Module, inputs: Any) -> jax.Array:
    """Returns the logits of classes, [B, ..., classes]; it is traced.

    Unless a task says otherwise, it predicts the class with the largest one.
    """
    raise self._lacks(
        'no probabilities: it defines no logits(model, inputs), as tasks whose'
        ' answers are classes do'
    )

  def distribution(self, model: nnx.Module, inputs: Any) -> Any:
    """Returns distributions of the numbers that `predict` returns; traced.

    They are a NamedTuple of arrays in the units of `predict`.
    """
    raise self._lacks(
        'no distributions: it defines no distribution(model, inputs), as the'
        ' task forecasting does'
    )

  def model_inputs(self, inputs: Any) -> Any:
    """Returns the first argument of the model, of the result of `check_inputs`.

    It may be traced.
    """
    return inputs

  def examples(self, inputs: Any, y: Any) -> Examples:
    """Returns examples as in `splits`, for `Trained.score`.

    They are of the result of `check_inputs` and a user's true answers.

    Raises:
      ValueError: y does not fit the inputs.
    """
    raise self._lacks('no scores for arrays: it defines no examples(inputs, y)')

  def in_units(self, predictions: Any) -> Any:
    """Returns the result of `predict` in the units of the data, for the user.

    It need not be traced, so numbers beyond float32 may be float64.
    """
    return predictions

  def predict_lines(
      self, model: nnx.Module, lines: Iterable[str]
  ) -> Iterator[str]:
    """Returns one line for each line, without its end: `rnnzoo predict`."""
    raise self._lacks(
        'no text to predict from; rnnzoo predict RUN --input=FILE reads arrays'
    )

  def sample(
      self,
      model: nnx.Module,
      prompt: str,
      key: jax.Array,
      *,
      length: int | None = None,
      temperature: float | None = None,
      top_k: int | None = None,
      top_p: float | None = None,
  ) -> Iterator[str]:
    """Returns pieces of text as they are made: `rnnzoo sample`.

    `Trained.sample` explains the arguments. A task whose samples lack one of
    the options leaves this argument out; whoever asks for it is told so.
    """
    raise self._lacks('nothing to sample')

  def sample_many(
      self,
      model: nnx.Module,
      prompts: Sequence[str],
      key: jax.Array,
      **options: Any,
  ) -> list[str]:
    """Returns a text for each prompt, as `sample` makes it.

    The key of each is `jax.random.fold_in(key, number)`, with its number from
    0; the options are those of `sample`.
    """
    keys = map(jax.random.fold_in, itertools.repeat(key), itertools.count())
    pairs = zip(prompts, keys, strict=False)
    return [''.join(self.sample(model, *pair, **options)) for pair in pairs]

  def read_text(self, text: str) -> Examples:
    """Returns a text as examples, for `Trained.perplexity`.

    For these, `evaluate` gives weights, the numbers of their targets, and the
    score 'bytes_per_token'.

    Raises:
      ValueError: the text has nothing to predict.
    """
    raise self._lacks('no perplexity of a text')

  def _lacks(self, text: str) -> NotImplementedError:
    return NotImplementedError(f'the task {type(self).__name__} has {text}')


class ConfigTask(Task):
  """A task that `config.data` and layers of `config.model` describe.

  Attributes:
    rules: rules for `config.data`.
    model_rules: rules for `config.model`, beside those of all layers.
  """

  rules: fields.Rules
  model_rules: fields.Rules = {}

  def _set_up(self, config: ml_collections.ConfigDict) -> None:
    """Checks a config before data are read, which takes a while; keeps it."""
    fields.check(config.data, self.rules, 'config.data')
    backbones.check(config.model)
    fields.check(config.model, self.model_rules, 'config.model')
    self._config = config
    self._model, self._data = config.model, config.data
    self.batch_size = config.batch_size
    for name in ('label_smoothing', 'pooling'):
      if name in self.model_rules:
        setattr(self, name, config.model[name])

  @classmethod
  def restore(cls, config, described):
    task = cls.__new__(cls)
    task._set_up(config)
    task._restore(described)
    return task

  def _restore(self, described: Mapping[str, Any]) -> None:
    """Sets what `describe` returned, after `_set_up`."""


def all_metrics(task: Task) -> tuple[Metric, ...]:
  """Returns a task's metrics, the loss among them."""
  named = any(metric.name == LOSS.name for metric in task.metrics)
  return task.metrics if named else (*task.metrics, LOSS)


def epoch_metrics(task: Task) -> tuple[Metric, ...]:
  """Returns the metrics that every epoch has, the loss first."""
  metrics = [metric for metric in all_metrics(task) if not metric.at_test]
  return tuple(sorted(metrics, key=lambda metric: metric.name != LOSS.name))


def buckets(split: Split) -> tuple[Examples, ...]:
  """Returns the mappings of a split that has arrays.

  Raises:
    ValueError: the split is a `Generator`.
  """
  if isinstance(split, Generator):
    raise ValueError("only 'train' can be made by a Generator")
  return (split,) if isinstance(split, Mapping) else tuple(split)


def num_examples(examples: Examples) -> int:
  """Returns N, which all arrays have as their leading axis.

  Raises:
    ValueError: arrays differ in N, or there are none.
  """
  sizes = {name: len(array) for name, array in examples.items()}
  if len(set(sizes.values())) != 1:
    raise ValueError(f'arrays of a split must be equally long; got {sizes}')
  return next(iter(sizes.values()))
