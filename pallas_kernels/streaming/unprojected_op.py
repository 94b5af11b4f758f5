"""The operation inputs -> carries, and its derivative, of both kernels.

A linear recurrence runs in `linear`, any other in `diagonal`. Under `vmap` a
kernel gains an axis of its grid, by Pallas's own rule, unless its CTAs wait for
each other. Then all elements together may need no segments; else the kernel
runs once for each element.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import auto_axes
from pallas_kernels import projection
from pallas_kernels import sharding
from pallas_kernels.mosaic import autodiff
from pallas_kernels.mosaic import mailbox
from pallas_kernels.streaming import diagonal
from pallas_kernels.streaming import diagonal_adjoint
from pallas_kernels.streaming import linear
from pallas_kernels.streaming import linear_adjoint
from pallas_kernels.streaming import recurrence
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import tuning

Recurrence = recurrence.Recurrence


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(static: Recurrence, theta, arrays, carry, restart, flags):
  """Returns the last carry and carries; arguments as for `op.run`, padded.

  Arrays may be products, which are then computed again in the backward pass
  instead of being kept.
  """
  outputs = static.call.outputs
  arrays = projection.form(arrays)
  return forward(static, theta, arrays, carry, restart, flags, outputs)


def _run_fwd(static: Recurrence, theta, arrays, carry, restart, flags):
  theta, arrays, carry, restart = autodiff.differentiable_once(
      (theta, arrays, carry, restart)
  )
  states = 1 if static.linear else carry.shape[0]
  last, carries = forward(
      static, theta, projection.form(arrays), carry, restart, flags, states
  )
  saved = theta, arrays, carries, carry, restart, flags
  return (last, carries[: static.call.outputs]), saved


def forward(static: Recurrence, theta, arrays, carry, restart, flags, outputs):
  """Runs the kernel; `outputs` carries are returned for all steps."""
  axis = static.batch_axis

  def part(theta, arrays, carry, restart, flags):
    own, arrays = _of_part(static, arrays)
    run_kernel = _linear_forward if static.linear else _diagonal_forward
    last, carries = run_kernel(
        own, theta, arrays, carry, restart, flags, outputs
    )
    return last, _cut_features(carries, static)

  operands = theta, arrays, carry, restart, flags
  positions = auto_axes.WHOLE, axis, 1, 1, 0
  run_part = auto_axes.over_batch(
      static.target, part, operands, positions, (1, axis)
  )
  results = run_part(*operands)
  return jax.tree.map(lambda x: sharding.like(x, arrays[0]), results)


def _of_part(static: Recurrence, *arrays):
  """Returns the recurrence of a part of the batch, and arrays as it wants them.

  Args:
    static: the recurrence of the whole batch.
    *arrays: trees of arrays of all steps; the first has the inputs.
  """
  inputs, *_ = arrays
  own = static.of_batch(inputs[0].shape[static.batch_axis])
  # A narrower batch may want other rows of features, see `aligned`.
  aligned = own.aligned(inputs)
  own = dataclasses.replace(own, shape=(*own.shape[:2], aligned))
  return own, *jax.tree.map(lambda x: streams.pad_features(x, aligned), arrays)


def _cut_features(arrays, static: Recurrence):
  """Undoes the padding of `_of_part`."""
  return jax.tree.map(lambda x: x[..., : static.shape[-1]], arrays)


def _linear_forward(
    static: Recurrence, theta, arrays, carry, restart, flags, outputs
):
  out_dtype = static.call.out_dtype
  ins = streams.streams_of(arrays)
  outs = [streams.Stream(i, None, out_dtype) for i in range(outputs)]
  operands = static.kernel_operands(theta, arrays, carry, restart, flags)

  def run_kernel(config, *operands):
    plan = static.plan(config, carry, restart, flags)
    return linear.forward(plan, *operands, out_dtype=out_dtype)

  tuned = _tuned(static, ins, outs, run_kernel)
  h, last = tuned(*operands)
  return last[None], (h,)[:outputs]


def _diagonal_forward(
    static: Recurrence, theta, arrays, carry, restart, flags, outputs
):
  out_dtype = static.call.out_dtype
  ins = streams.streams_of(arrays)
  outs = [streams.Stream(i, None, out_dtype) for i in range(outputs)]
  operands = static.kernel_operands(theta, arrays, carry, restart, flags)
  size = static.operations(len(ins), carry.shape[0])
  config = tuning.diagonal(static.layout, ins, outs, static.target, size)
  plan = static.plan(config, carry, restart, flags)
  carries, last = diagonal.forward(
      plan, *operands, outputs=outputs, out_dtype=out_dtype
  )
  return last, carries


def backward(static: Recurrence, saved, cotangents):
  """Returns the cotangents of the operands of `run`.

  Args:
    static: the static arguments.
    saved: theta, arrays, carries of all steps, carry, restart, flags.
    cotangents: of the last carry and of the carries.
  """
  theta, arrays, carries, carry, restart, flags = saved
  axis = static.batch_axis
  whole = auto_axes.WHOLE

  def part(theta, arrays, carries, carry, restart, flags, d_last, d_carries):
    own, arrays, carries, d_carries = _of_part(
        static, arrays, carries, d_carries
    )
    run_kernel = _linear_backward if static.linear else _diagonal_backward
    d_arrays, *others = run_kernel(
        own, theta, arrays, carries, carry, restart, flags, (d_last, d_carries)
    )
    return _cut_features(d_arrays, static), *others

  operands = *saved, *cotangents
  run_part = auto_axes.over_batch(
      static.target,
      part,
      operands,
      (whole, axis, axis, 1, 1, 0, 1, axis),
      (axis, 1, whole, 1),
  )
  d_arrays, d_carry, d_theta, d_restart = run_part(*operands)
  d_theta = d_theta if static.params else jnp.zeros_like(theta)
  if flags is None and restart is not None:
    d_restart = jnp.zeros_like(restart)
  # An operand that is None has no cotangent.
  d_carry = None if carry is None else d_carry
  d_restart = None if restart is None else d_restart
  primals = theta, arrays, carry, restart
  d_primals = d_theta, d_arrays, d_carry, d_restart
  return *jax.tree.map(sharding.like, d_primals, primals), None


def _run_bwd(static: Recurrence, saved, cotangents):
  *saved, flags = saved
  saved, cotangents = autodiff.differentiable_once((tuple(saved), cotangents))
  theta, kept, *others = saved
  arrays, cotangents = projection.form_again(kept, cotangents)
  d_theta, d_arrays, *rest = backward(
      static, (theta, arrays, *others, flags), cotangents
  )
  return d_theta, projection.pull(kept, d_arrays), *rest


run.defvjp(_run_fwd, _run_bwd)


def _linear_backward(
    static: Recurrence, theta, arrays, carries, carry, restart, flags, given
):
  d_last, d_carries = given
  outs = streams.streams_of(arrays)
  others = [streams.Stream(0, None, x.dtype) for x in (*carries, *d_carries)]
  operands = static.kernel_operands(theta, arrays, carry, restart, flags)
  needed = linear_adjoint.needed(static.step, static.params, len(outs))
  ins = [s for s, need in zip(outs, needed, strict=True) if need]

  def run_kernel(config, *operands):
    plan = static.plan(config, carry, restart, flags)
    *results, d_theta, d_restart = linear_adjoint.backward(plan, *operands)
    # The cut decides over how many warpgroups and segments these are summed.
    return *results, d_theta.sum((0, 1)), d_restart.sum(1)

  tuned = _tuned(static, [*ins, *others], outs, run_kernel, adjoint=True)
  d_arrays, d_carry, d_theta, d_restart = tuned(
      operands.theta,
      arrays,
      carries[0],
      operands.carry,
      operands.restart,
      operands.flags,
      d_carries[0],
      d_last[0],
  )
  return d_arrays, d_carry[None], d_theta, d_restart[None]


def _diagonal_backward(
    static: Recurrence, theta, arrays, carries, carry, restart, flags, given
):
  d_last, d_carries = given
  outs = streams.streams_of(arrays)
  others = [streams.Stream(0, None, x.dtype) for x in (*carries, *d_carries)]
  operands = static.kernel_operands(theta, arrays, carry, restart, flags)
  # A step is done again before its derivative.
  size = 2 * static.operations(len(outs), carry.shape[0])
  ins = [*outs, *others]
  config = tuning.diagonal(static.layout, ins, outs, static.target, size)
  plan = static.plan(config, carry, restart, flags)
  d_arrays, d_carry, d_theta, d_restart = diagonal_adjoint.backward(
      plan,
      operands.theta,
      arrays,
      carries,
      operands.carry,
      operands.restart,
      operands.flags,
      d_carries,
      d_last,
  )
  return d_arrays, d_carry, d_theta.sum(0), d_restart


def _tuned(static: Recurrence, ins, outs, run_kernel, adjoint=False):
  """Returns a linear kernel as a function of its operands.

  Args:
    static: the static arguments.
    ins: the streams that are read.
    outs: the streams that are written.
    run_kernel: (cut, *operands) -> results; it gets the best cut, and under
      `vmap` the best for all elements together if that has one segment.
    adjoint: whether it is for the backward pass.
  """
  layout = static.layout

  def choose(batch: int):
    many = dataclasses.replace(layout, batch=batch)
    return tuning.linear(many, ins, outs, static.target, adjoint)

  config = choose(layout.batch)
  alone = functools.partial(run_kernel, config)
  if config.segments == 1:
    return alone

  @jax.custom_batching.custom_vmap
  def function(*operands):
    return alone(*operands)

  @function.def_vmap
  def _rule(size, batched, *operands):
    each = mailbox.one_at_a_time(alone)
    together = choose(size * layout.batch)
    if together.segments == 1:
      each = functools.partial(run_kernel, together)
    return mapped(each, batched, operands)

  return function


def mapped(function, batched, operands):
  """Returns the results of a `custom_vmap` rule that maps a function."""
  axes = jax.tree.map(lambda yes: 0 if yes else None, tuple(batched))
  results = jax.vmap(function, axes)(*operands)
  return results, jax.tree.map(lambda _: True, results)
