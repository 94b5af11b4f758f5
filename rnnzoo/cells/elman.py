"""The Elman network: one tanh of input and memory."""

import dataclasses
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

ACTIVATIONS = {'tanh': jnp.tanh, 'relu': jax.nn.relu}


@dataclasses.dataclass(frozen=True)
class ElmanCell(cell.Cell):
  """h' = φ(x + R h), with φ = tanh or relu; carry (h,).

  Attributes:
    activation: φ, 'tanh' or 'relu'.
  """

  activation: str = 'tanh'
  input_gates = 1
  recurrent_gates = 1
  carry_names = ('h',)

  def __post_init__(self):
    settings.choice(self.activation, ACTIVATIONS, 'activation')

  def update(self, params, x_gates, h_gates, carry):
    del params, carry
    return (ACTIVATIONS[self.activation](x_gates[0] + h_gates[0]),)

  def guess(self, params, x_gates, h_gates, carry, diagonal, solve):
    del params, h_gates, carry
    if diagonal is None or self.activation != 'relu':
      return None
    # relu(u h + x) is affine and clipped at 0: this is the trajectory itself.
    _, h = solve(lambda carry: carry[0], diagonal[0], x_gates[0], 0)
    return (h,)

  @property
  def has_exact_guess(self) -> bool:
    return self.activation == 'relu'


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    sequence_layer.KernelInit,
    sequence_layer.BiasInit,
    sequence_layer.RecurrentKernel,
    total=False,
):
  """Options that Elman passes on."""


class Elman(recurrent.RecurrentLayer[cell.HiddenCarry]):
  """Elman recurrent layer, also known as the simple or vanilla RNN.

      h_t = φ(W x_t + b + R h_{t-1})        y_t = h_t

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.Elman(in_features=3, features=8, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of h.
    activation: φ, 'tanh' or 'relu'.
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
    J. L. Elman, 1990, "Finding structure in time".
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      activation: str = 'tanh',
      num_heads: int = 1,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    super().__init__(
        ElmanCell(activation),
        in_features,
        features,
        num_heads=num_heads,
        rngs=rngs,
        **options,
    )
