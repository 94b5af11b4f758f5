"""Readouts: the output of a layer whose memory is not its output."""

from flax import nnx
import jax

from pallas_kernels import promotion
from rnnzoo.engines import products
from rnnzoo.layers import initializers

Array = jax.Array

# (index of a carry's array, factor) for each part of C: of a complex memory
# the real part of C h, and twice that where h lacks the conjugate numbers.
REAL_PART = ((0, 1.0), (1, -1.0))
TWICE_REAL_PART = ((0, 2.0), (1, -2.0))


class Linear(nnx.Module):
  """y = C h + D x, of some arrays of the carry.

  Attributes:
    kernel: C, [parts, state_features, features].
    skip: D, [features]; where x has another size [in_features, features].
    parts: for each part of C the index of the carry's array, and a factor.
  """

  def __init__(
      self,
      in_features: int,
      kernel: Array,
      parts: tuple[tuple[int, float], ...] = REAL_PART,
      *,
      rngs: nnx.Rngs,
  ):
    """Creates the parameters.

    Args:
      in_features: size of x's last axis.
      kernel: C.
      parts: which arrays C multiplies.
      rngs: `nnx.Rngs` that D is drawn from.
    """
    features, dtype = kernel.shape[-1], kernel.dtype
    self.kernel = nnx.Param(kernel)
    if in_features == features:
      skip = jax.random.normal(rngs.params(), (features,), dtype)
    else:
      shape = in_features, features
      skip = initializers.lecun_normal(rngs.params(), shape, dtype)
    self.skip = nnx.Param(skip)
    self.parts = parts

  def __call__(self, x: Array, h: tuple[Array, ...]) -> Array:
    wide, skip = promotion.wide(x.dtype), self.skip[...]
    if skip.ndim == 1:
      y = skip.astype(wide) * x.astype(wide)
    else:
      y = products.contract('...i,if->...f', x, skip.astype(x.dtype), wide)
    for (index, factor), kernel in zip(
        self.parts, self.kernel[...], strict=True
    ):
      kernel = kernel.astype(x.dtype)
      part = products.contract('...s,sf->...f', h[index], kernel, wide)
      y += factor * part
    return y
