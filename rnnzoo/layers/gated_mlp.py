"""A norm and a gated MLP, as blocks of xLSTM and TiRex have them."""

from collections.abc import Callable, Mapping
import math

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import settings
from rnnzoo.layers import normalization

Array = jax.Array


@jax.custom_jvp
def _gelu(x: Array) -> Array:
  """The exact one, x Φ(x).

  jax 0.12 cannot differentiate erf inside `jax.shard_map`, so its derivative,
  Φ(x) + x φ(x), stands here.
  """
  return jax.nn.gelu(x, approximate=False)


@_gelu.defjvp
def _gelu_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  cdf = jax.lax.erfc(-x * math.sqrt(0.5)) / 2
  density = jnp.exp(-x * x / 2) / math.sqrt(2 * math.pi)
  return _gelu(x), (cdf + x * density) * dx


# By name.
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    'gelu': _gelu,
    'silu': jax.nn.silu,
}
NORMS = ('layer', 'rms')


def width(mlp_features: int | None, features: int, residual: bool) -> int:
  """Returns the width of a block's MLP; 0 for none.

  Args:
    mlp_features: as given; None for xLSTM's, 1.3 features rounded up to a
      multiple of 64.
    features: of the block.
    residual: whether the block adds its input; without that it has no MLP.

  Raises:
    ValueError: the width is not valid.
  """
  if mlp_features is None:
    return 64 * math.ceil(1.3 * features / 64) * residual
  if mlp_features != 0 or isinstance(mlp_features, bool):
    settings.positive(mlp_features, 'mlp_features')
    if not residual:
      raise ValueError('The MLP needs residual=True, got residual=False.')
  return mlp_features


class GatedMLP(nnx.Module):
  """W_down (activation(gate) (.) up), where gate, up = W_up norm(x).

  Attributes:
    norm: before the products.
    up: W_up, [features, 2 width], the gate first.
    down: W_down, [width, features].
    activation: 'gelu' or 'silu'.
  """

  def __init__(
      self,
      features: int,
      width: int,
      *,
      norm: str,
      activation: str,
      num_blocks: int,
      rngs: nnx.Rngs,
      **dtypes,
  ):
    """Creates the parameters: N(0, 2/(5 features)) and N(0, 4/(L² features)).

    Args:
      features: size of x's last axis.
      width: of the hidden layer.
      norm: 'layer' or 'rms'.
      activation: 'gelu' or 'silu'.
      num_blocks: L, the number of blocks of the network.
      rngs: `nnx.Rngs` that the parameters are drawn from.
      **dtypes: dtype and param_dtype.
    """
    first = jax.nn.initializers.normal(math.sqrt(2 / (5 * features)))
    last = jax.nn.initializers.normal(2 / num_blocks / math.sqrt(features))
    self.activation = activation
    self.norm = make_norm(norm, features, rngs=rngs, **dtypes)
    self.up = nnx.Linear(
        features,
        2 * width,
        use_bias=False,
        kernel_init=first,
        rngs=rngs,
        **dtypes,
    )
    self.down = nnx.Linear(
        width,
        features,
        use_bias=False,
        kernel_init=last,
        rngs=rngs,
        **dtypes,
    )

  def __call__(self, x: Array) -> Array:
    """Returns [..., features] for x [..., features]."""
    gate, up = jnp.split(
        self.up(normalization.normalize(self.norm, x)), 2, axis=-1
    )
    return self.down(ACTIVATIONS[self.activation](gate) * up)


def make_norm(norm: str, features: int, **options) -> nnx.Module:
  """Returns a norm of features without bias, with the published epsilon."""
  if norm == 'rms':
    return nnx.RMSNorm(
        features, epsilon=1e-6, use_fast_variance=False, **options
    )
  return nnx.LayerNorm(
      features,
      epsilon=1e-5,
      use_bias=False,
      use_fast_variance=False,
      **options,
  )
