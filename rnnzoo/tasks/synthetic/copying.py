"""Tasks of recall: copy memory and selective copying.

In both, symbols are shown first, and at the end of the sequence, on as many
steps, the model has to name them in their order.

Copy memory, with a delay of d and 10 symbols: 10 steps of symbols, d - 1 blank
steps, one step with a delimiter, and 10 more steps, blank, on which the symbols
are named: T = d + 20. Tokens 0 to 7 are symbols, 8 is the blank and 9 the
delimiter. On all earlier steps the answer is the blank.

Selective copying, of L steps and 16 symbols: the symbols stand at random places
among L steps, all others are noise, and 16 steps with a marker follow, on which
the symbols are named: T = L + 16. Token 0 of 16 is noise, the last one the
marker. Earlier steps have no answer. `curriculum` makes shorter sequences come
first; validation and test have L steps throughout.

References:
  S. Hochreiter and J. Schmidhuber, 1997, "Long short-term memory".
  M. Arjovsky, A. Shah and Y. Bengio, 2016, "Unitary evolution recurrent neural
  networks", section 5.1 (copy memory).
  A. Gu and T. Dao, 2023, "Mamba: Linear-time sequence modeling with selective
  state spaces", section 4.1.1 (selective copying).
"""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rnnzoo import models
from rnnzoo.models import language as language_model
from rnnzoo.tasks import array_checks
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks.synthetic import made

_RULES = {**made.RULES, 'num_symbols': fields.integer(1, 1000)}

SYMBOLS, BLANK, DELIMITER = 8, 8, 9


class Recall(made.MadeTask):
  """Names the symbols that were shown, on as many steps at the end.

  'accuracy' is the share of right answers on those steps alone, 'exact_match'
  the share of sequences with no wrong one.

  Attributes:
    splits: 'train' is made on the device; 'validation' and 'test' are fixed,
      with 'tokens' uint8 [N, T] and 'symbols' uint8 [N, K].
    num_tokens: how many tokens there are.
  """

  metrics = (protocol.Metric('accuracy'), protocol.Metric('exact_match'))
  # The blocks may be those of a language model.
  model_rules: fields.Rules = {
      'mlp': fields.optional(fields.one_of(language_model.MLPS)),
      'conv_width': fields.integer(0, 1000),
  }
  num_tokens: int
  # Whether the loss counts the steps before the answer, which is BLANK there.
  loss_on_all_steps = False

  def build_model(self, rngs):
    """Returns the model that `config.model` describes.

    Tokens are embedded in as many features as the layers have. With
    `config.model.mlp` or `conv_width` it has the blocks of a language model.
    """
    model = self._model
    if model.mlp is not None or model.conv_width:
      return backbones.build_language_model(
          model,
          self.num_tokens,
          rngs,
          mlp=model.mlp,
          conv_width=model.conv_width,
      )
    return models.SequenceModel(
        backbones.build(model, model.features, rngs),
        self.num_tokens,
        every_step=True,
        num_tokens=self.num_tokens,
        rngs=rngs,
    )

  def evaluate(self, model, examples, rngs=None) -> protocol.Evaluation:
    """Returns cross entropies, shares of right answers and answers."""
    symbols = jnp.asarray(examples['symbols'], jnp.int32)
    count = symbols.shape[1]
    logits = _logits(model, examples['tokens'], rngs)
    answers = jnp.argmax(logits[:, -count:], axis=-1)
    targets = symbols
    if self.loss_on_all_steps:
      before = logits.shape[1] - count
      targets = jnp.pad(symbols, ((0, 0), (before, 0)), constant_values=BLANK)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, -targets.shape[1] :], targets
    )
    hits = answers == symbols
    scores = {
        'accuracy': jnp.mean(hits.astype(jnp.float32), axis=1),
        'exact_match': jnp.all(hits, axis=1).astype(jnp.float32),
    }
    return protocol.Evaluation(
        jnp.mean(losses, axis=1), scores, predictions=answers
    )

  def check_inputs(self, inputs):
    return array_checks.tokens(inputs, self.num_tokens, self._data.num_symbols)

  def logits(self, model, inputs) -> jax.Array:
    """Returns logits [B, K, symbols] of the K symbols that are named.

    The tokens, [B, T], have the steps on which they are.
    """
    return _logits(model, inputs)[:, -self._data.num_symbols :]


class CopyMemory(Recall):
  """Names 10 symbols after a delay.

  With `config.data.loss_steps='all'` the loss is the literature's, the mean
  over all T steps, and 10 log(8) / T for a model without memory. With
  'recalled' it is the mean over the steps on which symbols are named.
  """

  rules: fields.Rules = {
      **_RULES,
      'delay': fields.integer(1, 20_000),
      'loss_steps': fields.one_of(('all', 'recalled')),
  }
  num_tokens = DELIMITER + 1

  def _set_up(self, config):
    super()._set_up(config)
    self.dataset = f'copy memory with a delay of {config.data.delay:,}'
    self.loss_on_all_steps = config.data.loss_steps == 'all'

  def _make_batch(self, key):
    shape = self.batch_size, self._data.num_symbols
    return self._show(jax.random.randint(key, shape, 0, SYMBOLS), jnp)

  def _make_examples(self, rng, count):
    shape = count, self._data.num_symbols
    return self._show(rng.integers(0, SYMBOLS, shape), np)

  def _show(self, symbols: Any, array: types.ModuleType) -> dict[str, Any]:
    """Returns examples with these symbols, as arrays of jax.numpy or numpy."""
    symbols = symbols.astype(array.uint8)
    after = np.full(self._data.delay + self._data.num_symbols, BLANK, np.uint8)
    after[self._data.delay - 1] = DELIMITER
    after = array.broadcast_to(after, (len(symbols), len(after)))
    tokens = array.concatenate([symbols, after], axis=1)
    return {'tokens': tokens, 'symbols': symbols}


class SelectiveCopying(Recall):
  """Names 16 symbols that stood among noise."""

  rules: fields.Rules = {
      **_RULES,
      'length': fields.integer(1, 20_000),
      'num_tokens': fields.integer(3, 256),
      'curriculum': fields.pairs(
          'pairs of a length and of epochs, such as ((64, 10), (256, 5))',
          *[fields.integer(1, 20_000)] * 2,
      ),
  }

  def _set_up(self, config):
    super()._set_up(config)
    data = config.data
    if data.num_symbols > data.length:
      raise ValueError(
          'config.data.num_symbols must be at most config.data.length,'
          f' {data.length}; got {data.num_symbols}'
      )
    if any(length < data.num_symbols for length, _ in data.curriculum):
      raise ValueError(
          'config.data.curriculum must have lengths of at least'
          f' config.data.num_symbols, {data.num_symbols}; got'
          f' {data.curriculum}'
      )
    self.num_tokens = data.num_tokens
    self.dataset = (
        f'selective copying of {data.num_symbols:,} among {data.length:,}'
    )
    self.lessons = tuple(
        (epochs, functools.partial(self._make_batch, length=length))
        for length, epochs in data.curriculum
    )

  def _make_batch(self, key, length=None):
    length = length or self._data.length
    of_places, of_symbols = jax.random.split(key)
    shape = self.batch_size, self._data.num_symbols
    order = jax.random.uniform(of_places, (self.batch_size, length))
    _, places = jax.lax.top_k(order, shape[1])
    symbols = jax.random.randint(of_symbols, shape, 1, self.num_tokens - 1)
    return self._show(symbols, places, length, jnp)

  def _make_examples(self, rng, count):
    shape = count, self._data.num_symbols
    order = rng.random((count, self._data.length))
    places = np.argpartition(order, -shape[1], axis=1)[:, -shape[1] :]
    symbols = rng.integers(1, self.num_tokens - 1, shape, np.uint8)
    return self._show(symbols, places, self._data.length, np)

  def _show(
      self, symbols: Any, places: Any, length: int, array: types.ModuleType
  ) -> dict[str, Any]:
    """Returns examples with symbols, in their order, at places of noise."""
    symbols = symbols.astype(array.uint8)
    tokens = array.zeros((len(symbols), length), array.uint8)
    at = np.arange(len(symbols))[:, None], array.sort(places, axis=1)
    if array is np:
      tokens[at] = symbols
    else:
      tokens = tokens.at[at].set(symbols)
    ends = (0, 0), (0, symbols.shape[1])
    tokens = array.pad(tokens, ends, constant_values=self.num_tokens - 1)
    return {'tokens': tokens, 'symbols': symbols}


def _logits(model, tokens, rngs=None) -> jax.Array:
  return model(jnp.asarray(tokens, jnp.int32), rngs=rngs).astype(jnp.float32)
