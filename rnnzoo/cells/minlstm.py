"""minLSTM: an LSTM whose gates see the input only, so time runs in parallel."""

import dataclasses
from typing import Unpack

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.cells import mingru
from rnnzoo.layers import initializers
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

# Sigmoids are constant beyond it; an infinity less itself is no number.
_LARGE = 1e30

sigmoid = jax.nn.sigmoid


def _values(f, i):
  """Returns the values of `_shares` and `_slopes`, at the price of the first.

  With σ(x) = 1 / (1 + exp(-x)), numerators and the denominator are sums of 1,
  exp(-f) and exp(-i). The largest becomes 1: none of the sums overflows, and
  not all terms underflow. No result depends on the scale.
  """
  scale = jnp.maximum(jnp.maximum(-f, -i), 0)
  one, exp_f, exp_i = (jnp.exp(x - scale) for x in (0, -f, -i))
  forget, admit = one + exp_i, one + exp_f
  total = forget + admit
  forget, admit = forget / total, admit / total
  shares = forget, admit, (exp_f - exp_i) / total
  return shares, (forget * (exp_f / total), admit * (exp_i / total))


@jax.custom_jvp
def _shares(f, i, shares, slopes):
  """Returns `shares`, which are f', i' and i' - f', as functions of f and i."""
  del f, i, slopes
  return shares


@_shares.defjvp
def _shares_jvp(primals, tangents):
  by_f, by_i = _slopes(*primals)
  d = by_f * tangents[0] - by_i * tangents[1]
  return _shares(*primals), (d, -d, -2 * d)


@jax.custom_jvp
def _slopes(f, i, shares, slopes):
  """Returns `slopes`, of f' by f and by -i: f' i' σ(-f) and f' i' σ(-i)."""
  del f, i, shares
  return slopes


@_slopes.defjvp
def _slopes_jvp(primals, tangents):
  # No difference of numbers near 1, of which a saturated gate leaves no digits.
  f, i, _, _ = primals
  d_f, d_i, _, _ = tangents
  by_f, by_i = slopes = _slopes(*primals)
  _, _, difference = _shares(*primals)
  d = difference * (sigmoid(-f) * d_f - sigmoid(-i) * d_i)
  return slopes, (by_f * (d - sigmoid(f) * d_f), by_i * (d - sigmoid(i) * d_i))


@dataclasses.dataclass(frozen=True)
class MinLSTMCell(cell.LinearCell):
  """Gates in the order f, i, h̃, all from the input; carry (h,).

  f' = σ(x_f) / (σ(x_f) + σ(x_i))
  i' = σ(x_i) / (σ(x_f) + σ(x_i)) = 1 - f'
  h' = f' h + i' g(x_h)

  Attributes:
    candidate: 'linear' for g(x) = x; 'positive' for the model of the paper's
      log-space version, g(x) = x + 0.5 where x >= 0 and σ(x) elsewhere.
  """

  candidate: str = 'linear'
  input_gates = 3

  def __post_init__(self):
    mingru.check_candidate(self.candidate)

  def coefficients(self, params, x_gates):
    del params
    f, i, h = x_gates
    f, i = (jnp.where(x < -_LARGE, -_LARGE, x) for x in (f, i))
    shares, slopes = _values(*lax.stop_gradient((f, i)))
    forget, admit, _ = _shares(f, i, shares, slopes)
    return forget, admit * mingru.CANDIDATES[self.candidate](h)


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    sequence_layer.KernelInit,
    total=False,
):
  """Options that MinLSTM passes on."""


class MinLSTM(recurrent.RecurrentLayer[cell.HiddenCarry]):
  """Minimal LSTM, linear in its memory, with forget and input normalised.

      f_t, i_t = σ(W x_t + b)
      f'_t = f_t / (f_t + i_t),  i'_t = i_t / (f_t + i_t)
      h_t = f'_t h_{t-1} + i'_t g(W_h x_t + b_h)            y_t = h_t

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.MinLSTM(in_features=3, features=8, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of h.
    forget_bias: added to the initial bias of f; a positive one keeps memory
      from the start and speeds training up.
    candidate: 'linear' for g(x) = x; 'positive' for the model of the paper's
      log-space version, g(x) = x + 0.5 where x >= 0 and σ(x) elsewhere, which
      keeps h > 0. Both run in linear space, where a reset is exact and long
      sequences keep their digits.
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      kernel_init, bias_init, learn_initial_carry, dtype (of the computation),
      param_dtype, implementation ('scan', 'associative_scan', 'pallas' or None
      for the fastest), time_axis_name (inside `jax.shard_map`, the mesh axis
      that time is over).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    L. Feng, F. Tung, M. O. Ahmed, Y. Bengio and H. Hajimirsadeghi, 2024, "Were
    RNNs all we needed?", section 3.2 and appendix B.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      forget_bias: float = 0.0,
      candidate: str = 'linear',
      bias_init: initializers.Initializer = initializers.zeros,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.within(forget_bias, 'forget_bias')
    settings.bias_of_gate(forget_bias, options)
    super().__init__(
        MinLSTMCell(candidate),
        in_features,
        features,
        bias_init=(
            initializers.shifted(bias_init, forget_bias),
            bias_init,
            bias_init,
        ),
        rngs=rngs,
        **options,
    )
