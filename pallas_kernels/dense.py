"""Recurrences with a dense kernel: kernels, products around them, one VJP.

What is sequential runs in `mosaic_gpu/dense.py`. Here is what is not: the
recurrent gates of all steps, which the adjoint needs again, are one product;
the gradient of the recurrent kernel is another.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import engine
from pallas_kernels import targets
from pallas_kernels import tuning
from pallas_kernels.mosaic_gpu import cta as cta_lib
from pallas_kernels.mosaic_gpu import dense
from pallas_kernels.mosaic_gpu import dense_backward
from pallas_kernels.mosaic_gpu import dense_forward
from pallas_kernels.mosaic_gpu import flags as flags_lib

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
  """What is static in a call.

  Attributes:
    update: (theta, inputs, h_gates, carry) -> carry, pointwise, hashable.
    operand: (theta, inputs, h_gates, carry) -> what the last recurrent gate
      multiplies, or None where that is h.
    params: how many rows of theta there are.
    shape: (B, T, N, D).
    time_major: whether streams are [T, B, ...].
    reverse: whether time runs from the last step to the first.
    both: whether it runs the other way for the second half of the heads.
    outputs: how many arrays of the carry are returned for all steps.
    out_dtype: dtype of these.
    clip: bound of what comes back through a product, or None.
    stop: whether nothing does.
    target: the device.
  """

  update: Callable[..., Any]
  operand: Callable[..., Any] | None
  params: int
  shape: tuple[int, int, int, int]
  time_major: bool
  reverse: bool
  both: bool
  outputs: int
  out_dtype: Any
  clip: float | None
  stop: bool
  target: targets.Target


def run(
    call: Call,
    theta: Array,
    x: Array,
    kernel: Array,
    carry: Array,
    restart: Array,
    reset: Array | None,
    mask: Array | None,
) -> tuple[Array, tuple[Array, ...]]:
  """Runs a recurrence; differentiable in all arrays but the last two.

  Args:
    call: what is static.
    theta: float32 [P, F].
    x: the inputs, [B, T, G, F].
    kernel: R, [G', N, D, D].
    carry: float32 [S, B, F].
    restart: float32 [S, B, F].
    reset: bool [B, T], in the order of the loop, or [2, B, T] with one for each
      direction; or None.
    mask: bool [B, T] or None.

  Returns:
    The final carry, float32 [S, B, F], and `call.outputs` streams.
  """
  batch, time, heads, size = call.shape
  directions = 1 + call.both
  if reset is not None:
    reset = jnp.broadcast_to(reset, (directions, batch, time))
  flags = flags_lib.pack(reset, mask)
  if flags is not None:
    flags = jnp.broadcast_to(flags, (directions, batch, time))
  _check(call, x, kernel)
  pieces = _pieces(call, x, kernel, carry.shape[0], flags is not None)
  if pieces > 1:
    return _in_pieces(
        pieces, call, theta, x, kernel, carry, restart, reset, mask
    )
  # Rows of a head have to start at multiples of 16 bytes.
  padded = -(-size // 8) * 8
  if padded == size:
    return _run(call, theta, x, kernel, carry, restart, flags)
  missing = padded - size

  def pad(a):
    a = a.reshape(*a.shape[:-1], heads, size)
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)])
    return a.reshape(*a.shape[:-2], heads * padded)

  def cut(a):
    a = a.reshape(*a.shape[:-1], heads, padded)[..., :size]
    return a.reshape(*a.shape[:-2], heads * size)

  call = dataclasses.replace(call, shape=(batch, time, heads, padded))
  kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, missing), (0, missing)))
  last, carries = _run(
      call, pad(theta), pad(x), kernel, pad(carry), pad(restart), flags
  )
  return cut(last), tuple(map(cut, carries))


def _check(call: Call, x, kernel) -> None:
  """Raises NotImplementedError where kernels would not do what is asked."""
  dtype = jnp.promote_types(x.dtype, kernel.dtype)
  config: Any = jax.config  # Its attributes have no types.
  precision = config.jax_default_matmul_precision
  if dtype == jnp.float32 and precision in ('highest', 'float32'):
    raise NotImplementedError(
        'GPU kernels multiply float32 in two bfloat16 parts, to about 2^-17,'
        f' and jax_default_matmul_precision is {precision!r}.'
        f' {targets.OTHERWISE}'
    )
  gates = max(x.shape[2], kernel.shape[0])
  batch, time, heads, size = call.shape
  rows = max(batch * time, size + 7)
  if rows * gates * heads * (size + 7) >= 2**31:
    raise NotImplementedError(
        'GPU kernels for dense recurrences take up to 2^31 elements of gates'
        f' and of the recurrent kernel, got {call.shape} (batch, time, heads,'
        f' head_dim) with {gates} gates: split the batch. {targets.OTHERWISE}'
    )


def _pieces(call: Call, x, kernel, states, has_flags) -> int:
  """Returns into how many pieces the batch has to be cut to fit the device."""
  batch, time, heads, size = call.shape
  pieces = 1
  while True:
    rows = -(-batch // pieces)
    padded = -(-size // 8) * 8
    piece = dataclasses.replace(call, shape=(rows, time, heads, padded))
    try:
      _forward_plan(piece, x, kernel, states, has_flags, True)
      _backward_plan(piece, x, kernel, states, has_flags)
      return pieces
    except NotImplementedError:
      if rows <= 8:
        raise
      pieces *= 2


def _in_pieces(pieces, call, theta, x, kernel, carry, restart, reset, mask):
  """Runs some rows of the batch after the others."""
  batch = call.shape[0]
  rows = -(-batch // pieces)
  axis = 1 if call.time_major else 0
  done = []
  for start in range(0, batch, rows):
    end = min(batch, start + rows)

    def cut(a, axis, start=start, end=end):
      if a is None:
        return None
      return lax.slice_in_dim(a, start, end, axis=axis)

    piece = dataclasses.replace(call, shape=(end - start, *call.shape[1:]))
    done.append(
        run(
            piece,
            theta,
            cut(x, axis),
            kernel,
            cut(carry, 1),
            cut(restart, 1),
            cut(reset, 1),
            cut(mask, 0),
        )
    )
  lasts, carries = zip(*done, strict=True)
  join = lambda *parts: jnp.concatenate(parts, axis)
  return jnp.concatenate(lasts, 1), jax.tree.map(join, *carries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: Call, theta, x, kernel, carry, restart, flags):
  return _forward(call, theta, x, kernel, carry, restart, flags, False)[:2]


def _run_fwd(call: Call, theta, x, kernel, carry, restart, flags):
  theta, x, kernel, carry, restart = engine.differentiable_once(
      (theta, x, kernel, carry, restart)
  )
  last, carries, starts, u = _forward(
      call, theta, x, kernel, carry, restart, flags, True
  )
  saved = theta, x, kernel, carry, restart, starts, u
  return (last, carries), (saved, flags)


def _forward(call: Call, theta, x, kernel, carry, restart, flags, save):
  plan = _forward_plan(call, x, kernel, carry.shape[0], flags is not None, save)
  carries, last, starts, u = dense_forward.forward(
      plan,
      theta,
      x,
      _matrix(jnp.swapaxes(kernel, -1, -2), plan.dtype),
      carry,
      restart,
      None if flags is None else dense.prepare_flags(flags, plan.shape),
      call.outputs,
      call.out_dtype,
      save,
  )
  results = last, carries, starts, u
  return jax.tree.map(lambda x: engine.vary_as(x, carry), results)


def _run_bwd(call: Call, saved, cotangents):
  saved, flags = saved
  saved, cotangents = engine.differentiable_once((saved, cotangents))
  theta, x, kernel, carry, restart, starts, u = saved
  d_last, d_carries = cotangents
  plan = _backward_plan(call, x, kernel, carry.shape[0], flags is not None)
  # What each of the products multiplies, and with which gates of the kernel.
  operands = [starts[0], *([] if u is None else [u])]
  kernels = [
      kernel[p.first :][: p.gates].astype(plan.dtype) for p in plan.stages
  ]
  h_gates = [_multiply(*pair) for pair in zip(operands, kernels, strict=True)]
  d_x, d_gates, d_carry, d_theta, d_restart = dense_backward.backward(
      plan,
      theta,
      x,
      h_gates,
      starts,
      _matrix(kernel, plan.dtype),
      None if flags is None else dense.prepare_flags(flags, plan.shape),
      d_carries,
      d_last,
  )
  if not d_gates:
    d_gates = [
        d_x[None, :, :, p.first :][..., : p.gates, :] for p in plan.stages
    ]
  d_kernel = jnp.concatenate(
      [
          _outer(plan.shape, *pair)
          for pair in zip(operands, d_gates, strict=True)
      ]
  )
  d_theta = d_theta.sum(1) if call.params else jnp.zeros_like(theta)
  if flags is None:
    d_restart = jnp.zeros_like(restart)
  cotangents = (
      d_theta,
      d_x.astype(x.dtype),
      d_kernel.astype(kernel.dtype),
      d_carry,
      d_restart,
  )
  primals = theta, x, kernel, carry, restart
  return *jax.tree.map(engine.vary_as, cotangents, primals), None


_run.defvjp(_run_fwd, _run_bwd)


def _plan(call: Call, x, kernel, has_flags) -> dense.Plan:
  """Returns a plan without a configuration."""
  return dense.Plan(
      call.update,
      call.operand,
      call.params,
      x.shape[2],
      kernel.shape[0],
      cta_lib.Shape(*call.shape, call.time_major),
      call.reverse,
      call.both,
      has_flags,
      jnp.promote_types(x.dtype, kernel.dtype),
      None,
      call.clip,
      call.stop,
  )


def _forward_plan(call: Call, x, kernel, states, has_flags, save):
  """Returns the plan of the forward kernel."""
  plan = _plan(call, x, kernel, has_flags)
  ins, outs = dense.forward_streams(
      plan, x.dtype, states, call.outputs, call.out_dtype, save
  )
  fits = functools.partial(dense.needs, plan, ins, outs, plan.stages)
  config = tuning.dense(
      plan.shape, plan.stages[0].gates, False, fits, call.target
  )
  return dataclasses.replace(plan, config=config)


def _backward_plan(call: Call, x, kernel, states, has_flags):
  """Returns the plan of the adjoint."""
  plan = _plan(call, x, kernel, has_flags)
  d_dtypes = [call.out_dtype] * call.outputs
  ins, outs = dense.backward_streams(plan, x.dtype, states, d_dtypes)
  fits = functools.partial(dense.needs, plan, ins, outs, plan.adjoints)
  config = tuning.dense(
      plan.shape, plan.stages[0].gates, True, fits, call.target
  )
  return dataclasses.replace(plan, config=config)


def _matrix(kernel: Array, dtype) -> tuple[Array, ...]:
  """Returns a recurrent kernel as tensor cores take it."""
  if dtype == jnp.float32:
    return cta_lib.split_parts(kernel.astype(jnp.float32))
  return (kernel.astype(dtype),)


def _multiply(h: Array, kernel: Array) -> Array:
  """[N, B, T, 1, D] and [G, N, D, D] -> float32 [N, B, T, G, D].

  The forward kernel did not round these sums either. Rounded to 16 bits, they
  would cost gradients up to half as much again as all other errors together.
  """
  heads, *lead, _, size = h.shape
  product = lax.dot_general(
      h.reshape(heads, -1, size),
      jnp.transpose(kernel, (1, 2, 0, 3)).reshape(heads, size, -1),
      (((2,), (1,)), ((0,), (0,))),
      preferred_element_type=jnp.float32,
  )
  return product.reshape(heads, *lead, -1, size)


# Elements of a product's result that keep a device busy.
_BUSY = 1 << 21


def _outer(shape, h: Array, d_gates: Array) -> Array:
  """[N, B, T, 1, D] and [N, B, T, G, D] -> float32 [G, N, D, D]."""
  steps = shape.batch * shape.time
  heads, _, _, gates, size = d_gates.shape
  result = gates * heads * size**2
  # A small result of a long sum is left to a few multiprocessors, unless the
  # sum is cut in parts.
  parts = 1
  while parts * result < _BUSY and steps % (2 * parts) == 0:
    parts *= 2
  # In an order that needs no array of all steps transposed.
  sums = lax.dot_general(
      h.reshape(heads, parts, -1, size),
      d_gates.reshape(heads, parts, -1, gates * size),
      (((2,), (2,)), ((0, 1), (0, 1))),
      preferred_element_type=jnp.float32,
  )
  sums = jnp.sum(sums, axis=1).reshape(heads, size, gates, size)
  return jnp.transpose(sums, (2, 0, 1, 3))
