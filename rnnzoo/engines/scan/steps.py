"""One step, and chunks of steps: forward and backward pass share them."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib
from rnnzoo.engines import autodiff
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import products

Array = jax.Array
Carry = cell_lib.Carry
Gates = cell_lib.Gates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Static (hashable) arguments of one run by `lax.scan`.

  Attributes:
    cell: the equations.
    project: maps (weights, x [T, B, ...]) to x_gates, each [T, B, F].
    call: static options.
    chunk: number of steps for which input gates exist at once.
    adjoint_chunk: number of such steps in the backward pass.
    save_gates: whether the forward pass saves the recurrent gates of all steps
      for the backward pass, which otherwise forms them again.
    joint: both passes take the sequence whole, and gates are stored and
      multiplied together where that runs as fast: there is less to compile.
  """

  cell: cell_lib.Cell
  project: call_lib.Projection
  call: call_lib.Call
  chunk: int
  adjoint_chunk: int
  save_gates: bool
  joint: bool = False


class Saved(NamedTuple):
  """The arrays that an unroll leaves to its derivatives.

  Attributes:
    operands: operands of the unroll.
    carries: carry after every step, [T, B, F], or None where `start` is kept.
    h_gates: recurrent gates of every step, each [T, B, F], or None where they
      are formed again; where `Plan.joint`, one array [T, B, G F].
    start: the carries before every step, after any restart, each [T, B, F], or
      None where they are found from `carries`.
  """

  operands: call_lib.Operands
  carries: Carry | None
  h_gates: Gates | None
  start: Carry | None = None


class Linearization(NamedTuple):
  """The points at which the steps of a chunk are linearised.

  Attributes:
    x_gates: input gates, each [T, B, F].
    h_gates: recurrent gates, each [T, B, F].
    start: the carries before the steps, after any restart, each [T, B, F].
    reset: bool [T, B] or None.
    mask: bool [T, B] or None.
  """

  x_gates: Gates
  h_gates: Gates
  start: Carry
  reset: Array | None
  mask: Array | None


# (body, init, xs, linearization, reverse=) -> (final, ys), as in `lax.scan`.
Loop = Callable[..., tuple[Any, Any]]


def in_turn(body, init, xs, linearization, *, reverse):
  """Runs a chunk's linear steps one by one."""
  del linearization
  return lax.scan(body, init, xs, reverse=reverse)


def step(
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    kernels: tuple[Array, ...],
    x_gates: Gates,
    carry: Carry,
    *,
    clip: float | None = None,
    stop: bool = False,
) -> tuple[Carry, Gates]:
  """Returns the carry after one step, and the recurrent gates it saw.

  Args:
    cell: the equations.
    params: the cell's own parameters.
    kernels: recurrent kernels as `pack` returns them.
    x_gates: input gates, each [..., F].
    carry: carry before the step, each [..., F].
    clip: `recurrent_gradient_clip` of plain autodiff through this function.
    stop: `stop_recurrent_gradient`, too.
  """
  h_gates = multiply(
      cell, params, kernels, x_gates, carry, clip=clip, stop=stop
  )
  new = cell.update(params, x_gates, h_gates, carry)
  carry = tuple(n.astype(c.dtype) for n, c in zip(new, carry, strict=True))
  return carry, h_gates


def multiply(
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    kernels: tuple[Array, ...],
    x_gates: Gates,
    carry: Carry,
    *,
    clip: float | None = None,
    stop: bool = False,
) -> Gates:
  """Returns the recurrent gates, each [..., F]; arguments as in `step`."""
  if not kernels:
    return ()

  def guarded(x):
    if stop:
      return lax.stop_gradient(x)
    return x if clip is None else _clip_cotangent(clip, x)

  h_gates = products.multiply(kernels[0], guarded(carry[0]))
  if isinstance(cell, cell_lib.TwoStageCell):
    operand = cell.operand(params, x_gates, h_gates, carry)
    h_gates += products.multiply(kernels[1], guarded(operand))
  return h_gates


# Returns x; its cotangent is clipped to [-bound, bound].
_clip_cotangent = autodiff.differentiable(
    lambda bound, x: (x, ()),
    lambda bound, _, d: refuse_clip(bound),
    lambda bound, _, d: jnp.clip(d, -bound, bound),
)


def refuse_clip(clip: float | None) -> None:
  """Raises NotImplementedError where forward mode meets a clipped gradient."""
  if clip is not None:
    raise NotImplementedError(
        f'recurrent_gradient_clip={clip} has no forward mode (jax.jvp,'
        ' jax.linearize): a clipped gradient is not the transpose of a'
        ' derivative. Reverse mode works, and without the clip both do.'
    )


def pack(
    cell: cell_lib.Cell,
    kernel: Array | None,
    pack_stage: Callable[[Array], Array] = products.pack,
) -> tuple[Array, ...]:
  """Packs a recurrent kernel, each stage's gates on their own."""
  if kernel is None:
    return ()
  if isinstance(cell, cell_lib.TwoStageCell):
    return pack_stage(kernel[:-1]), pack_stage(kernel[-1:])
  return (pack_stage(kernel),)


def project(fn, carry, mask, weights, x) -> Gates:
  """Returns x_gates of a chunk, in the dtype of the carry.

  Inputs under the mask are replaced first, so that whatever stands in padding,
  NaN included, reaches neither an output nor a gradient.
  """
  if mask is not None:
    x = where(mask, x, 0)
  gates = fn(weights, x)
  return tuple(gate.astype(carry[0].dtype) for gate in gates)


def where(condition: Array, x: Array, y) -> Array:
  """`jnp.where` with a condition that lacks x's trailing axes."""
  shape = condition.shape + (1,) * (x.ndim - condition.ndim)
  return jnp.where(condition.reshape(shape), x, y)


def select(condition: Array | None, chosen: Carry, other: Carry) -> Carry:
  """Chooses between two carries; `chosen` may lack the leading time axis."""
  if condition is None:
    return other
  return tuple(
      jnp.where(condition[..., None], a, b)
      for a, b in zip(chosen, other, strict=True)
  )


def previous(carries, in_chunk, carry, index, reverse) -> Carry:
  """Returns the carries before each step of a chunk, each [T, B, F].

  Args:
    carries: carry after every step of the sequence.
    in_chunk: the part of `carries` that belongs to the chunk.
    carry: carry before the first step.
    index: time of the chunk's steps, [T].
    reverse: direction of the recurrence.
  """
  time = carries[0].shape[0]
  entry = index[-1] + 1 if reverse else index[0] - 1
  is_first = entry == (time if reverse else -1)
  position = jnp.clip(entry, 0, time - 1)

  def previous(all_steps, own, initial):
    before = lax.dynamic_index_in_dim(all_steps, position, keepdims=True)
    before = jnp.where(is_first, initial[None], before)
    if reverse:
      return jnp.concatenate([own[1:], before])
    return jnp.concatenate([before, own[:-1]])

  return tuple(map(previous, carries, in_chunk, carry))


def shifted(init: Carry, carries: Carry, reverse: bool) -> Carry:
  """Returns the carries before all steps, given the carries after them."""

  def one(x0, x):
    order = (x[1:], x0[None]) if reverse else (x0[None], x[:-1])
    return jnp.concatenate(order)

  return tuple(map(one, init, carries))


def boundary(reset: Array, reverse: bool, axis: int) -> Array:
  """Turns boundaries between t-1 and t into restarts in loop order."""
  if not reverse:
    return reset
  size = reset.shape[axis]
  rest = lax.slice_in_dim(reset, 1, size, axis=axis)
  last = jnp.zeros_like(lax.slice_in_dim(reset, 0, 1, axis=axis))
  return jnp.concatenate([rest, last], axis=axis)


def with_starts(
    operands: call_lib.Operands,
    call: call_lib.Call,
    axis: int,
    earlier: Callable[[Any, Array], Any] = lambda reduce, own: 0,
) -> Array | None:
  """Returns resets in loop order, with those that a cell is to read.

  A cell reads where its carry is new: at a reset, at the next step that is not
  held after a reset in a held one and, if `call.starts`, at the first such one.

  Args:
    operands: the flags, in loop order, and x.
    call: says in which order steps run.
    axis: axis of time in x and the flags.
    earlier: (jnp.sum or jnp.max, numbers of this device, int32 [B] from 0) ->
      the sum or largest of the devices with earlier steps.
  """
  reset, mask = operands.reset, operands.mask
  if not call.starts and (reset is None or mask is None):
    return reset
  valid = jnp.ones(operands.x.shape[:2], bool) if mask is None else mask
  ones = valid.astype(jnp.int32)
  count = lax.cumsum(ones, axis, reverse=call.reverse)
  count += earlier(jnp.sum, jnp.sum(ones, axis))
  starts = valid & (count == 1) if call.starts else jnp.zeros_like(valid)
  if reset is None:
    return starts
  if mask is not None:
    held = jnp.where(reset & ~mask, count + 1, 0)
    last = lax.cummax(held, axis, reverse=call.reverse)
    last = jnp.maximum(last, earlier(jnp.max, jnp.max(held, axis)))
    starts |= mask & (last == count)
  return reset | starts


def divisor(time: int, target: int) -> int:
  """Returns `target`, or a divisor of T near it, which spares a remainder."""
  target = max(1, min(time, target))
  for length in range(target, target // 2, -1):
    if time % length == 0:
      return length
  return target


def scan_chunks(body, init, xs, length, reverse):
  """Like `lax.scan`, handing the body `length` steps at a time.

  The last T mod `length` steps are a shorter chunk of their own.
  """
  time = jax.tree.leaves(xs)[0].shape[0]
  if time <= length:
    return body(init, xs)
  count = time // length
  whole = count * length

  def run_whole(state):
    split = lambda x: x[:whole].reshape(count, length, *x.shape[1:])
    state, ys = lax.scan(body, state, jax.tree.map(split, xs), reverse=reverse)
    return state, jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), ys)

  if whole == time:
    return run_whole(init)
  rest = jax.tree.map(lambda x: x[whole:], xs)
  if reverse:
    state, tail = body(init, rest)
    state, head = run_whole(state)
  else:
    state, head = run_whole(init)
    state, tail = body(state, rest)
  join = lambda a, b: jnp.concatenate([a, b])
  return state, jax.tree.map(join, head, tail)
