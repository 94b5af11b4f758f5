"""A text read as streams: a window goes on from the memory of the one before.

The training text is cut into B streams, which an epoch reads once, in order.
Gradients reach back to the start of a window (truncated backpropagation
through time); carries pass on from window to window. Where windows meet is
drawn anew in each epoch, so their lengths vary. The model and what holds its
outputs small are those of AWD-LSTM.

References:
  Merity, Keskar, Socher, Regularizing and optimizing LSTM language models,
  2018, sections 4.1 (lengths) and 4.6 (AR and TAR).
"""

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from rnnzoo import models
from rnnzoo.tasks import backbones
from rnnzoo.tasks import fields
from rnnzoo.tasks import protocol
from rnnzoo.tasks.text import language

_RATE = fields.number(0, 1, below=True)
_RATES = ('token_dropout_rate', 'input_dropout_rate', 'output_dropout_rate')


class Memory(nnx.Variable):
  """A carry that the next window of each stream begins with."""


class TextStream(language.Text):
  """Predicts the next token of a text that goes on.

  Attributes:
    splits: as those of `language.Text`, but 'train' has windows [B, T + J + 1],
      'length' [B], the number of targets of each, and 'begins' bool [B].
  """

  rules = {
      **{
          k: v for k, v in language.DATA_RULES.items() if k != 'steps_per_epoch'
      },
      'context_jitter': fields.integer(0, 2**16),
  }
  model_rules = {
      'embedding_features': fields.optional(fields.integer(1)),
      **dict.fromkeys(_RATES, _RATE),
      'activation_penalty': fields.number(0),
      'change_penalty': fields.number(0),
  }

  def _set_up(self, config: ml_collections.ConfigDict) -> None:
    super()._set_up(config)
    context, jitter = config.data.context, config.data.context_jitter
    if jitter > context // 8:
      raise ValueError(
          f'config.data.context_jitter={jitter} must be at most an eighth of'
          f' config.data.context, {context}: {context // 8}'
      )

  def _training(self, tokens: np.ndarray) -> protocol.Generator:
    """Returns the windows of streams, in order."""
    context, size = self._data.context, len(tokens) // self.batch_size
    steps = (size - 1) // context
    if not steps:
      raise ValueError(
          f'{self.dataset} has {len(tokens):,} tokens to train,'
          f' {size:,} for each of config.batch_size={self.batch_size} streams;'
          f' a stream has more than config.data.context, {context}'
      )
    streams = tokens[: self.batch_size * size].reshape(self.batch_size, size)
    given = jnp.asarray(streams), context, self._data.context_jitter, steps
    make = functools.partial(next_windows, *given)
    return protocol.Generator(
        make, steps, source={'tokens': tokens}, is_ordered=True
    )

  def _validation(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
    return self._test_windows(tokens)

  def build_model(self, rngs) -> models.TiedLanguageModel:
    names = ('embedding_features', *_RATES)
    model: Any = backbones.build_language_model(
        self._model,
        len(self.tokens.pieces),
        rngs,
        make=_make,
        **{name: self._model[name] for name in names},
    )
    carry = model.initial_carry((self.batch_size,))
    model.memory = nnx.data(jax.tree.map(Memory, carry))
    return model

  def evaluate(self, model, examples, rngs=None) -> protocol.Evaluation:
    """Returns as `language.Text` does; in training, the loss with penalties.

    A window's loss is its sum over the tokens divided by `context`, so a short
    one moves the parameters less.
    """
    if rngs is None:
      return super().evaluate(model, examples)
    tokens, lengths = examples['tokens'], examples['length']
    memory = jax.tree.map(
        lambda first, held: _where(
            examples['begins'], first, jax.lax.stop_gradient(held[...])
        ),
        model.initial_carry((len(tokens),)),
        model.memory,
    )
    carry, y, dropped = model.outputs(
        tokens[:, :-1],
        initial_carry=memory,
        seq_lengths=lengths,
        rngs=rngs,
    )
    keep = lambda held, new: held.set_value(new.astype(held[...].dtype))
    is_held = lambda x: isinstance(x, Memory)
    jax.tree.map(keep, model.memory, carry, is_leaf=is_held)
    logits = model.logits(dropped).astype(jnp.float32)
    nats = optax.softmax_cross_entropy_with_integer_labels(
        logits, tokens[:, 1:]
    )
    valid = jnp.arange(nats.shape[1]) < lengths[:, None]
    mean = lambda x, valid: jnp.sum(jnp.where(valid, x, 0.0), axis=1) / (
        self._data.context
    )
    square = lambda x: jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1)
    losses = mean(nats, valid)
    losses += self._model.activation_penalty * mean(square(dropped), valid)
    losses += self._model.change_penalty * mean(
        square(y[:, 1:] - y[:, :-1]), valid[:, 1:]
    )
    sizes = jnp.asarray(self.tokens.sizes)[tokens[:, 1:]]
    sizes = jnp.sum(jnp.where(valid, sizes, 0), axis=1) / lengths
    scores = {protocol.BYTES_PER_TOKEN.name: sizes}
    return protocol.Evaluation(losses, scores)


def _make(layer, num_tokens, features, *, num_blocks, dtype, **options) -> Any:
  del dtype  # The layer has it.
  return models.TiedLanguageModel(
      layer, num_tokens, features, num_layers=num_blocks, **options
  )


def _where(condition: jax.Array, first: jax.Array, other: jax.Array):
  shape = condition.shape + (1,) * (first.ndim - condition.ndim)
  return jnp.where(condition.reshape(shape), first, other)


def next_windows(
    streams: jax.Array,
    context: int,
    jitter: int,
    steps: int,
    key: jax.Array,
    step: jax.Array,
) -> dict[str, jax.Array]:
  """Returns the windows of a step; those of an epoch follow each other.

  A window meets the next one `context` tokens after it begins, plus or minus a
  normal number of standard deviation `jitter`, at most three of these.

  Args:
    streams: tokens [B, N].
    context: T.
    jitter: a standard deviation, in tokens.
    steps: windows of an epoch.
    key: a function of the seed.
    step: steps of training before.
  """
  key, place = jax.random.fold_in(key, step // steps), step % steps

  def edge(index):
    drawn = jax.random.normal(jax.random.fold_in(key, index))
    moved = jnp.round(jnp.clip(drawn, -3, 3) * jitter).astype(jnp.int32)
    inside = (index > 0) & (index < steps)
    return context * index + jnp.where(inside, moved, 0)

  size, most = streams.shape[0], context + 6 * jitter
  first, end = edge(place), edge(place + 1)
  padded = jnp.pad(streams, [(0, 0), (0, 9 * jitter)])
  tokens = jax.lax.dynamic_slice_in_dim(padded, first, most + 1, axis=1)
  return {
      'tokens': tokens,
      'length': jnp.full(size, end - first),
      'begins': jnp.full(size, place == 0),
  }
