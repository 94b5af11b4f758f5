"""LRU: a linear memory of complex numbers, which turn and decay."""

import dataclasses
from typing import NamedTuple, Unpack

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import promotion
from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.layers import parameters
from rnnzoo.layers import readouts
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer


class ComplexCarry(NamedTuple):
  """The carry of a cell with a complex memory.

  Attributes:
    re: real part, [..., state_features].
    im: imaginary part, [..., state_features].
  """

  re: jax.Array
  im: jax.Array


cell.register(ComplexCarry)


@dataclasses.dataclass(frozen=True)
class LRUCell(cell.LinearCell):
  """Gates Re(B x) and Im(B x); carry (re, im).

  λ  = exp(-exp(ν) + i exp(θ))
  h' = λ h + exp(γ) B x
  """

  input_gates = 2
  carry_names = ('re', 'im')
  carry_type = ComplexCarry
  param_names = ('nu', 'theta', 'gamma')

  def coefficients(self, params, x_gates):
    # Beyond 80 the radius is 0, and so is its derivative.
    radius = jnp.exp(-jnp.exp(jnp.minimum(params['nu'], 80)))
    angle = jnp.exp(params['theta'])
    gain = jnp.exp(params['gamma'])
    a = radius * jnp.cos(angle), radius * jnp.sin(angle)
    return a, tuple(gain * x for x in x_gates)


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    total=False,
):
  """Options that LRU passes on."""


class LRU(recurrent.RecurrentLayer[ComplexCarry]):
  """Linear recurrent unit.

      h_t = λ (.) h_{t-1} + exp(γ) (.) (B x_t),  λ = exp(-exp(ν) + i exp(θ))
      y_t = Re(C h_t) + D x_t

  λ starts on a ring, min_radius <= |λ| <= max_radius, uniform in area, with an
  angle of at most `max_phase`; exp(γ) starts as sqrt(1 - |λ|^2), so that h has
  the size of B x. B and C are complex. The paper's network is near to
  `rnnzoo.Stack(functools.partial(rnnzoo.LRU, gated=True), ..., norm='layer',
  residual=True)`.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.LRU(in_features=3, features=8, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of the output.
    state_features: number of complex numbers in h; None for `features`.
    min_radius: least |λ| at the start; 0.9 and more for long memories.
    max_radius: largest |λ| at the start, below 1.
    max_phase: largest angle of λ at the start, in radians; π / 10 was better on
      sequences of tens of thousands of steps.
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
    A. Orvieto, S. L. Smith, A. Gu, A. Fernando, C. Gulcehre, R. Pascanu and
    S. De, 2023, "Resurrecting recurrent neural networks for long sequences",
    section 3 and appendix A.
  """

  def __init__(  # type: ignore[misc]
      self,
      in_features: int,
      features: int,
      *,
      state_features: int | None = None,
      min_radius: float = 0.0,
      max_radius: float = 1.0,
      max_phase: float = 2 * np.pi,
      use_bias: bool = False,
      gated: bool = False,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.positive(in_features, 'in_features')
    settings.positive(features, 'features')
    size = features if state_features is None else state_features
    settings.positive(size, 'state_features')
    settings.within(max_radius, 'max_radius', above=0, most=1)
    settings.within(min_radius, 'min_radius', least=0, most=max_radius)
    settings.within(max_phase, 'max_phase', above=0)
    settings.boolean(use_bias, 'use_bias')
    dtype = parameters.dtype_of(options, rngs)
    # In 16 bits a radius near 1 would be further from it.
    wide = promotion.wide(dtype)
    draw = lambda: jax.random.uniform(rngs.params(), (size,), wide)
    drawn = ring(draw(), draw(), min_radius, max_radius, max_phase)
    nu, theta, gamma = (x.astype(dtype) for x in drawn)
    kernel = _normal(size**-0.5)(rngs.params(), (2, size, features), dtype)
    super().__init__(
        LRUCell(),
        in_features,
        features,
        state_features=size,
        cell_params={
            'nu': nnx.Param(nu),
            'theta': nnx.Param(theta),
            'gamma': nnx.Param(gamma),
        },
        kernel_init=_normal((2 * in_features) ** -0.5),
        bias_init=nnx.initializers.zeros,
        readout=readouts.Linear(in_features, kernel, gated=gated, rngs=rngs),
        rngs=rngs,
        use_bias=use_bias,
        **options,
    )


def ring(u, v, min_radius: float, max_radius: float, max_phase: float):
  """Returns ν, θ and γ of λ on a ring, uniform in area.

  Args:
    u: uniform in [0, 1): places of the radii.
    v: uniform in [0, 1): places of the angles.
    min_radius: least |λ|.
    max_radius: largest |λ|.
    max_phase: largest angle.
  """
  tiny = jnp.finfo(u.dtype).eps
  square = min_radius**2 + (max_radius**2 - min_radius**2) * u
  square = jnp.clip(square, tiny, 1 - tiny)
  nu = jnp.log(-0.5 * jnp.log(square))
  theta = jnp.log(max_phase * jnp.maximum(v, tiny))
  return nu, theta, 0.5 * jnp.log1p(-square)


def _normal(stddev: float):
  return nnx.initializers.normal(stddev)
