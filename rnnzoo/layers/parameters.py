"""Parameters of a layer with a cell: checked, and as the engines take them."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from pallas_kernels import devices
from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo import checks
from rnnzoo import settings
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import selection
from rnnzoo.engines import sharding
from rnnzoo.layers import initializers
from rnnzoo.layers import sequence_layer

Array = jax.Array
Carry = cell_lib.Carry


@dataclasses.dataclass(frozen=True)
class Mapped(call_lib.Projection):
  """The gates of an `input_map`, whose parameters are the weights.

  Attributes:
    graphdef: the static part of the module, which has `without_bias`.
    size: F.
  """

  graphdef: Any
  size: int

  def __call__(self, weights, x):
    gates = nnx.merge(self.graphdef, weights)(x)
    return tuple(gate.astype(x.dtype) for gate in gates)

  def features(self, weights, x):
    del weights, x
    return self.size

  def for_kernels(self, weights, x):
    arrays, bias = nnx.merge(self.graphdef, weights).without_bias(x)
    return call_lib.KernelInputs(arrays, None, bias)


class CellParameters(sequence_layer.SequenceLayer):
  """The parameters of `RecurrentLayer`, which documents them."""

  cell: cell_lib.Cell
  state_features: int
  input_map: Any
  readout: Any
  num_heads: int
  kernel: Any
  bias: nnx.Param | None
  recurrent_kernel: nnx.Param | None
  cell_params: nnx.Dict
  learned_carry: nnx.List
  recurrent_structure: Any
  dtype: jax.typing.DTypeLike | None
  param_dtype: jax.typing.DTypeLike
  implementation: selection.Implementation

  def _draw(self, rngs, kernel_init, bias_init) -> None:
    """Draws W and, with an initialiser for it, b."""
    self.kernel = self.bias = nnx.data(None)
    if self.input_map is not None:
      return
    gates, features = self.cell.input_gates, self.state_features
    shape, dtype = (self.in_features, features), self.param_dtype
    keys = rngs.params
    self.kernel = initializers.draw(
        'kernel_init', kernel_init, keys, gates, shape, dtype
    )
    if bias_init is not None:
      self.bias = initializers.draw(
          'bias_init', bias_init, keys, gates, (features,), dtype
      )

  def _draw_recurrent(self, rngs, recurrent_kernel_init, max_abs) -> None:
    """Draws R, where the cell has one."""
    self.recurrent_kernel = nnx.data(None)
    if not self.cell.recurrent_gates:
      return
    self.recurrent_kernel = initializers.draw(
        'recurrent_kernel_init',
        recurrent_kernel_init,
        rngs.params,
        self.cell.recurrent_gates,
        self._block(),
        self.param_dtype,
        self.num_heads,
    )
    if max_abs is not None:
      self.recurrent_kernel.set_metadata(max_abs=max_abs)
      self.recurrent_kernel = initializers.constrain(self.recurrent_kernel)

  def _reads(self) -> int:
    """Returns how many of the carry's arrays the output is made of."""
    if self.readout is None:
      return 1
    return getattr(self.readout, 'reads', len(self.cell.carry_names))

  def _block(self) -> tuple[int, int]:
    """Returns the shape of one gate and head of the stored R."""
    size = self.state_features // self.num_heads
    return size, size

  def _operands(self, x: Array) -> call_lib.Operands:
    """Returns the arrays of a run from the layer's own carry.

    Args:
      x: [..., time, in_features].

    Returns:
      Time-major operands of `rnnzoo.engines`.
    """
    dtype, state = self._dtype(x), self._state_dtype(x)
    carry = self._initial_carry(x.shape[:-2], state, x)
    return call_lib.Operands(
        params=self._cell_params(state, x),
        weights=self._weights(),
        x=jnp.moveaxis(x.astype(dtype), -2, 0),
        recurrent_kernel=self._recurrent_kernel(dtype, x),
        carry=carry,
        restart=carry,
        reset=None,
        mask=None,
    )

  def _dtype(self, x: Array):
    return self.dtype or promotion.both(x, self.param_dtype)

  def _state_dtype(self, x: Array | None = None):
    """The dtype of carries and sums."""
    dtype = self.dtype or self.param_dtype
    if x is not None:
      dtype = self._dtype(x)
    return promotion.wide(dtype)

  def _initial_carry(self, batch_shape, dtype, like=None) -> Carry:
    shape = (*batch_shape, self.state_features)
    if not self.learned_carry:
      return tuple(jnp.zeros(shape, dtype) for _ in self.cell.carry_names)
    learned = [c[...] for c in self.learned_carry]
    if like is not None:
      # Before it has a batch axis and the dtype of state: under shard_map the
      # transpose of this sums over devices, and so it sums the least.
      learned = [devices.like(c, like) for c in learned]
    return tuple(jnp.broadcast_to(c.astype(dtype), shape) for c in learned)

  def _own_params(self) -> list[tuple[str, Any]]:
    # By no method of nnx.Dict: nnx.tabulate wraps these, and calls itself. It
    # also puts a number of its own there.
    own = self.cell_params
    return [(name, own[name]) for name in own if not name.startswith('_')]

  def _cell_params(self, dtype, like=None) -> dict[str, Array]:
    own = {name: value[...] for name, value in self._own_params()}
    if like is not None:
      # Before they are cast, like `_recurrent_kernel`.
      own = {name: devices.like(value, like) for name, value in own.items()}
    return {name: value.astype(dtype) for name, value in own.items()}

  def _weights(self) -> tuple[Array, Array | None]:
    bias = None if self.bias is None else self.bias[...]
    return self.kernel[...], bias

  def _inputs(self, x: Array) -> tuple[call_lib.Projection, Any, Array]:
    """Returns a projection, its weights, and the array that it projects.

    Args:
      x: [B, T, in_features] or [T, B, in_features].
    """
    if self.input_map is None:
      return call_lib.Dense(), self._weights(), x
    if hasattr(self.input_map, 'without_bias'):
      graphdef, weights = nnx.split(self.input_map)
      return Mapped(graphdef, self.state_features), weights, x
    gates = [gate.astype(self._dtype(x)) for gate in self._mapped(x)]
    return call_lib.Given(), (), jnp.stack(gates, axis=-2)

  def _mapped(self, x: Array) -> cell_lib.Gates:
    """Returns the gates of `input_map`, or raises ValueError."""
    gates = self.input_map(x)
    shape, count = (*x.shape[:-1], self.state_features), self.cell.input_gates
    is_tuple = isinstance(gates, tuple)
    found = [getattr(g, 'shape', None) for g in gates] if is_tuple else []
    if found != [shape] * count:
      raise ValueError(
          f'input_map must return a tuple of {count} arrays {shape} for x of'
          f' shape {x.shape}, got {_shapes(gates)}.'
      )
    for gate in gates:
      checks.real(gate, 'A gate of input_map')
    return gates

  def _read(self, x: Array, h: Carry) -> Array:
    """Returns the output of `readout`, or raises ValueError."""
    y = self.readout(x, h)
    shape = *x.shape[:-1], self.out_features
    if getattr(y, 'shape', None) != shape:
      raise ValueError(
          f'readout must return an array {shape} for x of shape {x.shape}, got'
          f' {_shapes(y)}.'
      )
    checks.real(y, 'The result of readout')
    return y

  def _recurrent_kernel(self, dtype, like=None) -> Array | None:
    if self.recurrent_kernel is None:
      return None
    kernel = self.recurrent_kernel[...]
    if like is not None:
      # Before it is cast: the sum over devices has the parameter's dtype.
      kernel = devices.like(kernel, like)
    return self._structured(kernel, dtype).astype(dtype)

  def _structured(self, kernel: Array, dtype) -> Array:
    """Returns the kernel that is used, rounded to no less than `dtype`."""
    if self.recurrent_structure is None:
      return kernel
    kernel = kernel.astype(promotion.both(kernel.dtype, dtype))
    made = self.recurrent_structure(kernel)
    made = checks.array(made, 'The result of recurrent_structure')
    if made.shape != kernel.shape or made.dtype != kernel.dtype:
      raise ValueError(
          f'recurrent_structure must return {kernel.dtype} of {kernel.shape},'
          f' as it was given, got {made.dtype} of {made.shape}.'
      )
    return made

  def _check_input(self, x: Array, axes: str) -> None:
    self._check_parameters()
    checks.inputs(x, axes, self.in_features, type(self).__name__)

  def _check_parameters(self) -> None:
    """Raises ValueError for a state that is not this layer's own."""
    gates, features = self.cell.input_gates, self.state_features
    heads = (self.cell.recurrent_gates, self.num_heads, *self._block())
    given: list[tuple[str, Any, tuple[int, ...] | None]] = []
    if self.input_map is None:
      of_kernel = gates, self.in_features, features
      given.append(('kernel', self.kernel, of_kernel))
    if self.bias is not None:
      given.append(('bias', self.bias, (gates, features)))
    if self.recurrent_kernel is not None:
      given.append(('recurrent_kernel', self.recurrent_kernel, heads))
    given += [('learned_carry', c, (features,)) for c in self.learned_carry]
    given += [(name, p, None) for name, p in self._own_params()]
    for name, value, shape in given:
      if isinstance(value, nnx.Variable):
        value = value.get_raw_value()
      checks.parameter(value, shape, f'{type(self).__name__}.{name}')

  def _over_devices(
      self,
      function: Callable[[Any, Any], Any],
      given: tuple[Any, ...],
      axes: sharding.Axes,
      *,
      positions: tuple[sharding.Positions, ...],
      out_positions: Any,
  ) -> Any:
    """Returns a function's results, each device with its part of the layer.

    Args:
      function: (layer, given) -> arrays. The layer has the heads, or the
        independent features, of this device, and the mesh axes that time is
        over.
      given: x, and other arrays, trees of arrays, or None.
      axes: axes that may be over devices.
      positions: positions for each of `given`, as `sharding.spread` takes them.
      out_positions: positions of the results, as `sharding.spread` takes them.
    """
    graphdef, *states = nnx.split(
        self, lambda path, _: path == ('recurrent_kernel',), ...
    )
    kernel, rest = states
    has_kernel = self.recurrent_kernel is not None
    heads = self.num_heads if has_kernel else self.state_features
    if self.readout is not None or self.input_map is not None:
      heads = 1  # They may mix all features.
    positions = axes.heads, axes.parameters, *positions
    over = sharding.choose((kernel, rest, *given), positions, heads)
    is_cut = bool(over[-1])
    if is_cut and self.recurrent_structure is not None:
      # It may be any function of all heads.
      (kernel,) = sharding.place([kernel], [axes.heads], over)
      dtype = self._dtype(given[0])
      kernel = jax.tree.map(lambda k: self._structured(k, dtype), kernel)

    def part(split):
      kernel, rest, *given = split
      layer: Any = nnx.merge(graphdef, kernel, rest)
      layer.time_axis_name = (*self.time_axis_name, *over[-2])
      if is_cut:
        layer.out_features = layer.state_features = layer.kernel.shape[-1]
        layer.recurrent_structure = None
        if has_kernel:
          layer.num_heads = layer.recurrent_kernel.shape[1]
      return function(layer, given)

    return sharding.spread(
        part,
        (kernel, rest, *given),
        positions=positions,
        out_positions=out_positions,
        over=over,
    )

  def _named(self, carry: Carry, given: Carry | None = None) -> Any:
    """Returns a carry with the type of the one given, or the cell's own."""
    if given is None:
      return cell_lib.of(self.cell)._make(carry)
    return cell_lib.like(given, carry)

  def _check_carry(self, carry: Carry, batch_shape, label: str) -> Carry:
    expected = (*batch_shape, self.state_features)
    return checks.carry(self.cell.carry_names, carry, expected, label)


def _shapes(tree: Any) -> Any:
  """Returns the tree with a shape in place of each array, for a message."""
  return jax.tree.map(lambda x: getattr(x, 'shape', x), tree)


def check_kernel_options(cell: cell_lib.Cell, **options: Any) -> None:
  """Raises ValueError for an option of R, not None, where the cell has none."""
  for name, value in options.items():
    if value is not None and not cell.recurrent_gates:
      raise ValueError(
          f'{type(cell).__name__} has no recurrent kernel, so there is nothing'
          f' for {name} to act on; got {name}={value!r}. Leaving {name} out'
          ' would work.'
      )


def dtype_of(options: Mapping[str, Any], rngs: nnx.Rngs) -> Any:
  """Returns the dtype of parameters that a layer draws before all else."""
  initializers.check_rngs(rngs, 'params', required=True)
  settings.boolean(options.get('use_bias', True), 'use_bias')
  dtype = options.get('param_dtype', jnp.float32)
  checks.floating(dtype, 'param_dtype')
  return dtype


def check_cell_params(
    given: Mapping[str, nnx.Variable] | None, features: int
) -> None:
  """Raises ValueError for parameters that no optimiser or step could use."""
  for name, value in (given or {}).items():
    if not isinstance(value, nnx.Variable):
      raise ValueError(
          f'cell_params[{name!r}] must be an nnx.Param, got'
          f' {settings.a(type(value))}; nnx.Param(jnp.zeros(features)) would'
          ' work.'
      )
    shape = jnp.shape(value[...])
    if shape and shape[-1] not in (1, features):
      raise ValueError(
          f'cell_params[{name!r}] must be [..., {features}], with one number a'
          f' feature, or one for all; got the shape {shape}.'
      )
