"""flax's norms, wherever JAX is told to refuse promotions of dtypes."""

from typing import Any

from flax import nnx
import jax

from pallas_kernels import dtypes

Array = jax.Array


@dtypes.promoted
def normalize(norm: nnx.Module, x: Array, **options: Any) -> Array:
  """Returns norm(x, **options).

  flax takes statistics in float32 and promotes x of 16 bits to it, as its
  documentation promises; `jax_numpy_dtype_promotion='strict'` would refuse.
  """
  apply: Any = norm
  return apply(x, **options)
