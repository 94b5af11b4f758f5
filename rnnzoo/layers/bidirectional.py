"""Layers in both directions of time."""

from typing import Any, TypeGuard

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import devices
from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import selection
from rnnzoo.engines import sharding
from rnnzoo.layers import initializers
from rnnzoo.layers import recurrent
from rnnzoo.layers import regularisation
from rnnzoo.layers import sequence_layer

# Two layers in opposite directions, in one kernel.
#
# Both directions of a bidirectional layer read one input and need nothing of
# each other, so one GPU kernel runs them side by side: it takes their heads as
# the heads of one layer, and runs the second half the other way.


Array = jax.Array
Carry = cell_lib.Carry


def unroll(
    ways: Any, given: tuple[Any, ...], reverse: bool, time_major: bool
) -> tuple[tuple[Carry, Carry], Array]:
  """Runs two layers in opposite directions at once, in one kernel.

  Args:
    ways: a layer, and a second one, which runs in the opposite direction.
    given: x, initial_carry, reset, seq_lengths and mask, as in
      `SequenceLayer.unroll`, but a carry, or None, for each layer.
    reverse: whether the first layer runs from the last step to the first.
    time_major: whether time is the first axis.

  Returns:
    The final carries of both layers, and their outputs side by side.

  Raises:
    ValueError: an argument has the wrong shape or dtype.
    NotImplementedError: the two differ in more than parameters, or no kernel
      can run them like this, or another implementation comes first.
  """
  first, second = ways
  x, initial_carry, reset, seq_lengths, mask = given
  if not (has_blocks(first) and has_blocks(second)):
    raise NotImplementedError('a layer has no recurrent kernel of blocks')
  if (static(first), first.in_features) != (static(second), second.in_features):
    raise NotImplementedError('the layers differ in more than parameters')
  if not selection.is_kernel_first(first.implementation):
    raise NotImplementedError('another path is tried before the kernels')
  devices.current()  # Nothing is put together where no kernel can run.
  first._check_input(x, '[..., time, in_features]')
  batch_shape = x.shape[1:-1] if time_major else x.shape[:-2]
  carries: list[Any] = [
      None
      if carry is None
      else level._check_carry(carry, batch_shape, 'initial_carry')
      for level, carry in zip(ways, initial_carry, strict=True)
  ]
  if sharding.is_sharded(first, second, given):
    return _unroll_over_devices(ways, given, reverse, time_major)
  both = _side_by_side(first, second, first._dtype(x))
  carry = None
  if any(c is not None for c in carries):
    carries = [
        level.initial_carry(batch_shape) if carry is None else carry
        for level, carry in zip(ways, carries, strict=True)
    ]
    carry = jax.tree.map(_join, *map(tuple, carries))
  call = call_lib.Call(
      reverse=reverse,
      both_directions=True,
      time_major=time_major,
      recurrent_gradient_clip=first.recurrent_gradient_clip,
      stop_recurrent_gradient=first.stop_recurrent_gradient,
  )
  with promotion.ranks_allowed():
    carry, (y,) = both._run((x, carry, reset, seq_lengths, mask), call)
  halves = [jnp.split(c, 2, axis=-1) for c in carry]
  own = [tuple(c[part] for c in halves) for part in (0, 1)]
  return (
      first._named(own[0], initial_carry[0]),
      second._named(own[1], initial_carry[1]),
  ), y


def _unroll_over_devices(ways, given, reverse: bool, time_major: bool):
  """`unroll`, each device with its part of the batch."""
  graphdef, *states = nnx.split(
      tuple(ways), lambda path, _: path[-1] == 'recurrent_kernel', ...
  )
  axes = sharding.axes_of_run(given[0].shape[:-1], time_major)
  split = *states, *given
  positions = (
      *(axes.heads, axes.parameters),
      *(axes.flags, axes.carry, axes.flags, axes.lengths, axes.flags),
  )
  over = sharding.choose(split, positions, ways[0].num_heads)
  if over[-1]:
    raise NotImplementedError('the heads of each layer are over devices')

  def part(split):
    kernels, rest, *given = split
    ways = nnx.merge(graphdef, kernels, rest)
    return unroll(ways, given, reverse, time_major)

  return sharding.spread(
      part,
      split,
      positions=positions,
      out_positions=(axes.carry, axes.steps),
      over=over,
  )


def _side_by_side(first, second, dtype) -> recurrent.RecurrentLayer:
  """Returns a layer with the heads of two, for one call in this dtype."""

  def join(x, y):
    return nnx.Param(_join(x[...], y[...]))

  def of_features(x):
    """A parameter that all features share is one for each."""
    return jnp.broadcast_to(x[...], (*x.shape[:-1], first.out_features))

  both = nnx.clone(first)
  both.out_features = both.state_features = 2 * first.out_features
  both.num_heads = 2 * first.num_heads
  both.kernel = join(first.kernel, second.kernel)
  if first.bias is not None:
    both.bias = join(first.bias, second.bias)
  own = lambda layer: layer._structured(layer.recurrent_kernel[...], dtype)
  kernels = jnp.concatenate([own(first), own(second)], axis=1)
  both.recurrent_kernel = nnx.Param(kernels)
  both.recurrent_structure = None
  both.cell_params = nnx.Dict(
      {
          k: join(of_features(v), of_features(second.cell_params[k]))
          for k, v in first.cell_params.items()
      }
  )
  both.learned_carry = nnx.List(
      map(join, first.learned_carry, second.learned_carry)
  )
  return both


def _join(x: Array, y: Array) -> Array:
  with jax.named_scope('concatenation'):
    return jnp.concatenate([x, y], axis=-1)


def has_blocks(layer) -> TypeGuard[recurrent.RecurrentLayer]:
  """Whether it is a layer whose recurrent kernel is not diagonal."""
  return (
      recurrent.is_plain(layer)
      and layer.recurrent_kernel is not None
      and layer.recurrent_kernel.shape[-1] > 1
  )


def static(layer: recurrent.RecurrentLayer) -> tuple[Any, ...]:
  """Returns all of a layer but its parameters and the size of its input."""
  return (
      type(layer),
      layer.cell,
      layer.out_features,
      layer.num_heads,
      layer.recurrent_structure,
      layer.recurrent_gradient_clip,
      layer.stop_recurrent_gradient,
      layer.dtype and jnp.dtype(layer.dtype),
      jnp.dtype(layer.param_dtype),
      selection.names(layer.implementation, linear=False),
      layer.bias is None,
      len(layer.learned_carry),
      sorted((k, v.shape) for k, v in layer.cell_params.items()),
  )


class Bidirectional(sequence_layer.SequenceLayer):
  """Two layers, one in each direction of time, with outputs side by side.

      y_t = [forward(x)_t, backward(x)_t]

  On a GPU both directions of a cell with a dense or block-diagonal recurrent
  kernel run at once, in one GPU kernel.

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
    self.time_axis_name = self.forward.time_axis_name

  @property
  def features(self) -> int:  # type: ignore[override]
    """`features` of each direction."""
    return self.forward.features

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Returns the initial carries of the forward and the backward layer."""
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

    The arguments and errors are as in `SequenceLayer.unroll`; a carry is the
    pair (forward, backward). With `reverse`, the two exchange directions.
    """
    if initial_carry is None:
      initial_carry = (None, None)
    if not isinstance(initial_carry, (tuple, list)) or len(initial_carry) != 2:
      raise ValueError(
          'initial_carry must be a pair (forward, backward) of carries; got'
          f' {checks.describe(initial_carry)}.'
      )

    ways = self.forward, self.backward
    try:
      if rngs is not None and any(map(regularisation.drops, ways)):
        raise NotImplementedError('a layer drops what R multiplies')
      given = x, tuple(initial_carry), reset, seq_lengths, mask
      return unroll(ways, given, reverse, time_major)
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
