"""Parts of a layer in which each head sees its own features only."""

import math

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo.engines import products

Array = jax.Array


class Gates(nnx.Module):
  """Input gates W x + b, W block-diagonal.

  Attributes:
    kernel: W, [gates, heads, head_dim, head_dim], indexed [gate, head, from,
      to].
    bias: b, [gates, features].
  """

  def __init__(self, num_heads: int, bias: Array, *, rngs: nnx.Rngs):
    """Draws W from N(0, 2 / (5 features)).

    Args:
      num_heads: number of heads.
      bias: the values to start from, [gates, features].
      rngs: `nnx.Rngs` that W is drawn from.
    """
    gates, features = bias.shape
    size = features // num_heads
    init = jax.nn.initializers.normal(math.sqrt(2 / (5 * features)))
    shape = (gates, num_heads, size, size)
    self.kernel = nnx.Param(init(rngs.params(), shape, bias.dtype))
    self.bias = nnx.Param(bias)

  def __call__(self, inputs: tuple[Array, ...]) -> Array:
    """Returns [batch, time, gates, features].

    Args:
      inputs: one array [batch, time, features] for each gate.
    """
    kernel, dtype = self.kernel[...], inputs[0].dtype
    wide = promotion.wide(dtype)
    _, heads, size, _ = kernel.shape
    gates = [
        products.contract(
            '...nd,nde->...ne',
            x.reshape(*x.shape[:-1], heads, size),
            w,
            wide,
        ).reshape(x.shape)
        for x, w in zip(inputs, kernel.astype(dtype), strict=True)
    ]
    bias = self.bias[...].astype(wide)
    return (jnp.stack(gates, axis=-2) + bias).astype(dtype)


def group_norm(features: int, num_heads: int, **options) -> nnx.GroupNorm:
  """Returns a norm of each head, with a scale and the published epsilon.

  Args:
    features: size of the last axis.
    num_heads: number of groups.
    **options: dtype, param_dtype and rngs.
  """
  return nnx.GroupNorm(
      features,
      num_heads,
      use_bias=False,
      epsilon=1e-5,
      use_fast_variance=False,
      reduction_axes=(-1,),
      **options,
  )
