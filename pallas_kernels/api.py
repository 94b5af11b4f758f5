"""`recurrence`: any cell's update over time, with derivatives.

A cell comes in as an argument, with equations and no name. Two facts choose the
kernels that run it:

* a cell that is linear in its carry has `coefficients`: `streaming/linear.py`;
* a diagonal recurrent kernel has blocks of 1 x 1: `streaming/diagonal.py`. All
  other recurrent kernels go to `dense/`, where a cell that has an `operand`
  gets a second product, or with many rows of one large head to `tiled/`.

`step` makes of a cell the functions that kernels call.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, Protocol

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import arguments
from pallas_kernels import auto_axes
from pallas_kernels import call as call_lib
from pallas_kernels import devices
from pallas_kernels import projection
from pallas_kernels import step
from pallas_kernels.tiled import choice
from pallas_kernels.tiled import limits

Array = jax.Array
Carry = tuple[Array, ...]


_DEFAULT = call_lib.Call()


class Cell(Protocol):
  """The methods of all cells; equal cells share a compilation.

  A linear cell also has `coefficients(params, x_gates)`, which is then used
  instead of `update`, and one with two dependent products has `operand`.
  """

  input_gates: int
  recurrent_gates: int
  carry_names: tuple[str, ...]

  def update(self, params, x_gates, h_gates, carry) -> Carry:
    """Returns the carry after one step, pointwise in batch and feature."""


def in_tiles(
    cell: Any,
    lead: tuple[int, int],
    recurrent_kernel: Any,
    call: call_lib.Call,
) -> bool:
  """Returns whether a recurrence here would run by the kernels in tiles.

  Args:
    cell: the equations.
    lead: (B, T).
    recurrent_kernel: [G', N, D, D]; its shape and dtype are read.
    call: static options.
  """
  try:
    target = devices.current()
  except NotImplementedError:
    return False
  rows, time = lead
  return choice.pay(
      target,
      recurrent_kernel,
      rows=rows,
      time=time,
      gates=cell.input_gates,
      states=len(cell.carry_names),
      two_stages=hasattr(cell, 'operand'),
      call=call,
  )


def at_once(
    cell: Any,
    params: Mapping[str, Any],
    bias: Any,
    lead: tuple[int, int],
    recurrent_kernel: Any,
    call: call_lib.Call,
    *,
    flags: bool,
) -> bool:
  """Returns whether the device holds all of a dense recurrence at once.

  Args:
    cell: the equations.
    params: the cell's parameters, or their types.
    bias: the bias of the input gates, or its type.
    lead: (B, T).
    recurrent_kernel: R, or its type; x has its dtype.
    call: static options.
    flags: whether there are resets or masks.

  Raises:
    NotImplementedError: no kernel can run it.
  """
  from pallas_kernels.dense import op as dense_op

  kernel = recurrent_kernel
  features = kernel.shape[1] * kernel.shape[2]
  rows = step.Rows.of(params, bias, None, features)
  dense = _dense(cell, rows, lead, kernel, call, devices.current())
  x = jax.ShapeDtypeStruct((*lead, cell.input_gates, features), kernel.dtype)
  return dense_op.at_once(
      dense, x, kernel, states=len(cell.carry_names), flags=flags
  )


def _dense(
    cell: Any,
    rows: step.Rows,
    lead: tuple[int, int],
    recurrent_kernel: Any,
    call: call_lib.Call,
    target: devices.Target,
) -> Any:
  """Returns the static facts of a recurrence with a dense kernel."""
  from pallas_kernels.dense import op as dense_op

  method = lambda name: step.Gated(name, cell, rows)
  return dense_op.Recurrence(
      update=method('update'),
      operand=method('operand') if hasattr(cell, 'operand') else None,
      params=rows.count,
      shape=(*lead, *recurrent_kernel.shape[1:3]),
      call=call,
      target=target,
  )


def recurrence(
    cell: Cell,
    params: Mapping[str, Array],
    x_gates: Array | Sequence[Array],
    recurrent_kernel: Array | None,
    carry: Carry | None,
    *,
    input_kernel: Array | None = None,
    bias: Array | None = None,
    restart: Carry | None = None,
    reset: Array | None = None,
    mask: Array | None = None,
    call: call_lib.Call = _DEFAULT,
) -> tuple[Carry, Carry]:
  """Computes carry_t = update(x_t, R h_{t-1}, carry_{t-1}) on the GPU.

  Every array is read and written once, in the layout that it has. Rows of
  features have to start at multiples of 16 bytes, and tiles have whole slices:
  where features do not fill them, x_gates, or W and x, and R are copied once.

  Args:
    cell: the equations.
    params: the cell's own parameters by name, each [..., F].
    x_gates: input gates, [B, T, G, F] or a sequence of arrays [B, T, F] and
      [B, T, g, F] that have G gates in all; float32, bfloat16 or float16. With
      `input_kernel` its operand, [B, T, I]. With `call.levels` = L, [L, B, T,
      G, F / L] and no `input_kernel`.
    recurrent_kernel: [G', N, D, D] with N D = F, or None for a cell without
      recurrent gates.
    carry: state before the first step, each [B, F]; None for zeros, which a
      linear recurrence then does not read.
    input_kernel: W, [G, I, F], or None; cast to the dtype of x_gates.
    bias: added to the input gates, [G, F], or None.
    restart: state after a reset, each [B, F]; zeros if None.
    reset: bool [B, T], also where x is time-major; where true, the carry
      restarts before the step, in the order of the loop. With
      `call.both_directions` [2, B, T], one for each half of the heads, in the
      order of its loop; with `call.levels` [L, B, T].
    mask: bool [B, T], also where x is time-major; where false, the carry is
      held over the step. With `call.levels` [L, B, T].
    call: static options. `out_dtype` is the dtype of the outputs and of the
      carries that are saved for the backward pass, x's dtype if None; the carry
      inside the kernel is float32. A diagonal recurrent kernel takes neither
      `both_directions` nor options for the recurrent gradient, and may have no
      outputs. Without `keep_gates`, W and its operand are kept for the backward
      pass instead of their product; x_gates that are given as such are kept.

  Returns:
    The final carry, each float32 [B, F], and the first `call.outputs` arrays
    of the carry after every step, each [B, T, F], or [L, B, T, F / L].

  Raises:
    ValueError: an argument has the wrong shape or dtype.
    NotImplementedError: the device, the jax version, a dtype, a size or the
      cell is one that the kernels cannot run; or a second derivative is asked
      for.
  """
  target = devices.current()
  arrays = x_gates if isinstance(x_gates, (list, tuple)) else (x_gates,)
  if call.levels > 1:
    arrays = [_level_by_level(x_gates, input_kernel, call)]
  out_dtype = jnp.dtype(call.out_dtype or arrays[0].dtype)
  call = dataclasses.replace(call, out_dtype=out_dtype)
  arguments.dtypes('recurrence', [*(x.dtype for x in arrays), out_dtype])
  weights = params, input_kernel, bias, recurrent_kernel
  operands = weights, arrays, carry, restart, reset, mask
  arguments.unsharded('recurrence', operands)
  weights, arrays, carry, restart, reset, mask = devices.alike(operands)
  params, input_kernel, bias, recurrent_kernel = weights
  shape = arguments.checked_shape(
      cell, call, weights, arrays, carry, restart, reset, mask
  )
  is_dense = arguments.is_dense(cell, recurrent_kernel)
  prepare = _prepare_dense if is_dense else _prepare_streaming
  given = weights, arrays, carry, restart, reset, mask
  run, operands = prepare(cell, call, target, shape, *given)
  last, carries = run(*operands)
  if call.levels > 1:
    lead = call.levels, *arrays[0].shape[:2]
    carries = tuple(y.reshape(*lead, -1) for y in carries)
  return tuple(last), carries


def _prepare_dense(
    cell, call, target, shape, weights, arrays, carry, restart, reset, mask
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Returns the function that runs a dense recurrence, and its operands."""
  # Pallas's GPU backend is imported where it is known to work.
  from pallas_kernels.dense import op as dense_op
  from pallas_kernels.tiled import op as tiled_op

  if target.interpret:
    raise NotImplementedError(
        'The kernels for dense recurrences cannot be interpreted on a CPU.'
    )
  params, input_kernel, bias, recurrent_kernel = weights
  batch, time, features = shape
  dtype = jnp.promote_types(arrays[0].dtype, recurrent_kernel.dtype)
  widest = jax.ShapeDtypeStruct(recurrent_kernel.shape, dtype)
  tiled = in_tiles(cell, (batch, time), widest, call)
  heads, size = recurrent_kernel.shape[1:3]
  # Rows of a head have to start at multiples of 16 bytes.
  padded = limits.padded(size) if tiled else -(-size // 8) * 8
  gates = max(cell.input_gates, recurrent_kernel.shape[0])
  most = limits.rows_at_once(batch, time, gates, heads * padded)
  if tiled and most < batch:
    by_row = arrays, carry, restart, reset, mask
    if auto_axes.may_be_split((weights, by_row)):
      raise NotImplementedError(
          f'GPU kernels in tiles take {most:,} rows of this recurrence at'
          f' once, got {batch:,}. They split a batch on one device, not one'
          ' that XLA may shard: use shard_map or Explicit axes.'
      )
    shared = cell, params, recurrent_kernel, input_kernel, bias
    return _in_parts, (most, shared, by_row, call)
  learns = restart is not None
  rows = step.Rows.of(params, bias, None, features)
  theta = rows.pack(params, bias, None)
  carry, restart = (_stacked(cell, each, shape) for each in (carry, restart))
  x = _join(arrays) if input_kernel is None else arrays[0]
  run = tiled_op.run if tiled else dense_op.run
  if padded > size:
    pad = functools.partial(projection.pad, size=padded)
    # New units are copies of a head's last one, whose values the equations are
    # made for; zeros may not be. R takes nothing of them.
    by_head = functools.partial(pad, heads=heads)
    theta, carry, restart = map(by_head, (theta, carry, restart))
    recurrent_kernel = pad(recurrent_kernel, heads=1)
    recurrent_kernel = jnp.pad(
        recurrent_kernel, ((0, 0), (0, 0), (0, padded - size), (0, 0))
    )
    if input_kernel is None:
      x = by_head(x)
    else:
      input_kernel = by_head(input_kernel)
    run = functools.partial(_cut, run, heads, size)
  if input_kernel is not None:
    if tiled and (missing := -x.shape[-1] % limits.slice_of_inputs(batch)):
      # A kernel may multiply W x, in whole slices.
      x = jnp.pad(x, ((0, 0), (0, 0), (0, missing)))
      input_kernel = jnp.pad(input_kernel, ((0, 0), (0, missing), (0, 0)))
    project = call.keep_gates and not tiled
    form = projection.project if project else projection.Product
    x = form(input_kernel, x)
  dense = dataclasses.replace(
      _dense(cell, rows, (batch, time), recurrent_kernel, call, target),
      restart_learns=learns,
  )
  return run, (dense, theta, x, recurrent_kernel, carry, restart, reset, mask)


def _cut(run: Callable[..., Any], heads: int, size: int, *operands):
  """Runs a recurrence with padding, and cuts its results."""
  return jax.tree.map(lambda y: projection.cut(y, heads, size), run(*operands))


def _prepare_streaming(
    cell, call, target, shape, weights, arrays, carry, restart, reset, mask
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Returns the function that runs any other recurrence, and its operands."""
  from pallas_kernels.streaming import op as streaming_op

  params, input_kernel, bias, recurrent_kernel = weights
  linear = hasattr(cell, 'coefficients')
  rows = step.Rows.of(params, bias, recurrent_kernel, shape[-1])
  equations = step.Coefficients if linear else step.Update
  streaming = streaming_op.Recurrence(
      step=equations(cell, rows),
      linear=linear,
      states=len(cell.carry_names),
      params=rows.count,
      reads_starts=getattr(cell, 'reads_starts', False),
      shape=shape,
      call=call,
      target=target,
  )
  return streaming_op.run, (
      streaming,
      rows.pack(params, bias, recurrent_kernel),
      tuple(arrays),
      input_kernel,
      _stacked(cell, carry, shape),
      _stacked(cell, restart, shape),
      reset,
      mask,
  )


def _level_by_level(x_gates: Any, input_kernel: Any, call: call_lib.Call):
  """Returns gates [L, B, T, G, F / L] as one array [B, T, G, F]."""
  shape = jnp.shape(x_gates) if not isinstance(x_gates, (list, tuple)) else ()
  if len(shape) != 5 or shape[0] != call.levels or input_kernel is not None:
    raise ValueError(
        'x_gates must be one array [levels, batch, time, gates, features] with'
        f' levels = {call.levels}, without an input_kernel; got {shape}.'
    )
  levels, *lead, gates, features = shape
  return x_gates.reshape(*lead, gates, levels * features)


def _in_parts(
    rows: int, shared: tuple[Any, ...], by_row: Any, call: call_lib.Call
) -> tuple[Carry, Carry]:
  """Runs a recurrence for some rows of the batch at a time.

  Args:
    rows: number of rows of a part.
    shared: cell, params, recurrent_kernel, input_kernel and bias.
    by_row: x_gates, carry, restart, reset and mask.
    call: static options.
  """
  cell, params, recurrent_kernel, input_kernel, bias = shared
  of_inputs = int(call.time_major)

  def split(tree: Any, axis: int) -> list[Any]:
    leaves, structure = jax.tree.flatten(tree)
    batch = by_row[0][0].shape[of_inputs]
    sizes = [min(rows, batch - start) for start in range(0, batch, rows)]
    parts = [lax.split(leaf, sizes, axis) for leaf in leaves]
    of_part = lambda i: jax.tree.unflatten(structure, [p[i] for p in parts])
    return list(map(of_part, range(len(sizes))))

  x_gates, *others = by_row
  results = [
      recurrence(
          cell,
          params,
          gates,
          recurrent_kernel,
          carry,
          input_kernel=input_kernel,
          bias=bias,
          restart=restart,
          reset=reset,
          mask=mask,
          call=call,
      )
      for gates, (carry, restart, reset, mask) in zip(
          split(x_gates, of_inputs), split(others, 0), strict=True
      )
  ]
  last, carries = zip(*results, strict=True)
  join = lambda axis, parts: jax.tree.map(
      lambda *leaves: lax.concatenate(leaves, axis), *parts
  )
  return join(0, last), join(of_inputs, carries)


def _stacked(
    cell: Cell, carry: Carry | None, shape: tuple[int, int, int]
) -> Any:
  """Returns a carry as float32 [S, B, F]; None for a linear cell's zeros."""
  if carry is not None:
    return jnp.stack([x.astype(jnp.float32) for x in carry])
  if hasattr(cell, 'coefficients'):
    return None
  batch, _, features = shape
  return jnp.zeros((len(cell.carry_names), batch, features), jnp.float32)


def _join(arrays: Sequence[Array]) -> Array:
  """Joins arrays [B, T, F] and [B, T, g, F] to one [B, T, G, F]."""
  if len(arrays) == 1 and arrays[0].ndim == 4:
    return arrays[0]
  whole = [x if x.ndim == 4 else x[:, :, None] for x in arrays]
  return jnp.concatenate(whole, axis=2)


# `linear_scan`: h_t = a_t h_{t-1} + b_t as an operation of its own.


def linear_scan(
    a: Array,
    b: Array,
    h0: Array | None = None,
    *,
    reset: Array | None = None,
    reverse: bool = False,
    time_major: bool = False,
) -> Array:
  """Computes h_t = a_t h_{t-1} + b_t on the GPU.

  One read of a and b, one write of h; the gradient reads a, h and its own
  cotangent once and writes two. Sums are float32.

  Args:
    a: [B, T, F], or [F] if it is free of time and batch; float32, bfloat16,
      float16 or complex64.
    b: [B, T, F].
    h0: h before the first step, [B, F]; zeros if None.
    reset: bool [B, T], also where arrays are time-major; where true, h restarts
      from zero before the step, in the order of the loop.
    reverse: run from the last step to the first.
    time_major: a, b and h are [T, B, F] instead.

  Returns:
    h, [B, T, F], in the dtype that a and b promote to.

  Raises:
    ValueError: an argument has the wrong shape or dtype.
    NotImplementedError: the device, the jax version, a dtype or a size is one
      that the kernels cannot run; or a second derivative is asked for.
  """
  _, h = _run(a, b, h0, reset, reverse, time_major)
  return h[0] if len(h) == 1 else lax.complex(*h)


def last(
    a: Array, b: Array, *, reset: Array | None = None, reverse: bool = False
) -> Array:
  """Computes h after the last step, from h = 0, for parts of a sequence.

  Args:
    a: factors of `linear_scan`, [B, T, F].
    b: [B, T, F].
    reset: bool [B, T].
    reverse: run from the last step to the first.

  Returns:
    h, float32 [B, F].
  """
  return _run(a, b, None, reset, reverse, False)[0][0]


def adjoint(
    a: Array,
    b: Array,
    h0: Array,
    h: Array,
    d_last: Array,
    d_h: Array,
    *,
    reset: Array | None = None,
    reverse: bool = False,
) -> tuple[Array, Array, Array]:
  """Computes the gradient of `linear_scan` alone, for parts of a sequence.

  Args:
    a: factors of `linear_scan`, [B, T, F].
    b: [B, T, F]; not read.
    h0: [B, F].
    h: the result, [B, T, F].
    d_last: a further cotangent of h after the last step, [B, F].
    d_h: cotangent of h, [B, T, F].
    reset: bool [B, T].
    reverse: whether the steps ran from the last to the first.

  Returns:
    The cotangents of a, b and h0, the last in float32.
  """
  operands = devices.alike((a, b, h0, reset, h, d_last, d_h))
  a, b, h0, reset, h, d_last, d_h = operands
  recurrence, theta, arrays, h0 = _checked(a, b, h0, reset, reverse, False)
  from pallas_kernels.streaming import op as streaming_op

  d_last = d_last.astype(jnp.float32)[None]
  (d_a, d_b), d_h0 = streaming_op.linear_adjoint_of(
      recurrence, theta, arrays, h0, reset, h, d_last, d_h
  )
  return d_a, d_b, d_h0[0]


def _run(a, b, h0, reset, reverse, time_major):
  """Returns the last h, each [B, F], and a tuple of all."""
  a, b, h0, reset = devices.alike((a, b, h0, reset))
  checked = _checked(a, b, h0, reset, reverse, time_major)
  recurrence, theta, arrays, h0 = checked
  # Pallas's GPU backend is imported where it is known to work.
  from pallas_kernels.streaming import op as streaming_op

  return streaming_op.run(
      recurrence,
      theta,
      arrays,
      input_kernel=None,
      carry=h0,
      restart=None,
      reset=reset,
      mask=None,
  )


def _checked(a, b, h0, reset, reverse, time_major):
  """Returns static arguments, theta, arrays and h0, for `streaming.op`."""
  target = devices.current()
  if b.ndim != 3:
    raise ValueError(f'b must be [batch, time, features], got {b.shape}.')
  is_free = a.ndim == 1
  expected = b.shape[-1:] if is_free else b.shape
  arguments.shape('a', a, 'like b, or [features]', expected)
  dtype = jnp.result_type(a, b)
  is_complex = dtype == jnp.complex64
  if not is_complex:
    arguments.dtypes('linear_scan', (a.dtype, b.dtype))
  arguments.unsharded('linear_scan', (a, b, h0, reset))
  from pallas_kernels.streaming import op as streaming_op

  batch, time, features = b.shape
  if time_major:
    batch, time = time, batch
  arguments.sizes('linear_scan', batch, time, features)
  if is_complex and b.size >= 2**31:
    raise NotImplementedError(
        'linear_scan on the GPU takes fewer than 2^31 complex numbers, got'
        f' {b.size:,}: split the batch.'
    )
  arguments.flags('reset', reset, batch, time)
  # Complex numbers are pairs; interpreted kernels have arrays of either part.
  parts = lambda x: [x.real, x.imag] if is_complex else [x]
  if h0 is not None:
    arguments.shape('h0', h0, '[batch, features]', (batch, features))
    h0 = jnp.stack(parts(h0)).astype(jnp.float32)
  a, b = (x.astype(dtype) if is_complex else x for x in (a, b))
  arrays = (b,) if is_free else (a, b)
  if is_complex and target.interpret:
    arrays = tuple(part for x in arrays for part in parts(x))
    dtype = jnp.dtype(jnp.float32)
  theta = jnp.zeros((1, features), jnp.float32)
  if is_free:
    theta = jnp.stack(parts(a)).astype(jnp.float32)
  states = 2 if is_complex else 1
  recurrence = streaming_op.Recurrence(
      step=_Coefficients(states, is_free),
      linear=True,
      states=states,
      params=states if is_free else 0,
      shape=(batch, time, features),
      call=call_lib.Call(
          reverse=reverse,
          time_major=time_major,
          outputs=states,
          out_dtype=dtype,
      ),
      target=target,
  )
  return recurrence, theta, arrays, h0


@dataclasses.dataclass(frozen=True)
class _Coefficients:
  """(theta, inputs) -> (A, b) of a plain scan.

  Attributes:
    states: 2 where numbers are complex, else 1.
    is_free: whether A is free of time, in theta, or an input.
  """

  states: int
  is_free: bool

  def __call__(self, theta, row):
    a = tuple(theta if self.is_free else row[: self.states])
    return a if self.states == 2 else a[0], tuple(row[-self.states :])
