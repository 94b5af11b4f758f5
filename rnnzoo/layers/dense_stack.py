"""Layers in depth, each over the outputs of all below."""

from collections.abc import Sequence

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo.layers import sequence_layer
from rnnzoo.layers import stack

Array = jax.Array
LayerFactory = sequence_layer.LayerFactory


class DenseStack(stack.Stack):
  """Several recurrent layers, each over the input and all outputs below it.

      y_i = dropout(norm(layer_i([x, y_1, ..., y_{i-1}])))
      output = [x, y_1, ..., y_n]

  with dropout between levels only. The output has `in_features + n features`
  numbers, in padding zeros. All else is as in `rnnzoo.Stack`: dropout and
  running averages in calls with `rngs`, `train()` and `eval()`.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> stack = rnnzoo.DenseStack(
  ...     rnnzoo.IndRNN, 3, 8, num_layers=2, rngs=nnx.Rngs(0)
  ... )
  >>> stack(jnp.ones((2, 5, 3))).shape
  (2, 5, 19)

  Attributes:
    layers: the layers, from the input up.
    norms: one normalisation for each layer, or empty.
    deterministic: False after `train()`, True after `eval()`; None, the
      default, leaves it to the `rngs` of each call.

  References:
    Huang, Liu, van der Maaten, Weinberger, 2017, Densely connected
    convolutional networks; Li, Li, Cook, Gao, 2019, Deep independently
    recurrent neural network (IndRNN), whose dense blocks these are, without
    bottlenecks and transitions.
  """

  def __init__(
      self,
      layer: LayerFactory | Sequence[LayerFactory],
      in_features: int,
      features: int,
      *,
      num_layers: int = 1,
      dropout_rate: float = 0.0,
      share_dropout_over_time: bool = False,
      norm: str | None = None,
      norm_momentum: float | None = None,
      rngs: nnx.Rngs,
      **options,
  ):
    """Creates the layers; arguments and errors are as in `rnnzoo.Stack`.

    None of the last level's outputs is dropped.
    """
    if 'residual' in options:
      raise TypeError(
          "DenseStack has no argument 'residual': a stack is dense or residual,"
          ' not both; rnnzoo.Stack(..., residual=True) is residual.'
      )
    super().__init__(
        layer,
        in_features,
        features,
        num_layers=num_layers,
        dropout_rate=dropout_rate,
        share_dropout_over_time=share_dropout_over_time,
        norm=norm,
        norm_momentum=norm_momentum,
        rngs=rngs,
        **options,
    )

  def _size_above(self, size, level) -> int:
    return size + level.out_features

  def _above(self, index, x, y, valid, train, rngs, time_axis) -> Array:
    y = super()._above(index, x, y, valid, train, rngs, time_axis)
    x = x.astype(y.dtype)
    if valid is not None:
      x = jnp.where(valid[..., None], x, 0)
    return jnp.concatenate([x, y], axis=-1)
