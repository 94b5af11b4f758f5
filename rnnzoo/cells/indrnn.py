"""IndRNN: every unit remembers on its own, through one number.

The equation is the Elman network's, h' = φ(x + R h), with a diagonal R = u; so
is the cell.
"""

from typing import Unpack

from flax import nnx

from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.cells import elman
from rnnzoo.layers import initializers
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    sequence_layer.KernelInit,
    sequence_layer.BiasInit,
    total=False,
):
  """Options that IndRNN passes on."""


class IndRNN(recurrent.RecurrentLayer[cell.HiddenCarry]):
  """Independently recurrent neural network.

      h_t = φ(W x_t + b + u h_{t-1}),  |u| <= max_abs       y_t = h_t

  u is `recurrent_kernel`, [1, features, 1, 1]. Units mix only between layers,
  so stack them: `rnnzoo.Stack(rnnzoo.IndRNN, ..., norm='batch')`.

  u starts within `max_abs`. An update may leave it, so a training loop calls
  `rnnzoo.constrain` after each one, as train.py does:

      optimizer.update(model, gradient)
      nnx.update(model, rnnzoo.constrain(nnx.state(model, nnx.Param)))

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.IndRNN(3, 8, max_abs=2 ** (1 / 5), rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of h.
    activation: φ, 'relu' or 'tanh'.
    recurrent_range: u starts uniform in this range, which must be within
      `max_abs`; the default is cut there. The last layer of a stack starts near
      1, for instance (0.9, 1.0), to keep memory to the end.
    max_abs: bound of |u| when the layer is made and after each call of
      `rnnzoo.constrain`, for instance 2^(1/T), so that T steps amplify at most
      by 2; None for none.
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      kernel_init, bias_init, learn_initial_carry, recurrent_gradient_clip,
      stop_recurrent_gradient, zoneout_rate, recurrent_dropout_rate, dtype (of
      the computation), param_dtype, implementation ('scan', 'associative_scan',
      'pallas' or None for the fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    S. Li, W. Li, C. Cook, C. Zhu and Y. Gao, 2018, "Independently recurrent
    neural network (IndRNN): Building a longer and deeper RNN", equation 4.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      activation: str = 'relu',
      recurrent_range: tuple[float, float] = (0.0, 1.0),
      max_abs: float | None = None,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.positive(features, 'features')
    low, high = settings.range_within(
        recurrent_range, 'recurrent_range', max_abs, default=(0.0, 1.0)
    )
    super().__init__(
        elman.ElmanCell(activation),
        in_features,
        features,
        num_heads=features,
        recurrent_kernel_init=initializers.uniform(low, high),
        max_abs=max_abs,
        rngs=rngs,
        **options,
    )
