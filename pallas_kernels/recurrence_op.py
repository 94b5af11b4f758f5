"""`recurrence`: any cell's update over time, with derivatives.

A cell comes in as an argument, with equations and no name. Two facts choose the
kernels that run it:

* a cell that is linear in its carry has `coefficients`: `streaming/linear.py`;
* a diagonal recurrent kernel has blocks of 1 x 1: `streaming/diagonal.py`. All
  other recurrent kernels go to `dense/`, where a cell that has an `operand`
  gets a second product, or with many rows of one large head to `tiled/`.

`cell_rows` makes of a cell the functions that kernels call.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import arguments
from pallas_kernels import call as call_lib
from pallas_kernels import cell_rows
from pallas_kernels import projection
from pallas_kernels import sharding
from pallas_kernels import targets
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
    target = targets.current()
  except NotImplementedError:
    return False
  rows, time = lead
  return limits.pay(
      target,
      recurrent_kernel,
      rows=rows,
      time=time,
      gates=cell.input_gates,
      two_stages=hasattr(cell, 'operand'),
      call=call,
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
  features have to start at multiples of 16 bytes: where features do not fill
  them, x_gates are copied once to do so.

  Args:
    cell: the equations.
    params: the cell's own parameters by name, each [..., F].
    x_gates: input gates, [B, T, G, F] or a sequence of arrays [B, T, F] and
      [B, T, g, F] that have G gates in all; float32, bfloat16 or float16. With
      `input_kernel` its operand, [B, T, I].
    recurrent_kernel: [G', N, D, D] with N D = F, or None for a cell without
      recurrent gates.
    carry: state before the first step, each [B, F]; None for zeros, which a
      linear recurrence then does not read.
    input_kernel: W, [G, I, F], or None; cast to the dtype of x_gates. A linear
      recurrence of inputs in 16 bits multiplies and scans in one kernel, where
      that is faster.
    bias: added to the input gates, [G, F], or None.
    restart: state after a reset, each [B, F]; zeros if None.
    reset: bool [B, T], also where x is time-major; where true, the carry
      restarts before the step, in the order of the loop. With
      `call.both_directions` [2, B, T], one for each half of the heads, in the
      order of its loop.
    mask: bool [B, T], also where x is time-major; where false, the carry is
      held over the step.
    call: static options. `out_dtype` is the dtype of the outputs and of the
      carries that are saved for the backward pass, that of x if None; the carry
      inside the kernel is float32. A diagonal recurrent kernel takes neither
      `both_directions` nor options for the recurrent gradient, and may have no
      outputs. Without `keep_gates`, W and its operand are kept for the backward
      pass instead of their product; x_gates that are given as such are kept.

  Returns:
    The final carry, each float32 [B, F], and the first `call.outputs` arrays
    of the carry after every step, each [B, T, F].

  Raises:
    ValueError: an argument has the wrong shape or dtype.
    NotImplementedError: the device, the jax version, a dtype, a size or the
      cell is one that the kernels cannot run; or a second derivative is asked
      for.
  """
  target = targets.current()
  arrays = x_gates if isinstance(x_gates, (list, tuple)) else (x_gates,)
  out_dtype = jnp.dtype(call.out_dtype or arrays[0].dtype)
  call = dataclasses.replace(call, out_dtype=out_dtype)
  arguments.dtypes('recurrence', [*(x.dtype for x in arrays), out_dtype])
  weights = params, input_kernel, bias, recurrent_kernel
  operands = weights, arrays, carry, restart, reset, mask
  arguments.unsharded('recurrence', operands)
  weights, arrays, carry, restart, reset, mask = sharding.alike(operands)
  params, input_kernel, bias, recurrent_kernel = weights
  linear = hasattr(cell, 'coefficients')
  batch, time, features = _checked_sizes(cell, call, weights, arrays)
  if carry is not None:
    arguments.carry('carry', carry, cell.carry_names, batch, features)
  if restart is not None:
    arguments.carry('restart', restart, cell.carry_names, batch, features)
  arguments.flags('reset', reset, batch, time, call.both_directions)
  arguments.flags('mask', mask, batch, time)
  dense_kernel = recurrent_kernel if cell.recurrent_gates else None
  if dense_kernel is not None and _is_diagonal(cell, dense_kernel):
    least, dense_kernel = 0, None
  else:
    least = 1
  if not least <= call.outputs <= len(cell.carry_names):
    raise ValueError(
        f'outputs must be {least} to {len(cell.carry_names)} for'
        f' {type(cell).__name__}, got {call.outputs}.'
    )

  def stack(xs):
    if xs is not None:
      return jnp.stack([x.astype(jnp.float32) for x in xs])
    if linear:
      return None
    return jnp.zeros((len(cell.carry_names), batch, features), jnp.float32)

  # Pallas's GPU backend is imported where it is known to work.
  if dense_kernel is not None:
    from pallas_kernels.dense import op as dense_op
    from pallas_kernels.tiled import op as tiled_op

    if targets.current().interpret:
      raise NotImplementedError(
          'The kernels for dense recurrences cannot be interpreted on a CPU.'
      )
    x: Array | projection.Product
    if input_kernel is None:
      x = _join(arrays)
    elif call.keep_gates:
      x = projection.project(input_kernel, arrays[0])
    else:
      x = projection.Product(input_kernel, arrays[0])
    rows = cell_rows.Rows.of(params, bias, None, features)
    heads, size = dense_kernel.shape[1:3]
    if call.both_directions and heads % 2:
      raise ValueError(
          f'both_directions needs an even number of heads, got {heads}.'
      )
    recurrence = dense_op.Recurrence(
        update=cell_rows.Gated('update', cell, rows),
        operand=(
            cell_rows.Gated('operand', cell, rows)
            if hasattr(cell, 'operand')
            else None
        ),
        params=rows.count,
        shape=(batch, time, heads, size),
        call=call,
        target=target,
        restart_learns=restart is not None,
    )
    dtype = jnp.promote_types(arrays[0].dtype, dense_kernel.dtype)
    widest = jax.ShapeDtypeStruct(dense_kernel.shape, dtype)
    tiled = in_tiles(cell, (batch, time), widest, call)
    run = tiled_op.run if tiled else dense_op.run
    last, carries = run(
        recurrence,
        rows.pack(params, bias, None),
        x,
        dense_kernel,
        stack(carry),
        stack(restart),
        reset,
        mask,
    )
    return tuple(last), carries
  if (
      call.recurrent_gradient_clip is not None
      or call.stop_recurrent_gradient
      or call.both_directions
  ):
    raise NotImplementedError(
        'GPU kernels have recurrent_gradient_clip, stop_recurrent_gradient and'
        ' both_directions for recurrent kernels that are not diagonal only.'
    )
  from pallas_kernels.streaming import op as streaming_op

  rows = cell_rows.Rows.of(params, bias, recurrent_kernel, features)
  step: Callable[..., Any]
  step = (
      cell_rows.Coefficients(cell, rows)
      if linear
      else cell_rows.Update(cell, rows)
  )
  problem = streaming_op.Recurrence(
      step=step,
      linear=linear,
      params=rows.count,
      shape=(batch, time, features),
      call=call,
      target=target,
  )
  last, carries = streaming_op.run(
      problem,
      rows.pack(params, bias, recurrent_kernel),
      tuple(arrays),
      input_kernel,
      stack(carry),
      stack(restart),
      reset,
      mask,
  )
  return tuple(last), carries


def _checked_sizes(
    cell: Cell, call: call_lib.Call, weights, arrays
) -> tuple[int, int, int]:
  """Returns B, T and F; raises where weights or inputs do not fit the cell."""
  _, input_kernel, bias, recurrent_kernel = weights
  features = arrays[0].shape[-1]
  if input_kernel is not None:
    _check_input_kernel(cell, arrays, input_kernel)
    features = input_kernel.shape[-1]
  lead = arrays[0].shape[:2]
  batch, time = lead[::-1] if call.time_major else lead
  arguments.sizes('recurrence', batch, time, features)
  if input_kernel is None:
    _check_gates(cell, arrays)
  if bias is not None:
    expected = (cell.input_gates, features)
    arguments.shape('bias', bias, '[gates, features]', expected)
  if cell.recurrent_gates:
    _check_kernel(cell, recurrent_kernel, features)
  elif not hasattr(cell, 'coefficients'):
    raise NotImplementedError(
        f'GPU kernels cannot run {type(cell).__name__}: it has no recurrent'
        ' gates and no coefficients.'
    )
  return batch, time, features


def _check_input_kernel(cell: Cell, arrays, input_kernel: Array):
  """Raises ValueError unless x_gates are inputs of an input kernel."""
  if len(arrays) > 1 or arrays[0].ndim != 3:
    raise ValueError(
        'x_gates must be [batch, time, in_features] with an input_kernel, got'
        f' {[tuple(x.shape) for x in arrays]}.'
    )
  axes = '[gates, in_features, features]'
  given = input_kernel.shape[-1:]
  expected = (cell.input_gates, arrays[0].shape[-1], *given)
  arguments.shape('input_kernel', input_kernel, axes, expected)


def _check_gates(cell: Cell, arrays: Sequence[Array]):
  """Raises ValueError unless the input gates are all there."""
  for x in arrays:
    if x.ndim not in (3, 4):
      raise ValueError(
          'x_gates must be [batch, time, gates, features] or arrays [batch,'
          f' time, features], got an array of shape {x.shape}.'
      )
    ends = (*arrays[0].shape[:2], *x.shape[2:-1], arrays[0].shape[-1])
    arguments.shape('x_gates', x, 'alike in batch, time and features', ends)
  gates = sum(x.shape[2] if x.ndim == 4 else 1 for x in arrays)
  if gates != cell.input_gates:
    raise ValueError(
        f'x_gates must hold {cell.input_gates} gates for'
        f' {type(cell).__name__}, got {gates}.'
    )


def _check_kernel(cell: Cell, recurrent_kernel: Array | None, features: int):
  """Raises ValueError unless the recurrent kernel is there."""
  axes = '[gates, heads, head_dim, head_dim]'
  if recurrent_kernel is None:
    raise ValueError(
        f'{type(cell).__name__} needs a recurrent_kernel {axes}, got None.'
    )
  size = recurrent_kernel.shape[-1]
  expected = (cell.recurrent_gates, features // max(size, 1), size, size)
  arguments.shape('recurrent_kernel', recurrent_kernel, axes, expected)


def _is_diagonal(cell: Cell, recurrent_kernel: Array) -> bool:
  return recurrent_kernel.shape[-1] == 1 and not hasattr(cell, 'operand')


def _join(arrays: Sequence[Array]) -> Array:
  """Joins arrays [B, T, F] and [B, T, g, F] to one [B, T, G, F]."""
  if len(arrays) == 1 and arrays[0].ndim == 4:
    return arrays[0]
  whole = [x if x.ndim == 4 else x[:, :, None] for x in arrays]
  return jnp.concatenate(whole, axis=2)
