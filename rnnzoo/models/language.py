"""A language model over any recurrent layer; no cell is named here.

A block, as in Feng et al., Were RNNs all we needed?, 2024 (section on language
modelling), with pre-norm and residual throughout:

    x = x + dropout(conv(norm(x)))       causal, depthwise
    x = x + dropout(layer(norm(x)))
    x = x + dropout(mlp(norm(x)))

The model embeds tokens, runs blocks, normalises, and maps to logits.

Dimensions: T time, F features, V tokens of the vocabulary.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.engines import sharding
from rnnzoo.layers import bidirectional
from rnnzoo.layers import embedding
from rnnzoo.layers import initializers
from rnnzoo.layers import sequence_layer
from rnnzoo.layers import stack

Array = jax.Array
MLPS = ('plain', 'gated')


class ShortConvolution(nnx.Module):
  """Depthwise convolution over the last steps: y_t = b + sum_k w_k x_(t-k).

  The convolution of xLSTM's blocks, in `layers.xlstm_parts`, has resets and
  masks, and its kernel lies the other way round in checkpoints.

  Attributes:
    kernel: w [width, F], the weight of the present step first.
    bias: b [F].
  """

  def __init__(self, features: int, width: int, *, rngs: nnx.Rngs):
    """Draws the kernel from U(-1, 1) / sqrt(width)."""
    settings.positive(features, 'features')
    settings.positive(width, 'width')
    bound = width**-0.5
    self.kernel = nnx.Param(
        jax.random.uniform(
            rngs.params(), (width, features), minval=-bound, maxval=bound
        )
    )
    self.bias = nnx.Param(jnp.zeros(features))

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> Array:
    """Returns the inputs before the first step: zeros [..., width - 1, F]."""
    width, features = self.kernel.shape
    return jnp.zeros((*batch_shape, width - 1, features))

  @promotion.of_ranks
  def unroll(self, carry: Array, x: Array) -> tuple[Array, Array]:
    """Returns the last inputs, in the carry's dtype, and outputs [..., T, F].

    Args:
      carry: the inputs before, [..., width - 1, F].
      x: [..., T, F].
    """
    width, time = self.kernel.shape[0], x.shape[-2]
    before = sharding.as_sharded(carry.astype(x.dtype), x)
    x = jnp.concatenate([before, x], axis=-2)
    kernel = self.kernel[...].astype(x.dtype)
    y = self.bias[...].astype(x.dtype)
    for k in range(width):
      start = width - 1 - k
      y = y + kernel[k] * x[..., start : start + time, :]
    return x[..., time:, :].astype(carry.dtype), y


class Mlp(nnx.Module):
  """Two linear maps with GELU, or gated: W3 (silu(W1 x) * W2 x)."""

  def __init__(
      self,
      features: int,
      kind: str,
      inner: int | None = None,
      *,
      dtype: jax.typing.DTypeLike | None = None,
      rngs: nnx.Rngs,
  ):
    """Creates the parameters; `LanguageModel` documents the arguments."""
    self.is_gated = kind == 'gated'
    if inner is None:
      factor = 8 / 3 if self.is_gated else 4
      inner = max(1, round(factor * features))
    self.up = nnx.Linear(features, inner, dtype=dtype, rngs=rngs)
    if self.is_gated:
      self.gate = nnx.Linear(features, inner, dtype=dtype, rngs=rngs)
    self.down = nnx.Linear(inner, features, dtype=dtype, rngs=rngs)

  def __call__(self, x: Array) -> Array:
    inner = self.up(x)
    if self.is_gated:
      return self.down(jax.nn.silu(self.gate(x)) * inner)
    return self.down(jax.nn.gelu(inner))


class Block(nnx.Module):
  """Convolution, recurrent layer and MLP, each with pre-norm and residual."""

  def __init__(
      self,
      make_layer: Callable[..., sequence_layer.SequenceLayer],
      features: int,
      *,
      conv_width: int,
      mlp: str | None,
      mlp_features: int | None,
      dropout_rate: float,
      dtype: jax.typing.DTypeLike | None,
      rngs: nnx.Rngs,
  ):
    """Creates the parts; see `LanguageModel`."""
    norm = functools.partial(nnx.LayerNorm, features, dtype=dtype, rngs=rngs)
    self.has_convolution, self.has_mlp = bool(conv_width), mlp is not None
    if conv_width:
      self.conv_norm = norm()
      self.convolution = ShortConvolution(features, conv_width, rngs=rngs)
    self.layer_norm = norm()
    self.layer = sequence_layer.make(
        make_layer, features, features, rngs, {}, 'make_layer'
    )
    check_forwards(self.layer)
    if self.layer.out_features != features:
      raise ValueError(
          f'a layer of a block must have {features} features, as many as the'
          f' model; got {self.layer.out_features}'
      )
    if mlp is not None:
      self.mlp_norm = norm()
      self.mlp = Mlp(features, mlp, mlp_features, dtype=dtype, rngs=rngs)
    self.dropout = nnx.Dropout(float(dropout_rate))

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> Any:
    """Returns (inputs of the convolution or None, carry of the layer)."""
    conv = None
    if self.has_convolution:
      conv = self.convolution.initial_carry(batch_shape)
    return conv, self.layer.initial_carry(batch_shape)

  def unroll(
      self, carry: Any, x: Array, rngs: nnx.Rngs | None
  ) -> tuple[Any, Array]:
    """Returns the final carry, and outputs [..., T, F]."""

    def add(x, y):
      if rngs is not None and self.dropout.rate:
        y = self.dropout(y, deterministic=False, rngs=rngs)
      # The sum is wider than parts that compute in 16 bits.
      return x + y.astype(promotion.both(x.dtype, y.dtype))

    conv, state = carry
    if self.has_convolution:
      conv, y = self.convolution.unroll(
          conv, stack.normalize(self.conv_norm, x)
      )
      x = add(x, y)
    y = stack.normalize(self.layer_norm, x)
    if x.shape[-2] == 1 and rngs is None:
      state, y = self.layer.step(state, y[..., 0, :])
      y = y[..., None, :]
    else:
      state, y = self.layer.unroll(y, initial_carry=state, rngs=rngs)
    x = add(x, y)
    if self.has_mlp:
      x = add(x, self.mlp(stack.normalize(self.mlp_norm, x)))
    return (conv, state), x


class LanguageModel(nnx.Module):
  """Logits of the next token after each one.

  >>> import jax, jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> from rnnzoo import models
  >>> model = models.LanguageModel(
  ...     rnnzoo.MinGRU, num_tokens=65, features=32, rngs=nnx.Rngs(0)
  ... )
  >>> jax.eval_shape(model, jnp.zeros((2, 10), jnp.int32)).shape
  (2, 10, 65)
  >>> carry = model.initial_carry((2,))
  >>> carry, logits = jax.eval_shape(model.step, carry, jnp.array([3, 4]))
  >>> logits.shape
  (2, 65)

  Attributes:
    embedding: a vector for each token; the logits' too, where tied.
    blocks: blocks from the input up.
    norm: norm before the logits.
    head: map to logits; only where not tied.
    is_tied: whether the embedding maps to logits.
  """

  def __init__(
      self,
      make_layer: Callable[..., sequence_layer.SequenceLayer],
      num_tokens: int,
      features: int,
      *,
      num_blocks: int = 3,
      conv_width: int = 4,
      mlp: str | None = 'plain',
      mlp_features: int | None = None,
      dropout_rate: float = 0.0,
      is_tied: bool = False,
      dtype: jax.typing.DTypeLike | None = None,
      rngs: nnx.Rngs,
  ):
    """Creates the parameters.

    Args:
      make_layer: a layer class, or a function of (in_features, features, rngs=)
        that returns a layer which runs forwards. No layer is told that a text
        starts, which an `RGLRU` would read.
      num_tokens: V.
      features: F, of embedding and all blocks.
      num_blocks: how many.
      conv_width: steps that a block's convolution sees; 0 for none.
      mlp: 'plain', 'gated', or None for none.
      mlp_features: width of an MLP; None for 4 F, or 8/3 F where it is gated.
      dropout_rate: rate for the embedding and for each part of a block.
      is_tied: whether the embedding maps to logits as well.
      dtype: dtype that norms, convolutions and MLPs of the blocks compute in;
        None for the parameters' dtype. `make_layer` sets the layers' dtype. The
        blocks' sums, and logits, have the parameters' dtype.
      rngs: `nnx.Rngs` that parameters are drawn from.

    Raises:
      ValueError: an argument is not valid.
    """
    settings.boolean(is_tied, 'is_tied')
    settings.dropout_rate(dropout_rate)
    base = sequence_layer.SequenceLayer
    settings.factories([make_layer], base, 'make_layer')
    settings.positive(num_tokens, 'num_tokens')
    settings.positive(features, 'features')
    # The layer's own check would come after a minute of drawing embeddings.
    settings.numbers_of((features, features), 'A kernel of a block')
    settings.positive(num_blocks, 'num_blocks')
    initializers.check_rngs(rngs, 'params', required=True)
    if mlp is not None and mlp not in MLPS:
      raise ValueError(f'mlp must be one of {MLPS} or None; got {mlp!r}')
    if mlp_features is not None:
      settings.positive(mlp_features, 'mlp_features')
      if mlp is None:
        raise ValueError(f'mlp_features={mlp_features} needs an mlp')
    if conv_width != 0:
      settings.positive(conv_width, 'conv_width')
    if dtype is not None:
      checks.floating(dtype, 'dtype')
    self.embedding = nnx.Embed(num_tokens, features, rngs=rngs)
    self.dropout = nnx.Dropout(float(dropout_rate))
    self.blocks = nnx.List(
        [
            Block(
                make_layer,
                features,
                conv_width=conv_width,
                mlp=mlp,
                mlp_features=mlp_features,
                dropout_rate=dropout_rate,
                dtype=dtype,
                rngs=rngs,
            )
            for _ in range(num_blocks)
        ]
    )
    self.norm = nnx.LayerNorm(features, rngs=rngs)
    self.is_tied = is_tied
    if not is_tied:
      self.head = nnx.Linear(features, num_tokens, rngs=rngs)

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> Any:
    """Returns the start of a text: a carry for each block."""
    batch_shape = checks.shape(batch_shape, 'batch_shape')
    return tuple(block.initial_carry(batch_shape) for block in self.blocks)

  def unroll(
      self,
      tokens: Array,
      *,
      initial_carry: Any = None,
      rngs: nnx.Rngs | None = None,
  ) -> tuple[Any, Array]:
    """Returns the final carry, and logits [..., T, V].

    Args:
      tokens: int [..., T], from 0 to V - 1.
      initial_carry: the final carry of the text before; None at its start.
      rngs: streams for dropout while training; None to evaluate.

    Raises:
      ValueError: tokens are no integers, or have no axis of time.
    """
    initializers.check_rngs(rngs, 'dropout' if self.dropout.rate else None)
    tokens = checks.tokens(tokens, self.embedding.num_embeddings)
    if initial_carry is None:
      initial_carry = self.initial_carry(tokens.shape[:-1])
    self._check_carry(initial_carry, tokens.shape[:-1])
    # A block needs time whole.
    (tokens,) = sharding.batch_alike([tokens], tokens.ndim - 1)
    x = embedding.vectors(self.embedding, tokens)
    if rngs is not None and self.dropout.rate:
      x = self.dropout(x, deterministic=False, rngs=rngs)
    carries = []
    for block, carry in zip(self.blocks, initial_carry, strict=True):
      carry, x = block.unroll(carry, x, rngs)
      carries.append(carry)
    head = self.embedding.attend if self.is_tied else self.head
    return tuple(carries), jax.named_call(head, name='logits')(
        stack.normalize(self.norm, x)
    )

  def _check_carry(self, carry: Any, batch_shape: tuple[int, ...]) -> None:
    """Raises ValueError unless it has the arrays of `initial_carry`."""
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    wanted = shapes(jax.eval_shape(lambda: self.initial_carry(batch_shape)))
    given = shapes(carry)
    if given != wanted:
      raise ValueError(
          f'the carry must be as initial_carry({batch_shape}) returns it, with'
          f' arrays of shapes {wanted}; got {given}.'
      )

  def step(
      self, carry: Any, tokens: Array, *, reset: Array | None = None
  ) -> tuple[Any, Array]:
    """Returns the carry after one token of each text, and logits [..., V].

    Args:
      carry: result of `initial_carry`, `unroll` or the last step.
      tokens: int [...].
      reset: bool [...]; where true, a text begins anew with this token.
    """
    tokens = checks.tokens(tokens, self.embedding.num_embeddings, axes='[...]')
    reset = checks.flags(reset, tokens.shape, 'reset')
    if reset is not None and carry is not None:
      carry = jax.tree.map(
          lambda first, c: jnp.where(
              reset.reshape(*reset.shape, *[1] * (c.ndim - reset.ndim)),
              first,
              c,
          ),
          self.initial_carry(tokens.shape),
          carry,
      )
    carry, logits = self.unroll(tokens[..., None], initial_carry=carry)
    return carry, logits[..., 0, :]

  def __call__(self, tokens: Array, *, rngs: nnx.Rngs | None = None) -> Array:
    """Returns logits [..., T, V] of tokens int [..., T], from their start."""
    return self.unroll(tokens, rngs=rngs)[1]


def check_forwards(layer: sequence_layer.SequenceLayer) -> None:
  """Raises ValueError for a layer, or a stack, that reads backwards."""
  if bidirectional.is_inside(layer):
    raise ValueError(
        'a layer of a language model must not read backwards, where it sees'
        f' the tokens to predict; got {type(layer).__name__}'
    )
