"""Kernels for linear and diagonal recurrences, with their derivatives.

This is where arrays are brought into the form that kernels take, where
`tuning.py` is asked how to cut the work, and where forward and backward kernels
become one differentiable operation. Under `vmap` a kernel gains an axis of its
grid, by Pallas's own rule, but for one whose CTAs wait for each other: with
more elements there may be no need for that, else it runs once for each. Where
it multiplies as well, the product and the recurrence become two kernels.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import projection
from pallas_kernels import sharding
from pallas_kernels import targets
from pallas_kernels.mosaic import autodiff
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import pointwise
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import diagonal
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import linear
from pallas_kernels.streaming import projected
from pallas_kernels.streaming import time_blocks
from pallas_kernels.streaming import tuning

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
  """What is static in a call.

  Attributes:
    step: (theta, inputs) -> (a, b) if linear, else (theta, inputs, carry) ->
      carry; pointwise, hashable.
    linear: which of the two.
    params: how many rows of theta there are.
    shape: (B, T, F).
    time_major: whether streams are [T, B, ...].
    reverse: whether time runs from the last step to the first.
    outputs: how many arrays of the carry are returned for all steps.
    out_dtype: dtype of these.
    target: the device.
  """

  step: Callable[..., Any]
  linear: bool
  params: int
  shape: tuple[int, int, int]
  time_major: bool
  reverse: bool
  outputs: int
  out_dtype: Any
  target: targets.Target


def run(
    call: Call,
    theta: Array,
    arrays: tuple[Array, ...],
    kernel: Array | None,
    carry: Array | None,
    restart: Array | None,
    reset: Array | None,
    mask: Array | None,
) -> tuple[Array, tuple[Array, ...]]:
  """Runs a recurrence; differentiable in all its floating-point operands.

  Args:
    call: what is static.
    theta: float32 [rows, F].
    arrays: streams of inputs, [B, T, F] or [B, T, g, F]; with W the one array
      that it multiplies, [B, T, I].
    kernel: W, [G, I, F], or None.
    carry: float32 [S, B, F]; None for zeros, if linear.
    restart: float32 [S, B, F]; None for zeros, if linear.
    reset: bool [B, T] or None, in the order of the loop.
    mask: bool [B, T] or None.

  Returns:
    The final carry, float32 [S, B, F], and `call.outputs` streams.
  """
  _, _, features = call.shape
  # Rows and a carry of zeros that were made here vary over no axis of a mesh.
  operands = theta, arrays, kernel, carry, restart, reset, mask
  operands = sharding.alike(operands)
  theta, arrays, kernel, carry, restart, reset, mask = operands
  flags = step_flags.pack(reset, mask)
  if kernel is not None:
    (x,) = arrays
    if _multiplies(call, x, kernel):
      theta, carry, restart = _whole_tiles(features, (theta, carry, restart))
      last, h = _run_projected(call, theta, x, kernel, carry, restart, flags)
      return last[..., :features], (h,)
    arrays = (projection.project(kernel, x),)
  aligned = _aligned(call, arrays)
  arrays = tuple(time_blocks.pad_features(x, aligned) for x in arrays)
  inner = dataclasses.replace(call, shape=(*call.shape[:2], aligned))
  theta, carry, restart = _whole_tiles(aligned, (theta, carry, restart))
  last, carries = _run(inner, theta, arrays, carry, restart, flags)
  cut = lambda x: x[..., :features]
  if aligned != features:
    carries = tuple(map(cut, carries))
  return cut(last), carries


def _multiplies(call: Call, x: Array, kernel: Array) -> bool:
  """Whether one kernel can multiply by W and run the recurrence, and faster."""
  gates, depth, features = kernel.shape
  gate_streams = jax.ShapeDtypeStruct((*x.shape[:2], gates, features), x.dtype)
  return (
      call.linear
      and call.out_dtype == x.dtype
      and x.dtype.itemsize == 2
      and depth > 0
      and _aligned(call, (gate_streams,)) == features
      and tuning.projected(_layout(call), kernel.shape, call.target)
  )


def _whole_tiles(features: int, small):
  """Pads small operands to whole tiles of features."""
  padded = time_blocks.round_up(features, time_blocks.LANES)
  return jax.tree.map(lambda x: time_blocks.pad_features(x, padded), small)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_projected(call: Call, theta, x, kernel, carry, restart, flags):
  operands = theta, x, kernel, carry, restart, flags
  return _forward_projected(call, False, *operands)[:2]


def _run_projected_fwd(call: Call, theta, x, kernel, carry, restart, flags):
  theta, x, kernel, carry, restart = autodiff.differentiable_once(
      (theta, x, kernel, carry, restart)
  )
  operands = theta, x, kernel, carry, restart, flags
  last, h, gates = _forward_projected(call, True, *operands)
  return (last, h), (theta, (gates,), (h,), carry, restart, flags, kernel, x)


def _run_projected_bwd(call: Call, saved, cotangents):
  *saved, kernel, x = saved
  d_last, d_h = cotangents
  d_theta, (d_gates,), *rest = _run_bwd(call, saved, (d_last, (d_h,)))
  d_kernel, d_x = projection.backward((kernel, x), d_gates)
  return d_theta, d_x, d_kernel, *rest


_run_projected.defvjp(_run_projected_fwd, _run_projected_bwd)


def _forward_projected(call: Call, keep: bool, *operands):
  """Returns the last carry, h, and the gates if `keep`, else None.

  Args:
    call: what is static.
    keep: whether to return the gates.
    *operands: of `_run_projected`.
  """

  def in_one(theta, x, kernel, carry, restart, flags):
    plan = _plan(call, projected.CONFIG, carry, restart, flags)
    small = _unread(call, theta, (x,), carry, restart, flags)
    theta, carry, restart, flags = small
    h, last, gates = projected.forward(
        plan, call.target.cores, theta, x, kernel, carry, restart, flags, keep
    )
    return jax.tree.map(lambda y: sharding.like(y, x), (last[None], h, gates))

  def in_two(theta, x, kernel, carry, restart, flags):
    gates = projection.project(kernel, x)
    small = carry, restart, flags
    last, (h,) = _forward(call, theta, (gates,), *small, outputs=1)
    return last, h, gates if keep else None

  function = jax.custom_batching.custom_vmap(in_one)

  @function.def_vmap
  def _rule(size, batched, *operands):
    del size
    # The CTAs of several such kernels could not all be there at once.
    return _mapped(in_two, batched, operands)

  return function(*operands)


def _mapped(function, batched, operands):
  """Returns what a `custom_vmap` rule does, for a function of one element."""
  axes = jax.tree.map(lambda yes: 0 if yes else None, tuple(batched))
  results = jax.vmap(function, axes)(*operands)
  return results, jax.tree.map(lambda _: True, results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: Call, theta, arrays, carry, restart, flags):
  return _forward(call, theta, arrays, carry, restart, flags, call.outputs)


def _run_fwd(call: Call, theta, arrays, carry, restart, flags):
  theta, arrays, carry, restart = autodiff.differentiable_once(
      (theta, arrays, carry, restart)
  )
  states = 1 if call.linear else carry.shape[0]
  last, carries = _forward(call, theta, arrays, carry, restart, flags, states)
  saved = theta, arrays, carries, carry, restart, flags
  return (last, carries[: call.outputs]), saved


def _forward(call: Call, theta, arrays, carry, restart, flags, outputs):
  layout = _layout(call)
  ins = time_blocks.streams_of(arrays)
  outs = [time_blocks.Stream(i, None, call.out_dtype) for i in range(outputs)]
  given = carry, restart, flags
  like = arrays[0]
  theta, carry, restart, flags = _unread(
      call, theta, arrays, carry, restart, flags
  )
  if call.linear:

    def run(config, *operands):
      plan = _plan(call, config, *given)
      forward = functools.partial(
          linear.forward, plan, out_dtype=call.out_dtype
      )
      return forward(*operands)

    tuned = _tuned(call, ins, outs, run)
    h, last = tuned(theta, arrays, carry, restart, flags)
    last, carries = last[None], (h,)[:outputs]
    return jax.tree.map(lambda x: sharding.like(x, like), (last, carries))
  size = _operations(call, len(ins), carry.shape[0])
  config = tuning.diagonal(layout, ins, outs, call.target, size)
  plan = _plan(call, config, *given)
  carries, last = diagonal.forward(
      plan, theta, arrays, carry, restart, flags, outputs, call.out_dtype
  )
  return jax.tree.map(lambda x: sharding.like(x, like), (last, carries))


def _run_bwd(call: Call, saved, cotangents):
  *saved, flags = saved
  saved, cotangents = autodiff.differentiable_once((tuple(saved), cotangents))
  theta, arrays, carries, carry, restart = saved
  d_last, d_carries = cotangents
  layout = _layout(call)
  given = carry, restart, flags
  primals = theta, arrays, carry, restart
  theta, carry, restart, flags = _unread(
      call, theta, arrays, carry, restart, flags
  )
  outs = time_blocks.streams_of(arrays)
  others = [
      time_blocks.Stream(0, None, x.dtype) for x in (*carries, *d_carries)
  ]
  if call.linear:
    needed = linear.needed(call.step, call.params, len(outs))
    ins = [s for s, need in zip(outs, needed, strict=True) if need]

    def run(config, *operands):
      plan = _plan(call, config, *given)
      *results, d_theta, d_restart = linear.backward(plan, *operands)
      # How many parts there are depends on the configuration.
      return *results, d_theta.sum((0, 1)), d_restart.sum(1)

    tuned = _tuned(call, [*ins, *others], outs, run, adjoint=True)
    d_arrays, d_carry, d_theta, d_restart = tuned(
        theta,
        arrays,
        carries[0],
        carry,
        restart,
        flags,
        d_carries[0],
        d_last[0],
    )
    d_carry, d_restart = d_carry[None], d_restart[None]
  else:
    # A step is done again before its derivative.
    size = 2 * _operations(call, len(outs), carry.shape[0])
    config = tuning.diagonal(layout, [*outs, *others], outs, call.target, size)
    plan = _plan(call, config, *given)
    d_arrays, d_carry, d_theta, d_restart = diagonal.backward(
        plan, theta, arrays, carries, carry, restart, flags, d_carries, d_last
    )
    d_theta = d_theta.sum(0)
  d_theta = d_theta if call.params else jnp.zeros_like(primals[0])
  if given[2] is None and primals[3] is not None:
    d_restart = jnp.zeros_like(primals[3])
  # What was None has no cotangent.
  optional = (
      None if primal is None else cotangent
      for primal, cotangent in zip(
          primals[2:], (d_carry, d_restart), strict=True
      )
  )
  cotangents = d_theta, d_arrays, *optional
  return *jax.tree.map(sharding.like, cotangents, primals), None


_run.defvjp(_run_fwd, _run_bwd)


def _tuned(call: Call, ins, outs, run, adjoint=False):
  """Returns a linear kernel as a function of its operands.

  Args:
    call: what is static.
    ins: the streams that are read.
    outs: the streams that are written.
    run: (configuration, *operands) -> results; it gets the best one, and under
      `vmap` the best for all elements together, if that needs no segments.
    adjoint: whether it is for the backward pass.
  """
  layout = _layout(call)

  def choose(batch: int):
    many = dataclasses.replace(layout, batch=batch)
    return tuning.linear(many, ins, outs, call.target, adjoint)

  config = choose(layout.batch)
  alone = functools.partial(run, config)
  if config.segments == 1:
    return alone

  @jax.custom_batching.custom_vmap
  def function(*operands):
    return alone(*operands)

  @function.def_vmap
  def _rule(size, batched, *operands):
    # CTAs that wait for each other have to be on the device at once.
    each = mailbox.one_at_a_time(alone)
    together = choose(size * layout.batch)
    if together.segments == 1:
      each = functools.partial(run, together)
    return _mapped(each, batched, operands)

  return function


def _unread(call: Call, theta, arrays, carry, restart, flags):
  """Returns a kernel's small operands: theta, carry, restart, flags.

  Those that it will not read are replaced by one that is there. Zeros would do,
  but every constant is a launch of its own.
  """
  there = arrays[0]
  if call.linear:  # Then h is all of the carry.
    carry, restart = (None if x is None else x[0] for x in (carry, restart))
  return (
      theta if call.params else there,
      there if carry is None else carry,
      there if restart is None or flags is None else restart,
      there if flags is None else flags,
  )


def _aligned(call: Call, arrays: Sequence[Any]) -> int:
  """Returns how many features arrays need to have, at least F."""
  batch, _, features = call.shape
  # TMA wants rows of device memory to start at multiples of 16 bytes.
  sizes = [x.dtype.itemsize for x in arrays] + [call.out_dtype.itemsize]
  multiple = 16 // min(sizes)
  aligned = time_blocks.round_up(features, multiple)
  # A tile of features that is wider than F must not look contiguous, or what is
  # beyond F would be copied too.
  gates = {x.shape[2] if x.ndim == 4 else 1 for x in arrays} | {1}
  rows = {g * (batch if call.time_major else 1) for g in gates}
  while aligned < time_blocks.LANES and time_blocks.LANES in (
      row * aligned for row in rows
  ):
    aligned += multiple
  return aligned


def _layout(call: Call) -> time_blocks.Layout:
  return time_blocks.Layout(*call.shape, call.time_major)


def _plan(
    call: Call, config: time_blocks.Config, carry, restart, flags
) -> kernel_call.Plan:
  """Returns the plan; carry, restart and flags are those of the call."""
  layout, interpret = _layout(call), None
  if call.target.interpret:
    interpret = plgpu.InterpretGPUParams()  # type: ignore[attr-defined]
    # Interpret mode knows no copies that reach beyond an array.
    margin = config.warpgroups * config.segments * config.rows
    layout = dataclasses.replace(layout, margin=margin)
  return kernel_call.Plan(
      call.step,
      call.params,
      layout,
      config,
      call.reverse,
      flags is not None,
      carry is not None,
      restart is not None,
      interpret,
  )


def _operations(call: Call, gates: int, states: int) -> int:
  """Returns about how many operations one step of a diagonal cell is."""
  lane = jax.ShapeDtypeStruct((time_blocks.LANES,), jnp.float32)
  args = (lane,) * call.params, (lane,) * gates, (lane,) * states
  step = pointwise.legalize(call.step)
  return len(jax.make_jaxpr(step)(*args).eqns)
