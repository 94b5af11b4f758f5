"""Parts of a layer in which each head sees its own features only."""

from collections.abc import Callable, Mapping
import math

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import settings
from rnnzoo.engines import products
from rnnzoo.layers import initializers
from rnnzoo.layers import stack

Array = jax.Array


class Gates(nnx.Module):
  """Input gates W x + b, W block-diagonal.

  Attributes:
    kernel: W, [gates, heads, head_dim, head_dim], indexed [gate, head, from,
      to].
    bias: b, [gates, features].
  """

  def __init__(self, num_heads: int, bias: Array, *, rngs: nnx.Rngs):
    """Draws W from N(0, 2 / (5 features)); b starts as `bias`."""
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
  """Returns a norm of each head, with a scale and the published epsilon."""
  return nnx.GroupNorm(
      features,
      num_heads,
      use_bias=False,
      epsilon=1e-5,
      use_fast_variance=False,
      reduction_axes=(-1,),
      **options,
  )


# A norm and a gated MLP, as blocks of xLSTM and TiRex have them.


@jax.custom_jvp
def _gelu(x: Array) -> Array:
  """The exact one, x Φ(x).

  jax 0.12 cannot differentiate erf inside `jax.shard_map`, so its derivative,
  Φ(x) + x φ(x), stands here.
  """
  return jax.nn.gelu(x, approximate=False)


@_gelu.defjvp
def _gelu_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  cdf = jax.lax.erfc(-x * math.sqrt(0.5)) / 2
  density = jnp.exp(-x * x / 2) / math.sqrt(2 * math.pi)
  return _gelu(x), (cdf + x * density) * dx


# By name.
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    'gelu': _gelu,
    'silu': jax.nn.silu,
}
NORMS = ('layer', 'rms')


def width(mlp_features: int | None, features: int, residual: bool) -> int:
  """Returns the width of a block's MLP; 0 for none.

  None is xLSTM's, 1.3 features rounded up to a multiple of 64, where the block
  adds its input. Without that it has no MLP.
  """
  if mlp_features is None:
    return 64 * math.ceil(1.3 * features / 64) * residual
  if mlp_features != 0 or isinstance(mlp_features, bool):
    settings.positive(mlp_features, 'mlp_features')
    if not residual:
      raise ValueError('The MLP needs residual=True, got residual=False.')
  return mlp_features


class GatedMLP(nnx.Module):
  """W_down (activation(gate) (.) up), where gate, up = W_up norm(x).

  Attributes:
    norm: norm before the products.
    up: W_up, [features, 2 width], the gate first.
    down: W_down, [width, features].
    activation: 'gelu' or 'silu'.
  """

  def __init__(
      self,
      features: int,
      width: int,
      *,
      norm: str,
      activation: str,
      num_blocks: int,
      rngs: nnx.Rngs,
      **dtypes,
  ):
    """Draws W from N(0, 2/(5 features)) and N(0, 4/(L² features)), L blocks."""
    first = jax.nn.initializers.normal(math.sqrt(2 / (5 * features)))
    last = jax.nn.initializers.normal(2 / num_blocks / math.sqrt(features))
    self.activation = activation
    self.norm = make_norm(norm, features, rngs=rngs, **dtypes)
    self.up = nnx.Linear(
        features,
        2 * width,
        use_bias=False,
        kernel_init=first,
        rngs=rngs,
        **dtypes,
    )
    self.down = nnx.Linear(
        width,
        features,
        use_bias=False,
        kernel_init=last,
        rngs=rngs,
        **dtypes,
    )

  def __call__(self, x: Array) -> Array:
    """Returns [..., features] for x [..., features]."""
    gate, up = jnp.split(self.up(stack.normalize(self.norm, x)), 2, axis=-1)
    return self.down(ACTIVATIONS[self.activation](gate) * up)


def make_norm(norm: str, features: int, **options) -> nnx.Module:
  """Returns a norm of features without bias, with the published epsilon."""
  if norm == 'rms':
    return nnx.RMSNorm(
        features, epsilon=1e-6, use_fast_variance=False, **options
    )
  return nnx.LayerNorm(
      features,
      epsilon=1e-5,
      use_bias=False,
      use_fast_variance=False,
      **options,
  )


# A causal depthwise convolution over time, with resets, masks and a carry.


class CausalConvolution(nnx.Module):
  """y_t = b + Σ_k K_k (.) x_{t-width+1+k}: each feature by itself.

  A window holds the inputs before the first step, the last width - 1
  inputs. A reset empties it; a masked step is passed over, as if the sequence
  did not have it.

  Attributes:
    kernel: K, [width, features]; the last multiplies x_t.
    bias: b, [features].
  """

  def __init__(self, width: int, features: int, *, rngs: nnx.Rngs, param_dtype):
    """Creates the parameters, U(±1/√width) as torch does; width >= 2."""
    init = initializers.uniform(-(width**-0.5), width**-0.5)
    self.kernel = nnx.Param(init(rngs.params(), (width, features), param_dtype))
    self.bias = nnx.Param(init(rngs.params(), (features,), param_dtype))

  def __call__(
      self, x: Array, window: Array, reset: Array | None, mask: Array | None
  ) -> tuple[Array, Array]:
    """Returns the window after the last step, and y in x's dtype.

    Args:
      x: [batch, time, features].
      window: inputs before x, the newest last, [batch, width - 1, features].
      reset: bool [batch, time] or None; where true, the window is empty (zeros)
        before this step. Acts in masked steps as well.
      mask: bool [batch, time] or None; where false, the step is passed over.
    """
    kernel, bias = self.kernel[...], self.bias[...]
    width, time = kernel.shape[0], x.shape[1]
    lagged = lags(x, window.astype(x.dtype), reset, mask)
    wide = promotion.wide(x.dtype)
    y = bias.astype(wide) + kernel[-1].astype(wide) * x.astype(wide)
    for k, past in enumerate(lagged, start=1):
      y += kernel[width - 1 - k].astype(wide) * past[:, :time].astype(wide)
    newest_last = [past[:, -1] for past in reversed(lagged)]
    return jnp.stack(newest_last, axis=1).astype(window.dtype), y.astype(
        x.dtype
    )


def lags(
    x: Array, window: Array, reset: Array | None, mask: Array | None
) -> list[Array]:
  """Returns the inputs 1, 2, ... steps before each step, and after the last.

  Args:
    x: [batch, time, features].
    window: [batch, width - 1, features], as `CausalConvolution` takes it.
    reset: bool [batch, time] or None.
    mask: bool [batch, time] or None.

  Returns:
    width - 1 arrays [batch, time + 1, features]: of lag 1, 2, ...; zeros where
    a reset is between.
  """
  batch, time = x.shape[:2]
  past = window.shape[1]
  inputs = jnp.concatenate([window, x], axis=1)
  episode = None
  if reset is not None:
    episode = jnp.pad(jnp.cumsum(reset, axis=1), ((0, 0), (past, 0)))
    now = jnp.concatenate([episode[:, past:], episode[:, -1:]], axis=1)
  if mask is not None:
    # The last valid position up to each one; all of the window is valid.
    valid = jnp.pad(mask, ((0, 0), (past, 0)), constant_values=True)
    positions = jnp.where(valid, jnp.arange(past + time), 0)
    last = lax.cummax(positions, axis=1)
    where = last[:, past - 1 :]
  result = []
  for k in range(1, past + 1):
    if mask is None:
      take = lambda a, k=k: a[:, past - k : past - k + time + 1]
    else:
      take = lambda a, where=where: jnp.take_along_axis(
          a, where.reshape(batch, time + 1, *(1,) * (a.ndim - 2)), axis=1
      )
    lagged = take(inputs)
    if episode is not None:
      lagged = jnp.where((take(episode) == now)[..., None], lagged, 0)
    result.append(lagged)
    if mask is not None and k < past:
      where = jnp.take_along_axis(last, where - 1, axis=1)
  return result
