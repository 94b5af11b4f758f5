"""The LSTM: an additive memory c behind input, forget and output gates."""

import dataclasses
from typing import Any, NamedTuple, Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from rnnzoo import cell
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.layers import initializers
from rnnzoo.layers import readouts
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

sigmoid, tanh = jax.nn.sigmoid, jnp.tanh


class LSTMCarry(NamedTuple):
  """Carry of `LSTMCell`.

  Attributes:
    h: output of the last step, [..., features].
    c: memory behind the gates, [..., features].
  """

  h: jax.Array
  c: jax.Array


cell.register(LSTMCarry)


@dataclasses.dataclass(frozen=True)
class LSTMCell(cell.Cell):
  """Gates in the order i, f, g, o; carry (h, c).

  i, f, o = σ(x + R h)
  g       = tanh(x_g + R_g h)
  c'      = f c + i g
  h'      = o tanh(c')
  """

  input_gates = 4
  recurrent_gates = 4
  carry_names = ('h', 'c')
  carry_type = LSTMCarry

  def update(self, params, x_gates, h_gates, carry):
    del params
    _, c = carry
    i, f, g, o = map(jnp.add, x_gates, h_gates)
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c

  def guess(self, params, x_gates, h_gates, carry, diagonal, solve):
    del params, carry, diagonal
    # If the gates are given, c is a linear recurrence.
    i, f, g, o = map(jnp.add, x_gates, h_gates)
    _, c = solve(lambda carry: carry[1], sigmoid(f), sigmoid(i) * tanh(g))
    return sigmoid(o) * tanh(c), c


@dataclasses.dataclass(frozen=True)
class PeepholeLSTMCell(cell.Cell):
  """Gates in the order i, f, g, o, of which three see c; carry (h, c).

  i, f = σ(x + R h + p c)               p is params['p_i'], ['p_f'], ['p_o']
  g    = tanh(x_g + R_g h)
  c'   = f c + i g
  o    = σ(x_o + R_o h + p_o c')
  h'   = o tanh(c')
  """

  input_gates = 4
  recurrent_gates = 4
  carry_names = ('h', 'c')
  carry_type = LSTMCarry
  param_names = ('p_i', 'p_f', 'p_o')

  def update(self, params, x_gates, h_gates, carry):
    _, c = carry
    i, f, g, o = map(jnp.add, x_gates, h_gates)
    i, f = i + params['p_i'] * c, f + params['p_f'] * c
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    return sigmoid(o + params['p_o'] * c) * tanh(c), c

  def guess(self, params, x_gates, h_gates, carry, diagonal, solve):
    del diagonal
    # If the gates are given, c is a linear recurrence.
    _, c = carry
    i, f, g, o = map(jnp.add, x_gates, h_gates)
    i, f = i + params['p_i'] * c, f + params['p_f'] * c
    _, c = solve(lambda carry: carry[1], sigmoid(f), sigmoid(i) * tanh(g))
    return sigmoid(o + params['p_o'] * c) * tanh(c), c


class _Options(
    sequence_layer.Options,
    sequence_layer.KernelInit,
    sequence_layer.RecurrentKernel,
    total=False,
):
  """Options that LSTM passes on."""


class LSTM(recurrent.RecurrentLayer[LSTMCarry]):
  """Long short-term memory, the form of torch, flax and cuDNN.

      i_t, f_t, o_t = σ(W x_t + b + R h_{t-1})
      g_t = tanh(W_g x_t + b_g + R_g h_{t-1})
      c_t = f_t c_{t-1} + i_t g_t
      h_t = o_t tanh(c_t)                              y_t = h_t

  With `peephole`, i and f also have p c_{t-1} in their sums, and o has p_o c_t.
  `cell_params` has p_i, p_f and p_o, each [features] and zero at the start.
  With `projection`, y_t = P h_t has `projection` features, and R multiplies
  y_{t-1}. The carry is still (h, c), of `features` each: an h that another
  library gives, which is y, is no h of this layer. All paths run it, since
  R P is formed once a call; `recurrent_gradient_clip`, zoneout and recurrent
  dropout act on h.

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.LSTM(in_features=3, features=8, rngs=nnx.Rngs(0))
  >>> (h, c), y = layer.unroll(jnp.ones((2, 5, 3)))
  >>> y.shape, c.shape
  ((2, 5, 8), (2, 8))

  Args:
    in_features: size of x's last axis.
    features: size of h and c, and of the output without a projection.
    forget_bias: added to the initial bias of f. A positive one keeps memory
      from the start, for instance 1 (Jozefowicz et al., 2015).
    chrono_steps: the longest dependency to be learnt, in steps; 3 or more. The
      initial bias of f is log u with u from U(1, chrono_steps - 1), the bias of
      i its negative (Tallec and Ollivier, 2018). None for `forget_bias`.
    num_heads: diagonal blocks of R; features must be a multiple of it.
    peephole: whether the gates see c, for precise times (Gers and Schmidhuber,
      2000); as `use_peepholes` of TensorFlow's LSTMCell.
    projection: number of features of y = P h, which R multiplies (Sak et al.,
      2014); torch's `proj_size`. None for y = h. P is `readout.kernel`,
      [features, projection], and R is [4, 1, projection, features].
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      kernel_init, recurrent_kernel_init, bias_init, learn_initial_carry,
      recurrent_gradient_clip, stop_recurrent_gradient, zoneout_rate,
      recurrent_dropout_rate, dtype (of the computation), param_dtype,
      implementation ('scan', 'associative_scan', 'pallas' or None for the
      fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    S. Hochreiter and J. Schmidhuber, 1997, "Long short-term memory".
    F. A. Gers, J. Schmidhuber and F. Cummins, 2000, "Learning to forget".
    F. A. Gers and J. Schmidhuber, 2000, "Recurrent nets that time and count".
    H. Sak, A. Senior and F. Beaufays, 2014, "Long short-term memory recurrent
    neural network architectures for large scale acoustic modeling".
    C. Tallec and Y. Ollivier, 2018, "Can recurrent neural networks warp time?".
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      forget_bias: float = 0.0,
      num_heads: int = 1,
      chrono_steps: int | None = None,
      peephole: bool = False,
      projection: int | None = None,
      param_dtype: jax.typing.DTypeLike = jnp.float32,
      bias_init: initializers.Initializer = initializers.zeros,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    forget_init = _forget_init(bias_init, forget_bias, chrono_steps)
    settings.bias_of_gate(forget_bias, options)
    settings.boolean(peephole, 'peephole')
    own = PeepholeLSTMCell() if peephole else LSTMCell()
    settings.positive(features, 'features')
    checks.floating(param_dtype, 'param_dtype')
    given: dict[str, Any] = {}
    if projection is not None:
      settings.positive(projection, 'projection')
      if num_heads != 1:
        raise ValueError(
            f'projection={projection} mixes all features, and'
            f' num_heads={num_heads} would part them; num_heads=1 would work.'
        )
      initializers.check_rngs(rngs, 'params', required=True)
      readout = readouts.Projection(features, projection, param_dtype, rngs)
      given = {'readout': readout, 'state_features': features}
      self.features = features
    super().__init__(
        own,
        in_features,
        projection or features,
        num_heads=num_heads,
        cell_params={
            name: nnx.Param(jnp.zeros((features,), param_dtype))
            for name in own.param_names
        },
        param_dtype=param_dtype,
        bias_init=(bias_init, forget_init, bias_init, bias_init),
        rngs=rngs,
        **given,
        **options,
    )
    if projection is not None and self.recurrent_structure is not None:
      self._check_structure(projection)
    if chrono_steps is not None:
      if self.bias is None:
        raise ValueError('chrono_steps needs use_bias=True.')
      i, f = 0, 1
      self.bias[...] = self.bias[...].at[i].set(-self.bias[...][f])

  def _check_structure(self, projection: int) -> None:
    """Raises ValueError for a structure that takes square matrices alone."""
    kernel: Any = self.recurrent_kernel
    try:
      jax.eval_shape(self.recurrent_structure, kernel[...])
    except (TypeError, ValueError) as error:
      raise ValueError(
          f'recurrent_structure cannot take the R of projection={projection},'
          f' {kernel.shape}, which is not square: {error}'
          ' Leaving recurrent_structure or projection out would work.'
      ) from error

  def _block(self) -> tuple[int, int]:
    if isinstance(self.readout, readouts.Projection):
      return self.out_features, self.state_features
    return super()._block()

  def _structured(self, kernel: jax.Array, dtype) -> jax.Array:
    kernel = super()._structured(kernel, dtype)
    if isinstance(self.readout, readouts.Projection):
      return self.readout.folded(kernel)
    return kernel


def _forget_init(bias_init, forget_bias: float, chrono_steps: int | None):
  """Returns the initialiser of the bias of f."""
  settings.within(forget_bias, 'forget_bias')
  if chrono_steps is None:
    return initializers.shifted(bias_init, forget_bias)
  settings.positive(chrono_steps, 'chrono_steps')
  settings.within(chrono_steps, 'chrono_steps', least=3)
  if forget_bias:
    raise ValueError(
        f'chrono_steps={chrono_steps} draws the bias of f, which'
        f' forget_bias={forget_bias} shifts; give one of them.'
    )
  draw = initializers.chrono(chrono_steps)
  return initializers.changed(
      bias_init, lambda key, value: draw(key, value.shape, value.dtype)
  )
