"""S5: a state space model, discretised, with a diagonal complex memory."""

import dataclasses
import functools
from typing import Any, Unpack

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.cells import lru
from rnnzoo.layers import parameters
from rnnzoo.layers import readouts
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

# The most rows of a HiPPO matrix: its eigenvectors take rows^3 operations.
_MOST_ROWS = 8192


def _product(x, y):
  """Returns the product of complex numbers (re, im)."""
  return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def _quotient(x, y):
  """Returns the quotient of complex numbers (re, im), without overflow."""
  scale = jnp.maximum(jnp.abs(y[0]), jnp.abs(y[1]))
  x, y = ((z[0] / scale, z[1] / scale) for z in (x, y))
  re, im = _product(x, (y[0], -y[1]))
  square = y[0] * y[0] + y[1] * y[1]
  return re / square, im / square


@dataclasses.dataclass(frozen=True)
class S5Cell(cell.LinearCell):
  """Gates Re(B x) and Im(B x); carry (re, im); Δ = exp(log_step).

  'zoh':       a = exp(λ Δ),                     h' = a h + (a - 1) / λ B x
  'bilinear':  a = (1 + λ Δ/2) / (1 - λ Δ/2),    h' = a h + Δ / (1 - λ Δ/2) B x

  Attributes:
    discretization: 'zoh' (zero-order hold) or 'bilinear'.
  """

  discretization: str = 'zoh'
  input_gates = 2
  carry_names = ('re', 'im')
  carry_type = lru.ComplexCarry
  param_names = ('re', 'im', 'log_step')

  def __post_init__(self):
    settings.choice(self.discretization, ('zoh', 'bilinear'), 'discretization')

  def coefficients(self, params, x_gates):
    step = jnp.exp(params['log_step'])
    # Stable: the real part stays below 0 whatever training does.
    re, im = jnp.minimum(params['re'], -1e-4), params['im']
    x, y = re * step, im * step
    if self.discretization == 'bilinear':
      below = 1 - x / 2, -y / 2
      a = _quotient((1 + x / 2, y / 2), below)
      return a, _product(_quotient((step, 0 * step), below), x_gates)
    # exp(z) - 1, which keeps its digits where z is small.
    grown, sine = jnp.expm1(x), jnp.sin(y / 2)
    change = grown * jnp.cos(y) - 2 * sine * sine, (1 + grown) * jnp.sin(y)
    a = 1 + change[0], change[1]
    return a, _product(_quotient(change, (re, im)), x_gates)


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    total=False,
):
  """Options that S5 passes on."""


class S5(recurrent.RecurrentLayer[lru.ComplexCarry]):
  """Simplified state space layer.

      h' = exp(λ Δ) h + (exp(λ Δ) - 1) / λ (.) (B x),  y = 2 Re(C h) + D x

  λ starts with the eigenvalues of the normal part of HiPPO-LegS, B and C in its
  eigenbasis, Δ log-uniform. Eigenvalues come in conjugate pairs, of which h has
  one each. The paper's network is near to
  `rnnzoo.Stack(functools.partial(rnnzoo.S5, gated=True), ..., norm='batch',
  norm_first=True, residual=True)`.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.S5(in_features=3, features=8, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of the output.
    state_features: number of complex numbers in h, half of the paper's P; None
      for `features`.
    num_blocks: HiPPO matrices side by side at the start, the paper's J; it
      divides `state_features`.
    discretization: 'zoh' (zero-order hold) or 'bilinear'.
    min_step: least Δ at the start.
    max_step: largest Δ at the start; steps of 1 / T suit T steps.
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
    J. T. H. Smith, A. Warrington and S. W. Linderman, 2023, "Simplified state
    space layers for sequence modeling", sections 3 and B.1.
  """

  def __init__(  # type: ignore[misc]
      self,
      in_features: int,
      features: int,
      *,
      state_features: int | None = None,
      num_blocks: int = 1,
      discretization: str = 'zoh',
      min_step: float = 1e-3,
      max_step: float = 0.1,
      use_bias: bool = False,
      gated: bool = False,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.positive(in_features, 'in_features')
    settings.positive(features, 'features')
    settings.positive(num_blocks, 'num_blocks')
    size = features if state_features is None else state_features
    settings.positive(size, 'state_features')
    _check_blocks(size, num_blocks)
    settings.within(max_step, 'max_step', above=0)
    settings.within(min_step, 'min_step', above=0, most=max_step)
    settings.boolean(use_bias, 'use_bias')
    dtype = parameters.dtype_of(options, rngs)
    values, vectors = hippo(2 * size // num_blocks)
    draw = functools.partial(
        _in_basis, rngs.params, vectors, num_blocks, dtype=dtype
    )
    # B in the basis is V^H B.
    signs = jnp.array([1, -1], dtype)[:, None, None]
    b = draw(in_features, in_features) * signs
    c, more = draw(features, 2 * size), draw(features, 2 * size)
    c += jnp.stack([-more[1], more[0]])
    low, high = np.log(min_step), np.log(max_step)
    step = jax.random.uniform(rngs.params(), (size,), dtype, low, high)
    b = b.astype(dtype)
    given: Any = lambda array: lambda key, shape, dtype, *_: array.T
    super().__init__(
        S5Cell(discretization),
        in_features,
        features,
        state_features=size,
        cell_params={
            're': nnx.Param(jnp.full(size, -0.5, dtype)),
            'im': nnx.Param(jnp.asarray(np.tile(values, num_blocks), dtype)),
            'log_step': nnx.Param(step),
        },
        kernel_init=(given(b[0]), given(b[1])),
        bias_init=nnx.initializers.zeros,
        readout=readouts.Linear(
            in_features, c, readouts.TWICE_REAL_PART, gated=gated, rngs=rngs
        ),
        rngs=rngs,
        use_bias=use_bias,
        **options,
    )


def _check_blocks(size: int, num_blocks: int) -> None:
  """Raises ValueError for blocks that do not divide h, or are too large."""
  if 2 * size > _MOST_ROWS * num_blocks:
    raise ValueError(
        f'num_blocks must be at least {-(-2 * size // _MOST_ROWS)} for'
        f' state_features={size}, got {num_blocks}: a HiPPO matrix has'
        f' 2 * state_features / num_blocks rows, {_MOST_ROWS} at most.'
    )
  if size % num_blocks:
    raise ValueError(
        f'num_blocks must divide state_features={size}, got {num_blocks}.'
    )


def _in_basis(
    key, vectors: np.ndarray, num_blocks: int, columns: int, fan_in: int, dtype
) -> jax.Array:
  """Returns V^T of a random matrix, [2, size, columns]: real, imaginary."""
  basis = jnp.asarray(np.stack([vectors.real, vectors.imag]), dtype)
  rows, size = vectors.shape
  shape = num_blocks * rows, columns
  drawn = jax.random.normal(key(), shape, dtype) / fan_in**0.5
  blocks = drawn.reshape(num_blocks, rows, columns)
  found = jnp.einsum('pnk,bni->pbki', basis, blocks)
  return found.reshape(2, num_blocks * size, columns)


def hippo(size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns eigenvalues and eigenvectors of the normal part of HiPPO-LegS.

  Its eigenvalues have the real part -1/2; of each conjugate pair one is kept.

  Args:
    size: number of rows, even.

  Returns:
    The imaginary parts, [size / 2], and the vectors, [size, size / 2].
  """
  n = np.arange(size)
  root = np.sqrt(2 * n + 1)
  skew = np.tril(np.outer(root, root), -1) / 2
  # A + P P^T of A = -(lower triangle), less its diagonal of -1/2.
  values, vectors = np.linalg.eigh(-1j * (skew.T - skew))
  return values[size // 2 :], vectors[:, size // 2 :]
