"""iRevRNN: an IndRNN with a reversible residual block inside each step."""

import dataclasses
from typing import NamedTuple, Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.layers import initializers
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

ACTIVATIONS = {
    'relu': jax.nn.relu,
    'tanh': jnp.tanh,
    'sigmoid': jax.nn.sigmoid,
}


class IRevRNNCarry(NamedTuple):
  """Carry of `IRevRNNCell`.

  Attributes:
    h: output of the last step, [..., features].
    c: memory beside it, [..., features].
  """

  h: jax.Array
  c: jax.Array


cell.register(IRevRNNCarry)


@dataclasses.dataclass(frozen=True)
class IRevRNNCell(cell.Cell):
  """R inner steps for each channel on its own; carry (h, c).

  h⁰ = w h,  c⁰ = c                      w h is the recurrent gate
  cⁱ = cⁱ⁻¹ + aᵢ φ(hⁱ⁻¹)                 i = 1 .. R
  hⁱ = hⁱ⁻¹ + bᵢ φ(cⁱ)
  c' = cᴿ,  h' = ψ(x + hᴿ)

  a and b are params['a'] and params['b'], [R, F]. Between the passes h and c
  are saved and nothing of the inner steps: the backward pass reruns them from
  (h, c), exactly and without a division. It does so a step at a time, so that
  more inner steps need no more memory.

  Attributes:
    activation: ψ, 'relu', 'tanh' or 'sigmoid'.
    inner_activation: φ, 'relu', 'tanh' or 'sigmoid'.
  """

  activation: str = 'relu'
  inner_activation: str = 'tanh'
  input_gates = 1
  recurrent_gates = 1
  carry_names = ('h', 'c')
  carry_type = IRevRNNCarry
  param_names = ('a', 'b')

  def __post_init__(self):
    settings.choice(self.activation, ACTIVATIONS, 'activation')
    settings.choice(self.inner_activation, ACTIVATIONS, 'inner_activation')

  def update(self, params, x_gates, h_gates, carry):
    (h,) = h_gates
    _, c = carry
    h, c = self._inner(params, h, c)
    return ACTIVATIONS[self.activation](x_gates[0] + h), c

  def guess(self, params, x_gates, h_gates, carry, diagonal, solve):
    if diagonal is None or self.activation != 'relu':
      return None
    # The inner steps add to h and c the amounts of an earlier guess.
    (h,), (_, c) = h_gates, carry
    # As a loop: of all steps of time, XLA would keep R arrays.
    body = lambda state, weights: (self._inner_step(*state, *weights), None)
    (h, c), _ = jax.lax.scan(body, (h, c), (params['a'], params['b']))
    _, c = solve(lambda carry: carry[1], 1, c - carry[1])
    _, h = solve(
        lambda carry: carry[0], diagonal[0], x_gates[0] + h - h_gates[0], 0
    )
    return h, c

  def _inner(self, params, h, c):
    """Returns (hᴿ, cᴿ) from (h⁰, c⁰)."""
    for a, b in zip(params['a'], params['b'], strict=True):
      h, c = self._inner_step(h, c, a, b)
    return h, c

  def _inner_step(self, h, c, a, b):
    phi = ACTIVATIONS[self.inner_activation]
    c = c + a * phi(h)
    return h + b * phi(c), c

  def invert(self, params, h, c):
    """Returns (h⁰, c⁰) from (hᴿ, cᴿ): the inner block is reversible.

    The step as a whole is not: ψ = relu forgets, and h = h⁰ / w needs w ≠ 0.
    Chained over many steps the inverse amplifies rounding errors.

    Args:
      params: 'a' and 'b', [R, F].
      h: hᴿ, [..., F], before the input is added.
      c: cᴿ, [..., F].
    """
    phi = ACTIVATIONS[self.inner_activation]
    for a, b in zip(params['a'][::-1], params['b'][::-1], strict=True):
      h = h - b * phi(c)
      c = c - a * phi(h)
    return h, c


# More would take minutes to trace.
_MOST_STEPS = 1000


class _Options(
    sequence_layer.Options,
    sequence_layer.KernelInit,
    sequence_layer.BiasInit,
    total=False,
):
  """Options that IRevRNN passes on."""


class IRevRNN(recurrent.RecurrentLayer[IRevRNNCarry]):
  """Reversible independent recurrent network.

      h⁰ = w h_{t-1},  c⁰ = c_{t-1}
      cⁱ = cⁱ⁻¹ + aᵢ φ(hⁱ⁻¹),  hⁱ = hⁱ⁻¹ + bᵢ φ(cⁱ)             i = 1 .. R
      c_t = cᴿ,  h_t = ψ(W x_t + bias + hᴿ)                     y_t = h_t

  w is `recurrent_kernel`, [1, features, 1, 1]; a and b are in `cell_params`.
  |w|, |a| and |b| start within `max_abs`. An update may leave it, so a training
  loop calls `rnnzoo.constrain` after each one, as train.py does:

      optimizer.update(model, gradient)
      nnx.update(model, rnnzoo.constrain(nnx.state(model, nnx.Param)))

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.IRevRNN(3, 8, inner_steps=2, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones((2, 5, 3))).shape               # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis.
    features: size of h and c.
    inner_steps: R, at most 1,000: the program unrolls every inner step.
    activation: ψ, 'relu', 'tanh' or 'sigmoid'. The last two bound h.
    inner_activation: φ, 'relu', 'tanh' or 'sigmoid'.
    recurrent_range: w starts uniform in this range, which must be within
      `max_abs`; the default is cut there. (0.9, 1.0) in the last layer of a
      stack.
    max_abs: bound of |w|, |a| and |b| when the layer is made and after each
      call of `rnnzoo.constrain`; None for none.
    inner_scale: standard deviation that a and b start with.
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      kernel_init, bias_init, learn_initial_carry, recurrent_gradient_clip,
      stop_recurrent_gradient, zoneout_rate, recurrent_dropout_rate, dtype (of
      the computation), param_dtype, implementation ('scan', 'associative_scan',
      'pallas' or None for the fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    The public project irevrnn (shaofei-liu), which defines the cell, after
    S. Li et al., 2018, "IndRNN", and A. N. Gomez et al., 2017, "The reversible
    residual network".
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      inner_steps: int = 3,
      activation: str = 'relu',
      inner_activation: str = 'tanh',
      recurrent_range: tuple[float, float] = (0.0, 1.0),
      max_abs: float | None = 1.002,
      inner_scale: float = 1e-4,
      param_dtype: jax.typing.DTypeLike = jnp.float32,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.positive(features, 'features')
    settings.within(inner_steps, 'inner_steps', most=_MOST_STEPS)
    settings.positive(inner_steps, 'inner_steps')
    low, high = settings.range_within(
        recurrent_range, 'recurrent_range', max_abs, default=(0.0, 1.0)
    )
    settings.within(inner_scale, 'inner_scale', least=0)
    checks.floating(param_dtype, 'param_dtype')
    initializers.check_rngs(rngs, 'params', required=True)
    shape = (inner_steps, features)
    inner = {}
    for name in ('a', 'b'):
      draw = jax.random.normal(rngs.params(), shape, param_dtype)
      inner[name] = nnx.Param(float(inner_scale) * draw)
      if max_abs is not None:
        inner[name].set_metadata(max_abs=max_abs)
        inner[name] = initializers.constrain(inner[name])
    super().__init__(
        IRevRNNCell(activation, inner_activation),
        in_features,
        features,
        num_heads=features,
        cell_params=inner,
        recurrent_kernel_init=initializers.uniform(low, high),
        max_abs=max_abs,
        param_dtype=param_dtype,
        rngs=rngs,
        **options,
    )
