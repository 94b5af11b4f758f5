"""Products with the recurrent kernel over all steps at once, left to XLA.

One GEMM before the adjoint's loop forms the recurrent gates of all steps again,
and the gradient of the recurrent kernel is one GEMM after it.
"""

import math

import jax
from jax import lax
import jax.numpy as jnp

Array = jax.Array

# Elements of a result that keep the device busy.
_BUSY = 1 << 21
# Fewest products that are worth a sum of their own.
_SUMMED = 64


def h_gates(h: Array, kernel: Array) -> Array:
  """[N, B, T, 1, D] and [G, N, D, D] -> float32 [N, B, T, G, D].

  The sums stay float32, as in the forward kernel: rounded to the dtype of h,
  they made errors of some gradients twice as large.
  """
  heads, *lead, _, size = h.shape
  product = lax.dot_general(
      h.reshape(heads, -1, size),
      jnp.transpose(kernel, (1, 2, 0, 3)).reshape(heads, size, -1),
      (((2,), (1,)), ((0,), (0,))),
      preferred_element_type=jnp.float32,
  )
  return product.reshape(heads, *lead, -1, size)


def d_kernel(h: Array, d_gates: Array) -> Array:
  """[N, B, T, 1, D] and [N, B, T, G, D] -> float32 [G, N, D, D]."""
  heads, *lead, gates, size = d_gates.shape
  steps = math.prod(lead)
  result = gates * heads * size**2
  # A small result of a long sum would be left to a few multiprocessors, so the
  # sum is cut in parts.
  parts = 1
  while (
      parts * result < _BUSY
      and steps % (2 * parts) == 0
      and steps >= 2 * parts * _SUMMED
  ):
    parts *= 2
  # This order of axes transposes no array of all steps.
  sums = lax.dot_general(
      h.reshape(heads, parts, -1, size),
      d_gates.reshape(heads, parts, -1, gates * size),
      (((2,), (2,)), ((0, 1), (0, 1))),
      preferred_element_type=jnp.float32,
  )
  sums = jnp.sum(sums, axis=1).reshape(heads, size, gates, size)
  return jnp.transpose(sums, (2, 0, 1, 3))
