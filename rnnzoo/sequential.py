"""Path 1: `lax.scan` over time, with the adjoint of a recurrence.

This is the reference that every other path is tested against, and the path
that runs everywhere. Both directions work through time in chunks:

  forward    the input projection of a chunk, then its steps one by one. The
             gates of all T steps never exist at once.
  backward   for a chunk, everything that does not depend on the adjoint is
             computed for all its steps at once: the projection, R h_{t-1} as
             one product, and the linearisation of `update`. What is left for
             the loop is linear: lambda_{t-1} = (d carry_t / d carry_{t-1})^T
             lambda_t. Gradients of kernels are then one product a chunk, added
             up in float32.

Saved for the backward pass: the inputs and the carries. Adding kernel gradients
step by step, as plain autodiff of a scan does, loses digits in bfloat16 and is
slower. The file knows cells with one stage and with two, and no cell by name.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from rnnzoo import cell as cell_lib
from rnnzoo import products

Array = jax.Array
Carry = cell_lib.Carry
Gates = cell_lib.Gates


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is static in an unroll.

  Attributes:
    cell: the equations.
    project: maps (weights, inputs [T, B, ...]) to x_gates, each [T, B, F].
    reverse: whether time runs from the last step to the first.
    outputs: how many of the carry's leading arrays are returned for all steps.
    chunk: number of steps for which gates exist at once.
  """

  cell: cell_lib.Cell
  project: Callable[[Any, Any], Gates]
  reverse: bool
  outputs: int
  chunk: int


class Operands(NamedTuple):
  """What an unroll is differentiated by, and its two boolean masks.

  Attributes:
    params: the cell's own parameters, each [..., F].
    weights: first argument of `Plan.project`.
    inputs: second argument of `Plan.project`, [T, B, ...].
    kernel: recurrent kernel [G, N, D, D], or None.
    carry: what the first step starts from, each [B, F].
    restart: what a step starts from where `reset` is true, each [B, F].
    reset: bool [T, B] or None; applies before the step, in loop order.
    mask: bool [T, B] or None; where false, the carry is held.
  """

  params: cell_lib.Params
  weights: Any
  inputs: Any
  kernel: Array | None
  carry: Carry
  restart: Carry
  reset: Array | None
  mask: Array | None


def chunk_length(time: int, rows: int) -> int:
  """Returns how many steps to take at once.

  On a CPU a chunk's gates should stay in cache: on two cores, chunks of about
  2 MiB made forward and backward twice as fast at T = 784 as one pass, most of
  it page faults saved. An accelerator wants few, large operations.

  Args:
    time: T.
    rows: elements of all gates in one step, B G F.
  """
  budget = 2**19 if jax.default_backend() == 'cpu' else 2**26
  target = max(1, min(time, budget // max(rows, 1)))
  # A divisor of T near the target spares a remainder, compiled on its own.
  for length in range(target, target // 2, -1):
    if time % length == 0:
      return length
  return target


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def unroll(plan: Plan, operands: Operands) -> tuple[Carry, Carry]:
  """Runs a cell over time.

  Args:
    plan: what is static.
    operands: arrays; the dtype of `carry` is that of all state.

  Returns:
    The carry after the last step, each [B, F], and the first `plan.outputs`
    arrays of the carries after every step, each [T, B, F].
  """
  carry, carries = _forward(plan, operands)
  return carry, carries[: plan.outputs]


def step(
    cell: cell_lib.Cell,
    params: cell_lib.Params,
    kernels: tuple[Array, ...],
    x_gates: Gates,
    carry: Carry,
) -> Carry:
  """Returns the carry after one step; `kernels` as `pack` returns them."""
  h_gates: Gates = ()
  if kernels:
    h_gates = products.multiply(kernels[0], carry[0])
  if isinstance(cell, cell_lib.TwoStageCell):
    operand = cell.operand(params, x_gates, h_gates, carry)
    h_gates += products.multiply(kernels[1], operand)
  new = cell.update(params, x_gates, h_gates, carry)
  return tuple(n.astype(c.dtype) for n, c in zip(new, carry, strict=True))


def pack(cell: cell_lib.Cell, kernel: Array | None) -> tuple[Array, ...]:
  """Packs a recurrent kernel, each stage's gates on their own."""
  if kernel is None:
    return ()
  if isinstance(cell, cell_lib.TwoStageCell):
    return products.pack(kernel[:-1]), products.pack(kernel[-1:])
  return (products.pack(kernel),)


# Forward.


def _forward(plan: Plan, operands: Operands) -> tuple[Carry, Carry]:
  params, weights, inputs, kernel, carry, restart, reset, mask = operands
  kernels = pack(plan.cell, kernel)

  def body(carry, xs):
    x_gates, reset, mask = xs
    start = _select(reset, restart, carry)
    new = step(plan.cell, params, kernels, x_gates, start)
    carry = new if mask is None else _select(mask, new, start)
    return carry, carry

  def chunk(carry, xs):
    inputs, reset, mask = xs
    x_gates = project(plan.project, carry, mask, weights, inputs)
    return lax.scan(body, carry, (x_gates, reset, mask), reverse=plan.reverse)

  return _scan_chunks(
      chunk, carry, (inputs, reset, mask), plan.chunk, plan.reverse
  )


def project(fn, carry, mask, weights, inputs) -> Gates:
  """Returns x_gates of a chunk, in the dtype of the carry.

  Inputs under the mask are replaced first, so that whatever stands in padding,
  NaN included, reaches neither an output nor a gradient.
  """
  if mask is not None:
    inputs = jax.tree.map(lambda x: _where(mask, x, 0), inputs)
  gates = fn(weights, inputs)
  return tuple(gate.astype(carry[0].dtype) for gate in gates)


# Backward.


class _Pullbacks(NamedTuple):
  """Linearised step functions; callable pytrees, so they can be scanned."""

  update: Callable[[Carry], Any]
  operand: Callable[[Array], Any] | None


def _linearize(cell, params, kernels, x_gates, carry) -> tuple[_Pullbacks, Any]:
  """Linearises a chunk's steps around carries [T, B, F], all at once.

  Returns:
    The pullbacks with a leading time axis, and the operand of the second stage
    (None for a cell of one stage).
  """

  def over_time(fn, *args):
    pull = lambda *args: jax.vjp(fn, params, *args)[1]
    return jax.vmap(pull)(*args)

  h_gates: Gates = ()
  operand = pull_operand = None
  if kernels:
    h_gates = products.multiply(kernels[0], carry[0])
  if isinstance(cell, cell_lib.TwoStageCell):
    operand = cell.operand(params, x_gates, h_gates, carry)
    pull_operand = over_time(cell.operand, x_gates, h_gates, carry)
    h_gates += products.multiply(kernels[1], operand)
  pull_update = over_time(cell.update, x_gates, h_gates, carry)
  return _Pullbacks(pull_update, pull_operand), operand


def _pull(pullbacks: _Pullbacks, d_new: Carry, d_operand) -> tuple[Any, Any]:
  """Pulls a carry's cotangent back through the pointwise part of a step.

  Args:
    pullbacks: of this step.
    d_new: cotangent of the carry after the step.
    d_operand: maps the last recurrent gate's cotangent to the operand's.

  Returns:
    Cotangents of (params, x_gates, h_gates, carry), and that of the operand.
  """
  cotangents = pullbacks.update(d_new)
  if pullbacks.operand is None:
    return cotangents, None
  params, x_gates, h_gates, carry = cotangents
  d_operand = d_operand(h_gates[-1])
  first = pullbacks.operand(d_operand)
  params, x_gates, carry = jax.tree.map(
      jnp.add, (params, x_gates, carry), (first[0], first[1], first[3])
  )
  h_gates = (*map(jnp.add, h_gates[:-1], first[2]), h_gates[-1])
  return (params, x_gates, h_gates, carry), d_operand


def _backward(plan: Plan, residuals, cotangents) -> tuple[Operands]:
  operands, carries = residuals
  params, weights, inputs, kernel, carry, restart, reset, mask = operands
  d_carry, d_outputs = cotangents
  kernels = pack(plan.cell, kernel)
  stages = len(kernels)

  def body(d_carry, xs):
    pullbacks, d_outputs, reset, mask = xs
    seen = map(jnp.add, d_carry, d_outputs)
    d_carry = (*seen, *d_carry[plan.outputs :])
    d_new = d_carry if mask is None else _select(mask, d_carry, _zeros(d_carry))
    (_, _, d_h_gates, d_start), d_operand = _pull(
        pullbacks,
        d_new,
        lambda d: products.multiply_transposed(kernels[1], (d,)),
    )
    if stages:
      first = d_h_gates if stages == 1 else d_h_gates[:-1]
      d_h = products.multiply_transposed(kernels[0], first)
      d_start = (d_start[0] + d_h, *d_start[1:])
    if mask is not None:
      held = _select(mask, _zeros(d_carry), d_carry)
      d_start = tuple(map(jnp.add, d_start, held))
    d_restart = ()
    if reset is not None:
      d_restart = _select(reset, d_start, _zeros(d_start))
      d_start = _select(reset, _zeros(d_start), d_start)
    return d_start, (d_new, d_operand, d_restart)

  def chunk(state, xs):
    d_carry, sums = state
    inputs, reset, mask, carries_in_chunk, d_outputs, index = xs
    before = _previous(carries, carries_in_chunk, carry, index, plan.reverse)
    start = _select(reset, restart, before)
    x_gates, pull_projection = jax.vjp(
        functools.partial(project, plan.project, carry, mask), weights, inputs
    )
    pullbacks, operand = _linearize(plan.cell, params, kernels, x_gates, start)
    d_carry, (d_new, d_operand, d_restart) = lax.scan(
        body,
        d_carry,
        (pullbacks, d_outputs, reset, mask),
        reverse=not plan.reverse,
    )
    (d_params, d_x_gates, d_h_gates, _), _ = jax.vmap(
        lambda pullbacks, d_new, d: _pull(pullbacks, d_new, lambda _: d)
    )(pullbacks, d_new, d_operand)
    d_weights, d_inputs = pull_projection(d_x_gates)
    d_kernels: tuple[Array, ...] = ()
    if stages == 1:
      d_kernels = (products.outer(kernels[0], start[0], d_h_gates),)
    elif stages == 2:
      d_kernels = (
          products.outer(kernels[0], start[0], d_h_gates[:-1]),
          products.outer(kernels[1], operand, d_h_gates[-1:]),
      )
    time_sum = functools.partial(jnp.sum, axis=0)
    parts = (
        jax.tree.map(time_sum, d_params),
        d_weights,
        d_kernels,
        jax.tree.map(time_sum, d_restart),
    )
    return (d_carry, jax.tree.map(jnp.add, sums, parts)), d_inputs

  sums = (
      params,
      weights,
      kernels,
      restart if reset is not None else (),
  )
  time = jax.tree.leaves(inputs)[0].shape[0]
  (d_carry, (d_params, d_weights, d_kernels, d_restart)), d_inputs = (
      _scan_chunks(
          chunk,
          (d_carry, jax.tree.map(_zero_sum, sums)),
          (inputs, reset, mask, carries, d_outputs, jnp.arange(time)),
          plan.chunk,
          not plan.reverse,
      )
  )
  d_kernel = None
  if kernel is not None:
    gates = kernel.shape[0]
    counts = (gates,) if stages == 1 else (gates - 1, 1)
    d_kernel = jnp.concatenate(
        [products.unpack(d, n) for d, n in zip(d_kernels, counts, strict=True)]
    )
  if reset is None:
    d_restart = _zeros(restart)
  cast = lambda d, x: d.astype(x.dtype)
  d_params, d_weights, d_kernel = jax.tree.map(
      cast, (d_params, d_weights, d_kernel), (params, weights, kernel)
  )
  return (
      Operands(
          d_params, d_weights, d_inputs, d_kernel, d_carry, d_restart, None, None
      ),
  )


def _forward_with_residuals(plan: Plan, operands: Operands):
  carry, carries = _forward(plan, operands)
  return (carry, carries[: plan.outputs]), (operands, carries)


unroll.defvjp(_forward_with_residuals, _backward)


# Pieces of both directions.


def _where(condition: Array, x: Array, y) -> Array:
  """`jnp.where` with a condition that lacks x's trailing axes."""
  shape = condition.shape + (1,) * (x.ndim - condition.ndim)
  return jnp.where(condition.reshape(shape), x, y)


def _select(condition: Array | None, chosen: Carry, other: Carry) -> Carry:
  """Chooses between two carries; `chosen` may lack the leading time axis."""
  if condition is None:
    return other
  return tuple(
      jnp.where(condition[..., None], a, b)
      for a, b in zip(chosen, other, strict=True)
  )


def _zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)


def _zero_sum(x: Array) -> Array:
  """Zeros to add gradients of x to: float32 or wider."""
  return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _previous(carries, in_chunk, carry, index, reverse) -> Carry:
  """Returns the carries before each step of a chunk, each [T, B, F].

  Args:
    carries: after every step of the sequence.
    in_chunk: the part of `carries` that belongs to the chunk.
    carry: before the first step.
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


def _scan_chunks(body, init, xs, length, reverse):
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
