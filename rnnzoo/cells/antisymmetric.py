"""AntisymmetricRNN: a forward Euler step of a stable differential equation.

An antisymmetric matrix has imaginary eigenvalues only, so h' = h + ε tanh(A h)
neither forgets nor explodes; γ > 0 adds the damping that the Euler step needs.
"""

import dataclasses
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.layers import initializers
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

sigmoid, tanh = jax.nn.sigmoid, jnp.tanh


@dataclasses.dataclass(frozen=True)
class Antisymmetric:
  """A = W - Wᵀ - γ I in place of the last recurrent gate's matrix W.

  Attributes:
    gamma: γ, the damping.
  """

  gamma: float

  def __post_init__(self):
    settings.within(self.gamma, 'gamma', least=0)

  def __call__(self, kernel: jax.Array) -> jax.Array:
    """Maps a recurrent kernel [gates, heads, head_dim, head_dim]."""
    w = kernel[-1:]
    identity = jnp.eye(w.shape[-1], dtype=w.dtype)
    a = w - jnp.swapaxes(w, -1, -2) - float(self.gamma) * identity
    return jnp.concatenate([kernel[:-1], a])


@dataclasses.dataclass(frozen=True)
class AntisymmetricRNNCell(cell.Cell):
  """h' = h + ε tanh(x + A h); carry (h,).

  Attributes:
    epsilon: ε, the step size.
  """

  epsilon: float = 0.01
  input_gates = 1
  recurrent_gates = 1
  carry_names = ('h',)

  def __post_init__(self):
    settings.within(self.epsilon, 'epsilon', above=0, most=1)

  def update(self, params, x_gates, h_gates, carry):
    del params
    (h,) = carry
    return (h + float(self.epsilon) * tanh(x_gates[0] + h_gates[0]),)


@dataclasses.dataclass(frozen=True)
class GatedAntisymmetricRNNCell(cell.Cell):
  """Input gates in the order z, h, one shared product A h; carry (h,).

  z  = σ(x_z + A h)
  h' = h + ε z tanh(x_h + A h)

  Attributes:
    epsilon: ε, the step size.
  """

  epsilon: float = 0.01
  input_gates = 2
  recurrent_gates = 1
  carry_names = ('h',)

  def __post_init__(self):
    settings.within(self.epsilon, 'epsilon', above=0, most=1)

  def update(self, params, x_gates, h_gates, carry):
    del params
    (h,) = carry
    z = sigmoid(x_gates[0] + h_gates[0])
    return (h + float(self.epsilon) * z * tanh(x_gates[1] + h_gates[0]),)


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    sequence_layer.BiasInit,
    total=False,
):
  """Options that AntisymmetricRNN passes on."""


class AntisymmetricRNN(recurrent.RecurrentLayer[cell.HiddenCarry]):
  """AntisymmetricRNN, plain or gated.

      A   = W - Wᵀ - γ I
      z_t = σ(V_z x_t + b_z + A h_{t-1})               gated only, else 1
      h_t = h_{t-1} + ε z_t tanh(V_h x_t + b_h + A h_{t-1})        y_t = h_t

  W is `recurrent_kernel`; A is built from it at every call.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.AntisymmetricRNN(3, 8, gated=True, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of h.
    gated: whether z_t scales the step.
    epsilon: ε, the step size; of the order of 1 / T, at most 1.
    gamma: γ, the damping, 0.001 to 1; larger forgets sooner.
    recurrent_scale: σ_w; W starts as N(0, σ_w² / head_dim).
    num_heads: diagonal blocks of A; features must be a multiple of it.
    kernel_init: initialiser of V, N(0, 1 / in_features).
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      bias_init, learn_initial_carry, recurrent_gradient_clip,
      stop_recurrent_gradient, zoneout_rate, recurrent_dropout_rate, dtype (of
      the computation), param_dtype, implementation ('scan', 'associative_scan',
      'pallas' or None for the fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    B. Chang, M. Chen, E. Haber and E. H. Chi, 2019, "AntisymmetricRNN: A
    dynamical system view on recurrent neural networks", equations 9, 11 and 12.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      gated: bool = False,
      epsilon: float = 0.01,
      gamma: float = 0.01,
      recurrent_scale: float = 1.0,
      num_heads: int = 1,
      kernel_init: initializers.Initializer = initializers.fan_in_normal,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.boolean(gated, 'gated')
    settings.within(recurrent_scale, 'recurrent_scale', least=0)
    make_cell = GatedAntisymmetricRNNCell if gated else AntisymmetricRNNCell
    super().__init__(
        make_cell(epsilon),
        in_features,
        features,
        num_heads=num_heads,
        recurrent_structure=Antisymmetric(gamma),
        kernel_init=kernel_init,
        recurrent_kernel_init=jax.nn.initializers.variance_scaling(
            float(recurrent_scale) ** 2, 'fan_in', 'normal'
        ),
        rngs=rngs,
        **options,
    )
