"""The product W x that gives a recurrence its input gates."""

import jax
from jax import lax
import jax.numpy as jnp

Array = jax.Array


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
