"""State tracking: train on short strings of a language, test on long ones.

languages.py has the languages. Training strings have lengths from `min_length`
to `max_length`, one a batch, drawn uniformly. The label is the whole string's,
at its last step; with label_steps='every' the model is trained on the labels of
all prefixes, as is usual for word problems. 'accuracy' always counts the last
step alone.

Test strings have exactly the lengths of `test_lengths`, and each class is as
frequent as any other: the longest are the split 'test', all else 'length_<n>'.
The lengths that a model solves tell whether it has learnt the state itself, or
something that looks like it on short strings.

Tokens are vectors with a single 1. With `input_noise` training, after
`clean_epochs` without, adds Gaussian noise to them, so that a state must be
corrected at every step, as one that is to hold for long. Tests have none.
Without `validation_noise` validation has none either, and then prefers a model
that is sure of short strings to one whose states hold. With it each string of
validation has noise of its own, which no epoch or run changes.
"""

import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rnnzoo import models
from rnnzoo.tasks import array_checks
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields
from rnnzoo.tasks import figures
from rnnzoo.tasks import protocol
from rnnzoo.tasks.synthetic import languages
from rnnzoo.tasks.synthetic import made

# Mean accuracy from which on a length counts as solved.
SOLVED = 0.995
_MOST = 20_000
# Tokens of all test strings, a byte each.
_MOST_TOKENS = 2**30


def _are_lengths(value: Any) -> bool:
  lengths = list(value) if isinstance(value, list | tuple) else []
  whole = fields.integer(1, _MOST).allows
  return (
      bool(lengths)
      and all(map(whole, lengths))
      and lengths == sorted(set(lengths))
  )


class StateTracking(made.MadeTask):
  """Classification of the last state of a string.

  Attributes:
    language: the automaton.
    splits: 'train' is made on the device; further ones are fixed. 'tokens'
      uint8 [N, T]; 'length' int32 [N]; 'label' int32 [N], or for all prefixes
      [N, T], where a prefix may have no label. With noise, 'noise' float32 [N],
      its deviation, and where it is fixed 'noise_seed' uint32 [N].
  """

  has_stream = True
  rules: fields.Rules = {
      **made.RULES,
      'language': fields.one_of(languages.LANGUAGES),
      'label_steps': fields.one_of(('last', 'every')),
      'input_noise': fields.number(0, 100),
      'clean_epochs': fields.integer(0),
      'validation_noise': fields.number(0, 100),
      'min_length': fields.integer(1, _MOST),
      'max_length': fields.integer(1, _MOST),
      'test_lengths': fields.Rule(
          f'ascending integers from 1 to {_MOST}, such as (40, 2048)',
          _are_lengths,
      ),
  }

  def _set_up(self, config):
    super()._set_up(config)
    data = config.data
    self.language = languages.LANGUAGES[data.language]()
    self.dataset = f'{data.language}, trained on lengths to {data.max_length}'
    self._every_step = data.label_steps == 'every'
    self.metrics = (protocol.Metric('accuracy'),)
    if self._every_step:
      self.metrics += (protocol.Metric('step_accuracy'),)
    if data.input_noise:
      clean = functools.partial(self._make_batch, noise=0.0)
      self.lessons = ((data.clean_epochs, clean),)
    # Lengths are drawn as multiples of it, first and last included.
    multiple = self.language.length_multiple
    self._first = -(-data.min_length // multiple)
    self._last = data.max_length // multiple
    *shorter, longest = data.test_lengths
    self._split_of = {n: f'length_{n}' for n in shorter} | {longest: 'test'}

  def _make_fixed(self, rng):
    data, language = self._data, self.language
    if not data.input_noise:
      fields.check_unread(data, {'clean_epochs': 0}, 'input_noise')
    tokens = data.num_test * sum(data.test_lengths)
    if tokens > _MOST_TOKENS:
      raise ValueError(
          'config.data.num_test times the sum of config.data.test_lengths must'
          f' be at most {_MOST_TOKENS:,} tokens; got {tokens:,}'
      )
    if self._first > self._last:
      raise ValueError(
          'config.data.min_length must be at most'
          f' {self._last * language.length_multiple} with a max_length of'
          f' {data.max_length} for {data.language!r}; got {data.min_length}'
      )
    lengths = rng.integers(self._first, self._last + 1, data.num_validation)
    validation = self._make_strings(
        rng, lengths * language.length_multiple, data.max_length
    )
    if data.validation_noise:
      noise = np.full(len(lengths), data.validation_noise, np.float32)
      validation['noise'] = noise
      validation['noise_seed'] = np.arange(len(lengths), dtype=np.uint32)
    # The longest comes first: random numbers are drawn in this order.
    *shorter, longest = data.test_lengths
    tests = {
        self._split_of[length]: self._make_test(rng, length)
        for length in (longest, *shorter)
    }
    return {'validation': validation, **tests}

  def build_model(self, rngs):
    backbone = backbones.build(self._model, self.language.num_tokens, rngs)
    return models.SequenceModel(
        backbone,
        self.language.num_classes,
        every_step=self._every_step,
        rngs=rngs,
    )

  def evaluate(self, model, examples, rngs=None) -> protocol.Evaluation:
    """Returns cross entropies, hits and predicted classes of a batch.

    In training `rngs` is the source of noise as well as of dropout masks.
    """
    labels = jnp.asarray(examples['label'])
    logits = self._logits(model, examples, rngs)
    classes = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    valid = labels != languages.NO_LABEL
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(valid, labels, 0)
    )
    hits = (classes == labels).astype(jnp.float32)
    if not self._every_step:
      return protocol.Evaluation(
          losses, {'accuracy': hits}, predictions=classes
      )
    mean = lambda x: jnp.sum(jnp.where(valid, x, 0), 1) / jnp.sum(valid, 1)
    last = functools.partial(_at_last, lengths=examples['length'])
    return protocol.Evaluation(
        mean(losses),
        {'accuracy': last(hits), 'step_accuracy': mean(hits)},
        predictions=last(classes),
    )

  def check_inputs(self, inputs):
    return array_checks.tokens_with_length(inputs, self.language.num_tokens)

  def logits(self, model, inputs) -> jax.Array:
    """Returns logits [B, labels] of the whole strings of 'tokens', [B, T]."""
    logits = self._logits(model, inputs)
    return _at_last(logits, inputs['length']) if self._every_step else logits

  def report(self, results, best_model) -> protocol.Report:
    """Returns accuracies over length: numbers and a figure.

    In the numbers 'accuracy_over_length' has mean, std and the accuracy of each
    seed for every length. 'solved_to' is the greatest length to which the mean
    is at least `SOLVED` at all lengths, None where there is none.
    """
    del best_model
    accuracies, rows = {}, {}
    for length, split in self._split_of.items():
      parts = results
      if split != 'test':
        parts = [result['splits'] for result in results]
      accuracies[length] = [part[split]['accuracy'] for part in parts]
      rows[str(length)] = {
          'mean': float(np.mean(accuracies[length])),
          'std': float(np.std(accuracies[length])),
          'seeds': accuracies[length],
      }
    is_solved = lambda length: np.mean(accuracies[length]) >= SOLVED
    solved = itertools.takewhile(is_solved, accuracies)
    chance = 1 / self.language.num_classes

    def plot(path, title):
      seeds = [result['seed'] for result in results]
      figures.plot_over_length(
          path, title, accuracies, seeds, chance, self._data.max_length
      )

    return protocol.Report(
        {
            'accuracy_over_length': rows,
            'chance': chance,
            'solved_to': max(solved, default=None),
        },
        {'accuracy_over_length.png': plot},
    )

  def _logits(self, model, examples, rngs=None) -> jax.Array:
    x = jax.nn.one_hot(examples['tokens'], self.language.num_tokens)
    noise = None
    if 'noise_seed' in examples:
      draw = lambda seed: jax.random.normal(
          jax.random.key(seed), x.shape[1:], x.dtype
      )
      noise = jax.vmap(draw)(examples['noise_seed'])
    elif rngs is not None and 'noise' in examples:
      noise = jax.random.normal(rngs.dropout(), x.shape, x.dtype)
    if noise is not None:
      x = x + examples['noise'][:, None, None] * noise
    logits = model(x, seq_lengths=examples['length'], rngs=rngs)
    return logits.astype(jnp.float32)

  def _make_batch(self, key, noise=None):
    """Returns a batch of strings of one length, made by JAX."""
    of_length, of_tokens = jax.random.split(key)
    length = self.language.length_multiple * jax.random.randint(
        of_length, (1,), self._first, self._last + 1
    )
    shape = self.batch_size, self._data.max_length
    tokens = languages.tokens_from(
        jax.random.uniform(of_tokens, shape), self.language, length, jnp
    )
    lengths = jnp.broadcast_to(length, shape[:1])
    labels = languages.prefix_labels(self.language, tokens)
    strings = self._examples(tokens, lengths, labels)
    if noise := self._data.input_noise if noise is None else noise:
      strings['noise'] = jnp.full(self.batch_size, noise, jnp.float32)
    return strings

  def _make_test(
      self, rng: np.random.Generator, length: int
  ) -> dict[str, np.ndarray]:
    """Returns strings of one length, with classes as frequent as each other."""
    language, number = self.language, self._data.num_test
    if length % language.length_multiple:
      raise ValueError(
          'config.data.test_lengths must be multiples of'
          f' {language.length_multiple} for {self._data.language!r}; got'
          f' {length}'
      )
    drawn: list[dict[str, np.ndarray]] = []
    # Some more than needed, and once more where a class is rare.
    for _ in range(50):
      more = np.full(number + number // 2, length)
      drawn.append(self._make_strings(rng, more, length))
      whole = {
          name: np.concatenate([part[name] for part in drawn])
          for name in drawn[0]
      }
      labels = whole['label']
      labels = labels[:, -1] if self._every_step else labels
      chosen = languages.balanced(labels, number, language.num_classes)
      if len(chosen) == number:
        return {name: array[chosen] for name, array in whole.items()}
    raise ValueError(
        f'config.data.test_lengths has {length}, but in strings of'
        f' {self._data.language!r} as short as that a label never, or hardly'
        ' ever, occurs; leave it out'
    )

  def _make_strings(self, rng, lengths, time: int) -> dict[str, np.ndarray]:
    uniform = rng.random((len(lengths), time), np.float32)
    tokens = languages.tokens_from(uniform, self.language, lengths)
    labels = np.asarray(languages.prefix_labels(self.language, tokens))
    return self._examples(tokens, lengths.astype(np.int32), labels, np)

  def _examples(self, tokens, lengths, labels, array=jnp) -> dict[str, Any]:
    """Returns examples, from the labels of all prefixes [N, T]."""
    if self._every_step:
      time = np.arange(labels.shape[1])
      labels = array.where(time < lengths[:, None], labels, languages.NO_LABEL)
    else:
      labels = _at_last(labels, lengths, array)
    return {'tokens': tokens, 'length': lengths, 'label': labels}


def _at_last(x: Any, lengths: Any, array: types.ModuleType = jnp) -> Any:
  """Returns the entry of the last valid step, [B, ...] of [B, T, ...]."""
  index = lengths - 1
  index = index.reshape(-1, *[1] * (x.ndim - 1))
  return array.take_along_axis(x, index, axis=1)[:, 0]
