"""An encoder and a decoder over any recurrent layers; no cell is named here.

With e_t the embedding of the token before, c the context of the source, h_t the
decoder's output, and W linear maps with biases:

  without attention      c    = the encoder's last output
                         h_0  = c, or tanh(W_0 c) where sizes differ
                         h_t  = decoder([e_t; c])
  with attention         a_ts = softmax_s(v . tanh(W_q h_(t-1) + W_k y_s))
                         c_t  = sum_s a_ts y_s,  y the encoder's outputs
                         h_0  = tanh(W_0 c)
                         h_t  = decoder([e_t; c_t])
  both                   logits_t = W [e_t; h_t; c_t]

Dimensions: B batch axes, any number or none, S steps of the source, T of the
target, E features of an embedding, C of the encoder, F of the decoder, A of the
attention, V tokens.

References:
  Cho et al., Learning phrase representations using RNN encoder-decoder, 2014.
  Bahdanau et al., Neural machine translation by jointly learning to align and
  translate, 2015: equations 4 to 6, appendix A.1.2.
  Bengio et al., Scheduled sampling for sequence prediction, 2015.
"""

import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import devices
from rnnzoo import cell
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.engines import sharding
from rnnzoo.layers import bidirectional
from rnnzoo.layers import dense_stack
from rnnzoo.layers import embedding
from rnnzoo.layers import initializers
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer
from rnnzoo.layers import stack
from rnnzoo.models import decoding

Array = jax.Array


class AdditiveAttention(nnx.Module):
  """Weights of steps by v . tanh(W_q query + W_k value)."""

  def __init__(
      self,
      query_features: int,
      value_features: int,
      features: int,
      *,
      dtype: Any = None,
      rngs: nnx.Rngs,
  ):
    """Creates the parameters for a query [F], values [C] and A features."""
    self.query = nnx.Linear(query_features, features, dtype=dtype, rngs=rngs)
    self.key = nnx.Linear(
        value_features, features, use_bias=False, dtype=dtype, rngs=rngs
    )
    self.score = nnx.Linear(features, 1, use_bias=False, dtype=dtype, rngs=rngs)

  def __call__(
      self, query: Array, keys: Array, values: Array, valid: Array
  ) -> tuple[Array, Array]:
    """Returns the context [B, C], and the weights [B, S].

    Args:
      query: [B, F].
      keys: `self.key` of the values, [B, S, A].
      values: [B, S, C].
      valid: bool [B, S], false in padding.
    """
    hidden = jnp.tanh(self.query(query)[..., None, :] + keys)
    scores = self.score(hidden)[..., 0].astype(jnp.float32)
    # A source of padding alone has no weights, rather than NaN.
    weights = jax.nn.softmax(jnp.where(valid, scores, -1e30), axis=-1)
    weights = jnp.where(valid, weights, 0.0)
    context = jnp.einsum(
        '...s,...sc->...c', weights.astype(values.dtype), values
    )
    return context, weights


class Memory(NamedTuple):
  """The source, as the decoder sees it.

  Attributes:
    context: [B, C], the encoder's last output.
    keys: [B, S, A], compared with a query; without attention None, as
      `values` and `valid`.
    values: the encoder's outputs [B, S, C].
    valid: bool [B, S], false in padding.
  """

  context: Array
  keys: Array | None = None
  values: Array | None = None
  valid: Array | None = None


class Outputs(NamedTuple):
  """The results of a run over target tokens.

  Attributes:
    logits: [B, T, V], of the next token.
    weights: [B, T, S], of the attention; None without.
  """

  logits: Array
  weights: Array | None = None


class Seq2Seq(nnx.Module):
  """Reads a sequence of tokens and writes another.

  >>> import jax, jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> from rnnzoo import models
  >>> rngs = nnx.Rngs(0)
  >>> model = models.Seq2Seq(
  ...     rnnzoo.GRU(16, 32, rngs=rngs),
  ...     rnnzoo.GRU(16 + 32, 32, rngs=rngs),
  ...     num_source_tokens=50, num_target_tokens=40, attention_features=32,
  ...     rngs=rngs
  ... )
  >>> source, target = jnp.ones((2, 7), jnp.int32), jnp.ones((2, 5), jnp.int32)
  >>> jax.eval_shape(model, source, target).shape
  (2, 5, 40)
  >>> translate = lambda: model.decode(source, max_length=9, num_beams=4)
  >>> jax.eval_shape(translate).tokens.shape
  (2, 9)

  Attributes:
    source_embedding: a vector for each token of the source.
    target_embedding: a vector for each token of the target.
    encoder: the layer over the source.
    decoder: the layer over the target.
    attention: only with attention.
    bridge: map from context to the decoder's first h, where it is needed.
    head: map to logits.
  """

  def __init__(
      self,
      encoder: sequence_layer.SequenceLayer,
      decoder: sequence_layer.SequenceLayer,
      *,
      num_source_tokens: int,
      num_target_tokens: int,
      attention_features: int | None = None,
      dropout_rate: float = 0.0,
      dtype: Any = None,
      rngs: nnx.Rngs,
  ):
    """Creates the parameters that the layers do not have.

    Args:
      encoder: a layer, a stack, or a `Bidirectional`; its `in_features` equal
        the size of the source's embedding.
      decoder: a layer or a stack that runs forwards; its `in_features` equal
        the size of the target's embedding and the encoder's `out_features`
        together.
      num_source_tokens: V of the source.
      num_target_tokens: V of the target.
      attention_features: A; None for no attention.
      dropout_rate: share of the embeddings' entries that training drops.
      dtype: dtype to compute in outside of the layers; None for the
        parameters' dtype.
      rngs: `nnx.Rngs` that parameters are drawn from.

    Raises:
      ValueError: an argument is not valid, or the sizes do not agree.
    """
    for layer, name in ((encoder, 'encoder'), (decoder, 'decoder')):
      if not isinstance(layer, sequence_layer.SequenceLayer):
        raise ValueError(
            f'{name} must be a layer or a stack, such as rnnzoo.GRU(16, 128,'
            f' rngs=rngs), got {layer!r:.80}.'
        )
    for size, name in (
        (num_source_tokens, 'num_source_tokens'),
        (num_target_tokens, 'num_target_tokens'),
    ):
      settings.positive(size, name)
    settings.dropout_rate(dropout_rate)
    initializers.check_rngs(rngs, 'params', required=True)
    if dtype is not None:
      checks.floating(dtype, 'dtype')
    context = encoder.out_features
    embed_features = decoder.in_features - context
    if embed_features < 1:
      raise ValueError(
          f'decoder must have more than {context} in_features: those of an'
          f" embedding and the encoder's {context}; got {decoder.in_features}."
      )
    features = decoder.out_features
    _with_h(decoder, decoder.initial_carry(), jnp.zeros(features))
    make = {'dtype': dtype, 'rngs': rngs}
    self.source_embedding = nnx.Embed(
        num_source_tokens, encoder.in_features, **make
    )
    self.target_embedding = nnx.Embed(num_target_tokens, embed_features, **make)
    self.dropout = nnx.Dropout(float(dropout_rate))
    self.encoder, self.decoder = encoder, decoder
    self.has_attention = attention_features is not None
    self.has_bridge = self.has_attention or context != features
    if attention_features is not None:
      settings.positive(attention_features, 'attention_features')
      self.attention = AdditiveAttention(
          features, context, attention_features, **make
      )
    if self.has_bridge:
      self.bridge = nnx.Linear(context, features, **make)
    self.head = nnx.Linear(
        embed_features + features + context, num_target_tokens, **make
    )

  def encode(
      self,
      source: Array,
      lengths: Array | None = None,
      rngs: nnx.Rngs | None = None,
  ) -> Memory:
    """Returns the source as the decoder sees it.

    Args:
      source: tokens int [B, S].
      lengths: int [B], valid steps of each; None for all.
      rngs: streams for dropout while training; None to evaluate.

    Raises:
      ValueError: an argument has the wrong shape or dtype.
    """
    source = _check_tokens(source, self.source_embedding, 'source')
    if lengths is None:
      lengths = jnp.full(source.shape[:-1], source.shape[-1], jnp.int32)
    x = embedding.vectors(self.source_embedding, source)
    if (scale := self._dropout_scale(x, rngs)) is not None:
      x = x * scale
    with jax.named_scope('recurrence'):
      values = self.encoder(x, seq_lengths=lengths, rngs=rngs)
    _, lengths = sharding.flags_as_sharded(None, lengths, values)
    context = _last(self.encoder, values, lengths)
    if not self.has_attention:
      return Memory(context)
    with jax.named_scope('projection'):
      keys = self.attention.key(values)
    steps = jnp.arange(source.shape[-1])
    batch_axes = range(source.ndim - 1)
    valid = jnp.expand_dims(steps, batch_axes) < lengths[..., None]
    return Memory(context, keys, values, valid)

  def initial_carry(self, memory: Memory) -> Any:
    """Returns the decoder's state before the first token: (carry, h_0)."""
    self._check_memory(memory)
    h = memory.context
    if self.has_bridge:
      h = jnp.tanh(self.bridge(h))
    carry = self.decoder.initial_carry(h.shape[:-1])
    return _with_h(self.decoder, carry, h), h

  def step(
      self, memory: Memory, carry: Any, tokens: Array
  ) -> tuple[Any, Array]:
    """Returns the state after one token of each target, and logits [B, V].

    Args:
      memory: result of `encode`.
      carry: result of `initial_carry` or the last step.
      tokens: int [B].

    Raises:
      ValueError: an argument has the wrong shape or dtype.
    """
    count = self.target_embedding.num_embeddings
    tokens = checks.tokens(tokens, count, axes='[...]')
    self._check_memory(memory, tokens.shape, 'tokens')
    shape = (*tokens.shape, self.decoder.out_features)
    is_pair = isinstance(carry, (tuple, list)) and len(carry) == 2
    if not is_pair or getattr(carry[1], 'shape', None) != shape:
      raise ValueError(
          'carry must be a pair (carry, h), as initial_carry(memory) returns'
          f' it, with h of shape {shape}, got {carry!r:.80}.'
      )
    x = embedding.vectors(self.target_embedding, tokens)
    carry, output, context, _ = self._step(memory, carry, x)
    return carry, self._logits(x, output, context)

  def unroll(
      self,
      memory: Memory,
      tokens: Array,
      *,
      teacher_forcing: float | Array = 1.0,
      rngs: nnx.Rngs | None = None,
  ) -> Outputs:
    """Returns logits after each token of a target.

    Args:
      memory: result of `encode`.
      tokens: the target's, int [B, T], from the start token on.
      teacher_forcing: the chance that a step sees the target's own token; else
        it sees the one that the model found most likely. The number 1 runs all
        steps at once where there is no attention.
      rngs: streams for dropout and these choices in training; None to evaluate.

    Raises:
      ValueError: an argument has the wrong shape or dtype, choices are to be
        made without `rngs`, or with `rngs` a decoder that runs by single steps
        has dropout or batch normalisation of its own.
    """
    tokens = _check_tokens(tokens, self.target_embedding, 'target')
    self._check_memory(memory, tokens.shape[:-1], 'target')
    teacher_forcing = checks.share(
        teacher_forcing, 'teacher_forcing', tokens.shape
    )
    forced = isinstance(teacher_forcing, float) and teacher_forcing == 1
    if not forced and rngs is None:
      raise ValueError(
          'teacher_forcing below 1 needs random numbers: rngs=nnx.Rngs(key).'
      )
    batch_axes = tokens.ndim - 1
    given = sharding.batch_alike([memory, tokens], batch_axes)
    memory, tokens = devices.alike(given)
    x = embedding.vectors(self.target_embedding, tokens)
    scale = self._dropout_scale(x, rngs)
    carry = self.initial_carry(memory)
    if rngs is not None and (self.has_attention or not forced):
      _check_single_steps(self.decoder)
    if not forced:
      keeps = jax.random.bernoulli(
          rngs.dropout(), teacher_forcing, tokens.shape  # type: ignore[union-attr]
      )
      keeps = sharding.as_sharded(keeps, tokens)
      return self._choose(memory, carry, tokens, keeps, scale)
    x = x if scale is None else x * scale
    if not self.has_attention:
      context = jnp.broadcast_to(
          memory.context[..., None, :],
          (*x.shape[:-1], memory.context.shape[-1]),
      )
      with jax.named_scope('concatenation'):
        inputs = jnp.concatenate([x, context.astype(x.dtype)], axis=-1)
      with jax.named_scope('recurrence'):
        _, outputs = self.decoder.unroll(
            inputs, initial_carry=carry[0], rngs=rngs
        )
      return Outputs(self._logits(x, outputs, context))

    def body(carry, x):
      carry, *results = self._step(memory, carry, x)
      return carry, results

    _, results = jax.lax.scan(body, carry, jnp.moveaxis(x, batch_axes, 0))
    outputs, context, weights = [
        jnp.moveaxis(y, 0, batch_axes) for y in results
    ]
    return Outputs(self._logits(x, outputs, context), weights)

  def __call__(
      self,
      source: Array,
      target: Array,
      *,
      source_lengths: Array | None = None,
      teacher_forcing: float | Array = 1.0,
      rngs: nnx.Rngs | None = None,
  ) -> Array:
    """Returns logits [B, T, V] after each token of the targets.

    The arguments and errors are as in `encode` and `unroll`.
    """
    memory = self.encode(source, source_lengths, rngs)
    return self.unroll(
        memory, target, teacher_forcing=teacher_forcing, rngs=rngs
    ).logits

  def decode(
      self,
      source: Array,
      lengths: Array | None = None,
      *,
      max_length: int,
      num_beams: int = 1,
      length_penalty: float = 0.0,
  ) -> decoding.Decoded:
    """Returns likely targets, found in one loop that `jax.jit` may compile.

    Args:
      source: tokens int [B, S].
      lengths: int [B], valid steps of each; None for all.
      max_length: length at which a target ends if it has not before.
      num_beams: width of beam search; 1 takes the most likely token each step.
      length_penalty: exponent for beams, see `rnnzoo.models.decoding`.
    """
    decoding.check(max_length, num_beams, length_penalty)

    def search(given):
      lead = given[0].context.shape[:-1]
      batch = math.prod(lead)
      memory = jax.tree.map(
          lambda x: x.reshape(batch, *x.shape[len(lead) :]), given[0]
      )
      start = self.step, memory, self.initial_carry(memory), batch
      if num_beams == 1:
        found = decoding.greedy(*start, max_length=max_length)
      else:
        found = decoding.beam_search(
            *start,
            max_length=max_length,
            num_beams=num_beams,
            length_penalty=length_penalty,
        )
      return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), found)

    split = (self.encode(source, lengths),)
    if not sharding.is_sharded(split):
      return search(split)
    # Each device decodes its own part of the batch.
    batch_axes = split[0].context.ndim - 1
    batch_first = (*range(batch_axes), None, None)
    return sharding.spread(
        search,
        split,
        positions=(batch_first,),
        out_positions=batch_first,
        over=sharding.choose(split, (batch_first,)),
    )

  def _check_memory(self, memory, batch_shape=None, name='') -> None:
    """Raises ValueError unless `encode` returned it, for such a batch.

    Args:
      memory: the caller's memory.
      batch_shape: batch shape of tokens beside it, or None.
      name: name of these tokens.
    """
    is_memory = isinstance(memory, Memory)
    given = memory if is_memory else (None,) * 4
    found = tuple(getattr(x, 'shape', ()) for x in given)
    batch, size = found[0][:-1], self.encoder.out_features
    wanted: Any = (*batch, size), (), (), ()
    if self.has_attention:
      steps = *batch, *found[3][-1:]
      keys = *steps, self.attention.key.out_features
      wanted = (*batch, size), keys, (*steps, size), steps
    if found != wanted:
      got = f'shapes {found}' if is_memory else settings.a(type(memory))
      raise ValueError(
          f'memory must be as encode of this model returns it, got {got}.'
      )
    if batch_shape not in (None, batch):
      raise ValueError(
          f"{name} must be integers with the source's batch axes {batch}, got"
          f' {batch_shape}.'
      )

  def _choose(self, memory, carry, tokens, keeps, scale) -> Outputs:
    """Runs over tokens, of which some are replaced by the model's own."""
    axis = tokens.ndim - 1
    over_time = lambda x: None if x is None else jnp.moveaxis(x, axis, 0)

    def body(state, inputs):
      carry, chosen = state
      token, keep, scale = inputs
      x = embedding.vectors(
          self.target_embedding, jnp.where(keep, token, chosen)
      )
      x = x if scale is None else x * scale
      carry, output, context, weights = self._step(memory, carry, x)
      logits = self._logits(x, output, context)
      chosen = jnp.argmax(logits, axis=-1).astype(tokens.dtype)
      return (carry, chosen), (logits, weights)

    # The first token is the start, which no model chooses.
    keeps = keeps.at[..., 0].set(True)
    _, results = jax.lax.scan(
        body,
        (carry, tokens[..., 0]),
        (over_time(tokens), over_time(keeps), over_time(scale)),
    )
    logits, weights = results
    weights = None if weights is None else jnp.moveaxis(weights, 0, axis)
    return Outputs(jnp.moveaxis(logits, 0, axis), weights)

  def _step(self, memory, carry, x):
    """Returns (carry, h [B, F], context [B, C], weights [B, S] or None)."""
    carry, output = carry
    context, weights = memory.context, None
    if self.has_attention:
      with jax.named_scope('attention'):
        context, weights = self.attention(output, *memory[1:])
    with jax.named_scope('concatenation'):
      inputs = jnp.concatenate([x, context.astype(x.dtype)], axis=-1)
    with jax.named_scope('recurrence'):
      carry, stepped = self.decoder.step(carry, inputs)
    # A loop's state keeps its dtype.
    stepped = stepped.astype(output.dtype)
    return (carry, stepped), stepped, context, weights

  def _logits(self, x: Array, output: Array, context: Array) -> Array:
    with jax.named_scope('logits'):
      parts = [part.astype(x.dtype) for part in (x, output, context)]
      return self.head(jnp.concatenate(parts, axis=-1))

  def _dropout_scale(self, x: Array, rngs: nnx.Rngs | None) -> Array | None:
    """Returns the factor of x by dropout, or None for none."""
    initializers.check_rngs(rngs, 'dropout' if self.dropout.rate else None)
    if rngs is None or not self.dropout.rate:
      return None
    return self.dropout(jnp.ones_like(x), deterministic=False, rngs=rngs)


def _with_h(layer: sequence_layer.SequenceLayer, carry: Any, h: Array) -> Any:
  """Returns a carry of a layer, or of all layers of a stack, with that h."""
  is_dense = isinstance(layer, dense_stack.DenseStack)
  if isinstance(layer, stack.Stack) and not is_dense:
    return tuple(
        _with_h(level, part, h)
        for level, part in zip(layer.layers, carry, strict=True)
    )
  if not isinstance(layer, recurrent.RecurrentLayer):
    raise ValueError(
        'decoder must be a recurrent layer or a stack of these, which can take'
        f' single steps; got {settings.a(type(layer))}.'
    )
  rest = [sharding.as_sharded(c, h) for c in carry[1:]]
  rest = [devices.like(c, h) for c in rest]
  return cell.like(carry, (h.astype(carry[0].dtype), *rest))


def _check_single_steps(decoder: sequence_layer.SequenceLayer) -> None:
  """Raises ValueError for a decoder that trains otherwise in single steps."""
  for _, part in nnx.iter_modules(decoder):
    drops = isinstance(part, stack.Stack) and part._drops()
    if drops or isinstance(part, nnx.BatchNorm):
      raise ValueError(
          'With attention, or teacher_forcing other than 1, the decoder takes'
          ' single steps, which drop nothing and update no averages, but its'
          f' {type(part).__name__} does; a decoder without dropout_rate and'
          " with norm=None or 'layer' would work."
      )


def _last(
    layer: sequence_layer.SequenceLayer, y: Array, lengths: Array
) -> Array:
  """Returns the outputs [B, C] that have seen the whole source.

  Args:
    layer: the encoder.
    y: its outputs [B, S, C].
    lengths: int [B], valid steps.
  """
  if isinstance(layer, dense_stack.DenseStack):
    # The input, which has no direction, and the outputs of each level.
    sizes = [level.out_features for level in layer.layers]
    starts = np.cumsum([layer.in_features, *sizes[:-1]])
    first, *parts = jnp.split(y, starts, axis=-1)
    index = checks.last_step(lengths, y.shape[-2])[..., None, None]
    found = [jnp.take_along_axis(first, index, axis=-2)[..., 0, :]]
    for level, part in zip(layer.layers, parts, strict=True):
      found.append(_last(level, part, lengths))
    return jnp.concatenate(found, axis=-1)
  if isinstance(layer, stack.Stack):
    return _last(layer.layers[-1], y, lengths)
  index = checks.last_step(lengths, y.shape[-2])[..., None, None]
  last = jnp.take_along_axis(y, index, axis=-2)[..., 0, :]
  if not isinstance(layer, bidirectional.Bidirectional):
    return last
  # The backward half has seen everything at its first step.
  size = layer.forward.out_features
  return jnp.concatenate([last[..., :size], y[..., 0, size:]], axis=-1)


def _check_tokens(tokens: Array, embed: nnx.Embed, name: str) -> Array:
  tokens = checks.tokens(tokens, embed.num_embeddings, name)
  if not tokens.shape[-1]:
    raise ValueError(f'{name} must have a step or more, got {tokens.shape}.')
  return tokens
