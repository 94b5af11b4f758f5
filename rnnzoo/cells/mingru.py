"""minGRU: a GRU whose gates see the input only, so time runs in parallel."""

import dataclasses
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

sigmoid = jax.nn.sigmoid


def positive(x: jax.Array) -> jax.Array:
  """g(x) = x + 0.5 for x >= 0, σ(x) below: continuous, monotone, positive."""
  return jnp.where(x >= 0, x + 0.5, sigmoid(x))


# Functions of the candidate's pre-activation.
CANDIDATES = {'linear': lambda x: x, 'positive': positive}


def check_candidate(candidate: str) -> None:
  """Raises ValueError unless the candidate is known."""
  settings.choice(candidate, CANDIDATES, 'candidate')


@dataclasses.dataclass(frozen=True)
class MinGRUCell(cell.LinearCell):
  """Gates in the order z, h̃, both from the input; carry (h,).

  z  = σ(x_z)
  h' = (1 - z) h + z g(x_h)

  Attributes:
    candidate: 'linear' for g(x) = x; 'positive' for the model of the paper's
      log-space version, g(x) = x + 0.5 where x >= 0 and σ(x) elsewhere.
  """

  candidate: str = 'linear'
  input_gates = 2

  def __post_init__(self):
    check_candidate(self.candidate)

  def coefficients(self, params, x_gates):
    del params
    z, h = x_gates
    # 1 - σ(z) = σ(-z), which keeps its digits where z is large.
    return sigmoid(-z), sigmoid(z) * CANDIDATES[self.candidate](h)


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    sequence_layer.KernelInit,
    sequence_layer.BiasInit,
    total=False,
):
  """Options that MinGRU passes on."""


class MinGRU(recurrent.RecurrentLayer[cell.HiddenCarry]):
  """Minimal GRU, linear in its memory.

      z_t = σ(W_z x_t + b_z)
      h_t = (1 - z_t) h_{t-1} + z_t g(W_h x_t + b_h)        y_t = h_t

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.MinGRU(in_features=3, features=8, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of h.
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
    RNNs all we needed?", section 3.1 and appendix B.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      candidate: str = 'linear',
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    super().__init__(
        MinGRUCell(candidate), in_features, features, rngs=rngs, **options
    )
