"""Readouts: the output of a layer whose memory is not its output."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import devices
from pallas_kernels import promotion
from rnnzoo import settings
from rnnzoo.engines import products
from rnnzoo.layers import initializers

Array = jax.Array

# (index of a carry's array, factor) for each part of C: of a complex memory
# the real part of C h, and twice that where h lacks the conjugate numbers.
REAL_PART = ((0, 1.0), (1, -1.0))
TWICE_REAL_PART = ((0, 2.0), (1, -2.0))


class Linear(nnx.Module):
  """y = C h + D x, of some arrays of the carry.

  With a gate the output is u (.) σ(W u + b) of u = gelu(y).

  Attributes:
    kernel: C, [parts, state_features, features].
    skip: D, [features]; where x has another size [in_features, features].
    parts: for each part of C the index of the carry's array, and a factor.
    gate: W, [features, features], or None.
    gate_bias: b, [features], or None.
  """

  def __init__(
      self,
      in_features: int,
      kernel: Array,
      parts: tuple[tuple[int, float], ...] = REAL_PART,
      *,
      gated: bool = False,
      rngs: nnx.Rngs,
  ):
    """Keeps C = kernel and its parts; draws D and, if gated, W."""
    settings.boolean(gated, 'gated')
    features, dtype = kernel.shape[-1], kernel.dtype
    self.kernel = nnx.Param(kernel)
    if in_features == features:
      skip = jax.random.normal(rngs.params(), (features,), dtype)
    else:
      shape = in_features, features
      skip = initializers.lecun_normal(rngs.params(), shape, dtype)
    self.skip = nnx.Param(skip)
    self.parts = parts
    self.gate: Any = nnx.data(None)
    self.gate_bias: Any = nnx.data(None)
    if gated:
      square = features, features
      gate = initializers.lecun_normal(rngs.params(), square, dtype)
      self.gate = nnx.Param(gate)
      self.gate_bias = nnx.Param(jnp.zeros((features,), dtype))

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
    if self.gate is None:
      return y
    u = jax.nn.gelu(y)
    gate = products.contract(
        '...f,fg->...g', u.astype(x.dtype), _like(self.gate, x), wide
    )
    return u * jax.nn.sigmoid(gate + self.gate_bias[...].astype(wide))


class Projection(nnx.Module):
  """y = P h, of a carry's first array.

  Attributes:
    kernel: P, [state_features, features].
    reads: number of the carry's arrays that it takes.
  """

  reads = 1

  def __init__(self, state_features: int, features: int, dtype, rngs: nnx.Rngs):
    """Draws P."""
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
    """Draws W_g and W_o from N(0, 1 / fan_in); the scale starts as 1."""
    draw = lambda *shape: initializers.lecun_normal(rngs.params(), shape, dtype)
    self.gate = nnx.Param(draw(in_features, size))
    self.scale = nnx.Param(jnp.ones((size,), dtype))
    self.kernel = nnx.Param(draw(size, features))

  def __call__(self, x: Array, h: tuple[Array, ...]) -> Array:
    wide = promotion.wide(x.dtype)
    state = jnp.concatenate(h, axis=-1).astype(wide)
    square = jnp.mean(state * state, axis=-1, keepdims=True)
    normed = state * jax.lax.rsqrt(square + 1e-5) * self.scale[...].astype(wide)
    gate = products.contract('...i,is->...s', x, _like(self.gate, x), x.dtype)
    gated = (normed * jax.nn.silu(gate.astype(wide))).astype(x.dtype)
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
    """Keeps W_o and b_o."""
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
