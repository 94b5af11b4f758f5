"""Bounds on parameters, kept by a projection after each update."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np


def constrain(params: Any) -> Any:
  """Clips every bounded parameter into its bound; call it after each update.

  A parameter is bounded when its `nnx.Param` has the metadata `max_abs`, as the
  recurrent kernels of `IndRNN` and `IRevRNN` have, |u| <= max_abs, and the
  inner weights a and b of `IRevRNN`. They start within the bound; only this
  call keeps them there. train.py makes it itself.

  >>> import optax, rnnzoo
  >>> layer = rnnzoo.IndRNN(3, 8, max_abs=0.5, rngs=nnx.Rngs(0))
  >>> optimizer = nnx.Optimizer(layer, optax.sgd(1.0), wrt=nnx.Param)
  >>> x = jnp.ones((2, 5, 3))
  >>> gradient = nnx.grad(lambda layer, x: -layer(x).sum())(layer, x)
  >>> _ = optimizer.update(layer, gradient)
  >>> bool(jnp.max(layer.recurrent_kernel[...]) <= 0.5)
  False
  >>> nnx.update(layer, rnnzoo.constrain(nnx.state(layer, nnx.Param)))
  >>> bool(jnp.max(layer.recurrent_kernel[...]) <= 0.5)
  True

  Args:
    params: any pytree of nnx variables, such as `nnx.state(model, nnx.Param)`.

  Returns:
    A tree of the same structure.

  Raises:
    ValueError: there is no nnx variable in the tree.
  """

  def clip(variable):
    bound = getattr(variable, 'max_abs', None)
    if bound is None:
      return variable
    value = variable[...]
    bound = _below(bound, value.dtype)
    return variable.replace(jnp.clip(value, -bound, bound))

  is_variable = lambda x: isinstance(x, nnx.Variable)
  leaves = jax.tree.leaves(params, is_leaf=is_variable)
  if isinstance(params, nnx.State) and not leaves:
    return params
  if isinstance(params, nnx.Module) or not any(map(is_variable, leaves)):
    raise ValueError(
        'constrain needs nnx variables, which carry the bounds; pass'
        ' nnx.state(model, nnx.Param), neither the model nor a tree of arrays.'
    )
  return jax.tree.map(clip, params, is_leaf=is_variable)


def _below(bound: float, dtype: Any) -> np.ndarray:
  """Returns the greatest number of a dtype that is no greater than `bound`.

  Rounded to the nearest, 1.007 would be 1.0078 in bfloat16.
  """
  nearest = np.asarray(bound, dtype)
  # In float64, which holds both as they are.
  if np.float64(nearest) > np.float64(bound):
    nearest = np.nextafter(nearest, np.zeros_like(nearest))
  return nearest
