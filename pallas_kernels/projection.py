"""The product W x that gives a recurrence its input gates.

The gates are the largest array of a recurrence. An operation that takes a
`Product` in their place keeps W and x for its backward pass, and multiplies
again there.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import promotion

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Product:
  """Input gates that are W x, not multiplied yet.

  Attributes:
    kernel: W, [G, I, F].
    x: [..., I].
  """

  kernel: Array
  x: Array

  def form(self) -> Array:
    """Returns the gates, [..., G, F]."""
    return project(self.kernel, self.x)

  def pull(self, d_gates: Array) -> 'Product':
    """Returns the cotangents of W and x, given the cotangent of the gates."""
    arranged = arrange(self.kernel, self.x.dtype)
    d_kernel, d_x = backward((self.kernel, arranged, self.x), d_gates)
    return dataclasses.replace(self, kernel=d_kernel, x=d_x)


@jax.custom_vjp
def project(kernel: Array, x: Array) -> Array:
  """Returns W x of all gates in one product, in x's dtype, without a bias.

  A GPU kernel reads the result and adds the bias itself. Sums are float32 or
  wider, and so is the gradient of W.

  Args:
    kernel: W, [G, I, F]; cast to x's dtype.
    x: [..., I].

  Returns:
    [..., G, F].
  """
  return forward(kernel, x)[0]


def arrange(kernel: Array, dtype: Any) -> Array:
  """Returns W as the products read it, [I, G F] in the dtype of x.

  A backward pass takes the copy of the forward pass, or has made W `wait`. XLA
  for GPUs would copy the parameter again, in one kernel with the
  updated parameter. That copy would wait for this layer's gradient, summed over
  all devices, and the backward passes of the layers below would wait for it.
  """
  gates, depth, features = kernel.shape
  joint = jnp.moveaxis(kernel.astype(dtype), 0, 1)
  return lax.optimization_barrier(joint.reshape(depth, gates * features))


def forward(kernel: Array, x: Array):
  """Returns the result of `project`, and the arrays that `backward` reads."""
  gates, _, features = kernel.shape
  arranged = arrange(kernel, x.dtype)
  joint = jnp.einsum('...i,if->...f', x, arranged)
  result = joint.reshape(*x.shape[:-1], gates, features)
  return result, (kernel, arranged, x)


def backward(saved: tuple[Array, Array, Array], d_gates: Array):
  """Returns the cotangents of W and x.

  Args:
    saved: W, of which only the type is read, the result of `arrange`, and x.
    d_gates: cotangent of `project`'s result.
  """
  kernel, arranged, x = saved
  wide = promotion.wide(x.dtype)
  # For one input these are sums, not matrix products; nothing is to be rounded.
  precision = 'highest' if x.shape[-1] == 1 else None
  # Without merging axes: the batch may be sharded over devices.
  lead = tuple(range(x.ndim - 1))
  d_kernel = lax.dot_general(
      x,
      d_gates,
      ((lead, lead), ((), ())),
      precision=precision,
      preferred_element_type=wide,
  ).swapaxes(0, 1)
  joint = d_gates.reshape(*x.shape[:-1], arranged.shape[1])
  d_x = jnp.einsum('...f,if->...i', joint, arranged, precision=precision)
  return d_kernel.astype(kernel.dtype), d_x


project.defvjp(forward, backward)


def pad(a: Array, heads: int, size: int) -> Array:
  """Repeats the last feature of every head, up to `size`: the last axis.

  Args:
    a: [..., F].
    heads: number of parts of the features.
    size: features of each part of the result.
  """
  missing = size - a.shape[-1] // heads
  if not missing:
    return a
  a = _by_head(a, heads)
  last = lax.stop_gradient(a[..., -1:])
  last = jnp.broadcast_to(last, (*a.shape[:-1], missing))
  a = jnp.concatenate([a, last], axis=-1)
  return a.reshape(*a.shape[:-2], heads * size)


def cut(a: Array, heads: int, size: int) -> Array:
  """Undoes `pad`: leaves the first `size` features of every head."""
  a = _by_head(a, heads)[..., :size]
  return a.reshape(*a.shape[:-2], heads * size)


def _by_head(a: Array, heads: int) -> Array:
  return a.reshape(*a.shape[:-1], heads, a.shape[-1] // heads)


def form(gates: Any) -> Any:
  """Returns a tree of input gates with every product multiplied."""
  return jax.tree.map(
      lambda g: g.form() if _is_product(g) else g, gates, is_leaf=_is_product
  )


def form_again(gates: Any, cotangents: Any) -> tuple[Any, Any, Any]:
  """`form` in a backward pass.

  Args:
    gates: gates as they were kept.
    cotangents: cotangents of the results. The products wait for them: else XLA
      would find the products in the forward pass too, and keep their results.

  Returns:
    The gates; the argument `gates`, for `pull`; and the cotangents.
  """
  if any(map(_is_product, jax.tree.leaves(gates, is_leaf=_is_product))):
    gates, cotangents = wait(gates, cotangents)
  return form(gates), gates, cotangents


def wait(gates: Any, cotangents: Any) -> tuple[Any, Any]:
  """Returns both; whatever is made of the first is made after the second."""
  return lax.optimization_barrier((gates, cotangents))


def pull(gates: Any, d_gates: Any) -> Any:
  """Returns the cotangents of `gates`, with its structure.

  Args:
    gates: a tree of input gates and of products, from `form_again`.
    d_gates: cotangents of `form(gates)`.
  """
  return jax.tree.map(
      lambda g, d: g.pull(d) if _is_product(g) else d,
      gates,
      d_gates,
      is_leaf=_is_product,
  )


def _is_product(gates: Any) -> bool:
  return isinstance(gates, Product)
