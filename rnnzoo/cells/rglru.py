"""RG-LRU: a linear memory with two gates that see the input only."""

import dataclasses
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.engines import products
from rnnzoo.layers import initializers
from rnnzoo.layers import parameters
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

Array = jax.Array
sigmoid = jax.nn.sigmoid

# The constant c of equation 4.
_C = 8.0


@dataclasses.dataclass(frozen=True)
class RGLRUCell(cell.LinearCell):
  """Gates in the order r, i, x; carry (h,).

  a  = exp(-8 σ(r) softplus(Λ)), or 2 a - 1 where signed
  h' = a h + sqrt(1 - a²) σ(i) x; in a step that starts h' = a h + σ(i) x

  Attributes:
    signed: whether a is in (-1, 1) in place of (0, 1).
  """

  signed: bool = False
  input_gates = 3
  param_names = ('Lambda',)
  reads_starts = True

  def __post_init__(self):
    settings.boolean(self.signed, 'signed')

  def coefficients(self, params, x_gates):
    r, i, x, starts = x_gates
    large = params['Lambda']
    softplus = jnp.maximum(large, 0) + jnp.log1p(jnp.exp(-jnp.abs(large)))
    log_a = -_C * sigmoid(r) * softplus
    a = jnp.exp(log_a)
    # 1 - a² keeps its digits near a = 1, and so does 1 - (2 a - 1)².
    square = -jnp.expm1(2 * log_a)
    if self.signed:
      square = -4 * a * jnp.expm1(log_a)
      a = 2 * a - 1
    # The gradient of sqrt at 0 is infinite, but no gradient of a parameter is:
    # it holds σ(r) or softplus(Λ), which go to 0 faster.
    gain = jnp.sqrt(jnp.maximum(square, 1e-30))
    return a, jnp.where(starts > 0, 1.0, gain) * sigmoid(i) * x


class Gates(nnx.Module):
  """The gates r and i, W x + b with W block-diagonal, and x.

  Attributes:
    kernel: W_a and W_x, [2, heads, head_dim, head_dim], indexed [gate, head,
      from, to].
    bias: b_a and b_x, [2, features], or None.
    inputs: W_in, [in_features, features], or None where the sizes are equal.
  """

  def __init__(
      self, sizes: tuple[int, int], num_heads: int, use_bias, dtype, *, rngs
  ):
    """Draws W from N(0, 1 / head_dim).

    Args:
      sizes: in_features and features.
      num_heads: number of diagonal blocks.
      use_bias: whether there are b_a and b_x.
      dtype: dtype of the parameters.
      rngs: `nnx.Rngs` that the parameters are drawn from.
    """
    features, init = sizes[1], initializers.fan_in_normal
    size = features // num_heads
    self.kernel = initializers.draw(
        'kernel_init', init, rngs.params, 2, (size, size), dtype, num_heads
    )
    self.bias = self.inputs = nnx.data(None)
    if use_bias:
      self.bias = nnx.Param(jnp.zeros((2, features), dtype))
    if sizes[0] != features:
      self.inputs = nnx.Param(init(rngs.params(), sizes, dtype))

  def __call__(self, x: Array) -> cell.Gates:
    wide = promotion.wide(x.dtype)
    (gates, x), bias = self.without_bias(x)
    gates = gates.astype(wide)
    if bias is not None:
      gates += bias[:2].astype(wide)
    return gates[..., 0, :], gates[..., 1, :], x.astype(wide)

  def without_bias(self, x: Array) -> tuple[tuple[Array, Array], Array | None]:
    """Returns arrays [..., 2, F] and [..., F], and the bias [3, F] or None."""
    if self.inputs is not None:
      kernel = self.inputs[...].astype(x.dtype)
      wide = promotion.wide(x.dtype)
      x = products.contract('...i,if->...f', x, kernel, wide).astype(x.dtype)
    kernel = self.kernel[...].astype(x.dtype)
    heads = x.reshape(*x.shape[:-1], *kernel.shape[1:3])
    gates = products.contract('...nd,gnde->...gne', heads, kernel, x.dtype)
    gates = gates.reshape(*x.shape[:-1], 2, x.shape[-1])
    bias = (
        None if self.bias is None else jnp.pad(self.bias[...], [(0, 1), (0, 0)])
    )
    return (gates, x), bias


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    total=False,
):
  """Options that RGLRU passes on."""


class RGLRU(recurrent.RecurrentLayer[cell.HiddenCarry]):
  """Real-gated linear recurrent unit.

      r_t = σ(W_a x_t + b_a)                             W_a and W_x: each head
      i_t = σ(W_x x_t + b_x)
      a_t = exp(-8 softplus(Λ) r_t)
      h_t = a_t (.) h_{t-1} + sqrt(1 - a_t²) (.) (i_t (.) x_t)      y_t = h_t

  Λ starts so that a_t is uniform in [0.9, 0.999] where r_t = 1; where signed,
  in (-1, 1). In the package recurrentgemma it is a_t to the power 1 / 8.

  A step that starts a sequence, by a reset or as the first one without a given
  carry, has 1 in place of sqrt(1 - a_t²), as in that package; in `step`, give
  the first one reset=True. Where in_features is not features, x_t is W_in x_t.
  `rnnzoo.GriffinBlock` has the layers around it.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.RGLRU(8, 8, num_heads=2, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 8))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis; features in the paper.
    features: size of h.
    num_heads: number of diagonal blocks of W_a and W_x; features must be a
      multiple of it.
    signed: take 2 a_t - 1 for a_t, which is in (-1, 1): a memory that can
      change its sign counts modulo 2, which one with a_t > 0 cannot.
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      learn_initial_carry, dtype (of the computation), param_dtype,
      implementation ('scan', 'associative_scan', 'pallas' or None for the
      fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    S. De et al., 2024, "Griffin: Mixing gated linear recurrences with local
    attention for efficient language models", equations 1 to 4. R. Grazzi,
    J. Siems et al., 2024, "Unlocking state-tracking in linear RNNs through
    negative eigenvalues", for `signed`.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      num_heads: int = 1,
      signed: bool = False,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.positive(in_features, 'in_features')
    settings.heads(features, num_heads, has_kernel=True)
    settings.boolean(signed, 'signed')
    dtype = parameters.dtype_of(options, rngs)
    use_bias = options.get('use_bias', True)
    wide = promotion.wide(dtype)
    least = 1e-3 if signed else 0.9
    a = jax.random.uniform(rngs.params(), (features,), wide, least, 0.999)
    # The inverse of a = exp(-8 softplus(Λ)).
    large = jnp.log(jnp.expm1(-jnp.log(a) / _C)).astype(dtype)
    super().__init__(
        RGLRUCell(signed),
        in_features,
        features,
        cell_params={'Lambda': nnx.Param(large)},
        input_map=Gates(
            (in_features, features), num_heads, use_bias, dtype, rngs=rngs
        ),
        rngs=rngs,
        **options,
    )
