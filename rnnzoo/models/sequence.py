"""Models over any layer; no cell is named here."""

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

Array = jax.Array

POOLINGS = ('last', 'mean')


class SequenceModel(nnx.Module):
  """Reads a sequence and answers at its end, or after every step.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> from rnnzoo import models
  >>> rngs = nnx.Rngs(0)
  >>> model = models.SequenceModel(
  ...     rnnzoo.GRU(16, 128, rngs=rngs), 3, num_tokens=12, every_step=True,
  ...     rngs=rngs
  ... )
  >>> model(jnp.zeros((4, 28), jnp.int32)).shape
  (4, 28, 3)
  >>> carry = model.initial_carry((4,))
  >>> carry, answer = model.step(carry, jnp.zeros(4, jnp.int32))
  >>> answer.shape
  (4, 3)

  Attributes:
    embedding: a vector of `backbone.in_features` for each token; only in a
      model of tokens.
    backbone: the recurrent layer or stack.
    head: linear map from the backbone's outputs to the answer.
    every_step: whether there is an answer after every step.
    pooling: which output an answer at the end reads, the 'last' one or the
      'mean' of all.
  """

  def __init__(
      self,
      backbone: sequence_layer.SequenceLayer,
      out_features: int,
      *,
      every_step: bool = False,
      pooling: str = 'last',
      num_tokens: int | None = None,
      rngs: nnx.Rngs,
  ):
    """Creates the head, and the embedding of tokens.

    Args:
      backbone: a layer or stack. Where the last output answers, not one that
        runs backwards as well: there its last output has seen one step.
      out_features: numbers of an answer.
      every_step: whether to answer after every step, not at the end only.
      pooling: which output an answer at the end reads: the 'last' valid one, or
        the 'mean' of all valid ones since the last reset.
      num_tokens: how many tokens there are, if sequences are of tokens; None
        for sequences of vectors.
      rngs: `nnx.Rngs` that parameters are drawn from.

    Raises:
      ValueError: the backbone is no layer, or runs in both directions where it
        must not, or another argument is not valid.
    """
    settings.boolean(every_step, 'every_step')
    settings.choice(pooling, POOLINGS, 'pooling')
    if every_step and pooling != 'last':
      raise ValueError(
          f'pooling={pooling!r} makes one answer of a sequence, and'
          ' every_step=True one after every step; one of them would work.'
      )
    self.pooling = pooling
    reads_all = every_step or pooling == 'mean'
    _check_backbone(backbone, reads_all, type(self).__name__)
    settings.positive(out_features, 'out_features')
    initializers.check_rngs(rngs, 'params', required=True)
    if num_tokens is not None:
      settings.positive(num_tokens, 'num_tokens')
      self.embedding = nnx.Embed(num_tokens, backbone.in_features, rngs=rngs)
    self.backbone = backbone
    self.head = nnx.Linear(backbone.out_features, out_features, rngs=rngs)
    self.every_step = every_step

  def __call__(
      self,
      x: Array,
      *,
      reset: Array | None = None,
      seq_lengths: Array | None = None,
      mask: Array | None = None,
      rngs: nnx.Rngs | None = None,
  ) -> Array:
    """Returns the answers: logits, or predictions of numbers.

    Args:
      x: [..., time, in_features], or tokens, int [..., time].
      reset: bool [..., time]; where true, every layer restarts before this
        step, as in `SequenceLayer.unroll`: at the first step of an episode, or
        of each of several sequences in a row. So an answer at the end is of the
        steps since the last reset; `every_step` also answers for earlier steps.
        A layer that runs backwards restarts at these boundaries too.
      seq_lengths: int [...], the number of valid steps of each sequence;
        resets beyond it have no effect.
      mask: bool [..., time], true where a step is valid; steps in the middle
        may be missing. A reset at such a step still acts.
      rngs: streams for dropout while training; None to evaluate.

    Returns:
      [..., out_features], of the last valid step, or with `every_step`
      [..., time, out_features], where steps that are not valid hold
      nothing of use.

    Raises:
      ValueError: an argument has the wrong shape or dtype.
    """
    if hasattr(self, 'embedding'):
      x = self._embed(x)
    y = self.backbone(
        x, reset=reset, seq_lengths=seq_lengths, mask=mask, rngs=rngs
    )
    if self.every_step:
      with jax.named_scope('logits'):
        return self.head(y)
    time = y.shape[-2]
    if not time:
      raise ValueError(
          f'{type(self).__name__} needs at least one step to answer, got x of'
          f' shape {x.shape}.'
      )
    as_y = functools.partial(sharding.flags_as_sharded, y=y)
    if self.pooling == 'mean':
      valid = _valid(*as_y(mask, seq_lengths), as_y(reset, None)[0], time)
      last = _mean(y, valid)
    elif seq_lengths is None and mask is None:
      last = y[..., -1, :]
    else:
      flags = as_y(mask, seq_lengths)
      index = _last_valid(*flags, time)[..., None, None]
      last = jnp.take_along_axis(y, index, axis=-2)[..., 0, :]
    with jax.named_scope('logits'):
      return self.head(last)

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> Any:
    """Returns the start of a sequence: the backbone's own carry.

    Args:
      batch_shape: leading axes of x, before time.

    Raises:
      NotImplementedError: the model cannot take steps; see `step`.
    """
    self._check_steps()
    return self.backbone.initial_carry(batch_shape)

  def step(
      self, carry: Any, x: Array, *, reset: Array | None = None
  ) -> tuple[Any, Array]:
    """Takes one step: returns the carry after it, and the answer.

    A model that answers at the end answers as if the sequence ended here.

    Args:
      carry: result of `initial_carry` or the last step; None for the first.
      x: [..., in_features], or tokens, int [...].
      reset: bool [...]; where true, the carries of all layers restart before
        the step.

    Returns:
      The carry, and the answer [..., out_features].

    Raises:
      NotImplementedError: the backbone reads backwards as well, or the answer
        reads the mean of all outputs.
      ValueError: an argument has the wrong shape or dtype.
    """
    self._check_steps()
    if hasattr(self, 'embedding'):
      x = checks.tokens(x, self.embedding.num_embeddings, axes='[...]')
      x = self._embed(x[..., None])[..., 0, :]
    if carry is None:
      batch_shape = jnp.shape(x)[:-1]
      carry = self.backbone.initial_carry(batch_shape)
      checks.flags(reset, batch_shape, 'reset')
      reset = jnp.ones(batch_shape, bool)
    carry, y = self.backbone.step(carry, x, reset=reset)
    with jax.named_scope('logits'):
      return carry, self.head(y)

  def _check_steps(self) -> None:
    """Raises NotImplementedError where a step needs other ones."""
    if self.pooling == 'mean':
      raise NotImplementedError(
          f"{type(self).__name__} with pooling='mean' cannot take single steps;"
          " pooling='last' would work."
      )
    if bidirectional.is_inside(self.backbone):
      raise NotImplementedError(
          f'{type(self).__name__} cannot take single steps here: the backward'
          ' layer of its backbone needs the whole sequence. Call the model, or'
          ' make one whose layers run forwards.'
      )

  def _embed(self, x: Array) -> Array:
    tokens = checks.tokens(x, self.embedding.num_embeddings)
    return embedding.vectors(self.embedding, tokens)


class SequenceClassifier(SequenceModel):
  """Reads a whole sequence and names its class.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> from rnnzoo import models
  >>> rngs = nnx.Rngs(0)
  >>> model = models.SequenceClassifier(
  ...     rnnzoo.GRU(28, 128, rngs=rngs), num_classes=10, rngs=rngs
  ... )
  >>> model(jnp.zeros((4, 28, 28))).shape
  (4, 10)

  Attributes:
    backbone: the recurrent layer or stack.
    head: linear map from the last output, or their mean, to logits.
  """

  def __init__(
      self,
      backbone: sequence_layer.SequenceLayer,
      num_classes: int,
      *,
      pooling: str = 'last',
      rngs: nnx.Rngs,
  ):
    """Creates the head of `num_classes` logits; see `SequenceModel`."""
    settings.positive(num_classes, 'num_classes')
    super().__init__(backbone, num_classes, pooling=pooling, rngs=rngs)


@promotion.of_ranks
def _valid(mask: Any, seq_lengths: Any, reset: Any, time: int) -> Any:
  """Returns which steps count, bool [..., T]; None for all.

  Steps before the last reset do not, nor do resets beyond a sequence's end.
  """
  steps, valid = jnp.arange(time), mask
  if seq_lengths is not None:
    inside = steps < seq_lengths[..., None]
    valid = inside if valid is None else valid & inside
    reset = None if reset is None else reset & inside
  if reset is None:
    return valid
  last = jnp.max(jnp.where(reset, steps, 0), axis=-1, keepdims=True)
  return steps >= last if valid is None else valid & (steps >= last)


def _last_valid(mask: Any, seq_lengths: Any, time: int) -> Array:
  """Returns the index [...] of the last valid step, 0 where there is none."""
  if mask is None:
    return checks.last_step(seq_lengths, time)
  valid = _valid(mask, seq_lengths, None, time)
  with promotion.ranks_allowed():
    return jnp.max(jnp.where(valid, jnp.arange(time), 0), axis=-1)


@promotion.of_ranks
def _mean(y: Array, valid: Any) -> Array:
  """Returns the mean of outputs [..., T, F] over valid steps, or 0."""
  total = promotion.wide(y.dtype)
  if valid is None:
    return jnp.mean(y, axis=-2, dtype=total).astype(y.dtype)
  number = jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True), 1).astype(total)
  summed = jnp.sum(jnp.where(valid[..., None], y, 0), axis=-2, dtype=total)
  return (summed / number).astype(y.dtype)


def _check_backbone(backbone, reads_all: bool, name: str) -> None:
  """Raises ValueError unless the model can read the backbone's outputs."""
  if not isinstance(backbone, sequence_layer.SequenceLayer):
    raise ValueError(
        'backbone must be a layer or a stack, such as rnnzoo.GRU(28, 128,'
        f' rngs=rngs), got {backbone!r:.80}.'
    )
  if bidirectional.is_inside(backbone) and not reads_all:
    raise ValueError(
        f'{name} reads the last output, of which the backward half of a'
        " Bidirectional has seen one step; pooling='mean' would work."
    )
