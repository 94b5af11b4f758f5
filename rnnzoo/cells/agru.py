"""A-GRU: a gated unit whose candidate sees the memory antisymmetrically."""

import dataclasses
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.cells import antisymmetric
from rnnzoo.layers import initializers
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

sigmoid, tanh = jax.nn.sigmoid, jnp.tanh
xavier_uniform = initializers.xavier_uniform


@dataclasses.dataclass(frozen=True)
class AGRUCell(cell.TwoStageCell):
  """Gates in the order r, z, d; carry (h,).

  r  = σ(x_r + U_r h)
  z  = σ(x_z + U_z h)
  d  = tanh(x_d + A (r h))               the operand of A is r h
  h' = h + ε z d                         ε is params['epsilon']
  """

  input_gates = 3
  recurrent_gates = 3
  carry_names = ('h',)
  param_names = ('epsilon',)

  def operand(self, params, x_gates, h_gates, carry):
    del params
    (h,) = carry
    return sigmoid(x_gates[0] + h_gates[0]) * h

  def update(self, params, x_gates, h_gates, carry):
    (h,) = carry
    z = sigmoid(x_gates[1] + h_gates[1])
    d = tanh(x_gates[2] + h_gates[2])
    return (h + params['epsilon'] * z * d,)


class _Options(sequence_layer.Options, sequence_layer.BiasInit, total=False):
  """Options that AGRU passes on."""


class AGRU(recurrent.RecurrentLayer[cell.HiddenCarry]):
  """Antisymmetric gated recurrent unit.

      A   = W - Wᵀ - γ I
      r_t = σ(V_r x_t + b_r + U_r h_{t-1})
      z_t = σ(V_z x_t + b_z + U_z h_{t-1})
      d_t = tanh(V_d x_t + b_d + A (r_t h_{t-1}))
      h_t = h_{t-1} + ε z_t d_t                        y_t = h_t

  `recurrent_kernel` holds U_r, U_z and W; A is built from it at every call.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.AGRU(3, 8, gamma=2.0, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of h.
    gamma: γ, the damping. 0.01 suits some tens of steps; with ε = 1 it is
      chaotic over hundreds, where 0.5 or more contracts and 2 is usual.
    epsilon: ε, the step size, or its initial value if learned.
    learn_epsilon: whether ε is a parameter, one number for the layer.
    num_heads: diagonal blocks of U and A; features must be a multiple of it.
    kernel_init: initialiser of V, Xavier uniform.
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      bias_init, learn_initial_carry, recurrent_gradient_clip,
      stop_recurrent_gradient, zoneout_rate, recurrent_dropout_rate, dtype (of
      the computation), param_dtype, implementation ('scan', 'associative_scan',
      'pallas' or None for the fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    The public study agru_benchmark, which defines the cell, after B. Chang et
    al., 2019, "AntisymmetricRNN".
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      gamma: float = 0.01,
      epsilon: float = 1.0,
      learn_epsilon: bool = True,
      num_heads: int = 1,
      kernel_init: initializers.Initializer = xavier_uniform,
      param_dtype: jax.typing.DTypeLike = jnp.float32,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.within(epsilon, 'epsilon', above=0)
    settings.boolean(learn_epsilon, 'learn_epsilon')
    checks.floating(param_dtype, 'param_dtype')
    variable = nnx.Param if learn_epsilon else recurrent.Constant
    super().__init__(
        AGRUCell(),
        in_features,
        features,
        num_heads=num_heads,
        cell_params={'epsilon': variable(jnp.asarray(epsilon, param_dtype))},
        recurrent_structure=antisymmetric.Antisymmetric(gamma),
        kernel_init=kernel_init,
        recurrent_kernel_init=(xavier_uniform, xavier_uniform, _candidate_init),
        param_dtype=param_dtype,
        rngs=rngs,
        **options,
    )


def _candidate_init(key, shape, dtype=None, out_sharding=None):
  """W ~ U(-1/√n, 1/√n), n = head_dim."""
  del out_sharding
  bound = shape[0] ** -0.5
  return jax.random.uniform(key, shape, dtype, -bound, bound)
