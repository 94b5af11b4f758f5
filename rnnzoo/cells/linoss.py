"""LinOSS: oscillators, each a position and a velocity, driven by the input."""

import dataclasses
from typing import NamedTuple, Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.layers import initializers
from rnnzoo.layers import parameters
from rnnzoo.layers import readouts
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

sigmoid = jax.nn.sigmoid


class OscillatorCarry(NamedTuple):
  """The carry of an oscillator.

  Attributes:
    velocity: z, [..., state_features].
    position: y, [..., state_features].
  """

  velocity: jax.Array
  position: jax.Array


cell.register(OscillatorCarry)


@dataclasses.dataclass(frozen=True)
class LinOSSCell(cell.LinearCell):
  """Gate u = B x; carry (z, y); A = relu(stiffness), Δ = σ(step).

  S = 1 / (1 + Δ² A)
  'implicit':           z' = S (z - Δ A y + Δ u),   y' = S (Δ z + y + Δ² u)
  'implicit_explicit':  z' = z - Δ A y + Δ u,       y' = y + Δ z'

  Attributes:
    discretization: 'implicit', which loses energy, or 'implicit_explicit',
      which keeps it.
  """

  discretization: str = 'implicit'
  input_gates = 1
  carry_names = ('velocity', 'position')
  carry_type = OscillatorCarry
  param_names = ('stiffness', 'step')

  def __post_init__(self):
    choices = 'implicit', 'implicit_explicit'
    settings.choice(self.discretization, choices, 'discretization')

  def coefficients(self, params, x_gates):
    a, d = jnp.maximum(params['stiffness'], 0), sigmoid(params['step'])
    (u,) = x_gates
    if self.discretization == 'implicit':
      s = 1 / (1 + d * d * a)
      return ((s, -s * d * a), (s * d, s)), (s * d * u, s * d * d * u)
    one = jnp.ones_like(d)
    return ((one, -d * a), (d, 1 - d * d * a)), (d * u, d * d * u)


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    total=False,
):
  """Options that LinOSS passes on."""


class LinOSS(recurrent.RecurrentLayer[OscillatorCarry]):
  """Linear oscillatory state space layer.

      y'' = -A y + B x in steps Δ (`LinOSSCell` has both forms), C y + D x

  A, of at least 0, is the square of each oscillator's frequency.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.LinOSS(in_features=3, features=8, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of the output.
    state_features: number of oscillators; None for `features`.
    discretization: 'implicit' (LinOSS-IM), which forgets, or
      'implicit_explicit' (LinOSS-IMEX), which keeps energy.
    use_bias: whether to add a bias to B x; the paper has none.
    gated: whether the output is u (.) σ(W u + b) of u = gelu(y), as in the
      networks of the paper.
    **options: options of all layers (`rnnzoo.RecurrentLayer`):
      learn_initial_carry, dtype (of the computation), param_dtype,
      implementation ('scan', 'associative_scan', 'pallas' or None for the
      fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    T. K. Rusch and D. Rus, 2024, "Oscillatory state-space models", sections 2
    and 3.
  """

  def __init__(  # type: ignore[misc]
      self,
      in_features: int,
      features: int,
      *,
      state_features: int | None = None,
      discretization: str = 'implicit',
      use_bias: bool = False,
      gated: bool = False,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.positive(in_features, 'in_features')
    settings.positive(features, 'features')
    size = features if state_features is None else state_features
    settings.positive(size, 'state_features')
    settings.boolean(use_bias, 'use_bias')
    dtype = parameters.dtype_of(options, rngs)
    key, shape = rngs.params, (1, size, features)
    uniform = lambda n: initializers.uniform(-(n**-0.5), n**-0.5)
    draw = lambda: nnx.Param(jax.random.uniform(key(), (size,), dtype))
    super().__init__(
        LinOSSCell(discretization),
        in_features,
        features,
        state_features=size,
        cell_params={'stiffness': draw(), 'step': draw()},
        kernel_init=uniform(in_features),
        bias_init=nnx.initializers.zeros,
        readout=readouts.Linear(
            in_features,
            uniform(size)(key(), shape, dtype),
            ((1, 1.0),),
            gated=gated,
            rngs=rngs,
        ),
        rngs=rngs,
        use_bias=use_bias,
        **options,
    )
