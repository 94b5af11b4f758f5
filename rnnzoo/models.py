"""Models over any layer; no cell is named here."""

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import settings
from rnnzoo.layers import bidirectional
from rnnzoo.layers import initializers
from rnnzoo.layers import sequence_layer

Array = jax.Array


class SequenceClassifier(nnx.Module):
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
    head: linear map from its last output to logits.
  """

  def __init__(
      self,
      backbone: sequence_layer.SequenceLayer,
      num_classes: int,
      *,
      rngs: nnx.Rngs,
  ):
    """Creates the head.

    Args:
      backbone: a layer or stack, whose last valid output is classified. Not one
        that runs backwards as well: there its last output has seen one step.
      num_classes: number of logits.
      rngs: `nnx.Rngs` that the head's parameters are drawn from.

    Raises:
      ValueError: the backbone is no layer, or runs in both directions, or
        another argument is not valid.
    """
    if isinstance(backbone, bidirectional.Bidirectional):
      raise ValueError(
          'SequenceClassifier reads the last output, of which the backward half'
          ' of a Bidirectional has seen one step; classify its final carries,'
          ' from unroll, instead.'
      )
    if not isinstance(backbone, sequence_layer.SequenceLayer):
      raise ValueError(
          'backbone must be a layer or a stack, such as rnnzoo.GRU(28, 128,'
          f' rngs=rngs), got {backbone!r:.80}.'
      )
    settings.positive(num_classes, 'num_classes')
    initializers.check_rngs(rngs, 'params', required=True)
    self.backbone = backbone
    self.head = nnx.Linear(backbone.out_features, num_classes, rngs=rngs)

  def __call__(
      self,
      x: Array,
      *,
      seq_lengths: Array | None = None,
      rngs: nnx.Rngs | None = None,
  ) -> Array:
    """Returns logits.

    Args:
      x: [..., time, in_features].
      seq_lengths: int [...], the number of valid steps of each sequence.
      rngs: for dropout while training; None to evaluate.

    Returns:
      [..., num_classes].

    Raises:
      ValueError: an argument has the wrong shape or dtype.
    """
    y = self.backbone(x, seq_lengths=seq_lengths, rngs=rngs)
    time = y.shape[-2]
    if not time:
      raise ValueError(
          'SequenceClassifier needs at least one step to classify, got x of'
          f' shape {x.shape}.'
      )
    if seq_lengths is None:
      last = y[..., -1, :]
    else:
      index = jnp.clip(jnp.asarray(seq_lengths) - 1, 0, time - 1)
      index = index[..., None, None]
      last = jnp.take_along_axis(y, index, axis=-2)[..., 0, :]
    return self.head(last)
