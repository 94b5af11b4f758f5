"""The sLSTM block of xLSTM: convolution, cell, group norm, gated MLP."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.cells import slstm
from rnnzoo.engines import paths
from rnnzoo.engines import selection
from rnnzoo.layers import initializers
from rnnzoo.layers import rows
from rnnzoo.layers import stack
from rnnzoo.layers import xlstm_parts

Array = jax.Array
Carry = tuple[Array, ...]


class SLSTMBlock(rows.RowLayer):
  """The sLSTM block of xLSTM, and with other options the block of TiRex.

      u_t = norm(x_t)
      v_t = silu(conv(u_{t-3}, ..., u_t))                causal, each feature
      ĩ_t, f̃_t = W v_t + b + R h_{t-1}                   W and R: each head
      z̃_t, õ_t = W u_t + b + R h_{t-1}
      h_t = sLSTM(ĩ_t, f̃_t, z̃_t, õ_t)                    see `rnnzoo.SLSTM`
      x'_t = x_t + group_norm(h_t)                       each head
      gate, up = W_up norm(x'_t)
      y_t = x'_t + W_down (gelu(gate) (.) up)

  With `residual=False` it is y_t = group_norm(h_t) with u_t = x_t: the layer
  inside the block.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> block = rnnzoo.SLSTMBlock(8, 8, num_heads=2, rngs=nnx.Rngs(0))
  >>> carry, y = block.unroll(jnp.ones((2, 5, 8)))
  >>> y.shape, [c.shape for c in carry]            # h, c, n, m and the window
  ((2, 5, 8), [(2, 8), (2, 8), (2, 8), (2, 8), (2, 3, 8)])

  TiRex's has conv_width=0, norm='rms', mlp_activation='silu', max_forget=15,
  min_normalizer=0, and 2.6667 features, rounded up to 64s, in its MLP.

  The carry is (h, c, n, m, window): the last, [..., conv_width - 1, features],
  has the convolution's past inputs, the newest last; without a convolution it
  is not there. A reset empties it, and a masked step does not enter it.

  Attributes:
    cell: the equations of the recurrence, static.
    convolution: `kernel` [conv_width, features] and `bias`, or None.
    gates: `kernel` W, [4, num_heads, head_dim, head_dim], indexed [gate, head,
      from, to], and `bias` [4, features]; gates in the order i, f, z, o.
    recurrent_kernel: R, [4, num_heads, head_dim, head_dim].
    head_norm: group norm of h, one group a head.
    norm: norm before the layer, or None.
    mlp: `norm`, `up` and `down` of the gated MLP, or None.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      num_heads: int = 4,
      conv_width: int = 4,
      residual: bool = True,
      norm: str = 'layer',
      mlp_features: int | None = None,
      mlp_activation: str = 'gelu',
      block_index: int = 0,
      num_blocks: int = 1,
      max_forget: float | None = None,
      min_normalizer: float = 1.0,
      dtype: jax.typing.DTypeLike | None = None,
      param_dtype: jax.typing.DTypeLike = jnp.float32,
      implementation: selection.Implementation = None,
      rngs: nnx.Rngs,
      **unknown,
  ):
    """Creates the parameters; R starts with zeros.

    Args:
      in_features: size of x's last axis.
      features: in_features; as in xLSTM a block does not change the size.
      num_heads: number of diagonal blocks of W and R, and groups of the norm.
      conv_width: steps that the convolution sees, 2 or more; 0 for none, as in
        TiRex.
      residual: whether to add the input, after a norm of it, and then the MLP.
        False for the layer alone.
      norm: 'layer' or 'rms' for `nnx.LayerNorm` or `nnx.RMSNorm`, without bias,
        before the layer and before the MLP.
      mlp_features: width of the gated MLP; None for xLSTM's, 1.3 features
        rounded up to a multiple of 64; 0 for none.
      mlp_activation: 'gelu' or 'silu', of the MLP's gate.
      block_index: index as in `SLSTM`, and so are the next three.
      num_blocks: the network's number of blocks.
      max_forget: upper bound of f̃, or None.
      min_normalizer: lower bound of n.
      dtype: dtype of the computation; None for the dtype of x and parameters.
      param_dtype: dtype of the parameters.
      implementation: 'scan', 'associative_scan', 'pallas', or None for the
        fastest.
      rngs: `nnx.Rngs` that the parameters are drawn from.
      **unknown: refused, by name.

    Raises:
      ValueError: an option is not valid.

    References:
      M. Beck et al., 2024, "xLSTM: Extended long short-term memory", figure 10
      of the appendix.
    """
    settings.no_more(unknown, type(self).__name__)
    settings.positive(in_features, 'in_features')
    settings.heads(features, num_heads, has_kernel=True)
    if in_features != features:
      raise ValueError(
          'SLSTMBlock has as many inputs as features, got'
          f' in_features={in_features} and features={features}; an nnx.Linear'
          ' before it can change the size.'
      )
    if type(conv_width) is not int or conv_width == 1 or conv_width < 0:
      raise ValueError(
          f'conv_width must be 0 or an int of at least 2, got {conv_width!r}.'
      )
    settings.boolean(residual, 'residual')
    settings.choice(norm, xlstm_parts.NORMS, 'norm')
    settings.choice(
        mlp_activation, tuple(xlstm_parts.ACTIVATIONS), 'mlp_activation'
    )
    width = xlstm_parts.width(mlp_features, features, residual)
    cell = slstm.make_cell(max_forget, min_normalizer)
    forget = slstm.forget_bias(num_heads, block_index, num_blocks)
    checks.floating(param_dtype, 'param_dtype')
    if dtype is not None:
      checks.floating(dtype, 'dtype')
    initializers.check_rngs(rngs, 'params', required=True)
    self.cell = cell
    self.in_features = self.out_features = features
    self.num_heads = num_heads
    self.conv_width = int(conv_width)
    self.dtype = dtype
    self.param_dtype = param_dtype
    self.implementation = selection.checked(implementation)
    biases = jnp.zeros((4, features), param_dtype)
    biases = biases.at[1].set(forget(rngs.params(), (features,), param_dtype))
    self.gates = xlstm_parts.Gates(num_heads, biases, rngs=rngs)
    self.recurrent_kernel = nnx.Param(jnp.zeros_like(self.gates.kernel[...]))
    options: Any = {'dtype': dtype, 'param_dtype': param_dtype, 'rngs': rngs}
    self.head_norm = xlstm_parts.group_norm(features, num_heads, **options)
    self.convolution = self.norm = self.mlp = nnx.data(None)
    if conv_width:
      self.convolution = xlstm_parts.CausalConvolution(
          self.conv_width, features, param_dtype=param_dtype, rngs=rngs
      )
    if residual:
      self.norm = xlstm_parts.make_norm(norm, features, **options)
    if width:
      self.mlp = xlstm_parts.GatedMLP(
          features,
          width,
          norm=norm,
          activation=mlp_activation,
          num_blocks=num_blocks,
          **options,
      )

  def initial_carry(self, batch_shape: tuple[int, ...] = ()) -> Carry:
    """Returns zeros (h, c, n, m, window), float32 or wider.

    Args:
      batch_shape: leading axes of the input, before time.
    """
    batch_shape = checks.shape(batch_shape, 'batch_shape')
    settings.numbers_of((*batch_shape, self.out_features), 'The carry')
    return self._initial_carry(batch_shape, self.dtype or self.param_dtype)

  def _rows(self, x, carry: Carry, reset, mask, *, implementation):
    """Runs over x [batch, time, in_features] from a carry of this batch."""
    dtype = self._dtype(x)
    x = x.astype(dtype)
    if mask is not None:
      x = jnp.where(mask[..., None], x, 0)
    u = x if self.norm is None else stack.normalize(self.norm, x)
    v, window = u, carry[4:]
    if self.convolution is not None:
      past, v = self.convolution(u, carry[4], reset, mask)
      v, window = jax.nn.silu(v), (past,)
    state, h = paths.unroll(
        self.cell,
        {},
        self.gates((v, v, u, u)),
        self.recurrent_kernel[...].astype(dtype),
        carry[:4],
        reset=reset,
        mask=mask,
        implementation=implementation,
    )
    # flax's group norm repeats its statistics along the second axis.
    y = stack.normalize(self.head_norm, h.reshape(-1, h.shape[-1]))
    y = y.reshape(h.shape)
    y = y.astype(dtype)
    if self.norm is not None:
      y = x + y
    if self.mlp is not None:
      y = y + self.mlp(y)
    if mask is not None:
      y = jnp.where(mask[..., None], y, 0)
    return (*state, *window), y

  def _dtype(self, x: Array):
    return self.dtype or promotion.both(x, self.param_dtype)

  def _initial_carry(self, batch_shape, dtype) -> Carry:
    state = promotion.wide(dtype)
    zeros = lambda *shape: jnp.zeros((*batch_shape, *shape), state)
    carry = tuple(zeros(self.out_features) for _ in self.cell.carry_names)
    if self.conv_width:
      carry += (zeros(self.conv_width - 1, self.in_features),)
    return carry

  def _check_carry(self, carry: Any, batch_shape, label: str, x) -> Carry:
    """Returns the carry in its dtype, or raises ValueError."""
    start = self._initial_carry(batch_shape, self._dtype(x))
    if carry is None and label == 'initial_carry':
      return start
    names = (*self.cell.carry_names, 'window')[: len(start)]
    shapes = [c.shape for c in start]
    got = checks.describe(carry)
    if isinstance(carry, (tuple, list)):
      given = [checks.array(c, label) for c in carry]
      got = f'{len(given)} of shapes {[c.shape for c in given]}'
      if [c.shape for c in given] == shapes:
        for c in given:
          checks.number(c, label)
        return tuple(c.astype(start[0].dtype) for c in given)
    raise ValueError(
        f'{label} must be a tuple ({", ".join(names)}) of arrays of shapes'
        f' {shapes}, got {got}.'
    )
