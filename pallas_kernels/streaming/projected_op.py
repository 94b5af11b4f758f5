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
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import op
from pallas_kernels.streaming import projected
from pallas_kernels.streaming import recurrence as recurrence_lib
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import tuning

Array = jax.Array
Recurrence = recurrence_lib.Recurrence


def pays(recurrence: Recurrence, arrays, input_kernel: Array | None) -> bool:
  """Whether one kernel can multiply by W and scan, and is faster than two.

  Args:
    recurrence: the static arguments.
    arrays: as for `op.run`.
    input_kernel: likewise.
  """
  if input_kernel is None or not recurrence.linear:
    return False
  (x,) = arrays
  gates, depth, features = input_kernel.shape
  gate_streams = jax.ShapeDtypeStruct((*x.shape[:2], gates, features), x.dtype)
  return (
      recurrence.call.out_dtype == x.dtype
      and x.dtype.itemsize == 2
      and depth > 0
      and recurrence.aligned((gate_streams,)) == features
      and tuning.projected(
          recurrence.layout, input_kernel.shape, recurrence.target
      )
  )


def run(
    recurrence: Recurrence,
    theta: Array,
    arrays: tuple[Array, ...],
    input_kernel: Array,
    carry: Array | None,
    restart: Array | None,
    reset: Array | None,
    mask: Array | None,
) -> tuple[Array, tuple[Array, ...]]:
  """Runs a recurrence for which this `pays`; as `op.run`."""
  operands = theta, arrays, input_kernel, carry, restart, reset, mask
  operands = sharding.alike(operands)
  theta, (x,), input_kernel, carry, restart, reset, mask = operands
  flags = step_flags.pack(reset, mask)
  features = recurrence.shape[-1]
  theta, carry, restart = streams.pad_to_tiles(
      features, (theta, carry, restart)
  )
  last, h = _run(recurrence, theta, x, input_kernel, carry, restart, flags)
  return last[..., :features], (h,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(recurrence: Recurrence, theta, x, input_kernel, carry, restart, flags):
  """Returns the last carry and h; arguments as for `run`, padded."""
  operands = theta, x, input_kernel, carry, restart, flags
  return _forward(recurrence, operands, keep=False)(*operands)[:2]


def _run_fwd(
    recurrence: Recurrence, theta, x, input_kernel, carry, restart, flags
):
  theta, x, input_kernel, carry, restart = autodiff.differentiable_once(
      (theta, x, input_kernel, carry, restart)
  )
  operands = theta, x, input_kernel, carry, restart, flags
  keep = recurrence.call.keep_gates
  last, h, gates = _forward(recurrence, operands, keep)(*operands)
  saved = theta, gates, (h,), carry, restart, flags, input_kernel, x
  return (last, h), saved


def _run_bwd(recurrence: Recurrence, saved, cotangents):
  theta, gates, *others, flags, input_kernel, x = saved
  primals, cotangents = autodiff.differentiable_once(
      ((theta, gates, tuple(others), input_kernel, x), cotangents)
  )
  theta, gates, others, input_kernel, x = primals
  product = projection.Product(input_kernel, x)
  if gates is None:
    gates, product, cotangents = projection.form_again(product, cotangents)
  else:
    product, cotangents = projection.wait(product, cotangents)
  d_last, d_h = cotangents
  saved = theta, (gates,), *others, flags
  d_theta, (d_gates,), *rest = op.backward(recurrence, saved, (d_last, (d_h,)))
  d_product = product.pull(d_gates)
  return d_theta, d_product.x, d_product.kernel, *rest


_run.defvjp(_run_fwd, _run_bwd)


def _forward(recurrence: Recurrence, operands, keep: bool):
  """Returns a function of the operands, each device with its part of the batch.

  It returns the last carry, h, and the pre-activations if `keep`, else None.

  Args:
    recurrence: the static arguments.
    operands: of `_run`.
    keep: whether the pre-activations are returned.
  """

  def in_one(theta, x, input_kernel, carry, restart, flags):
    own = recurrence.of_batch(x.shape[recurrence.batch_axis])
    plan = own.plan(projected.CONFIG, carry, restart, flags)
    operands = own.kernel_operands(theta, (x,), carry, restart, flags)
    h, last, gates = projected.forward(
        plan,
        recurrence.target.cores,
        operands.theta,
        x,
        input_kernel,
        operands.carry,
        operands.restart,
        operands.flags,
        keep=keep,
    )
    return jax.tree.map(lambda y: sharding.like(y, x), (last[None], h, gates))

  def in_two(theta, x, input_kernel, carry, restart, flags):
    gates = projection.project(input_kernel, x)
    last, (h,) = op.forward(recurrence, theta, (gates,), carry, restart, flags)
    return last, h, gates if keep else None

  function = jax.custom_batching.custom_vmap(in_one)

  @function.def_vmap
  def _rule(size, batched, *operands):
    del size
    # The CTAs of several such kernels could not all be on the device at once.
    return op.mapped(in_two, batched, operands)

  whole, axis = auto_axes.WHOLE, recurrence.batch_axis
  return auto_axes.over_batch(
      recurrence.target,
      function,
      operands,
      (whole, axis, whole, 1, 1, 0),
      (1, axis, axis),
  )
