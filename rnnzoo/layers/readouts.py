"""Readouts: the output of a layer whose memory is not its output."""

from flax import nnx
import jax
import jax.numpy as jnp

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

  def __call__(self, x: Array, h: tuple[Array, ...]) -> Array:
    re, im = (k.astype(x.dtype) for k in self.kernel[...])
    wide = promotion.wide(x.dtype)
    y = products.contract('...s,sf->...f', h[0], re, wide)
    y -= products.contract('...s,sf->...f', h[1], im, wide)
    return self.scale * y + skipped(self.skip[...], x)


def skip(in_features: int, features: int, dtype, rngs: nnx.Rngs) -> Array:
  """Returns a new D: numbers where sizes are equal, else a matrix."""
  if in_features == features:
    return jax.random.normal(rngs.params(), (features,), dtype)
  shape = in_features, features
  return initializers.lecun_normal(rngs.params(), shape, dtype)


def skipped(weights: Array, x: Array) -> Array:
  """Returns D x in float32 or wider."""
  wide = promotion.wide(x.dtype)
  if weights.ndim == 1:
    return weights.astype(wide) * x.astype(wide)
  kernel = weights.astype(x.dtype)
  return products.contract('...i,if->...f', x, kernel, wide)


class GatedNorm(nnx.Module):
  """y = W_o (norm(h) (.) silu(W_g x)), of all arrays of h side by side.

  norm(h) = scale (.) h / sqrt(mean(h²) + 1e-5).

  Attributes:
    gate: W_g, [in_features, size], with as many numbers as h has.
    scale: [size].
    kernel: W_o, [size, features].
  """

  def __init__(
      self, in_features: int, size: int, features: int, dtype, *, rngs: nnx.Rngs
  ):
    """Draws W_g and W_o from N(0, 1 / fan_in); the scale starts as 1.

    Args:
      in_features: size of x's last axis.
      size: size of h.
      features: size of the output.
      dtype: dtype of the parameters.
      rngs: `nnx.Rngs` that the parameters are drawn from.
    """
    draw = lambda *shape: initializers.lecun_normal(rngs.params(), shape, dtype)
    self.gate = nnx.Param(draw(in_features, size))
    self.scale = nnx.Param(jnp.ones((size,), dtype))
    self.kernel = nnx.Param(draw(size, features))

  def __call__(self, x: Array, h: tuple[Array, ...]) -> Array:
    wide = promotion.wide(x.dtype)
    state = jnp.concatenate(h, axis=-1).astype(wide)
    square = jnp.mean(state * state, axis=-1, keepdims=True)
    normed = state * jax.lax.rsqrt(square + 1e-5) * self.scale[...].astype(wide)
    gate = products.contract('...i,is->...s', x, _like(self.gate, x), wide)
    gated = (normed * jax.nn.silu(gate)).astype(x.dtype)
    return products.contract(
        '...s,sf->...f', gated, _like(self.kernel, x), wide
    )


class OutputGate(nnx.Module):
  """y = σ(W_o x + b_o) (.) h.

  Attributes:
    kernel: W_o, [in_features, features].
    bias: b_o, [features], or None.
  """

  def __init__(self, kernel: Array, bias: Array | None):
    """Keeps the parameters.

    Args:
      kernel: W_o.
      bias: b_o, or None.
    """
    self.kernel = nnx.Param(kernel)
    self.bias = nnx.data(None if bias is None else nnx.Param(bias))

  def __call__(self, x: Array, h: tuple[Array, ...]) -> Array:
    wide = promotion.wide(x.dtype)
    gate = products.contract('...i,if->...f', x, _like(self.kernel, x), wide)
    if self.bias is not None:
      gate += self.bias[...].astype(wide)
    return jax.nn.sigmoid(gate) * h[0].astype(wide)


def _like(parameter: nnx.Param, x: Array) -> Array:
  return parameter[...].astype(x.dtype)
