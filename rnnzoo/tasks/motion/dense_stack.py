"""Layers in depth, each over the outputs of all below."""

from collections.abc import Sequence
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

import rnnzoo
from rnnzoo import checks
from rnnzoo.layers import sequence_layer

Array = jax.Array


class DenseStack(sequence_layer.SequenceLayer):
  """Several recurrent layers, each over the input and all outputs below it.

      y_i = dropout(norm(layer_i([x, y_1, ..., y_{i-1}])))
      output = [x, y_1, ..., y_n]

  with dropout between levels only. `in_features + n features` numbers come out.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> from rnnzoo.tasks.motion import dense_stack
  >>> stack = dense_stack.DenseStack(
  ...     [rnnzoo.IndRNN] * 2, 3, 8, num_layers=2, rngs=nnx.Rngs(0)
  ... )
  >>> stack(jnp.ones((2, 5, 3))).shape
  (2, 5, 19)

  Attributes:
    levels: one `rnnzoo.Stack` of one layer each, with its normalisation.

  Args:
    layers: a layer class, or a function like one, for each level.
    in_features: size of the input's last axis.
    features: of every layer.
    num_layers: how many layers there are.
    dropout_rate: share of a level's outputs that are dropped while training.
    share_dropout_over_time: one dropout mask for all time steps.
    norm: 'layer', 'batch' or None, as in `rnnzoo.Stack`.
    residual: must be False.
    rngs: that parameters are drawn from.
    **options: passed to each layer.

  Raises:
    ValueError: an option is not valid.

  References:
    Huang, Liu, van der Maaten, Weinberger, 2017, Densely connected
    convolutional networks; Li, Li, Cook, Gao, 2019, Deep independently
    recurrent neural network (IndRNN), whose dense blocks these are, without
    bottlenecks and transitions.
  """

  def __init__(
      self,
      layers: Sequence[sequence_layer.LayerFactory],
      in_features: int,
      features: int,
      *,
      num_layers: int,
      dropout_rate: float = 0.0,
      share_dropout_over_time: bool = False,
      norm: str | None = None,
      residual: bool = False,
      rngs: nnx.Rngs,
      **options,
  ):
    if residual:
      raise ValueError(
          'a stack is dense or residual, not both; config.model.dense or'
          ' config.model.residual must be False'
      )
    if len(layers) != num_layers:
      raise ValueError(
          f'num_layers is {num_layers}, but there are {len(layers)} layers'
      )
    levels = []
    size = in_features
    for layer in layers:
      level = rnnzoo.Stack(
          [layer], size, features, norm=norm, rngs=rngs, **options
      )
      size += level.out_features
      levels.append(level)
    self.levels = nnx.List(levels)
    self.in_features = in_features
    self.out_features = size
    self.dropout_rate = dropout_rate
    self.share_dropout_over_time = share_dropout_over_time

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Returns a tuple of the levels' initial carries, from the input up.

    Args:
      batch_shape: leading axes of the input, those before time.
    """
    return tuple(level.initial_carry(batch_shape) for level in self.levels)

  def unroll(
      self,
      x: Array,
      *,
      initial_carry: tuple[Any, ...] | None = None,
      reset: Array | None = None,
      seq_lengths: Array | None = None,
      mask: Array | None = None,
      reverse: bool = False,
      time_major: bool = False,
      rngs: nnx.Rngs | None = None,
  ) -> tuple[tuple[Any, ...], Array]:
    """Runs the layers over a sequence and returns the final carries as well.

    The arguments and errors are those of `SequenceLayer.unroll`; a carry is a
    tuple of the levels' carries. Calls with `rngs` train, others evaluate.
    """
    if initial_carry is None:
      initial_carry = (None,) * len(self.levels)
    self._check_carry(initial_carry, 'initial_carry')
    shared = (
        ((0 if time_major else -2),) if self.share_dropout_over_time else ()
    )
    dropout = nnx.Dropout(self.dropout_rate, broadcast_dims=shared)
    carries = []
    for level, start in zip(self.levels, initial_carry, strict=True):
      carry, y = level.unroll(
          x,
          initial_carry=start,
          reset=reset,
          seq_lengths=seq_lengths,
          mask=mask,
          reverse=reverse,
          time_major=time_major,
          rngs=rngs,
      )
      is_last = level is self.levels[-1]
      if rngs is not None and self.dropout_rate and not is_last:
        y = dropout(y, deterministic=False, rngs=rngs)
      carries.append(carry)
      x = jnp.concatenate([x.astype(y.dtype), y], axis=-1)
    return tuple(carries), x

  def step(
      self, carry: tuple[Any, ...], x: Array, *, reset: Array | None = None
  ) -> tuple[tuple[Any, ...], Array]:
    """Takes one step through all levels, without dropout.

    Args:
      carry: tuple of the levels' carries.
      x: [..., in_features].
      reset: bool [...]; where true, the carries restart before the step.

    Returns:
      The carries after the step, and the output [..., out_features].

    Raises:
      ValueError: an argument has the wrong shape or dtype.
    """
    self._check_carry(carry, 'carry')
    carries = []
    for level, before in zip(self.levels, carry, strict=True):
      after, y = level.step(before, x, reset=reset)
      carries.append(after)
      x = jnp.concatenate([x.astype(y.dtype), y], axis=-1)
    return tuple(carries), x

  def _check_carry(self, carry: Any, label: str) -> None:
    count = len(self.levels)
    if not isinstance(carry, tuple | list) or len(carry) != count:
      raise ValueError(
          f'{label} must be a tuple of {count} carries, one for each level; got'
          f' {checks.describe(carry)}'
      )
