"""`ScannedRNN`: the class that programs for reinforcement learning share.

purejaxrl, JaxMARL and many programs after them copy a class of this name: a
`GRUCell` under `nn.scan` that restarts its carry where an episode began. This
is that interface around any layer of the zoo. `rnnzoo.linen.ScannedRNN` is its
counterpart for flax.linen.
"""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.cells import gru
from rnnzoo.layers import initializers
from rnnzoo.layers import sequence_layer

Array = jax.Array
LayerFactory = sequence_layer.LayerFactory


class ScannedRNN(nnx.Module):
  """A layer over time-major sequences of episodes: carry first, resets beside.

      carry, y = rnn(carry, (ins, resets))

  Before step t the carry restarts where `resets[t]` is set. To act, call it
  with one step; to learn, with a whole rollout and the carry from before it.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> rnn = rnnzoo.ScannedRNN(3, 8, rngs=nnx.Rngs(0))
  >>> carry = rnnzoo.ScannedRNN.initialize_carry(2, 8)
  >>> carry.shape                                       # [batch, hidden]
  (2, 8)
  >>> rollout = jnp.ones((5, 2, 3)), jnp.zeros((5, 2))  # [time, batch, ...]
  >>> carry, y = rnn(carry, rollout)
  >>> y.shape
  (5, 2, 8)

  A carry of one array is that array, as a `GRUCell`'s is; any other carry is
  as `layer.initial_carry` returns it, for instance (h, c) of an `LSTM`.

  Attributes:
    layer: the layer inside.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      layer: LayerFactory = gru.GRU,
      rngs: nnx.Rngs,
      **options: Any,
  ):
    """Creates the layer.

    Args:
      in_features: size of the input's last axis.
      features: size of the carry and of the output.
      layer: a layer class such as `rnnzoo.LSTM`, or any function with its
        signature, for instance `functools.partial(rnnzoo.Stack, rnnzoo.GRU,
        num_layers=2)`.
      rngs: `nnx.Rngs` that the parameters are drawn from.
      **options: passed to the layer.

    Raises:
      ValueError: an option is not valid, or the layer learns its initial carry,
        which `initialize_carry` could not return.
    """
    settings.factories([layer], sequence_layer.SequenceLayer)
    self.layer = sequence_layer.make(
        layer, in_features, features, rngs, options
    )
    _check_start(self.layer)

  def __call__(
      self,
      carry: Any,
      x: tuple[Array, Array],
      *,
      rngs: nnx.Rngs | None = None,
  ) -> tuple[Any, Array]:
    """Runs the layer over a part of a rollout.

    Args:
      carry: result of `initialize_carry` or the last call.
      x: the pair (ins, resets) of arrays [time, batch, in_features] and
        [time, batch]; any number of batch axes. Resets may be bool, or numbers
        of any dtype, of which 0 alone means no reset.
      rngs: streams for dropout in a `Stack` inside; None for no dropout.

    Returns:
      The carry after the last step, and the outputs [time, batch, features].

    Raises:
      ValueError: an argument has the wrong shape or dtype.
    """
    ins, resets = pair(x)
    axes = '[time, batch, in_features]'
    sizes = self.layer.in_features, type(self).__name__
    checks.inputs(ins, axes, *sizes, name='ins')
    reset = _flags(resets, ins.shape[:-1])
    _check_carry(carry, self.layer, ins.shape)
    carry, y = self.layer.unroll(
        ins,
        initial_carry=_pack(carry),
        reset=reset,
        time_major=True,
        rngs=rngs,
    )
    return _unpack(carry), y

  @staticmethod
  def initialize_carry(
      batch_size: int | tuple[int, ...],
      hidden_size: int,
      layer: LayerFactory = gru.GRU,
  ) -> Any:
    """Returns zeros to start the first rollout from.

    Args:
      batch_size: number of environments, or a tuple of several batch axes.
      hidden_size: `features` of the layer.
      layer: the layer inside where it is not a GRU.

    Raises:
      ValueError: a size is not a positive int, or the layer cannot be made or
        learns its initial carry.
    """
    settings.positive(hidden_size, 'hidden_size')
    settings.factories([layer], sequence_layer.SequenceLayer)
    is_tuple = isinstance(batch_size, (tuple, list))
    batch_shape = checks.shape(
        batch_size if is_tuple else (batch_size,), 'batch_size'
    )

    def make():
      made = sequence_layer.make(
          layer, hidden_size, hidden_size, nnx.Rngs(0), {}
      )
      _check_start(made)
      return made.initial_carry(batch_shape)

    zeros = lambda c: jnp.zeros(c.shape, c.dtype)
    with initializers.boxes_allowed():
      carry = jax.eval_shape(make)
    return _unpack(jax.tree.map(zeros, carry))


def _check_start(layer: sequence_layer.SequenceLayer) -> None:
  """Raises ValueError for a layer that would begin unlike it restarts."""
  for _, part in nnx.iter_modules(layer):
    if getattr(part, 'learned_carry', None):
      raise ValueError(
          f'ScannedRNN starts from zeros, and this {type(part).__name__} has'
          ' learn_initial_carry=True, so a reset would restart it from another'
          ' carry. layer.unroll(x, reset=resets, time_major=True) would begin'
          ' with the learned one.'
      )


def pair(x: Any) -> tuple[Array, Array]:
  """Returns (ins, resets), or raises ValueError."""
  if not isinstance(x, (tuple, list)) or len(x) != 2:
    raise ValueError(
        f'x must be the pair (ins, resets); got {checks.describe(x)}.'
    )
  if not getattr(x[0], 'shape', ()):
    raise ValueError(
        'ins must be an array [time, batch, in_features], got'
        f' {settings.a(type(x[0]))}; jnp.asarray(ins) would work.'
    )
  return x[0], x[1]


def width(carry: Any) -> int:
  """Returns the number of features of a carry's h."""
  leaves = jax.tree.leaves(carry)
  if not leaves or not getattr(leaves[0], 'shape', ()):
    raise ValueError(
        'carry must be as ScannedRNN.initialize_carry(batch_size, hidden_size)'
        f' returns it; got {checks.describe(carry)}.'
    )
  return leaves[0].shape[-1]


def _pack(carry):
  return carry if isinstance(carry, (tuple, list)) else (carry,)


def _unpack(carry):
  """Returns the array of a carry that has one."""
  if len(carry) == 1 and not isinstance(carry[0], (tuple, list)):
    return carry[0]
  return carry


def _flags(resets: Any, shape: tuple[int, ...]) -> Array:
  """Returns resets as bool, or raises ValueError unless they have a shape."""
  resets = checks.array(resets, 'resets')
  if resets.dtype != jnp.bool_:
    checks.number(resets, 'resets')
  if resets.shape != shape:
    raise ValueError(
        f'resets must have shape {shape}, [time, batch] as ins has, got'
        f' {resets.shape}.'
    )
  return resets != 0 if resets.dtype != jnp.bool_ else resets


def _check_carry(
    carry: Any, layer: sequence_layer.SequenceLayer, ins_shape: tuple[int, ...]
) -> None:
  """Raises ValueError unless a carry is like an `initialize_carry` result."""
  batch = ins_shape[1:-1]
  shapes = lambda tree: [*map(np.shape, jax.tree.leaves(tree))]
  want = shapes(jax.eval_shape(lambda: layer.initial_carry(batch)))
  if shapes(carry) != want:
    size = batch[0] if len(batch) == 1 else batch
    inside = '' if type(layer) is gru.GRU else ', layer'
    raise ValueError(
        f'carry must be as ScannedRNN.initialize_carry({size},'
        f' {layer.features}{inside}) returns it, with arrays of shapes {want},'
        f' for ins of shape {ins_shape} with time first; got {shapes(carry)}.'
    )
  for array in jax.tree.leaves(carry):
    checks.number(array, 'carry')
