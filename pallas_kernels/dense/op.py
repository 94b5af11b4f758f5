"""Recurrences with a dense kernel as one differentiable operation.

The kernels run the loops over time (`forward.py`, `backward.py`). Here are the
parts around them: a batch in pieces, and the VJP, whose products over
all steps are GEMMs outside the kernels (`gradients.py`).
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import auto_axes
from pallas_kernels import devices
from pallas_kernels import projection
from pallas_kernels.dense import backward
from pallas_kernels.dense import forward
from pallas_kernels.dense import gradients
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.dense import tuning
from pallas_kernels.mosaic import autodiff
from pallas_kernels.mosaic import step_flags

Array = jax.Array
Recurrence = plan_lib.Recurrence


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
  """Runs a recurrence; differentiable in all arrays but the last two.

  Args:
    recurrence: static facts.
    theta: float32 [P, F].
    x: the inputs, [B, T, G, F], or their product, which is then computed again
      in the backward pass instead of being kept.
    recurrent_kernel: R, [G', N, D, D].
    carry: float32 [S, B, F].
    restart: float32 [S, B, F].
    reset: bool [B, T], in the order of the loop, or [2, B, T] with one for each
      direction; or None.
    mask: bool [B, T] or None.

  Returns:
    The final carry, float32 [S, B, F], and `recurrence.call.outputs` arrays
    [B, T, F], or time-major as x.
  """
  # A carry of zeros that was made here varies over no axis of a mesh yet.
  theta, x, recurrent_kernel, carry, restart, reset, mask = devices.alike(
      (theta, x, recurrent_kernel, carry, restart, reset, mask)
  )
  batch, time, *_ = recurrence.shape
  groups = recurrence.call.groups
  if reset is not None:
    reset = jnp.broadcast_to(reset, (groups, batch, time))
  flags = step_flags.pack(reset, mask)
  if flags is not None:
    flags = jnp.broadcast_to(flags, (groups, batch, time))
  if recurrence.call.levels > 1 and auto_axes.may_be_split((x, carry)):
    raise NotImplementedError(
        'Levels that run at the same time need batches that XLA does not split.'
    )
  inputs = jax.eval_shape(projection.form, x)
  used = jax.eval_shape(
      functools.partial(_used, recurrence), inputs, recurrent_kernel
  )
  _check(recurrence, inputs, used)
  recurrence = dataclasses.replace(recurrence, holds=mask is not None)
  # Both directions are planned first, so that an error is raised here.
  for options in ({'save': True}, {'adjoint': True}):
    plan_lib.plan_pieces(
        recurrence,
        inputs,
        used,
        states=len(carry),
        flags=flags is not None,
        **options,
    )
  return _run(recurrence, theta, x, recurrent_kernel, carry, restart, flags)


def at_once(
    recurrence: Recurrence, x: Any, recurrent_kernel: Any, **facts: Any
) -> bool:
  """Returns whether all CTAs of both kernels are on the device at once.

  Args:
    recurrence: static facts.
    x: the inputs, or their type.
    recurrent_kernel: R, or its type.
    **facts: states and flags of `plan.plan_pieces`.

  Raises:
    NotImplementedError: no kernel can run it.
  """
  for options in ({'save': True}, {'adjoint': True}):
    planned = plan_lib.plan_pieces(
        recurrence, x, recurrent_kernel, **facts, **options
    )
    plan = planned[0].plan
    most = tuning.most_at_once(plan.config, recurrence.target)
    if len(planned) > 1 or plan.shape.ctas(plan.config) > most:
      return False
  return True


def _check(recurrence: Recurrence, x, recurrent_kernel) -> None:
  """Raises NotImplementedError for a precision, a cell or sizes beyond them."""
  dtype = jnp.promote_types(x.dtype, recurrent_kernel.dtype)
  config: Any = jax.config  # Its attributes have no types.
  precision = config.jax_default_matmul_precision
  if dtype == jnp.float32 and precision in ('highest', 'float32'):
    raise NotImplementedError(
        'GPU kernels multiply float32 in two bfloat16 parts, to about 2^-17,'
        f' and jax_default_matmul_precision is {precision!r}.'
    )
  if recurrence.operand is not None and recurrent_kernel.shape[0] < 2:
    raise NotImplementedError(
        'GPU kernels for cells with two stages take those whose first stage has'
        ' recurrent gates, got one gate in all.'
    )
  gates = max(x.shape[2], recurrent_kernel.shape[0])
  batch, time, heads, size = recurrence.shape
  if max(batch * time, size) * gates * heads * size >= 2**31:
    raise NotImplementedError(
        'GPU kernels for dense recurrences take fewer than 2^31 elements of'
        f' gates and of the recurrent kernel, got {recurrence.shape} (batch,'
        f' time, heads, head_dim with padding) with {gates} gates: split the'
        ' batch.'
    )


def _used(recurrence: Recurrence, inputs: Array, recurrent_kernel: Array):
  """Returns R in the dtype that the kernels get it in."""
  if recurrence.call.cast_kernel:
    return recurrent_kernel.astype(inputs.dtype)
  return recurrent_kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    recurrence: Recurrence, theta, x, recurrent_kernel, carry, restart, flags
):
  inputs = projection.form(x)
  recurrent_kernel = _used(recurrence, inputs, recurrent_kernel)
  operands = theta, inputs, recurrent_kernel, carry, restart, flags
  forward_pass = _forward(recurrence, operands, save=False)
  return forward_pass(*operands)[:2]


def _run_fwd(
    recurrence: Recurrence, theta, x, recurrent_kernel, carry, restart, flags
):
  theta, x, recurrent_kernel, carry, restart = autodiff.differentiable_once(
      (theta, x, recurrent_kernel, carry, restart)
  )
  inputs = projection.form(x)
  recurrent_kernel = _used(recurrence, inputs, recurrent_kernel)
  operands = theta, inputs, recurrent_kernel, carry, restart, flags
  forward_pass = _forward(recurrence, operands, save=True)
  last, carries, (h, others), u = forward_pass(*operands)
  starts = *h, *others
  saved = theta, x, recurrent_kernel, carry, restart, starts, u
  return (last, carries), (saved, flags)


def _forward(recurrence, operands, save):
  """Returns `forward_part` as a function of the operands, over devices."""
  axis = recurrence.batch_axis
  whole = auto_axes.WHOLE
  return auto_axes.over_batch(
      recurrence.target,
      functools.partial(forward_part, recurrence, save),
      operands,
      (whole, axis, whole, 1, 1, 1),
      # h and u lie head by head, all further arrays of the carry do not.
      (1, axis, (axis + 1, axis), axis + 1),
  )


def forward_part(
    recurrence, save, theta, x, recurrent_kernel, carry, restart, flags
):
  """Runs the forward kernel for the part of the batch that one device has.

  Returns:
    The final carry; the outputs; and, if `save`, the carry that every step
    starts from, h apart, and the operand of the second product.
  """
  recurrence = recurrence.of_batch(x.shape[recurrence.batch_axis])
  batch_pieces = plan_lib.plan_pieces(
      recurrence,
      x,
      recurrent_kernel,
      states=len(carry),
      flags=flags is not None,
      save=save,
  )
  matrix = _matrix(jnp.swapaxes(recurrent_kernel, -1, -2), batch_pieces[0].plan)
  axis = recurrence.batch_axis

  results = [
      forward.forward(
          piece.plan,
          theta,
          piece.cut(axis, x),
          matrix,
          piece.cut(1, carry),
          piece.cut(1, restart),
          _flags_of(piece, flags),
      )
      for piece in batch_pieces
  ]
  carries, last, starts, u = zip(*results, strict=True)
  h = [start[:1] for start in starts]
  by_head = plan_lib.join(axis + 1, list(zip(h, u, strict=True)))
  others = plan_lib.join(axis, [start[1:] for start in starts])
  joined = (
      plan_lib.join(1, last),
      plan_lib.join(axis, carries),
      (by_head[0], others),
      by_head[1],
  )
  return jax.tree.map(lambda y: devices.like(y, x), joined)


def _run_bwd(recurrence: Recurrence, saved, cotangents):
  saved, flags = saved
  saved, cotangents = autodiff.differentiable_once((saved, cotangents))
  *primals, starts, u = saved
  theta, x, recurrent_kernel, carry, restart = primals
  inputs, x, cotangents = projection.form_again(x, cotangents)
  axis = recurrence.batch_axis
  whole = auto_axes.WHOLE
  places = whole, axis, whole, 1, 1
  operands = (
      *(theta, inputs, recurrent_kernel, carry, restart, flags),
      *(starts[:1], starts[1:], u, *cotangents),
  )
  adjoint = auto_axes.over_batch(
      recurrence.target,
      functools.partial(backward_part, recurrence),
      operands,
      (*places, 1, axis + 1, axis, axis + 1, 1, axis),
      places,
  )
  d_theta, d_x, d_recurrent_kernel, d_carry, d_restart = adjoint(*operands)
  no_restart = flags is None or not recurrence.restart_learns
  cotangents = (
      d_theta if recurrence.params else jnp.zeros_like(theta),
      projection.pull(x, d_x.astype(inputs.dtype)),
      d_recurrent_kernel
      if recurrence.call.cast_kernel
      else d_recurrent_kernel.astype(recurrent_kernel.dtype),
      d_carry,
      jnp.zeros_like(restart) if no_restart else d_restart,
  )
  return *jax.tree.map(devices.like, cotangents, tuple(primals)), None


def backward_part(
    recurrence,
    theta,
    x,
    recurrent_kernel,
    carry,
    restart,
    flags,
    h,
    others,
    u,
    *given,
):
  """Returns the cotangents of a part of the batch; of theta, R in float32."""
  recurrence = recurrence.of_batch(x.shape[recurrence.batch_axis])
  d_last, d_carries = given
  starts = *h, *others
  batch_pieces = plan_lib.plan_pieces(
      recurrence,
      x,
      recurrent_kernel,
      states=len(carry),
      flags=flags is not None,
      adjoint=True,
  )
  axis = recurrence.batch_axis
  matrix = _matrix(recurrent_kernel, batch_pieces[0].plan)
  again: tuple[Array, ...] = ()
  if any(piece.plan.again for piece in batch_pieces):
    transposed = jnp.swapaxes(recurrent_kernel, -1, -2)
    again = _matrix(transposed, batch_pieces[0].plan)
  # The factor of each product.
  operands = [starts[0], *([] if u is None else [u])]

  def pull_piece(piece: plan_lib.Piece):
    plan = piece.plan
    own = piece.cut(axis + 1, operands)
    d_x, d_gates, d_carry, d_theta, d_restart = backward.backward(
        plan,
        theta,
        piece.cut(axis, x),
        [] if plan.again else _h_gates(plan, own, recurrent_kernel),
        (own[0], *piece.cut(axis, starts[1:])),
        matrix,
        again if plan.again else (),
        _flags_of(piece, flags),
        piece.cut(axis, d_carries),
        piece.cut(1, d_last),
    )
    cores = recurrence.target.cores
    d_recurrent_kernel = _d_recurrent_kernel(plan, cores, own, d_x, d_gates)
    return d_x, d_carry, d_restart, d_theta.sum(1), d_recurrent_kernel

  d_x, d_carry, d_restart, d_theta, d_recurrent_kernel = zip(
      *map(pull_piece, batch_pieces), strict=True
  )
  add = lambda parts: functools.reduce(jnp.add, parts)
  return (
      add(d_theta),
      plan_lib.join(axis, d_x),
      add(d_recurrent_kernel),
      plan_lib.join(1, d_carry),
      plan_lib.join(1, d_restart),
  )


_run.defvjp(_run_fwd, _run_bwd)


def _h_gates(
    plan: plan_lib.Plan, factors: list[Array], recurrent_kernel: Array
) -> list[Array]:
  """Returns the products of all steps with R, one for each factor."""
  return [
      gradients.h_gates(
          h, recurrent_kernel[p.first :][: p.gates].astype(plan.dtype)
      )
      for h, p in zip(factors, plan.stages, strict=True)
  ]


def _d_recurrent_kernel(
    plan: plan_lib.Plan, cores: int, factors: list[Array], d_x, d_gates
) -> Array:
  """Returns the cotangent of R; where d_gates is empty, d_x has the gates."""
  if plan.in_place:
    return gradients.d_small_kernel(factors[0], d_x, cores)
  d_gates = d_gates or [
      d_x[None, :, :, p.first :][..., : p.gates, :] for p in plan.stages
  ]
  return jnp.concatenate(
      [gradients.d_kernel(h, d) for h, d in zip(factors, d_gates, strict=True)]
  )


def _flags_of(piece: plan_lib.Piece, flags: Array | None) -> Array | None:
  """Returns the flags of a piece as the kernels read them."""
  if flags is None:
    return None
  return kernel_call.prepare_flags(piece.cut(1, flags), piece.plan.shape)


def _matrix(recurrent_kernel: Array, plan: plan_lib.Plan) -> tuple[Array, ...]:
  """Returns a recurrent kernel as tensor cores take it.

  Float32 becomes two bfloat16 parts, whose sum is off by 2^-17 of it.
  """
  if not plan.split:
    return (recurrent_kernel.astype(plan.dtype),)
  whole = recurrent_kernel.astype(jnp.float32)
  high = lax.reduce_precision(whole, 8, 7)
  return high.astype(jnp.bfloat16), (whole - high).astype(jnp.bfloat16)
