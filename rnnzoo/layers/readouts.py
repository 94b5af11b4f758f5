"""Readouts: the output of a layer whose memory is not its output."""

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import devices
from pallas_kernels import promotion
from rnnzoo.engines import products
from rnnzoo.layers import initializers

Array = jax.Array


class Complex(nnx.Module):
  """y = scale Re(C h) + D x, of a memory h = re + i im.

  Attributes:
    kernel: C, [2, state_features, features]: its real and its imaginary part.
    skip: D, [features]; where x has another size [in_features, features].
    scale: 2 where h is half of a memory that holds conjugate pairs.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      kernel: Array,
      *,
      scale: float = 1.0,
      rngs: nnx.Rngs,
  ):
    """Creates the parameters.

    Args:
      in_features: size of x's last axis.
      features: size of the output.
      kernel: C.
      scale: factor of Re(C h).
      rngs: `nnx.Rngs` that D is drawn from.
    """
    self.kernel = nnx.Param(kernel)
    self.skip = nnx.Param(skip(in_features, features, kernel.dtype, rngs))
    self.scale = scale

  def __call__(self, x: Array, h: tuple[Array, Array]) -> Array:
    re, im = (k.astype(x.dtype) for k in self.kernel[...])
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = products.contract('...s,sf->...f', h[0], re, wide)
    y -= products.contract('...s,sf->...f', h[1], im, wide)
    return self.scale * y + skipped(self.skip[...], x)


class Projection(nnx.Module):
  """y = P h, of a carry's first array.

  Attributes:
    kernel: P, [state_features, features].
    reads: number of the carry's arrays that it takes.
  """

  reads = 1

  def __init__(self, state_features: int, features: int, dtype, rngs: nnx.Rngs):
    """Draws P.

    Args:
      state_features: size of h.
      features: size of the output.
      dtype: dtype of P.
      rngs: `nnx.Rngs` that P is drawn from.
    """
    shape = state_features, features
    draw = initializers.lecun_normal
    self.kernel = nnx.Param(draw(rngs.params(), shape, dtype))

  def __call__(self, x: Array, carry: tuple[Array, ...]) -> Array:
    del x
    h = carry[0]
    kernel = self.kernel[...].astype(h.dtype)
    return products.contract(
        '...s,sf->...f', h, kernel, promotion.wide(h.dtype)
    )

  def folded(self, kernel: Array) -> Array:
    """Returns R P for the R of y, [G, 1, features, F], in float32 or wider."""
    wide = promotion.wide(kernel.dtype)
    own = devices.like(self.kernel[...], kernel).astype(wide)
    return products.contract('sp,gnpf->gnsf', own, kernel.astype(wide), wide)


def skip(in_features: int, features: int, dtype, rngs: nnx.Rngs) -> Array:
  """Returns a new D: numbers where sizes are equal, else a matrix."""
  if in_features == features:
    return jax.random.normal(rngs.params(), (features,), dtype)
  shape = in_features, features
  return initializers.lecun_normal(rngs.params(), shape, dtype)


def skipped(weights: Array, x: Array) -> Array:
  """Returns D x in float32 or wider."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  if weights.ndim == 1:
    return weights.astype(wide) * x
  kernel = weights.astype(x.dtype)
  return products.contract('...i,if->...f', x, kernel, wide)
