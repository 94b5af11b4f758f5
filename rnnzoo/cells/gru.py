"""The GRU: one interpolation between the old memory and a candidate."""

import dataclasses
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

sigmoid, tanh = jax.nn.sigmoid, jnp.tanh


@dataclasses.dataclass(frozen=True)
class GRUCell(cell.Cell):
  """Gates in the order r, z, n; carry (h,).

  r  = σ(x_r + R_r h)
  z  = σ(x_z + R_z h)
  n  = tanh(x_n + r (R_n h + b))        b is params['recurrent_bias']
  h' = (1 - z) n + z h
  """

  input_gates = 3
  recurrent_gates = 3
  carry_names = ('h',)
  param_names = ('recurrent_bias',)

  def update(self, params, x_gates, h_gates, carry):
    (h,) = carry
    r = sigmoid(x_gates[0] + h_gates[0])
    z = sigmoid(x_gates[1] + h_gates[1])
    n = tanh(x_gates[2] + r * (h_gates[2] + params['recurrent_bias']))
    return ((1 - z) * n + z * h,)

  def guess(self, params, x_gates, h_gates, carry, diagonal, solve):
    del carry, diagonal
    # If the gates are given, h is a linear recurrence.
    r = sigmoid(x_gates[0] + h_gates[0])
    z = sigmoid(x_gates[1] + h_gates[1])
    n = tanh(x_gates[2] + r * (h_gates[2] + params['recurrent_bias']))
    return (solve(lambda carry: carry[0], z, (1 - z) * n)[1],)


class _Options(
    sequence_layer.Options,
    sequence_layer.KernelInit,
    sequence_layer.BiasInit,
    sequence_layer.RecurrentKernel,
    total=False,
):
  """Options that GRU passes on."""


class GRU(recurrent.RecurrentLayer[cell.HiddenCarry]):
  """Gated recurrent unit, reset after the product as in torch and cuDNN.

      r_t = σ(W_r x_t + b_r + R_r h_{t-1})
      z_t = σ(W_z x_t + b_z + R_z h_{t-1})
      n_t = tanh(W_n x_t + b_n + r_t (R_n h_{t-1} + b_hn))
      h_t = (1 - z_t) n_t + z_t h_{t-1}                y_t = h_t

  b_hn is `cell_params['recurrent_bias']`, initialised to zero.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.GRU(in_features=3, features=8, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)
  >>> carry = layer.initial_carry((2,))              # one step at a time
  >>> carry, y = layer.step(carry, jnp.ones((2, 3)))
  >>> y.shape
  (2, 8)

  Args:
    in_features: size of x's last axis.
    features: size of h.
    num_heads: diagonal blocks of R; features must be a multiple of it.
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      kernel_init, recurrent_kernel_init, bias_init, learn_initial_carry,
      recurrent_gradient_clip, stop_recurrent_gradient, zoneout_rate,
      recurrent_dropout_rate, dtype (of the computation), param_dtype,
      implementation ('scan', 'associative_scan', 'pallas' or None for the
      fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    K. Cho et al., 2014, "Learning phrase representations using RNN
    encoder-decoder for statistical machine translation"; the reset-after form
    comes from version 1 of the paper and from cuDNN.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      num_heads: int = 1,
      param_dtype: jax.typing.DTypeLike = jnp.float32,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.positive(features, 'features')
    checks.floating(param_dtype, 'param_dtype')
    recurrent_bias = nnx.Param(jnp.zeros((features,), param_dtype))
    super().__init__(
        GRUCell(),
        in_features,
        features,
        num_heads=num_heads,
        cell_params={'recurrent_bias': recurrent_bias},
        param_dtype=param_dtype,
        rngs=rngs,
        **options,
    )
