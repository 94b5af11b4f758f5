"""Griffin's recurrent block: two branches, one through an RG-LRU."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.cells import rglru
from rnnzoo.engines import selection
from rnnzoo.layers import initializers
from rnnzoo.layers import rows
from rnnzoo.layers import xlstm_parts

Array = jax.Array
Carry = tuple[Array, ...]


class GriffinBlock(rows.RowLayer):
  """The recurrent block of Griffin and Hawk.

      u_t = conv(W_x x_{t-3} + b_x, ..., W_x x_t + b_x)  causal, each feature
      h_t = RG-LRU(u_t)                                  see `rnnzoo.RGLRU`
      y_t = W_out (h_t (.) gelu(W_y x_t + b_y)) + b_out

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> block = rnnzoo.GriffinBlock(8, 8, num_heads=2, rngs=nnx.Rngs(0))
  >>> carry, y = block.unroll(jnp.ones((2, 5, 8)))
  >>> y.shape, [c.shape for c in carry]              # h and the window
  ((2, 5, 8), [(2, 8), (2, 3, 8)])

  The carry is (h, window): the second, [..., conv_width - 1, state_features],
  has the convolution's past inputs, the newest last. A reset empties it, and a
  masked step does not enter it. In `step`, give the first one reset=True.

  Attributes:
    linear_x: W_x and b_x.
    linear_y: W_y and b_y.
    convolution: `kernel` [conv_width, state_features] and `bias`.
    recurrence: the RG-LRU.
    linear_out: W_out and b_out.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      state_features: int | None = None,
      num_heads: int = 1,
      conv_width: int = 4,
      signed: bool = False,
      dtype: jax.typing.DTypeLike | None = None,
      param_dtype: jax.typing.DTypeLike = jnp.float32,
      implementation: selection.Implementation = None,
      rngs: nnx.Rngs,
      **unknown,
  ):
    """Creates the parameters: W from N(0, 1 / fan_in), b from 0.

    Args:
      in_features: size of x's last axis.
      features: size of the output.
      state_features: size of h and of both branches; None for `features`.
      num_heads: number of diagonal blocks of the RG-LRU's gates.
      conv_width: steps that the convolution sees, 2 or more.
      signed: let the RG-LRU's a_t be in (-1, 1).
      dtype: dtype of the computation; None for the dtype of x and parameters.
      param_dtype: dtype of the parameters.
      implementation: 'scan', 'associative_scan', 'pallas', or None for the
        fastest.
      rngs: `nnx.Rngs` that the parameters are drawn from.
      **unknown: refused, by name.

    Raises:
      ValueError: an option is not valid.

    References:
      S. De et al., 2024, "Griffin: Mixing gated linear recurrences with local
      attention for efficient language models", section 2.3.
    """
    settings.no_more(unknown, type(self).__name__)
    settings.positive(in_features, 'in_features')
    settings.positive(features, 'features')
    size = features if state_features is None else state_features
    settings.positive(size, 'state_features')
    settings.positive(conv_width, 'conv_width')
    settings.within(conv_width, 'conv_width', least=2)
    initializers.check_rngs(rngs, 'params', required=True)
    options: Any = {'dtype': dtype, 'param_dtype': param_dtype, 'rngs': rngs}
    # First, since it checks the options.
    self.recurrence = rglru.RGLRU(
        size,
        size,
        num_heads=num_heads,
        signed=signed,
        implementation=implementation,
        **options,
    )
    self.implementation = self.recurrence.implementation
    self.in_features, self.out_features = in_features, features
    self.dtype, self.param_dtype = dtype, param_dtype
    init = initializers.fan_in_normal
    linear = lambda *sizes: nnx.Linear(*sizes, kernel_init=init, **options)
    self.linear_x = linear(in_features, size)
    self.linear_y = linear(in_features, size)
    self.linear_out = linear(size, features)
    self.convolution = xlstm_parts.CausalConvolution(
        conv_width, size, param_dtype=param_dtype, rngs=rngs
    )
    # The paper's code draws it from N(0, 0.01 / conv_width).
    kernel = 0.1 * init(rngs.params(), (conv_width, size), param_dtype)
    self.convolution.kernel.set_value(kernel)
    self.convolution.bias.set_value(jnp.zeros((size,), param_dtype))

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> Carry:
    """Returns zeros (h, window), float32 or wider.

    Args:
      batch_shape: leading axes of the input, before time.
    """
    batch_shape = checks.shape(batch_shape, 'batch_shape')
    return self._initial_carry(batch_shape, self.dtype or self.param_dtype)

  def _rows(self, x, carry: Carry, reset, mask, *, implementation):
    """Runs over x [batch, time, in_features]; an empty carry is a start."""
    dtype = self._dtype(x)
    x = x.astype(dtype)
    if mask is not None:
      x = jnp.where(mask[..., None], x, 0)
    h, window = carry or self._initial_carry(x.shape[:1], dtype)
    window, u = self.convolution(self.linear_x(x), window, reset, mask)
    recurrence: Any = nnx.merge(*nnx.split(self.recurrence))
    recurrence.implementation = implementation
    (h,), y = recurrence.unroll(
        u, initial_carry=(h,) if carry else None, reset=reset, mask=mask
    )
    y = self.linear_out(y * jax.nn.gelu(self.linear_y(x)))
    if mask is not None:
      y = jnp.where(mask[..., None], y, 0)
    return (h, window), y

  def _dtype(self, x: Array):
    return self.dtype or promotion.both(x, self.param_dtype)

  def _initial_carry(self, batch_shape, dtype) -> Carry:
    past, size = self.convolution.kernel.shape
    state = promotion.wide(dtype)
    shapes = (size,), (past - 1, size)
    return tuple(jnp.zeros((*batch_shape, *s), state) for s in shapes)

  def _check_carry(self, carry: Any, batch_shape, label: str, x) -> Carry:
    """Returns the carry in its dtype, () for none, or raises ValueError."""
    if carry is None and label == 'initial_carry':
      return ()
    start = self._initial_carry(batch_shape, self._dtype(x))
    shapes, given = [c.shape for c in start], carry
    if isinstance(carry, (tuple, list)):
      given = tuple(checks.array(c, label) for c in carry)
    if given is carry or [c.shape for c in given] != shapes:
      raise ValueError(
          f'{label} must be a tuple (h, window) of arrays of shapes {shapes},'
          f' got {checks.describe(carry)}.'
      )
    for c in given:
      checks.number(c, label)
    return tuple(c.astype(start[0].dtype) for c in given)
