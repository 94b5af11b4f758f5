"""A causal depthwise convolution over time, with resets, masks and a carry."""

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo.layers import initializers

Array = jax.Array


class CausalConvolution(nnx.Module):
  """y_t = b + Σ_k K_k (.) x_{t-width+1+k}: each feature by itself.

  The inputs before the first step are those of a window, the last width - 1
  inputs. A reset empties it; a masked step is passed over, as if the sequence
  did not have it.

  Attributes:
    kernel: K, [width, features]; the last multiplies x_t.
    bias: b, [features].
  """

  def __init__(self, width: int, features: int, *, rngs: nnx.Rngs, param_dtype):
    """Creates the parameters, U(±1/√width) as torch does.

    Args:
      width: 2 or more.
      features: size of x's last axis.
      rngs: `nnx.Rngs` that the parameters are drawn from.
      param_dtype: dtype of the parameters.
    """
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
    newest_last = [past[:, time] for past in reversed(lagged)]
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
