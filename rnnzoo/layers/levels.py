"""Layers in depth, several at once: a wavefront.

A step of a layer needs the layer below up to that step, and no more. So time is
cut in parts, and while the lowest layer runs over part k, the next layer runs
over part k - 1:

    turn      1   2   3   4   5   6
    level 3           1   2   3   4
    level 2       1   2   3   4
    level 1   1   2   3   4

The levels of a turn need nothing of each other. One GPU kernel runs them, as
heads of one layer, where a single layer leaves multiprocessors idle. One
batched product makes the gates of all.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import api
from pallas_kernels import auto_axes
from pallas_kernels import devices
from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo import checks
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import choice
from rnnzoo.engines import paths
from rnnzoo.engines import products
from rnnzoo.engines import selection
from rnnzoo.engines import sharding
from rnnzoo.engines.scan import steps as scan_steps
from rnnzoo.layers import bidirectional
from rnnzoo.layers import recurrent
from rnnzoo.layers import sequence_layer

Array = jax.Array
Carry = cell_lib.Carry


# Most layers at once: each number of layers compiles a kernel more.
_MOST = 4


def count(
    layers: Sequence[sequence_layer.SequenceLayer],
    x: Array,
    call: call_lib.Call,
    flags: bool,
) -> int:
  """Returns how many layers, from the input up, may run at once.

  Args:
    layers: layers from the input up.
    x: inputs of the first layer.
    call: static options.
    flags: whether there are resets or masks.

  Raises:
    NotImplementedError: it is one, for the reason that it gives.
  """
  levels: list[Any] = _alike(layers)
  lowest = levels[0]
  lead = x.shape[:-1]
  time = lead[0] if call.time_major else lead[-1]
  selection.check_known(lead)
  dtype, state = lowest._dtype(x), lowest._state_dtype(x)
  one: Any = jax.ShapeDtypeStruct(lowest.recurrent_kernel.shape, dtype)
  parts = choice.parts_of_wavefront(time, one)
  batch = math.prod(lead) // time
  if batch == 0:
    raise NotImplementedError('There are no sequences.')
  # Without shardings: inside of `jax.shard_map` parameters may lie outside.
  graphdef, own = nnx.split(nnx.List(levels))
  own = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), own)

  def types(number, state_of_levels):
    levels = nnx.merge(graphdef, state_of_levels)[:number]
    params = [_params(level, state) for level in levels]
    kernels: Any = [level._recurrent_kernel(dtype) for level in levels]
    return (
        jax.tree.map(_side_by_side, *params),
        _joint([level.bias for level in levels]),
        jnp.concatenate(kernels, axis=1),
    )

  for number in range(min(len(levels), _MOST), 1, -1):
    params, bias, kernel = jax.eval_shape(functools.partial(types, number), own)
    if api.at_once(
        lowest.cell,
        params,
        bias,
        (batch, time),
        kernel,
        dataclasses.replace(call, levels=number, out_dtype=dtype),
        flags=flags or time % parts > 0,
    ):
      # Run five layers as 3 + 2, not 4 + 1.
      turns = -(-len(levels) // number)
      return -(-len(levels) // turns)
  raise NotImplementedError('The device does not hold two layers at once.')


def unroll(
    layers: Sequence[sequence_layer.SequenceLayer],
    given: tuple[Any, ...],
    above: Callable[[int, Array, Array, Array | None], Array],
    *,
    reverse: bool,
    time_major: bool,
) -> tuple[tuple[Carry, ...], Array]:
  """Runs some of the layers, from the input up, at once.

  Args:
    layers: layers from the input up.
    given: x, initial_carry, reset, seq_lengths and mask, as in `Stack.unroll`.
    above: (layer, inputs, outputs, valid steps or None) -> a layer's outputs as
      the next layer reads them; each step depends on this step alone.
    reverse: whether to run from the last step to the first.
    time_major: whether time is the first axis.

  Returns:
    The final carries of the layers that ran, and the outputs of the last layer.

  Raises:
    ValueError: an argument has the wrong shape or dtype.
    NotImplementedError: the layers differ in more than parameters, or no kernel
      can run them like this, or it does not pay.
  """
  x, initial_carry, *flags = given
  first: Any = layers[0]
  if not recurrent.is_plain(first):
    raise NotImplementedError('A layer has no recurrent kernel of blocks.')
  alike = _alike(layers)
  if sharding.is_sharded(layers, given):
    raise NotImplementedError('Arrays are over devices.')
  first._check_input(x, '[..., time, in_features]')
  call = first._call(reverse, time_major)
  lead = x.shape[:-1]
  steps, batch_shape = sequence_layer.time_and_batch(lead, time_major)
  for level, carry in zip(alike, initial_carry, strict=False):
    level._check_parameters()
    if carry is not None:
      level._check_carry(carry, batch_shape, 'initial_carry')
  reset, seq_lengths, mask = flags
  flags = [
      checks.flags(reset, lead, 'reset'),
      checks.lengths(seq_lengths, batch_shape, steps),
      checks.flags(mask, lead, 'mask'),
  ]
  if auto_axes.may_be_split((x, *flags)):
    raise NotImplementedError('Arrays may be over devices.')
  has_flags = any(flag is not None for flag in flags)
  levels: list[Any] = list(layers[: count(layers, x, call, has_flags)])
  initial_carry = initial_carry[: len(levels)]
  with promotion.ranks_allowed():
    wave = _Wavefront.of(levels, x, call)
    arrays = wave.arrays(x, batch_shape, initial_carry, flags)
    carries, y = wave.run_in_parts(above, arrays)
  path = selection.names(first.implementation, linear=False)[0]
  for level in levels:
    shape = *wave.lead, level.in_features
    choice.note(
        path,
        type(level.cell).__name__,
        shape,
        has_heads=True,
        at_once=len(levels),
    )
  shape = *batch_shape, first.out_features
  named = tuple(
      level._named(tuple(c.reshape(shape) for c in own), carry)
      for level, own, carry in zip(levels, carries, initial_carry, strict=True)
  )
  return named, y.reshape(*lead, y.shape[-1])


def _alike(layers) -> list[recurrent.RecurrentLayer]:
  """Returns the first layers, as long as they are alike; at least two."""
  devices.current()  # Nothing is put together where no kernel can run.
  first = layers[0]
  if not bidirectional.has_blocks(first):
    raise NotImplementedError('A layer has no recurrent kernel of blocks.')
  if not selection.is_kernel_first(first.implementation):
    raise NotImplementedError('Another path is tried before the kernels.')
  path = selection.names(first.implementation, linear=False)[0]
  if isinstance(path, selection.Pallas):
    if not path.wavefront:
      raise NotImplementedError('rnnzoo.Pallas(wavefront=False) says so.')
    if path.keep != 'gates':
      raise NotImplementedError(
          f'A wavefront keeps the gates, and keep is {path.keep!r}.'
      )
  levels = [first]
  for level in layers[1:]:
    if not bidirectional.has_blocks(level):
      break
    if bidirectional.static(level) != bidirectional.static(first):
      break
    levels.append(level)
  if len(levels) < 2:
    raise NotImplementedError('Layers differ in more than parameters.')
  return levels


class _Arrays(NamedTuple):
  """The arrays of a run: each level's arrays, and x and flags.

  Attributes:
    x: inputs of the lowest level, of the dtype of the products.
    carries: carry that each level starts from, each [B, F].
    restarts: carry that each level restarts from, each [B, F]; None for zeros.
    recurrent_kernels: R of each level, in float32 or wider: so the gradients of
      all parts are summed.
    biases: b of each level, in float32 or wider; or None.
    params: the cell's own parameters of each level.
    kernels: W of each level, [G, I, F], in float32 or wider.
    flags: reset, in the order of the loop, and mask, [B, T] or [T, B]; or None.
  """

  x: Array
  carries: list[Carry]
  restarts: list[Carry | None]
  recurrent_kernels: list[Array]
  biases: list[Array | None]
  params: list[dict[str, Array]]
  kernels: list[Array]
  flags: tuple[Array | None, Array | None]

  def of_levels(self, own: slice) -> '_Arrays':
    """Returns the arrays of some levels that a turn reads."""
    return self._replace(
        restarts=self.restarts[own],
        recurrent_kernels=self.recurrent_kernels[own],
        biases=self.biases[own],
        params=self.params[own],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wavefront:
  """All but the arrays of a run.

  Attributes:
    levels: the layers; of their parameters only shapes are read.
    call: static options.
    parts: number of parts of time, of as many steps each; the last one is
      padded, and its padding masked.
    lead: [B, T], or [T, B].
  """

  levels: list[recurrent.RecurrentLayer]
  call: call_lib.Call
  parts: int
  lead: tuple[int, int]

  @classmethod
  def of(cls, levels, x, call: call_lib.Call) -> '_Wavefront':
    """Returns the run of some layers over inputs x of the lowest."""
    dtype = levels[0]._dtype(x)
    lead = x.shape[:-1]
    time = lead[0] if call.time_major else lead[-1]
    batch = math.prod(lead) // time
    kernel: Any = levels[0].recurrent_kernel
    cast: Any = jax.ShapeDtypeStruct(kernel.shape, dtype)
    return cls(
        levels=levels,
        call=dataclasses.replace(call, out_dtype=dtype, cast_kernel=True),
        parts=choice.parts_of_wavefront(time, cast),
        lead=(time, batch) if call.time_major else (batch, time),
    )

  def arrays(self, x, batch_shape, initial_carry, flags) -> _Arrays:
    """Returns the arrays of a run.

    Args:
      x: inputs of the lowest level.
      batch_shape: leading axes of the input.
      initial_carry: first carry of each level, or None.
      flags: reset, seq_lengths and mask.
    """
    levels, axis = self.levels, 0 if self.call.time_major else 1
    dtype, state = self.call.out_dtype, levels[0]._state_dtype(x)
    reset, lengths, mask = flags
    reset, mask = (
        f if f is None else f.reshape(self.lead) for f in (reset, mask)
    )
    if lengths is not None:
      number = lax.broadcasted_iota(jnp.int32, self.lead, axis)
      valid = number < jnp.expand_dims(lengths.reshape(-1), axis)
      mask = valid if mask is None else mask & valid
      reset = None if reset is None else reset & valid
    if reset is not None:
      reset = scan_steps.boundary(reset, self.call.reverse, axis)
    carries, restarts = self._carries(initial_carry, batch_shape, x)
    return _Arrays(
        x=x.astype(dtype).reshape(*self.lead, x.shape[-1]),
        carries=carries,
        restarts=restarts,
        recurrent_kernels=[_recurrent_kernel(v, dtype, x) for v in levels],
        biases=[
            None
            if level.bias is None
            else devices.like(level.bias[...], x).astype(state)
            for level in levels
        ],
        params=[_params(level, state, x) for level in levels],
        kernels=[devices.like(v.kernel[...], x).astype(state) for v in levels],
        flags=(reset, mask),
    )

  def run_in_parts(self, above, arrays: _Arrays) -> tuple[list[Carry], Array]:
    """Returns the final carries, each [B, F], and the last level's outputs.

    Args:
      above: makes inputs of the next layer, as in `unroll`.
      arrays: arrays of the run.
    """
    count, dtype = len(self.levels), self.call.out_dtype
    axis = 0 if self.call.time_major else 1
    reset, mask = arrays.flags
    if mask is None and self.lead[axis] % self.parts:
      mask = devices.like(jnp.ones(self.lead, bool), arrays.x)
    inputs, reset, masks = (
        _cut(array, self.parts, axis) for array in (arrays.x, reset, mask)
    )
    valid_in = lambda part: None if masks is None else masks[part]
    carries, kernels = list(arrays.carries), _gates_side_by_side(arrays.kernels)
    order = range(self.parts)
    order = order[::-1] if self.call.reverse else order
    waiting: list[Any] = [None] * count
    outputs: list[Any] = [None] * self.parts
    for turn in range(self.parts + count - 1):
      active = [i for i in range(count) if 0 <= turn - i < self.parts]
      places = [order[turn - i] for i in active]
      for i in active:
        if i:
          self.levels[i]._check_input(waiting[i], '[..., time, in_features]')
      if active[0] == 0:
        x, valid = inputs[places[0]], valid_in(places[0])
        waiting[0] = x if valid is None else scan_steps.where(valid, x, 0)
      own = slice(active[0], active[-1] + 1)
      chosen = lambda array, places=places: (
          None if array is None else [array[place] for place in places]
      )
      carries[own], y = self._turn(
          arrays.of_levels(own),
          kernels[own],
          waiting[own],
          carries[own],
          (chosen(reset), chosen(masks)),
      )
      for i, place, y_i in reversed(list(zip(active, places, y, strict=True))):
        valid = valid_in(place)
        y_i = y_i if valid is None else scan_steps.where(valid, y_i, 0)
        y_i = above(i, waiting[i], y_i, valid)
        if i + 1 < count:
          waiting[i + 1] = y_i.astype(dtype)
        else:
          outputs[place] = y_i
    y = lax.slice_in_dim(
        jnp.concatenate(outputs, axis), 0, self.lead[axis], axis=axis
    )
    return carries, y

  def _turn(
      self, arrays: _Arrays, kernels, inputs, carries, flags
  ) -> tuple[list[Carry], Array]:
    """Runs some levels, each over its part.

    Args:
      arrays: arrays of these levels.
      kernels: W of each level, [L, I, G F].
      inputs: inputs of each level, of its part.
      carries: carry of each level.
      flags: reset of each level, and mask; or None.

    Returns:
      Their carries after the turn, and outputs [L, B, T, F].
    """
    lowest, count = self.levels[0], len(inputs)
    several = count > 1
    depth = kernels.shape[1]
    widened = [
        jnp.pad(z, ((0, 0), (0, 0), (0, depth - z.shape[-1]))) for z in inputs
    ]
    with jax.named_scope('projection'):
      gates = products.project_levels(kernels, jnp.stack(widened))
    gates = gates.reshape(*gates.shape[:-1], -1, lowest.out_features)
    reset, mask = (
        f if f is None else jnp.stack(f) if several else f[0] for f in flags
    )
    restarts: list[Any] = arrays.restarts
    operands = call_lib.Operands(
        params=jax.tree.map(_side_by_side, *arrays.params),
        weights=(_joint(arrays.biases),),
        x=gates if several else gates[0],
        recurrent_kernel=jnp.concatenate(arrays.recurrent_kernels, axis=1),
        carry=tuple(map(_side_by_side, *carries)),
        restart=None
        if restarts[0] is None
        else tuple(map(_side_by_side, *restarts)),
        reset=reset,
        mask=mask,
    )
    call = dataclasses.replace(self.call, levels=count)
    with jax.named_scope('recurrence'):
      carry, (y,) = _run_levels(
          lowest.cell, operands, call, lowest.implementation
      )
    split = zip(*(jnp.split(c, count, axis=-1) for c in carry), strict=True)
    return list(split), y if several else y[None]

  def _carries(self, given, batch_shape, x) -> tuple[list[Any], list[Any]]:
    """Returns the carry that each level starts from, and restarts from."""
    batch, lowest = math.prod(batch_shape), self.levels[0]
    state = lowest._state_dtype(x)
    rows = lambda carry: tuple(
        c.astype(state).reshape(batch, lowest.out_features) for c in carry
    )
    starts = [
        rows(level._initial_carry(batch_shape, state, x))
        for level in self.levels
    ]
    restarts = starts if lowest.learned_carry else [None] * len(starts)
    carries = [
        start if carry is None else rows(carry)
        for start, carry in zip(starts, given, strict=True)
    ]
    return carries, restarts


# Turns with as many levels share a trace.
_run_levels = jax.jit(
    paths.run_levels, static_argnames=('cell', 'call', 'implementation')
)


def _cut(array: Array | None, parts: int, axis: int) -> Any:
  """Returns the parts of an array over time, padded with zeros; or None."""
  if array is None:
    return None
  length = -(-array.shape[axis] // parts)
  missing = [(0, 0)] * array.ndim
  missing[axis] = (0, parts * length - array.shape[axis])
  array = jnp.pad(array, missing)
  return [
      lax.slice_in_dim(array, start, start + length, axis=axis)
      for start in range(0, parts * length, length)
  ]


def _side_by_side(*arrays: Array) -> Array:
  return jnp.concatenate(arrays, axis=-1)


def _joint(biases: Sequence[Any]) -> Array | None:
  """Returns the biases of some layers side by side; None where none has one."""
  if biases[0] is None:
    return None
  return _side_by_side(*(bias[...] for bias in biases))


def _params(level, state, x=None) -> dict[str, Array]:
  """Returns a cell's own parameters, with one number for each feature."""
  return {
      name: jnp.broadcast_to(v, (*v.shape[:-1], level.out_features))
      for name, v in level._cell_params(state, x).items()
  }


def _recurrent_kernel(level, dtype, x) -> Array:
  """Returns R as it is used, before it is cast to a dtype."""
  kernel = devices.like(level.recurrent_kernel[...], x)
  return level._structured(kernel, dtype).astype(promotion.wide(dtype))


def _gates_side_by_side(kernels: Sequence[Array]) -> Array:
  """Returns W of each, [L, I, G F], with rows of zeros where I is less."""
  most = max(kernel.shape[1] for kernel in kernels)

  def side_by_side(kernel):
    gates, depth, features = kernel.shape
    kernel = jnp.moveaxis(kernel, 0, 1).reshape(depth, gates * features)
    return jnp.pad(kernel, ((0, most - depth), (0, 0)))

  return jnp.stack([side_by_side(kernel) for kernel in kernels])
