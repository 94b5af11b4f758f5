"""Recurrences in tiles as one differentiable operation.

The kernels run the loops over time. Around them: the order of R, the gradient
of R, one product over all steps, and a batch over devices. On Auto axes of a
mesh a device may turn out to have few rows, when the program is compiled: these
run by the kernels of the family 'dense'.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import auto_axes
from pallas_kernels import devices
from pallas_kernels import projection
from pallas_kernels.dense import op as dense_op
from pallas_kernels.dense import plan as dense_plan
from pallas_kernels.mosaic import autodiff
from pallas_kernels.mosaic import step_flags
from pallas_kernels.tiled import backward
from pallas_kernels.tiled import choice
from pallas_kernels.tiled import forward
from pallas_kernels.tiled import limits
from pallas_kernels.tiled import on_chip as on_chip_lib
from pallas_kernels.tiled import on_chip_backward
from pallas_kernels.tiled import plan as plan_lib
from pallas_kernels.tiled import tuning

Array = jax.Array
Recurrence = dense_plan.Recurrence


def run(
    recurrence: Recurrence,
    theta: Array,
    x: Array | projection.Product,
    recurrent_kernel: Array,
    carry: Array,
    restart: Array,
    reset: Array | None,
    mask: Array | None,
) -> tuple[Array, tuple[Array, ...]]:
  """Runs a recurrence that `limits` allows; as `dense.op.run`."""
  # A carry of zeros that was made here varies over no axis of a mesh yet.
  theta, x, recurrent_kernel, carry, restart, reset, mask = devices.alike(
      (theta, x, recurrent_kernel, carry, restart, reset, mask)
  )
  flags = step_flags.pack(reset, mask)
  if isinstance(x, projection.Product) and recurrence.call.keep_gates:
    if not _multiplies(recurrence, x, recurrent_kernel, len(carry)):
      x = projection.project(x.kernel, x.x)
  return _run(recurrence, theta, x, recurrent_kernel, carry, restart, flags)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    recurrence: Recurrence, theta, x, recurrent_kernel, carry, restart, flags
):
  x = _formed(recurrence, x, recurrent_kernel, len(carry))
  operands = theta, x, recurrent_kernel, carry, restart, flags
  return _forward(recurrence, operands, save=False)(*operands)[:2]


def _run_fwd(
    recurrence: Recurrence, theta, x, recurrent_kernel, carry, restart, flags
):
  theta, x, recurrent_kernel, carry, restart = autodiff.differentiable_once(
      (theta, x, recurrent_kernel, carry, restart)
  )
  given = _formed(recurrence, x, recurrent_kernel, len(carry))
  operands = theta, given, recurrent_kernel, carry, restart, flags
  forward_pass = _forward(recurrence, operands, save=True)
  last, carries, (h, others, gates, alone) = forward_pass(*operands)
  inputs = jax.eval_shape(projection.form, x)
  if not recurrence.call.keep_gates:
    gates = alone = None
  elif not isinstance(x, projection.Product):
    plan = _make_plan(recurrence, inputs, recurrent_kernel, len(carry), False)
    # Only inputs that are in no sum are kept.
    x, alone = None, plan_lib.alone(plan, x)
  saved = h, others, gates, alone
  of_inputs = plan_lib.Inputs(inputs.shape[2], inputs.dtype)
  return (last, carries), ((theta, x, *operands[2:]), saved, of_inputs)


def _multiplies(
    recurrence: Recurrence, x: projection.Product, recurrent_kernel, states: int
) -> bool:
  """Returns whether the forward kernel multiplies W x."""
  depth, dtype = x.x.shape[-1], x.x.dtype
  if not _many_rows(recurrence) or depth % limits.DEPTH:
    return False
  inputs = jax.eval_shape(projection.form, x)
  plan = _make_plan(recurrence, inputs, recurrent_kernel, states, False)
  streams = not isinstance(plan, on_chip_lib.Plan) and plan.heads == 1
  fits = len(plan.alone) == len(plan.apart)
  return streams and fits and plan.dtype == dtype and depth > 0


def _many_rows(recurrence: Recurrence) -> bool:
  """Returns whether rows are so many that a kernel multiplies W x faster."""
  return recurrence.shape[0] >= limits.ROWS_TO_PROJECT


def _formed(recurrence, x, recurrent_kernel, states: int):
  """Returns the inputs as the forward pass takes them: a product as it is."""
  if isinstance(x, projection.Product) and _multiplies(
      recurrence, x, recurrent_kernel, states
  ):
    return x
  return projection.form(x)


def _make_plan(
    recurrence,
    x,
    recurrent_kernel,
    states,
    flags,
    adjoint=False,
    save=False,
    depth=0,
) -> plan_lib.Plan:
  batch, time, heads, size = recurrence.shape
  recurrent = recurrent_kernel.shape[0]
  facts: dict[str, Any] = {
      'batch': batch,
      'heads': heads,
      'size': size,
      'recurrent': recurrent,
      'target': recurrence.target,
  }
  make: Callable[..., plan_lib.Plan] = plan_lib.Plan
  config: Any = None
  if not adjoint:
    make, config = on_chip_lib.ForwardPlan, tuning.choose_resident(**facts)
  elif not recurrence.call.stop_recurrent_gradient:
    make, config = on_chip_lib.AdjointPlan, tuning.choose_team(**facts)
  if config is None:
    make = plan_lib.Plan
    config = tuning.choose(adjoint=adjoint, depth=depth, **facts)
  return make(
      update=recurrence.update,
      params=recurrence.params,
      gates=x.shape[2],
      recurrent=recurrent,
      states=states,
      batch=batch,
      time=time,
      heads=heads,
      size=size,
      call=recurrence.call,
      flags=flags,
      x_dtype=x.dtype,
      dtype=jnp.promote_types(x.dtype, recurrent_kernel.dtype),
      adjoint=adjoint,
      save=save,
      depth=depth,
      config=config,
  )


def _forward(recurrence, operands, save):
  """Returns `_forward_part` as a function of the operands, over devices."""
  axis, whole = recurrence.batch_axis, auto_axes.WHOLE
  of_x: Any = axis
  if isinstance(operands[1], projection.Product):
    places: dict[str, Any] = {'kernel': whole, 'x': axis}
    of_x = dataclasses.replace(operands[1], **places)
  return auto_axes.over_batch(
      recurrence.target,
      functools.partial(_forward_part, recurrence, save),
      operands,
      (whole, of_x, whole, 1, 1, 0),
      (1, axis, axis),
  )


def _forward_part(
    recurrence, save, theta, x, recurrent_kernel, carry, restart, flags
):
  """Runs the forward kernel for the part of the batch that one device has.

  Returns:
    The final carry; the outputs; and, if `save`, h, `others` and the gates as
    `forward.Outputs` has them, and `kept_gates.alone` of a product.
  """
  inputs = jax.eval_shape(projection.form, x)
  few = _of_few_rows(recurrence, inputs, recurrent_kernel, carry, flags)
  recurrence = recurrence.of_batch(inputs.shape[recurrence.batch_axis])
  make_plan = functools.partial(
      _make_plan,
      *(recurrence, inputs, recurrent_kernel, len(carry), flags is not None),
      save=save,
  )
  plan = make_plan()
  on_chip = isinstance(plan, on_chip_lib.Plan)
  alone = None
  if few or on_chip or not _many_rows(recurrence):
    given, x = x, projection.form(x)
    if isinstance(given, projection.Product):
      alone = plan_lib.alone(plan, x)
  if few:
    last, carries, (h, others), _ = dense_op.forward_part(
        few,
        save,
        *(theta, x, recurrent_kernel, carry, restart),
        None if flags is None else flags[None],
    )
    if not save:
      return last, carries, ()
    h = h[0].reshape(x.shape[0], x.shape[1], -1)
    return (
        last,
        carries,
        (h, others, plan_lib.kept(plan, h, x, recurrent_kernel), alone),
    )
  source = None
  if isinstance(x, projection.Product):
    source, plan = x.x, make_plan(depth=x.x.shape[-1])
    matrix, x = plan.arrange_both(x.kernel, recurrent_kernel), None
  else:
    matrix, x = plan.arrange(recurrent_kernel), x.reshape(*x.shape[:2], -1)
  outs = forward.forward(
      plan,
      forward.Inputs(
          theta=theta,
          x=x,
          source=source,
          matrix=matrix,
          carry=carry,
          restart=None if flags is None else restart,
          flags=_flags_of(flags),
      ),
  )
  if outs.alone is not None:
    alone = outs.alone.reshape(*outs.h.shape[:2], -1, plan.features)
  saved = (outs.h, outs.others, outs.gates, alone) if save else ()
  results = outs.last, outs.carries, saved
  return jax.tree.map(lambda y: devices.like(y, carry), results)


def _of_few_rows(
    recurrence: Recurrence, x, recurrent_kernel, carry, flags
) -> Recurrence | None:
  """Returns the recurrence of a part of the batch whose rows are too few.

  None where kernels in tiles are faster, or no others can run it. Tiles are
  faster for the whole batch. Only the types of the arrays are read.
  """
  rows = x.shape[recurrence.batch_axis]
  whole, time, *_ = recurrence.shape
  dtype = jnp.promote_types(x.dtype, recurrent_kernel.dtype)
  if rows == whole or choice.pay(
      recurrence.target,
      jax.ShapeDtypeStruct(recurrent_kernel.shape, dtype),
      rows=rows,
      time=time,
      gates=x.shape[2],
      states=len(carry),
      two_stages=False,
      call=recurrence.call,
  ):
    return None
  part = dataclasses.replace(recurrence.of_batch(rows), holds=flags is not None)
  try:
    for options in ({'save': True}, {'adjoint': True}):
      dense_plan.plan_pieces(
          part,
          x,
          recurrent_kernel,
          states=len(carry),
          flags=flags is not None,
          **options,
      )
  except NotImplementedError:
    return None
  return part


def _flags_of(flags: Array | None) -> Array | None:
  """[B, T] -> [T, B]."""
  return None if flags is None else flags.T


def _run_bwd(recurrence: Recurrence, saved, cotangents):
  operands, saved, of_inputs = saved
  *primals, flags = operands
  (primals, saved), cotangents = autodiff.differentiable_once(
      ((tuple(primals), saved), cotangents)
  )
  theta, x, recurrent_kernel, carry, restart = primals
  h, _, gates, _ = saved
  inputs = None
  if gates is None:
    inputs, x, cotangents = projection.form_again(x, cotangents)
  elif x is not None:
    x, cotangents = projection.wait(x, cotangents)
  axis, whole = recurrence.batch_axis, auto_axes.WHOLE
  places = whole, axis, whole, 1, 1
  operands = (
      *(theta, inputs, recurrent_kernel, carry, restart, flags),
      *(saved, *cotangents),
  )
  adjoint = auto_axes.over_batch(
      recurrence.target,
      functools.partial(_backward_part, recurrence, of_inputs),
      operands,
      (*places, 0, axis, 1, axis),
      places,
  )
  d_theta, d_x, d_recurrent_kernel, d_carry, d_restart = adjoint(*operands)
  d_x = devices.like(d_x.astype(of_inputs.dtype), h)
  results = (
      d_theta if recurrence.params else jnp.zeros_like(theta),
      d_recurrent_kernel.astype(recurrent_kernel.dtype),
      d_carry,
      d_restart,
  )
  primals = theta, recurrent_kernel, carry, restart
  d_theta, *others = jax.tree.map(devices.like, results, primals)
  d_x = d_x if x is None else projection.pull(x, d_x)
  return d_theta, d_x, *others, None


def _backward_part(
    recurrence,
    of_inputs,
    theta,
    x,
    recurrent_kernel,
    carry,
    restart,
    flags,
    saved,
    *cotangents,
):
  """Returns the cotangents of a part of the batch; of theta, R in float32."""
  h, others, gates, alone = saved
  inputs = of_inputs.beside(h)
  few = _of_few_rows(recurrence, inputs, recurrent_kernel, carry, flags)
  recurrence = recurrence.of_batch(h.shape[recurrence.batch_axis])
  plan = _make_plan(
      recurrence,
      inputs,
      recurrent_kernel,
      len(carry),
      flags is not None,
      adjoint=True,
  )
  if few:
    if x is None:
      x = plan_lib.inputs(
          plan, h, gates, alone, recurrent_kernel, of_inputs.dtype
      )
    primals = theta, x, recurrent_kernel, carry, restart
    return _of_few_rows_backward(few, primals, flags, h, others, cotangents)
  if gates is None:
    gates, alone = plan_lib.kept(plan, h, x, recurrent_kernel), plan_lib.alone(
        plan, x
    )
  d_last, d_carries = cotangents
  on_chip = isinstance(plan, on_chip_lib.Plan)
  run_kernel = on_chip_backward.run if on_chip else backward.backward
  outs = run_kernel(
      plan,
      backward.Inputs(
          theta=theta,
          x=None if alone is None else alone.reshape(*h.shape[:2], -1),
          matrix=plan.arrange(recurrent_kernel),
          h=h,
          others=others,
          gates=gates,
          d_carries=d_carries,
          d_last=d_last,
          flags=_flags_of(flags),
      ),
  )
  d_gates = outs.d_x if plan.shared else outs.d_gates
  return (
      outs.d_theta.sum(0),
      outs.d_x.reshape(inputs.shape),
      _d_recurrent_kernel(plan, h, d_gates),
      outs.d_carry,
      jnp.zeros_like(restart) if flags is None else outs.d_restart,
  )


_run.defvjp(_run_fwd, _run_bwd)


def _of_few_rows_backward(few, primals, flags, h, others, cotangents):
  """`_backward_part` by the kernels for few rows."""
  by_head = h.reshape(1, *h.shape[:2], 1, -1)
  results = dense_op.backward_part(
      few,
      *primals,
      None if flags is None else flags[None],
      *((by_head,), others, None, *cotangents),
  )
  no_restart = flags is None or not few.restart_learns
  return *results[:4], jnp.zeros_like(primals[4]) if no_restart else results[4]


def _d_recurrent_kernel(plan: plan_lib.Plan, h: Array, d_gates: Array) -> Array:
  """[B, T, F] and [B, T, G' F] -> float32 [G', N, D, D]."""
  heads, size = plan.heads, plan.size
  if heads == 1:
    # Two matrices of all rows: no array of all steps is transposed.
    sums = lax.dot_general(
        h.reshape(-1, size),
        d_gates.reshape(-1, plan.recurrent * size),
        (((0,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    sums = sums.reshape(size, plan.recurrent, size)
    return jnp.swapaxes(sums, 0, 1)[:, None]
  lead = h.shape[:2]
  return jnp.einsum(
      'abnd,abgnk->gndk',
      h.reshape(*lead, heads, size),
      d_gates.reshape(*lead, plan.recurrent, heads, size),
      preferred_element_type=jnp.float32,
  )
