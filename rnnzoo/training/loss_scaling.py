"""Dynamic loss scaling: training in float16.

Small gradients are zero in float16, large ones are infinite. So the loss is
multiplied by a factor before it is differentiated, and the gradients are
divided by it afterwards, in float32. A step whose gradients are not finite is
skipped: it changes nothing but the factor, which halves. The factor doubles
after many steps in a row that were not skipped.

References:
  Micikevicius et al., Mixed precision training, 2018, section 3.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from flax.training import dynamic_scale
import jax
import jax.numpy as jnp
import ml_collections

from rnnzoo.tasks import backbones

T = TypeVar('T')


class LossScaling(NamedTuple):
  """The state of loss scaling.

  Attributes:
    dynamic: flax's factor, `scale`, and the steps since it changed.
    skipped: int32 [], steps that were skipped since the start of training.
  """

  dynamic: dynamic_scale.DynamicScale
  skipped: jax.Array


class Gradients(NamedTuple):
  """The value of a loss and its gradients.

  Attributes:
    loss: float32 [].
    more: what the loss function returns beside it.
    gradients: like the parameters.
    scaling: the state of loss scaling after the step, or None.
    finite: bool [], whether the gradients are finite; None without scaling.
  """

  loss: jax.Array
  more: Any
  gradients: Any
  scaling: LossScaling | None = None
  finite: jax.Array | None = None


def interval(config: ml_collections.ConfigDict) -> int | None:
  """Returns after how many steps the factor doubles; None for no scaling.

  Args:
    config: with `model.dtype` and `optimizer.loss_scale_interval`.

  Raises:
    ValueError: `model.dtype` is no dtype.
  """
  model = config.get('model', {})
  if 'dtype' not in model or backbones.find_dtype(model) != jnp.float16:
    return None
  return config.optimizer.loss_scale_interval


def begin(growth_interval: int | None) -> LossScaling | None:
  """Returns the state before the first step, for what `interval` returned."""
  if growth_interval is None:
    return None
  dynamic = dynamic_scale.DynamicScale(
      # flax doubles in the step after so many.
      growth_interval=growth_interval - 1,
      fin_steps=jnp.zeros((), jnp.int32),  # type: ignore[arg-type]
      scale=jnp.asarray(2.0**16, jnp.float32),  # type: ignore[arg-type]
  )
  return LossScaling(dynamic, jnp.zeros((), jnp.int32))


def differentiate(
    function: Callable[..., tuple[jax.Array, Any]],
    scaling: LossScaling | None,
    *args: Any,
) -> Gradients:
  """Returns a loss and its gradients with respect to the first argument.

  Args:
    function: (*args) -> (loss, more).
    scaling: the state of loss scaling; None for none.
    *args: of the function.
  """
  if scaling is None:
    (loss, more), gradients = jax.value_and_grad(function, has_aux=True)(*args)
    return Gradients(loss, more, gradients)
  dynamic, finite, (loss, more), gradients = scaling.dynamic.value_and_grad(
      function, has_aux=True
  )(*args)
  # flax has them in float32; an optimiser wants them as the parameters are.
  gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, args[0])
  skipped = scaling.skipped + jnp.where(finite, 0, 1)
  return Gradients(loss, more, gradients, LossScaling(dynamic, skipped), finite)


def choose(finite: jax.Array | None, new: T, old: T) -> T:
  """Returns the new tree, or the old one if the step is skipped."""
  if finite is None:
    return new
  return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)


def skipped_steps(scaling: LossScaling | None) -> int:
  """Returns how many steps were skipped since the start of training."""
  return 0 if scaling is None else int(scaling.skipped)
