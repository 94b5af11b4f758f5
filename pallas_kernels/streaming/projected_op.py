"""The operation x, W -> h: forward in one kernel, backward in two.

The forward kernel keeps the pre-activations W x where a derivative is wanted,
or the backward pass computes them again, as the call says. That pass runs the
adjoint of the recurrence on them and multiplies their cotangents by W, outside
of kernels.
"""

import functools

import jax

from pallas_kernels import auto_axes
from pallas_kernels import projection
from pallas_kernels import sharding
from pallas_kernels.mosaic import autodiff
from pallas_kernels.streaming import projected
from pallas_kernels.streaming import recurrence
from pallas_kernels.streaming import unprojected_op

Recurrence = recurrence.Recurrence


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(static: Recurrence, theta, x, kernel, carry, restart, flags):
  """Returns the last carry and h; arguments as for `op.run`, padded."""
  operands = theta, x, kernel, carry, restart, flags
  return _forward(static, operands, keep=False)(*operands)[:2]


def _run_fwd(static: Recurrence, theta, x, kernel, carry, restart, flags):
  theta, x, kernel, carry, restart = autodiff.differentiable_once(
      (theta, x, kernel, carry, restart)
  )
  operands = theta, x, kernel, carry, restart, flags
  keep = static.call.keep_gates
  last, h, gates = _forward(static, operands, keep)(*operands)
  return (last, h), (theta, gates, (h,), carry, restart, flags, kernel, x)


def _run_bwd(static: Recurrence, saved, cotangents):
  theta, gates, *others, flags, kernel, x = saved
  primals, cotangents = autodiff.differentiable_once(
      ((theta, gates, tuple(others), kernel, x), cotangents)
  )
  theta, gates, others, kernel, x = primals
  if gates is None:
    product = projection.Product(kernel, x)
    gates, cotangents = projection.form_again(product, cotangents)
  d_last, d_h = cotangents
  saved = theta, (gates,), *others, flags
  d_theta, (d_gates,), *rest = unprojected_op.backward(
      static, saved, (d_last, (d_h,))
  )
  d_kernel, d_x = projection.backward((kernel, x), d_gates)
  return d_theta, d_x, d_kernel, *rest


run.defvjp(_run_fwd, _run_bwd)


def _forward(static: Recurrence, operands, keep: bool):
  """Returns a function of the operands, each device with its part of the batch.

  It returns the last carry, h, and the pre-activations if `keep`, else None.

  Args:
    static: the static arguments.
    operands: of `run`.
    keep: whether the pre-activations are returned.
  """

  def in_one(theta, x, kernel, carry, restart, flags):
    own = static.of_batch(x.shape[static.batch_axis])
    plan = own.plan(projected.CONFIG, carry, restart, flags)
    operands = own.kernel_operands(theta, (x,), carry, restart, flags)
    h, last, gates = projected.forward(
        plan,
        static.target.cores,
        operands.theta,
        x,
        kernel,
        operands.carry,
        operands.restart,
        operands.flags,
        keep=keep,
    )
    return jax.tree.map(lambda y: sharding.like(y, x), (last[None], h, gates))

  def in_two(theta, x, kernel, carry, restart, flags):
    gates = projection.project(kernel, x)
    last, (h,) = unprojected_op.forward(
        static, theta, (gates,), carry, restart, flags, outputs=1
    )
    return last, h, gates if keep else None

  function = jax.custom_batching.custom_vmap(in_one)

  @function.def_vmap
  def _rule(size, batched, *operands):
    del size
    # The CTAs of several such kernels could not all be on the device at once.
    return unprojected_op.mapped(in_two, batched, operands)

  whole, axis = auto_axes.WHOLE, static.batch_axis
  return auto_axes.over_batch(
      static.target,
      function,
      operands,
      (whole, axis, whole, 1, 1, 0),
      (1, axis, axis),
  )
