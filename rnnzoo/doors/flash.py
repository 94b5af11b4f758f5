"""`flashrnn`: the function of the library FlashRNN, for its users.

Shapes, arguments and results are as in its public function. B is the batch,
T time, G gates, N heads, D the head dimension, P the dimension that R reads
from and S the number of states.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.cells import elman
from rnnzoo.cells import gru
from rnnzoo.cells import lstm
from rnnzoo.cells import slstm
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import paths

Array = jax.Array

_CELLS: dict[str, type[cell_lib.Cell]] = {
    'elman': elman.ElmanCell,
    'gru': gru.GRUCell,
    'lstm': lstm.LSTMCell,
    'slstm': slstm.SLSTMCell,
}

# FlashRNN's backends, and the implementation that takes each one's place. None
# is the fastest that can run, a GPU kernel where there is one.
_BACKENDS: dict[str, str | None] = {
    'vanilla': 'scan',
    'vanilla_fwbw': 'scan',
    'cuda': None,
    'cuda_fused': None,
    'triton_fused': None,
}
_DTYPES = ('bfloat16', 'float16', 'float32', 'float64')
_SHAPES = {
    'input_shape': ('BTGHD', 'TBGHD'),
    'recurrent_shape': ('GHDP', 'HGDP', 'HPGD', 'HPDG'),
    'bias_shape': ('GHD', 'HGD', 'HDG'),
    'output_shape': ('SBTHD', 'STBHD', 'SBHTD'),
}


@dataclasses.dataclass(frozen=True)
class FlashRNNConfig:
  """Options of `flashrnn`, by FlashRNN's names.

  Attributes:
    backend: 'vanilla', 'vanilla_fwbw', 'cuda', 'cuda_fused' or 'triton_fused'.
    function: 'elman', 'gru', 'lstm' or 'slstm'.
    gradient_recurrent_cut: no gradient comes back through R.
    gradient_recurrent_clipval: bound of that gradient's elements.
    gradient_recurrent_zero_not_finite: whether a NaN or an infinity in that
      gradient becomes zero before it is bounded, as in FlashRNN's kernels.
      Without it an infinity becomes the bound and a NaN stays, so that it is
      seen. It needs a bound.
    input_shape: axes of Wx, 'BTGHD' or 'TBGHD'; H is the head.
    output_shape: axes of the states, 'SBTHD', 'STBHD' or 'SBHTD'.
    recurrent_shape: axes of R, 'GHDP', 'HGDP', 'HPGD' or 'HPDG'.
    bias_shape: axes of b, 'GHD', 'HGD' or 'HDG'.
    dtype: dtype of the computation; 'vanilla' takes the dtype of Wx instead.
    initial_val: value that the states start from where none are given, or one
      for each state.
  """

  backend: str = 'cuda_fused'
  function: str = 'lstm'
  gradient_recurrent_cut: bool = False
  gradient_recurrent_clipval: float | None = None
  input_shape: str = 'BTGHD'
  output_shape: str = 'SBTHD'
  recurrent_shape: str = 'GHDP'
  bias_shape: str = 'GHD'
  dtype: str | None = 'bfloat16'
  initial_val: float | Sequence[float] = 0.0
  gradient_recurrent_zero_not_finite: bool = False

  def __post_init__(self):
    if self.dtype is None:
      object.__setattr__(self, 'dtype', FlashRNNConfig.dtype)
    settings.choice(self.backend, tuple(_BACKENDS), 'backend')
    settings.choice(self.function, tuple(_CELLS), 'function')
    settings.choice(self.dtype, _DTYPES, 'dtype')
    settings.boolean(self.gradient_recurrent_cut, 'gradient_recurrent_cut')
    name = 'gradient_recurrent_zero_not_finite'
    settings.boolean(getattr(self, name), name)
    if getattr(self, name) and self.gradient_recurrent_clipval is None:
      raise ValueError(
          f'{name} is an option of the clip: it needs'
          ' gradient_recurrent_clipval, got None.'
      )
    if (clip := self.gradient_recurrent_clipval) is not None:
      settings.within(clip, 'gradient_recurrent_clipval', above=0)
    if isinstance(self.initial_val, list):  # A list has no hash.
      object.__setattr__(self, 'initial_val', tuple(self.initial_val))
    values = self.initial_val
    given = values if isinstance(values, (tuple, list)) else (values,)
    # States are float32 or wider.
    wide = 'float64' if self.dtype == 'float64' else 'float32'
    most = float(jnp.finfo(wide).max)
    for value in given:
      settings.within(value, 'initial_val', least=-most, most=most)
    for name, known in _SHAPES.items():
      settings.choice(getattr(self, name), known, name)


@promotion.of_ranks
def flashrnn(
    Wx: Array,
    R: Array,
    b: Array,
    states: Array | None = None,
    function: str = 'lstm',
    config: FlashRNNConfig | None = None,
    backend: str = 'cuda_fused',
    dtype: str | None = 'bfloat16',
) -> tuple[Array, Array]:
  """Runs a recurrent network over gates that were projected before.

  >>> import jax.numpy as jnp, rnnzoo
  >>> Wx, b = jnp.ones((2, 5, 4, 3, 8)), jnp.zeros((4, 3, 8))
  >>> states, last_states = rnnzoo.flashrnn(
  ...     Wx, jnp.zeros((4, 3, 8, 8)), b, function='lstm', dtype='float32'
  ... )
  >>> states.shape, last_states.shape      # [S, B, T, N, D], [S, B, 1, N, D]
  ((2, 2, 5, 3, 8), (2, 2, 1, 3, 8))

  Gates are in FlashRNN's orders. 'lstm' and 'slstm' have i, f, z, o. 'gru' has
  r, z, n in Wx; n, r, z in R; and four biases: for R_n h, then r, z, n.
  States are h; h and c; or h, c, n and m.

  Args:
    Wx: [B, T, G, N, D].
    R: [G, N, D, P], multiplies h from the left.
    b: [G, N, D], for 'gru' with 4 gates.
    states: the initial carry, [S, B, 1, N, D]; None for zero.
    function: 'elman', 'gru', 'lstm' or 'slstm'.
    config: more options, `rnnzoo.FlashRNNConfig`; if given, `function`,
      `backend` and `dtype` are its own.
    backend: 'cuda', 'cuda_fused' and 'triton_fused' run by the fastest path
      that can run on the device, 'vanilla' and 'vanilla_fwbw' by 'scan'.
    dtype: dtype of the computation and the results, None for 'bfloat16';
      'vanilla' takes the dtype of Wx instead. States within the loop are
      float32 or wider.

  Returns:
    All states after each step, [S, B, T, N, D], and after the last one,
    [S, B, 1, N, D].

  Raises:
    ValueError: an argument has the wrong shape or dtype or is not known.
  """
  if config is None:
    config = FlashRNNConfig(backend=backend, function=function, dtype=dtype)
  if not isinstance(config, FlashRNNConfig):
    raise ValueError(
        'config must be an rnnzoo.FlashRNNConfig, which takes the arguments of'
        f' flashrnn.FlashRNNConfig, got {settings.a(type(config))}.'
    )
  cell = _CELLS[config.function]()
  Wx, R, b = _of_gates(config, cell.input_gates, Wx, R, b)
  batch, time, gates, heads, size = Wx.shape
  kind = jnp.dtype(Wx.dtype if config.backend == 'vanilla' else config.dtype)
  checks.floating(kind, 'dtype')
  wide = promotion.wide(kind)
  Wx, R, b = (array.astype(kind) for array in (Wx, R, b))
  carry = _initial(cell, config, states, (batch, heads, size), kind)
  params, features = {}, heads * size
  if config.function == 'gru':
    R = R[jnp.array([1, 2, 0])]
    params['recurrent_bias'] = b[0].astype(wide).reshape(features)
    b = b[1:]
  # The sum of two numbers of 16 bits is rounded once.
  x_gates = (Wx.astype(wide) + b.astype(wide)).astype(kind)
  operands = call_lib.Operands(
      params=params,
      weights=(),
      x=x_gates.reshape(batch, time, gates, features),
      recurrent_kernel=R,
      carry=carry,
      restart=None,
      reset=None,
      mask=None,
  )
  call = call_lib.Call(
      outputs=len(carry),
      recurrent_gradient_clip=checks.recurrent_gradient(
          cell, config.gradient_recurrent_clipval, config.gradient_recurrent_cut
      ),
      zero_not_finite=config.gradient_recurrent_zero_not_finite,
      stop_recurrent_gradient=config.gradient_recurrent_cut,
  )
  last, carries = paths.run(
      cell, call_lib.Given(), operands, call, _BACKENDS[config.backend]
  )
  stack = lambda arrays, steps: jnp.stack(arrays).reshape(
      len(arrays), batch, steps, heads, size
  )
  order = [*map('SBTHD'.index, config.output_shape)]
  finish = lambda made: jnp.transpose(made, order).astype(kind)
  return finish(stack(carries, time)), finish(stack(last, 1))


def _of_gates(config: FlashRNNConfig, gates: int, Wx, R, b):
  """Returns Wx [B, T, G, N, D], R [G, N, P, D] and b [G, N, D], checked."""
  Wx = _axes(Wx, 'Wx', config.input_shape, 'BTGHD')
  batch, time, _, heads, size = Wx.shape
  if not size or not heads:
    raise ValueError(
        'Wx must have heads and a head dimension of at least 1, its last two'
        f' axes of BTGHD, got shape {Wx.shape}.'
    )
  Wx = _sized(
      Wx, (batch, time, gates, heads, size), 'Wx', 'BTGHD', config.input_shape
  )
  square = gates, heads, size, size
  R = _axes(R, 'R', config.recurrent_shape, 'GHPD', square)
  biases = gates + (config.function == 'gru'), heads, size
  b = _axes(b, 'b', config.bias_shape, 'GHD', biases)
  return Wx, R, b


def _initial(cell, config: FlashRNNConfig, states, shape, kind):
  """Returns the carry before the first step, each [B, N D]."""
  batch, heads, size = shape
  count, wide = len(cell.carry_names), promotion.wide(kind)
  if states is not None:
    wanted = count, batch, 1, heads, size
    states = _axes(states, 'states', config.output_shape, 'SBTHD', wanted)
    states = states.astype(kind).astype(wide)
    return tuple(states.reshape(count, batch, heads * size))
  values: Any = config.initial_val
  if not isinstance(values, (tuple, list)):
    values = (values,) * count
  if len(values) != count:
    raise ValueError(
        f'initial_val must be a number or {count} of them, one for each of'
        f' {", ".join(cell.carry_names)}; got {values!r}.'
    )
  return tuple(jnp.full((batch, heads * size), v, wide) for v in values)


def _axes(given: Any, name: str, axes: str, wanted: str, shape=None) -> Array:
  """Returns an array with its axes in the wanted order, and of the shape."""
  array = checks.array(given, name)
  checks.real(array, name)
  if array.ndim != len(axes):
    step = f'{name}[{":, " * axes.find("T")}None]'
    hint = f' One step has an axis too: {step}.' if 'T' in axes else ''
    raise ValueError(
        f'{name} must have the axes {axes}, got shape {array.shape}.{hint}'
    )
  array = jnp.transpose(array, [*map(axes.index, wanted)])
  return array if shape is None else _sized(array, shape, name, wanted, axes)


def _sized(
    array: Array, shape: tuple[int, ...], name: str, axes: str, given: str
) -> Array:
  """Returns the array, in the order `axes`, if it has the shape.

  An error speaks of `given`, the caller's order.
  """
  if array.shape != shape:
    order = [axes.index(axis) for axis in given]
    of_caller = lambda sizes: tuple(sizes[i] for i in order)
    raise ValueError(
        f'{name} must have shape {of_caller(shape)} along {given}, as Wx and'
        f' the function say, got {of_caller(array.shape)}.'
    )
  return array
