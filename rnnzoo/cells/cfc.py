"""CfC: the closed form of a liquid time-constant network."""

import dataclasses
from typing import Unpack

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import devices
from rnnzoo import cell
from rnnzoo import settings
from rnnzoo.engines import products
from rnnzoo.layers import initializers
from rnnzoo.layers import parameters
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

Array = jax.Array
sigmoid, tanh = jax.nn.sigmoid, jnp.tanh

MODES = ('default', 'no_gate', 'pure')


@dataclasses.dataclass(frozen=True)
class CfCCell(cell.Cell):
  """Gates in the order f1, f2, a, b; carry (h,). Mode 'pure' has f1 alone.

  t  = σ(a ts + b)
  h' = (1 - t) tanh(f1) + t tanh(f2)         mode 'default'
  h' = tanh(f1) + t tanh(f2)                 mode 'no_gate'
  h' = A - A exp(-ts (|w| + |f1|)) f1        mode 'pure'

  Attributes:
    mode: 'default', 'no_gate' or 'pure'.
    timespans: whether the last input gate is ts, the time since the last step;
      else ts is 1.
  """

  mode: str = 'default'
  timespans: bool = False
  carry_names = ('h',)

  def __post_init__(self):
    settings.choice(self.mode, MODES, 'mode')
    settings.boolean(self.timespans, 'timespans')

  @property
  def recurrent_gates(self) -> int:  # type: ignore[override]
    return 1 if self.mode == 'pure' else 4

  @property
  def input_gates(self) -> int:  # type: ignore[override]
    return self.recurrent_gates + self.timespans

  @property
  def param_names(self) -> tuple[str, ...]:  # type: ignore[override]
    return ('w', 'A') if self.mode == 'pure' else ()

  def update(self, params, x_gates, h_gates, carry):
    del carry
    ts = x_gates[-1] if self.timespans else 1.0
    f1, *others = (x + h for x, h in zip(x_gates, h_gates, strict=False))
    if self.mode == 'pure':
      w, amplitude = params['w'], params['A']
      decay = jnp.exp(-ts * (jnp.abs(w) + jnp.abs(f1)))
      return (amplitude - amplitude * decay * f1,)
    f2, a, b = others
    t = sigmoid(a * ts + b)
    keep = 1.0 if self.mode == 'no_gate' else 1 - t
    return (keep * tanh(f1) + t * tanh(f2),)


class TimedGates(nnx.Module):
  """Input gates W x + b without x's last feature, and that one as a gate.

  Attributes:
    kernel: W, [gates, in_features - 1, features].
    bias: b, [gates, features], or None.
  """

  def __init__(self, gates: int, sizes: tuple[int, int], options, *, rngs):
    """Draws W and b.

    Args:
      gates: number of gates without the last one.
      sizes: in_features - 1 and features.
      options: the layer's options with initialisers.
      rngs: `nnx.Rngs` that the parameters are drawn from.
    """
    dtype = options.get('param_dtype', jnp.float32)

    def draw(name, shape):
      init = options[name]
      return initializers.draw(name, init, rngs.params, gates, shape, dtype)

    self.kernel, self.bias = draw('kernel_init', sizes), nnx.data(None)
    if options.get('use_bias', True):
      self.bias = draw('bias_init', sizes[1:])

  def __call__(self, x: Array) -> cell.Gates:
    bias = None if self.bias is None else self.bias[...]
    weights, x = devices.alike(((self.kernel[...], bias), x))
    gates = products.project(weights, x[..., :-1])
    ts = jnp.broadcast_to(x[..., -1:], gates[0].shape)
    return *gates, ts.astype(gates[0].dtype)


class _Options(
    sequence_layer.Options,
    sequence_layer.ParamDtype,
    sequence_layer.KernelInit,
    sequence_layer.BiasInit,
    sequence_layer.RecurrentKernel,
    total=False,
):
  """Options that CfC passes on."""


class CfC(recurrent.RecurrentLayer[cell.HiddenCarry]):
  """Closed-form continuous-time network, without a backbone.

      f1_t, f2_t, a_t, b_t = W x_t + b + R h_{t-1}
      t_t = σ(a_t ts_t + b_t)
      h_t = (1 - t_t) (.) tanh(f1_t) + t_t (.) tanh(f2_t)      y_t = h_t

  ts_t is the time between steps t-1 and t, for data that are not sampled
  evenly. With timespans=True it is the last feature of x:

  >>> import jax.numpy as jnp, rnnzoo
  >>> from flax import nnx
  >>> layer = rnnzoo.CfC(4, 8, timespans=True, rngs=nnx.Rngs(0))
  >>> x, ts = jnp.ones((2, 5, 3)), jnp.full((2, 5, 1), 0.1)
  >>> layer(jnp.concatenate([x, ts], axis=-1)).shape   # [batch, time, features]
  (2, 5, 8)

  Args:
    in_features: size of x's last axis, timespans included.
    features: size of h.
    mode: 'default'; 'no_gate' for tanh(f1) + t tanh(f2); or 'pure', the
      solution of the differential equation itself, which is
      A - A exp(-ts (|w| + |f1|)) f1 and overflows at a very negative ts.
    timespans: whether x's last feature is ts; else ts is 1. In a stack, the
      lowest layer alone can have it. A reversed run, also of `Bidirectional`,
      takes ts of a step as the time to the step that it has just left.
    num_heads: diagonal blocks of R; features must be a multiple of it.
    **options: options of all layers (`rnnzoo.RecurrentLayer`): use_bias,
      kernel_init, recurrent_kernel_init, bias_init (W and R start as one
      Xavier uniform matrix for each gate, as in the package ncps),
      learn_initial_carry, max_abs, recurrent_gradient_clip,
      stop_recurrent_gradient, dtype (of the computation), param_dtype,
      implementation ('scan', 'associative_scan', 'pallas' or None for the
      fastest).
    rngs: `nnx.Rngs` that the parameters are drawn from.

  Raises:
    ValueError: a size or an option is not valid.

  References:
    R. Hasani, M. Lechner, A. Amini, L. Liebenwein, A. Ray, M. Tschaikowski,
    G. Teschl and D. Rus, 2022, "Closed-form continuous-time neural networks",
    equations 2 and 3.
  """

  def __init__(
      self,
      in_features: int,
      features: int,
      *,
      mode: str = 'default',
      timespans: bool = False,
      num_heads: int = 1,
      rngs: nnx.Rngs,
      **options: Unpack[_Options],
  ):
    settings.boolean(timespans, 'timespans')
    timespans = bool(timespans)
    made = CfCCell(mode, timespans)
    if timespans:
      self.reads_timespans = True
    settings.positive(in_features, 'in_features')
    settings.positive(features, 'features')
    size = in_features - timespans
    settings.positive(size, 'in_features - 1')
    dtype = parameters.dtype_of(options, rngs)
    limit = (6 / (size + 2 * features)) ** 0.5
    shift = (size + features) ** -0.5
    given: _Options = {
        'kernel_init': initializers.uniform(-limit, limit),
        'recurrent_kernel_init': initializers.uniform(-limit, limit),
        'bias_init': initializers.uniform(-shift, shift),
        **options,
    }
    gates = made.recurrent_gates
    input_map = None
    if timespans:
      input_map = TimedGates(gates, (size, features), given, rngs=rngs)
      del given['kernel_init'], given['bias_init']  # For its W and b.
    start = {'w': jnp.zeros(features, dtype), 'A': jnp.ones(features, dtype)}
    super().__init__(
        made,
        in_features,
        features,
        num_heads=num_heads,
        cell_params={name: nnx.Param(start[name]) for name in made.param_names},
        input_map=input_map,
        rngs=rngs,
        **given,
    )
