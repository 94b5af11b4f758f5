"""Layers in both directions of time."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.engines import selection
from rnnzoo.layers import initializers
from rnnzoo.layers import paired
from rnnzoo.layers import sequence_layer

Array = jax.Array


class Bidirectional(sequence_layer.SequenceLayer):
  """Two layers, one in each direction of time, with outputs side by side.

      y_t = [forward(x)_t, backward(x)_t]

  On a GPU both directions of a cell with a dense or block-diagonal recurrent
  kernel run at the same time, in one kernel.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.Bidirectional(rnnzoo.GRU, 3, 8, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape          # [batch, time, 2 * features]
  (2, 5, 16)

  Attributes:
    forward: the layer that runs from the first step to the last.
    backward: the layer that runs from the last step to the first.
  """

  def __init__(
      self,
      layer: sequence_layer.LayerFactory,
      in_features: int,
      features: int,
      *,
      rngs: nnx.Rngs,
      **options,
  ):
    """Creates the two layers.

    Args:
      layer: a layer class such as `rnnzoo.GRU`, or any function with its
        signature.
      in_features: size of the input's last axis.
      features: `features` of each direction; the output has twice as many.
      rngs: `nnx.Rngs` that the parameters are drawn from.
      **options: passed to both layers.

    Raises:
      ValueError: an option is not valid.
    """
    settings.factories([layer], sequence_layer.SequenceLayer)
    initializers.check_rngs(rngs, 'params', required=True)
    make = lambda: sequence_layer.make(
        layer, in_features, features, rngs, options
    )
    self.forward, self.backward = make(), make()
    self.in_features = in_features
    self.out_features = self.forward.out_features + self.backward.out_features
    if self.forward.time_axis_name:
      self.time_axis_name = self.forward.time_axis_name

  @property
  def features(self) -> int:  # type: ignore[override]
    """`features` of each direction."""
    return self.forward.features

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Returns the initial carries of the forward and the backward layer.

    Args:
      batch_shape: leading axes of the input, those before time.
    """
    return (
        self.forward.initial_carry(batch_shape),
        self.backward.initial_carry(batch_shape),
    )

  def unroll(
      self,
      x: Array,
      *,
      initial_carry: tuple[Any, Any] | None = None,
      reset: Array | None = None,
      seq_lengths: Array | None = None,
      mask: Array | None = None,
      reverse: bool = False,
      time_major: bool = False,
      rngs: nnx.Rngs | None = None,
  ) -> tuple[tuple[Any, Any], Array]:
    """Runs both layers over a sequence and returns the final carries as well.

    The arguments and errors are those of `SequenceLayer.unroll`; a carry is the
    pair (forward, backward). With `reverse`, the two exchange directions.
    """
    if initial_carry is None:
      initial_carry = (None, None)
    if not isinstance(initial_carry, (tuple, list)) or len(initial_carry) != 2:
      raise ValueError(
          'initial_carry must be a pair (forward, backward) of carries; got'
          f' {checks.describe(initial_carry)}.'
      )

    try:
      return paired.unroll(
          self.forward,
          self.backward,
          x,
          tuple(initial_carry),
          reset,
          seq_lengths,
          mask,
          reverse,
          time_major,
      )
    except NotImplementedError as error:
      selection.log_once(f'One direction after the other: {error}')

    def direction(level, carry, reverse):
      return level.unroll(
          x,
          initial_carry=carry,
          reset=reset,
          seq_lengths=seq_lengths,
          mask=mask,
          reverse=reverse,
          time_major=time_major,
          rngs=rngs,
      )

    first, y = direction(self.forward, initial_carry[0], reverse)
    second, z = direction(self.backward, initial_carry[1], not reverse)
    with jax.named_scope('concatenation'):
      return (first, second), jnp.concatenate([y, z], axis=-1)

  def step(self, carry, x, *, reset=None):
    """Raises NotImplementedError: one direction needs the future."""
    raise NotImplementedError(
        'Bidirectional cannot take single steps: its backward layer needs the'
        ' whole sequence. Call the layer or `unroll`, or step a layer of one'
        ' direction.'
    )


def is_inside(layer: sequence_layer.SequenceLayer) -> bool:
  """Returns whether a layer, or a part of it, reads backwards as well."""
  return any(
      isinstance(part, Bidirectional) for _, part in nnx.iter_modules(layer)
  )
