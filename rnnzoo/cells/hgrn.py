"""HGRN: a forget gate with a lower bound, so that upper layers remember."""

import dataclasses
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import promotion
from rnnzoo import cell
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.cells import lru
from rnnzoo.layers import parameters
from rnnzoo.layers import readouts
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

sigmoid = jax.nn.sigmoid


@dataclasses.dataclass(frozen=True)
class HGRNCell(cell.LinearCell):
  """Gates in the order f, i; carry (h,).

  λ  = γ + (1 - γ) σ(f)
  h' = λ h + (1 - λ) silu(i)

  Attributes:
    lower_bound: γ, where `params` has no gamma, [..., F].
  """

  lower_bound: float = 0.0
  input_gates = 2

  def __post_init__(self):
    settings.within(self.lower_bound, 'lower_bound', least=0, most=1 - 1e-6)

  def coefficients(self, params, x_gates):
    f, i = x_gates
    keep, write = _forget(self.lower_bound, params, f)
    return keep, write * i * sigmoid(i)


@dataclasses.dataclass(frozen=True)
class ComplexHGRNCell(cell.LinearCell):
  """Gates in the order f, Re(i), Im(i); carry (re, im).

  λ  = γ + (1 - γ) σ(f)
  h' = λ exp(i θ) h + (1 - λ) (silu(Re(i)) + i silu(Im(i)))

  Attributes:
    lower_bound: γ, where `params` has no gamma, [..., F].
  """

  lower_bound: float = 0.0
  input_gates = 3
  carry_names = ('re', 'im')
  carry_type = lru.ComplexCarry
  param_names = ('theta',)

  def __post_init__(self):
    settings.within(self.lower_bound, 'lower_bound', least=0, most=1 - 1e-6)

  def coefficients(self, params, x_gates):
    f, *i = x_gates
    keep, write = _forget(self.lower_bound, params, f)
    theta = params['theta']
    a = keep * jnp.cos(theta), keep * jnp.sin(theta)
    return a, tuple(write * x * sigmoid(x) for x in i)


def _forget(lower_bound, params, f):
  """Returns λ and 1 - λ, which keeps its digits near λ = 1."""
  gamma = params.get('gamma', lower_bound)
  return gamma + (1 - gamma) * sigmoid(f), (1 - gamma) * sigmoid(-f)


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    sequence_layer.KernelInit,
    sequence_layer.BiasInit,
    total=False,
):
  """Options that HGRN passes on."""


class HGRN(recurrent.RecurrentLayer[cell.HiddenCarry | lru.ComplexCarry]):
  """Hierarchically gated recurrent network, one layer of it.

      λ_t = γ + (1 - γ) σ(W_f x_t + b_f)
      h_t = λ_t (.) h_{t-1} + (1 - λ_t) (.) silu(W_i x_t + b_i)
      y_t = W_o (norm(h_t) (.) silu(W_g x_t))

  norm is an RMS norm with a scale, as in flash-linear-attention. The paper's
  form, with `complex=True`, turns h by an angle θ that is learned: λ_t exp(i θ)
  in place of λ_t, with a complex W_i x_t, silu of both of its parts, and both
  parts of h in the output.

  The output of a step is 0 where x is: read a sequence whose last steps may be
  zeros from the mean of its outputs.

  γ rises with depth. A `Stack` with a layer for each level sets it:

  >>> import functools, jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> levels = [
  ...     functools.partial(rnnzoo.HGRN, lower_bound=k / 4) for k in range(4)
  ... ]
  >>> stack = rnnzoo.Stack(levels, 3, 8, num_layers=4, rngs=nnx.Rngs(0))
  >>> stack(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of the output.
    state_features: size of h; None for `features`.
    lower_bound: γ, from 0 and below 1: a number, or an array [state_features]
      that training leaves alone. The paper learns it for all levels together.
    complex: take the paper's form, with a complex h.
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias (of
      W_f x and W_i x; flash-linear-attention has none), kernel_init, bias_init,
      learn_initial_carry, dtype (of the computation), param_dtype,
      implementation ('scan', 'associative_scan', 'pallas' or None for the
      fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    Z. Qin, S. Yang and Y. Zhong, 2023, "Hierarchically gated recurrent neural
    network for sequence modeling", section 3.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      state_features: int | None = None,
      lower_bound: float | jax.Array = 0.0,
      complex: bool = False,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.positive(in_features, 'in_features')
    settings.positive(features, 'features')
    size = features if state_features is None else state_features
    settings.positive(size, 'state_features')
    settings.boolean(complex, 'complex')
    dtype = parameters.dtype_of(options, rngs)
    own: dict[str, nnx.Variable] = {}
    if np.ndim(lower_bound):
      gamma = checks.array(lower_bound, 'lower_bound')
      if gamma.shape != (size,):
        raise ValueError(
            f'lower_bound must be a number or [{size}], got {gamma.shape}.'
        )
      checks.real(gamma, 'lower_bound')
      if not isinstance(gamma, jax.core.Tracer) and not bool(
          jnp.all((gamma >= 0) & (gamma < 1))
      ):
        raise ValueError(
            'lower_bound must be numbers from 0 to below 1, got one outside.'
        )
      # In 16 bits a bound near 1 would be 1, and h zero for ever.
      wide = promotion.wide(dtype)
      own['gamma'] = recurrent.Constant(gamma.astype(wide))
      lower_bound = 0.0
    settings.within(lower_bound, 'lower_bound', least=0, most=1 - 1e-6)
    if complex:
      # The angles of the paper's code: 1 down to 1e-8.
      angles = 10000.0 ** (-2 / size * jnp.arange(size, dtype=jnp.float32))
      own['theta'] = nnx.Param(angles.astype(dtype))
    parts = 2 if complex else 1
    make_cell = ComplexHGRNCell if complex else HGRNCell
    super().__init__(
        make_cell(float(lower_bound)),
        in_features,
        features,
        state_features=size,
        cell_params=own,
        readout=readouts.GatedNorm(
            in_features, parts * size, features, dtype, rngs=rngs
        ),
        rngs=rngs,
        **options,
    )
