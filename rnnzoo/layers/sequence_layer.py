"""The interface that every layer of the zoo has, single or composed."""

import abc
from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
from typing import Any, TypedDict

from flax import nnx
import jax

from rnnzoo import settings
from rnnzoo.engines import selection
from rnnzoo.layers import initializers

Array = jax.Array


class OutFeatures:
  """`out_features`, where a layer sets no attribute itself.

  No property: that could not be set by a layer of another project.
  """

  def __get__(self, layer: Any, owner: type | None = None) -> int:
    return self if layer is None else layer.out_features  # type: ignore


class SequenceLayer(nnx.Module):
  """A layer over sequences: [..., time, in] -> [..., time, out].

  Attributes:
    in_features: size of the input's last axis.
    out_features: size of the output's last axis.
    features: size given to the constructor: `out_features`, or half as many in
      a `Bidirectional`.
    time_axis_name: the mesh axes that time is over inside `jax.shard_map`.
    reads_timespans: whether x's last feature is the time since the last step.
  """

  in_features: int
  out_features: int
  features = OutFeatures()
  time_axis_name: tuple[str, ...] = ()
  reads_timespans: bool = False

  @abc.abstractmethod
  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> Any:
    """Returns the carry that a sequence starts from, and restarts from.

    Args:
      batch_shape: leading axes of the input, before time.
    """

  @abc.abstractmethod
  def unroll(
      self,
      x: Array,
      *,
      initial_carry: Any = None,
      reset: Array | None = None,
      seq_lengths: Array | None = None,
      mask: Array | None = None,
      reverse: bool = False,
      time_major: bool = False,
      rngs: nnx.Rngs | None = None,
  ) -> tuple[Any, Array]:
    """Runs the layer over a sequence and returns the final carry as well.

    Args:
      x: [..., time, in_features], any number of batch axes, none included.
      initial_carry: state before the first step, as the method
        `initial_carry` returns it, for instance the final carry of the
        sequence's last part; None for the layer's own. A recurrent layer's is a
        tuple of arrays [..., features], one for each of `cell.carry_names`. The
        layer's own are named, `carry.h`; one that was given keeps its type.
      reset: bool [..., time]; where true, the carry restarts from the layer's
        own initial carry before this step. It is the boundary between t-1 and
        t: a reversed run restarts when it goes from t to t-1.
      seq_lengths: int [...], each from 0 to the number of steps; the sequence
        is valid for that many steps. After these the carry is held, the output
        is zero; padding has no effect, resets in it included, and gets no
        gradient. Under `jax.jit`, where values cannot be checked, more than all
        steps are all steps and less than none are none.
      mask: bool [..., time]; where false, as beyond `seq_lengths`, except that
        a reset still acts: an episode's end is one, seen or not.
      reverse: run from the last step to the first; outputs stay in the order
        of x.
      time_major: x, reset, mask and the output have time as the first axis.
      rngs: stream 'dropout' for a call that trains: dropout and zoneout; None
        for evaluation.

    Returns:
      The carry after the last valid step, and the output
      [..., time, out_features].

    Raises:
      ValueError: an argument has the wrong shape or dtype.
      NotImplementedError: the layer's implementation cannot run this.
    """

  def __call__(
      self,
      x: Array,
      *,
      initial_carry: Any = None,
      reset: Array | None = None,
      seq_lengths: Array | None = None,
      mask: Array | None = None,
      reverse: bool = False,
      time_major: bool = False,
      rngs: nnx.Rngs | None = None,
  ) -> Array:
    """Runs the layer over a sequence: `unroll` without the final carry.

    Arguments and errors are as in `unroll`.

    Returns:
      The output, [..., time, out_features].
    """
    return self.unroll(
        x,
        initial_carry=initial_carry,
        reset=reset,
        seq_lengths=seq_lengths,
        mask=mask,
        reverse=reverse,
        time_major=time_major,
        rngs=rngs,
    )[1]

  @abc.abstractmethod
  def step(
      self, carry: Any, x: Array, *, reset: Array | None = None
  ) -> tuple[Any, Array]:
    """Takes one step, for streams and for acting in an environment.

    Args:
      carry: carry of `initial_carry` or of the step before.
      x: [..., in_features].
      reset: bool [...]; where true, the carry restarts before the step.

    Returns:
      The carry after the step, and the output [..., out_features].

    Raises:
      ValueError: an argument has the wrong shape or dtype.
    """


def time_and_batch(lead: Any, time_major: bool) -> tuple[int, tuple[int, ...]]:
  """Returns the number of steps, and the batch axes beside time."""
  return (lead[0], lead[1:]) if time_major else (lead[-1], lead[:-1])


# A layer class, or any function with the signature
# (in_features, features, *, rngs, **options).
LayerFactory = Callable[..., SequenceLayer]


def make(
    factory: LayerFactory,
    in_features: int,
    features: int,
    rngs: nnx.Rngs,
    options: Mapping[str, Any],
    argument: str = 'layer',
) -> SequenceLayer:
  """Returns a new layer, or raises ValueError if the factory makes none.

  Args:
    factory: a layer class, or a function with its signature.
    in_features: size of the layer's input.
    features: features of the layer.
    rngs: `nnx.Rngs` of the layer.
    options: other arguments for the layer.
    argument: the name by which the caller was given the factory.
  """
  if isinstance(factory, type):
    # Not of the class, whose metaclass takes any arguments.
    init = factory.__init__  # type: ignore[misc]
    inner = inspect.signature(init).parameters.get('layer')
    if inner is not None and inner.default is inspect.Parameter.empty:
      name = factory.__name__
      raise ValueError(
          f'{argument} must say which layer is inside, got {name}; for instance'
          f' functools.partial({name}, rnnzoo.GRU) would work.'
      )
  if isinstance(factory, functools.partial):
    for name in ('in_features', 'features', 'rngs', *options):
      if name in factory.keywords:
        raise ValueError(
            f'{argument} must not have {name} of its own, which would be'
            f' ignored, got a functools.partial with {name}=; its caller sets'
            ' it.'
        )
  layer = factory(in_features, features, rngs=rngs, **options)
  if not isinstance(layer, SequenceLayer):
    raise ValueError(
        f'{argument} must make an rnnzoo.SequenceLayer, and'
        f' {getattr(factory, "__name__", factory)!r} made'
        f' {settings.a(type(layer))}.'
    )
  return layer


# The options of `RecurrentLayer` as types, for `**options` of the layers.
#
# A layer names the options that its paper sets, passes all other options on,
# and types them: `**options: Unpack[Options]`. So an editor completes them, and
# mypy and pyright find a name or a type that is wrong. The docstring of
# `RecurrentLayer` explains each option.


Initializer = initializers.Initializer


class Options(TypedDict, total=False):
  """Options that no layer names itself: how it computes and learns."""

  use_bias: bool
  learn_initial_carry: bool
  recurrent_gradient_clip: float | None
  stop_recurrent_gradient: bool
  zoneout_rate: float | Sequence[float]
  recurrent_dropout_rate: float
  recurrent_dropout_per_step: bool
  dtype: jax.typing.DTypeLike | None
  implementation: selection.Implementation


class ParamDtype(TypedDict, total=False):
  """The dtype of parameters."""

  param_dtype: jax.typing.DTypeLike


class KernelInit(TypedDict, total=False):
  """The initialiser of W."""

  kernel_init: Initializer


class BiasInit(TypedDict, total=False):
  """The initialisers of b."""

  bias_init: Initializer | Sequence[Initializer]


class RecurrentKernel(TypedDict, total=False):
  """Initialisers, a bound and a form of R."""

  recurrent_kernel_init: Initializer | Sequence[Initializer]
  max_abs: float | None
  recurrent_structure: Callable[[jax.Array], jax.Array] | None


class NoMore(TypedDict):
  """No option at all: a type checker finds every one that is left."""
