"""A language model whose embedding maps to logits too, as AWD-LSTM has it.

    x_0 = dropout(E[tokens])             whole tokens are dropped, then units
    x_l = dropout(layer_l(x_(l-1)))      l = 1 .. L
    logits = x_L E^T + b

All masks hold for all steps of a call. The last layer has the features of the
embedding.

Dimensions: T time, V tokens of the vocabulary.

References:
  Merity, Keskar, Socher, Regularizing and optimizing LSTM language models,
  2018.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.layers import embedding
from rnnzoo.layers import initializers
from rnnzoo.layers import sequence_layer
from rnnzoo.layers import stack
from rnnzoo.models import language

Array = jax.Array


class TiedLanguageModel(language.LanguageModel):
  """Logits of the next token after each one, by a plain stack of layers.

  >>> import jax, jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> from rnnzoo import models
  >>> model = models.TiedLanguageModel(
  ...     rnnzoo.LSTM, num_tokens=65, features=48, embedding_features=32,
  ...     rngs=nnx.Rngs(0)
  ... )
  >>> jax.eval_shape(model, jnp.zeros((2, 10), jnp.int32)).shape
  (2, 10, 65)

  Attributes:
    embedding: a vector for each token, and the map to logits.
    stack: the layers.
    bias: b, [V].
  """

  def __init__(
      self,
      make_layer: Callable[..., sequence_layer.SequenceLayer],
      num_tokens: int,
      features: int,
      embedding_features: int | None = None,
      *,
      num_layers: int = 3,
      dropout_rate: float = 0.0,
      token_dropout_rate: float = 0.0,
      input_dropout_rate: float = 0.0,
      output_dropout_rate: float = 0.0,
      rngs: nnx.Rngs,
  ):
    """Creates the parameters.

    Args:
      make_layer: a layer class, or a function of (in_features, features, rngs=)
        that returns a layer which runs forwards.
      num_tokens: V.
      features: of all layers but the last.
      embedding_features: of the embedding and the last layer; None for
        `features`.
      num_layers: how many.
      dropout_rate: between layers.
      token_dropout_rate: share of the vocabulary whose vectors are zero.
      input_dropout_rate: of the embedded tokens.
      output_dropout_rate: of the last layer's output.
      rngs: `nnx.Rngs` that parameters are drawn from.

    Raises:
      ValueError: an argument is not valid.
    """
    settings.positive(num_tokens, 'num_tokens')
    settings.positive(features, 'features')
    size = features if embedding_features is None else embedding_features
    settings.positive(size, 'embedding_features')
    settings.positive(num_layers, 'num_layers')
    rates = token_dropout_rate, input_dropout_rate, output_dropout_rate
    for rate in rates:
      settings.dropout_rate(rate)
    base = sequence_layer.SequenceLayer
    settings.factories([make_layer], base, 'make_layer')
    initializers.check_rngs(rngs, 'params', required=True)

    def last(in_features, unused_features, **options):
      return make_layer(in_features, size, **options)

    self.embedding = nnx.Embed(num_tokens, size, rngs=rngs)
    self.stack = stack.Stack(
        [make_layer] * (num_layers - 1) + [last],
        size,
        features,
        num_layers=num_layers,
        dropout_rate=dropout_rate,
        share_dropout_over_time=True,
        rngs=rngs,
    )
    language.check_forwards(self.stack)
    self.bias = nnx.Param(jnp.zeros(num_tokens))
    over_time = functools.partial(nnx.Dropout, broadcast_dims=(-2,))
    self.input_dropout = over_time(float(input_dropout_rate))
    self.output_dropout = over_time(float(output_dropout_rate))
    self.token_dropout = nnx.Dropout(float(token_dropout_rate))

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> Any:
    """Returns the start of a text: a carry for each layer."""
    batch_shape = checks.shape(batch_shape, 'batch_shape')
    return self.stack.initial_carry(batch_shape)

  def unroll(
      self,
      tokens: Array,
      *,
      initial_carry: Any = None,
      rngs: nnx.Rngs | None = None,
  ) -> tuple[Any, Array]:
    """Returns the final carry, and logits; see `LanguageModel.unroll`."""
    carry, _, y = self.outputs(tokens, initial_carry=initial_carry, rngs=rngs)
    return carry, self.logits(y)

  def outputs(
      self,
      tokens: Array,
      *,
      initial_carry: Any = None,
      seq_lengths: Array | None = None,
      rngs: nnx.Rngs | None = None,
  ) -> tuple[Any, Array, Array]:
    """Returns the final carry, and the last layer's outputs, [..., T, size].

    The outputs come twice: as they are, and as dropout leaves them.

    Args:
      tokens: int [..., T], from 0 to V - 1.
      initial_carry: the final carry of the text before; None at its start.
      seq_lengths: int [...]; the carry is the one after so many tokens.
      rngs: streams for dropout while training; None to evaluate.

    Raises:
      ValueError: tokens are no integers, or have no axis of time.
    """
    initializers.check_rngs(rngs, None)
    count = self.embedding.num_embeddings
    tokens = checks.tokens(tokens, count)

    def drop(dropout, x):
      if rngs is None or not dropout.rate:
        return x
      return dropout(x, deterministic=False, rngs=rngs)

    x = embedding.vectors(self.embedding, tokens)
    if rngs is not None and self.token_dropout.rate:
      kept = drop(self.token_dropout, jnp.ones((count,), x.dtype))
      x *= kept[tokens][..., None]
    x = drop(self.input_dropout, x)
    carry, y = self.stack.unroll(
        x, initial_carry=initial_carry, seq_lengths=seq_lengths, rngs=rngs
    )
    return carry, y, drop(self.output_dropout, y)

  def logits(self, y: Array) -> Array:
    """Returns logits [..., V] of outputs [..., size]."""
    return self.embedding.attend(y) + self.bias[...]
