"""The product W x that gives a recurrence its input gates.

The gates are the largest array of a recurrence. An operation that takes a
`Product` in their place keeps W and x for its backward pass, and multiplies
again there.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

Array = jax.Array


class Product(NamedTuple):
  """Input gates that are W x, not multiplied yet.

  Attributes:
    kernel: W, [G, I, F].
    x: [..., I].
  """

  kernel: Array
  x: Array


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
  return jnp.einsum('...i,gif->...gf', x, kernel.astype(x.dtype))


def _forward(kernel: Array, x: Array):
  return project(kernel, x), (kernel, x)


def backward(saved: tuple[Array, Array], d_gates: Array):
  """Returns the cotangents of W and x.

  Args:
    saved: W and x.
    d_gates: cotangent of `project`'s result.
  """
  kernel, x = saved
  wide = jnp.promote_types(x.dtype, jnp.float32)
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
  d_x = jnp.einsum(
      '...gf,gif->...i',
      d_gates,
      kernel.astype(x.dtype),
      precision=precision,
  )
  return d_kernel.astype(kernel.dtype), d_x


project.defvjp(_forward, backward)


def form(gates: Any) -> Any:
  """Returns input gates, each product of a tree as [..., G, F]."""
  return jax.tree.map(
      lambda g: project(*g) if _is_product(g) else g,
      gates,
      is_leaf=_is_product,
  )


def form_again(gates: Any, cotangents: Any) -> tuple[Any, Any]:
  """`form` in a backward pass.

  Args:
    gates: as they were kept.
    cotangents: of the results. The products wait for them: XLA would otherwise
      take them for those of the forward pass, and keep these.

  Returns:
    The gates, and the cotangents.
  """
  if any(map(_is_product, jax.tree.leaves(gates, is_leaf=_is_product))):
    gates, cotangents = lax.optimization_barrier((gates, cotangents))
  return form(gates), cotangents


def pull(gates: Any, d_gates: Any) -> Any:
  """Returns the cotangents of `gates`, of the same structure.

  Args:
    gates: a tree of input gates and of products.
    d_gates: cotangents of `form(gates)`.
  """
  return jax.tree.map(
      lambda g, d: Product(*backward(g, d)) if _is_product(g) else d,
      gates,
      d_gates,
      is_leaf=_is_product,
  )


def _is_product(gates: Any) -> bool:
  return isinstance(gates, Product)
