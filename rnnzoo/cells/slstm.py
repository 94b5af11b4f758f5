"""The sLSTM: an LSTM with exponential gates, kept in range by a stabiliser."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple, Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.layers import initializers
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

sigmoid, tanh = jax.nn.sigmoid, jnp.tanh


def log_sigmoid(x):
  """Returns log σ(x)."""
  return jnp.minimum(x, 0) - jnp.log1p(jnp.exp(-jnp.abs(x)))


# exp of it is so large that other terms do not count beside it, and sums and
# reciprocals of such numbers are float32. Derivatives of less than exp(-70) are
# those at this bound.
_LARGE = 70.0

# The stabiliser of an empty cell in a guess: below any input.
_EMPTY = -1e30


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def mix(least, i, f, t, c, n, m):
  """Returns c' / n', c', n' and m', where t = tanh(z) and n' >= least."""
  return _mix(least, i, f, t, c, n, m)[0]


@jax.custom_jvp
def _reciprocal(x):
  """Returns 1 / x; the square of x, which may be too large, is not needed."""
  return 1 / x


@_reciprocal.defjvp
def _reciprocal_jvp(primals, tangents):
  y = _reciprocal(*primals)
  return y, -(y * tangents[0]) * y


def _mix(least, i, f, t, c, n, m):
  """Returns `mix`'s results; g; and factors of c + g t for c' / n', c'."""
  # No logarithm on the way to g: exp(-l) is exp(-m) (1 + exp(-f)).
  old, forgotten = jnp.minimum(i - m, _LARGE), jnp.minimum(i - m - f, _LARGE)
  g = jnp.exp(old) + jnp.exp(forgotten)
  c, n = c + g * t, jnp.maximum(n + g, least)
  per_n, scale = _reciprocal(n), _reciprocal(jnp.maximum(g, 1))
  m = jnp.maximum(i, log_sigmoid(f) + m)
  return (per_n * c, scale * c, scale * n, m), g, per_n, scale


@mix.defjvp
def _mix_jvp(least, primals, tangents):
  # The factors of the tangents depend on no tangent, so that little of the
  # adjoint waits for the steps after this one. None is a difference of large
  # numbers: where g is large, c' is t + c / g, and has -c / g by i.
  _, f, t, c, n, _ = primals
  d_i, d_f, d_t, d_c, d_n, d_m = tangents
  new, g, per_n, scale = _mix(least, *primals)
  mean = new[0]
  larger = jnp.where(g > 1, jnp.ones_like(g), 0)  # m' is i, scale is 1 / g.
  counted = jnp.where(n + g < least, 0, jnp.ones_like(g))  # n is not cut off.
  share = g * per_n
  mean_by_i = share * jnp.where(counted > 0, (t * n - c) * per_n, t)
  c_by_i = jnp.where(g > 1, -scale * c, g * t)
  kept = jnp.where(counted > 0, n, least)
  n_by_i = jnp.where(g > 1, -scale * kept, counted * g)
  d_l = d_m + sigmoid(-f) * d_f
  d = d_i - d_l
  d_mean = per_n * d_c + share * d_t + mean_by_i * d
  d_mean -= (counted * mean * per_n) * d_n
  d_c = scale * d_c + jnp.minimum(g, 1) * d_t + c_by_i * d
  d_n = (scale * counted) * d_n + n_by_i * d
  return new, (d_mean, d_c, d_n, larger * d_i + (1 - larger) * d_l)


class SLSTMCarry(NamedTuple):
  """Carry of `SLSTMCell`.

  Attributes:
    h: output of the last step, [..., features].
    c: memory, scaled by exp(-m), [..., features].
    n: normaliser, scaled by exp(-m), [..., features].
    m: stabiliser of the exponential gates, [..., features].
  """

  h: jax.Array
  c: jax.Array
  n: jax.Array
  m: jax.Array


cell.register(SLSTMCarry)


@dataclasses.dataclass(frozen=True)
class SLSTMCell(cell.Cell):
  """Gates in the order i, f, z, o; carry (h, c, n, m).

  l  = log σ(f) + m
  m' = max(i, l), or i where n = 0      stabiliser, leaves h unchanged
  i' = exp(i - m')
  f' = exp(l - m'), or 0 where n = 0    n = 0: nothing is stored yet
  c' = f' c + i' tanh(z)
  n' = max(f' n + i', 1)                normaliser
  h' = σ(o) c' / n'

  which for n >= 0 equals, with g = i' / f' = exp(i - l),

  c' = (c + g tanh(z)) / max(g, 1)
  n' = max(n + g, 1) / max(g, 1)
  h' = σ(o) (c + g tanh(z)) / max(n + g, 1)

  where i, f, z, o are the sums x + R h. The second form has h' sooner.

  Attributes:
    max_forget: upper bound of f, or None.
    min_normalizer: lower bound of n', from 0 to 1.
  """

  max_forget: float | None = None
  min_normalizer: float = 1.0

  input_gates = 4
  recurrent_gates = 4
  carry_names = ('h', 'c', 'n', 'm')
  carry_type = SLSTMCarry

  def update(self, params, x_gates, h_gates, carry):
    del params
    _, c, n, m = carry
    i, f, z, o = map(jnp.add, x_gates, h_gates)
    if self.max_forget is not None:
      f = jnp.minimum(f, self.max_forget)
    # An empty cell has nothing to keep: it takes its first input whole, and its
    # carry has no gradient.
    empty = n == 0
    c, n = jnp.where(empty, 0, c), jnp.where(empty, 0, n)
    m = jnp.where(empty, -jnp.inf, m)
    mean, c, n, m = mix(self.min_normalizer, i, f, tanh(z), c, n, m)
    return sigmoid(o) * mean, c, n, m

  def guess(self, params, x_gates, h_gates, carry, diagonal, solve):
    # If the gates are given, m is a recurrence of maxima, and with it c and
    # n are linear, n with a bound.
    del params, carry, diagonal
    i, f, z, o = map(jnp.add, x_gates, h_gates)
    l = log_sigmoid(f)

    def stabiliser(carry):
      _, _, n, m = carry
      return jnp.where(n == 0, _EMPTY, m)

    before, m = solve(stabiliser, 1, l, i)
    keep, admit = jnp.exp(l + before - m), jnp.exp(i - m)
    _, c = solve(lambda carry: carry[1], keep, admit * tanh(z))
    _, n = solve(lambda carry: carry[2], keep, admit, self.min_normalizer)
    return sigmoid(o) * c / n, c, n, m


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    sequence_layer.KernelInit,
    total=False,
):
  """Options that SLSTM passes on."""


class SLSTM(recurrent.RecurrentLayer[SLSTMCarry]):
  """sLSTM, the scalar-memory cell of xLSTM.

      ĩ_t, f̃_t, z̃_t, õ_t = W x_t + b + R h_{t-1}
      l_t = log σ(f̃_t) + m_{t-1}
      m_t = max(ĩ_t, l_t)
      c_t = exp(l_t - m_t) c_{t-1} + exp(ĩ_t - m_t) tanh(z̃_t)
      n_t = exp(l_t - m_t) n_{t-1} + exp(ĩ_t - m_t)
      h_t = σ(õ_t) c_t / max(n_t, 1)                    y_t = h_t

  A carry with n = 0 holds nothing: the first step takes m_t = ĩ_t. So of a
  learned initial carry only h has an effect.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.SLSTM(in_features=3, features=8, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of h, c, n and m.
    num_heads: diagonal blocks of R; features must be a multiple of it.
    block_index: l, this layer's place among the network's blocks, from 0.
    num_blocks: L, the number of blocks. Feature j of a head of size D starts
      with the forget bias 5 - 12 (j / (D-1))^(0.3 + 1.3 l / (L-1)): within a
      head memories range from long to short, and later blocks keep more long
      ones.
    max_forget: upper bound of f̃, for instance 15 as in TiRex, where σ(f̃) is 1
      up to rounding; None for none.
    min_normalizer: lower bound of n, from 0 to 1. With an empty carry n is 1 or
      more by itself, so the bound acts only on a carry passed in with n < 1:
      xLSTM's 'vanilla' backend and TiRex have none, which is 0.
    recurrent_kernel_init: initialiser of R, zeros as in xLSTM.
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      kernel_init, learn_initial_carry, recurrent_gradient_clip,
      stop_recurrent_gradient, zoneout_rate, recurrent_dropout_rate, dtype (of
      the computation), param_dtype, implementation ('scan', 'associative_scan',
      'pallas' or None for the fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    M. Beck et al., 2024, "xLSTM: Extended long short-term memory", equations 8
    to 17.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      num_heads: int = 4,
      block_index: int = 0,
      num_blocks: int = 1,
      max_forget: float | None = None,
      min_normalizer: float = 1.0,
      recurrent_kernel_init: initializers.Initializer = initializers.zeros,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    zoneout = options.get('zoneout_rate', 0.0)
    if any(zoneout[1:] if isinstance(zoneout, Sequence) else (zoneout,)):
      raise ValueError(
          'zoneout_rate of an SLSTM must be 0 for c, n and m, which share one'
          f' scale, got {zoneout!r}; (0.1, 0, 0, 0) would work.'
      )
    cell = make_cell(max_forget, min_normalizer)
    forget = forget_bias(num_heads, block_index, num_blocks)
    zeros = initializers.zeros
    super().__init__(
        cell,
        in_features,
        features,
        num_heads=num_heads,
        recurrent_kernel_init=recurrent_kernel_init,
        bias_init=(zeros, forget, zeros, zeros),
        rngs=rngs,
        **options,
    )


def make_cell(max_forget: float | None, min_normalizer: float) -> SLSTMCell:
  """Returns the cell with these options, or raises ValueError."""
  if max_forget is not None:
    settings.within(max_forget, 'max_forget')
    max_forget = float(max_forget)
  settings.within(min_normalizer, 'min_normalizer', least=0, most=1)
  return SLSTMCell(max_forget, float(min_normalizer))


def forget_bias(
    num_heads: int, block_index: int, num_blocks: int
) -> initializers.Initializer:
  """Returns the initialiser of the forget gate's bias, or raises ValueError.

  Args:
    num_heads: heads as in `SLSTM`, and so is all else.
    block_index: l, this layer's place among the network's blocks, from 0.
    num_blocks: L, the number of blocks.
  """
  settings.positive(num_blocks, 'num_blocks')
  settings.positive(num_heads, 'num_heads')
  if isinstance(block_index, bool) or block_index not in range(num_blocks):
    raise ValueError(
        'block_index must be an int in [0, num_blocks), got'
        f' block_index={block_index!r} and num_blocks={num_blocks}.'
    )
  exponent = 0.3 + 1.3 * block_index / max(num_blocks - 1, 1)

  def init(key, shape, dtype=None, out_sharding=None):
    del key, out_sharding
    size = shape[0] // num_heads
    place = jnp.arange(size) / max(size - 1, 1)
    return jnp.tile(5 - 12 * place**exponent, num_heads).astype(dtype)

  return init
