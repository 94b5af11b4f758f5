"""Recurrences with a dense kernel: kernels, products around them, one VJP.

What is sequential runs in `mosaic_gpu/dense.py`. Here is what is not: for each
product of a step, the recurrent gates of all steps, which the adjoint needs
again, are one product over all steps, and the gradient of the recurrent kernel
is another.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import sharding
from pallas_kernels import targets
from pallas_kernels.dense import backward
from pallas_kernels.dense import forward
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import thread_layout
from pallas_kernels.dense import tuning
from pallas_kernels.mosaic import autodiff
from pallas_kernels.mosaic import step_flags

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
  # A carry of zeros that was made here varies over no axis of a mesh yet.
  theta, x, kernel, carry, restart, reset, mask = sharding.alike(
      (theta, x, kernel, carry, restart, reset, mask)
  )
  batch, time, heads, size = call.shape
  directions = 1 + call.both
  if reset is not None:
    reset = jnp.broadcast_to(reset, (directions, batch, time))
  flags = step_flags.pack(reset, mask)
  if flags is not None:
    flags = jnp.broadcast_to(flags, (directions, batch, time))
  _check(call, x, kernel)
  # Rows of a head have to start at multiples of 16 bytes.
  padded = -(-size // 8) * 8
  call = dataclasses.replace(call, shape=(batch, time, heads, padded))
  # What cannot be done is said before anything is.
  _forward_pieces(call, x, kernel, len(carry), flags is not None, True)
  _backward_pieces(call, x, kernel, len(carry), flags is not None)
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
  if call.operand is not None and kernel.shape[0] < 2:
    raise NotImplementedError(
        'GPU kernels for cells with two stages take those whose first stage has'
        f' recurrent gates, got one gate in all. {targets.OTHERWISE}'
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


@dataclasses.dataclass(frozen=True)
class _Piece:
  """Some rows of a batch that a kernel can hold at once.

  Attributes:
    plan: for these rows.
    start: the first row.
  """

  plan: kernel_call.Plan
  start: int

  def cut(self, axis: int, arrays: Any) -> Any:
    """Returns the rows of arrays whose batch axis is given."""
    end = self.start + self.plan.shape.batch
    return jax.tree.map(
        lambda x: lax.slice_in_dim(x, self.start, end, axis=axis), arrays
    )


def _pieces(
    call: Call, make_plan: Callable[[Call], kernel_call.Plan]
) -> list[_Piece]:
  """Cuts a batch into as few pieces as fit the device.

  Args:
    call: for the whole batch.
    make_plan: returns a plan, or raises NotImplementedError.
  """
  batch, time, heads, size = call.shape
  plans: dict[int, kernel_call.Plan] = {}

  def plan_of(rows: int) -> kernel_call.Plan:
    if rows not in plans:
      shape = (rows, time, heads, size)
      plans[rows] = make_plan(dataclasses.replace(call, shape=shape))
    return plans[rows]

  # Kernels take rows by 8.
  octets = -(-batch // 8)
  sizes = {8 * -(-octets // pieces) for pieces in range(1, octets + 1)}
  for rows in sorted(sizes, reverse=True):
    starts = range(0, batch, rows)
    try:
      return [
          _Piece(plan_of(min(rows, batch - start)), start) for start in starts
      ]
    except NotImplementedError:
      if rows == 8:
        raise
  raise ValueError('there are no sequences')


def _join(axis: int, parts: Sequence[Any]) -> Any:
  """Puts pieces together again."""
  if len(parts) == 1:
    return parts[0]
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: Call, theta, x, kernel, carry, restart, flags):
  return _forward(call, theta, x, kernel, carry, restart, flags, False)[:2]


def _run_fwd(call: Call, theta, x, kernel, carry, restart, flags):
  theta, x, kernel, carry, restart = autodiff.differentiable_once(
      (theta, x, kernel, carry, restart)
  )
  last, carries, starts, u = _forward(
      call, theta, x, kernel, carry, restart, flags, True
  )
  saved = theta, x, kernel, carry, restart, starts, u
  return (last, carries), (saved, flags)


def _forward(call: Call, theta, x, kernel, carry, restart, flags, save):
  pieces = _forward_pieces(call, x, kernel, len(carry), flags is not None, save)
  matrix = _matrix(jnp.swapaxes(kernel, -1, -2), pieces[0].plan.dtype)
  axis = 1 if call.time_major else 0

  def run_piece(piece: _Piece):
    own_flags = None
    if flags is not None:
      own_flags = kernel_call.prepare_flags(
          piece.cut(1, flags), piece.plan.shape
      )
    return forward.forward(
        piece.plan,
        theta,
        piece.cut(axis, x),
        matrix,
        piece.cut(1, carry),
        piece.cut(1, restart),
        own_flags,
        call.outputs,
        call.out_dtype,
        save,
    )

  carries, last, starts, u = zip(*map(run_piece, pieces), strict=True)
  by_head = _join(
      axis + 1, [(start[:1], v) for start, v in zip(starts, u, strict=True)]
  )
  starts = *by_head[0], *_join(axis, [start[1:] for start in starts])
  results = _join(1, last), _join(axis, carries), starts, by_head[1]
  return jax.tree.map(lambda y: sharding.like(y, x), results)


def _run_bwd(call: Call, saved, cotangents):
  saved, flags = saved
  saved, cotangents = autodiff.differentiable_once((saved, cotangents))
  theta, x, kernel, carry, restart, starts, u = saved
  d_last, d_carries = cotangents
  pieces = _backward_pieces(call, x, kernel, len(carry), flags is not None)
  axis = 1 if call.time_major else 0
  matrix = _matrix(kernel, pieces[0].plan.dtype)
  # What each of the products multiplies.
  operands = [starts[0], *([] if u is None else [u])]

  def pull_piece(piece: _Piece):
    plan = piece.plan
    own_flags = None
    if flags is not None:
      own_flags = kernel_call.prepare_flags(piece.cut(1, flags), plan.shape)
    own = piece.cut(axis + 1, operands)
    h_gates = [
        _multiply(h, kernel[p.first :][: p.gates].astype(plan.dtype))
        for h, p in zip(own, plan.stages, strict=True)
    ]
    d_x, d_gates, d_carry, d_theta, d_restart = backward.backward(
        plan,
        theta,
        piece.cut(axis, x),
        h_gates,
        (own[0], *piece.cut(axis, starts[1:])),
        matrix,
        own_flags,
        piece.cut(axis, d_carries),
        piece.cut(1, d_last),
    )
    if not d_gates:
      d_gates = [
          d_x[None, :, :, p.first :][..., : p.gates, :] for p in plan.stages
      ]
    d_kernel = jnp.concatenate(
        [_outer(h, d) for h, d in zip(own, d_gates, strict=True)]
    )
    return d_x, d_carry, d_restart, d_theta.sum(1), d_kernel

  d_x, d_carry, d_restart, d_theta, d_kernel = zip(
      *map(pull_piece, pieces), strict=True
  )
  add = lambda parts: functools.reduce(jnp.add, parts)
  cotangents = (
      add(d_theta) if call.params else jnp.zeros_like(theta),
      _join(axis, d_x).astype(x.dtype),
      add(d_kernel).astype(kernel.dtype),
      _join(1, d_carry),
      jnp.zeros_like(restart) if flags is None else _join(1, d_restart),
  )
  primals = theta, x, kernel, carry, restart
  return *jax.tree.map(sharding.like, cotangents, primals), None


_run.defvjp(_run_fwd, _run_bwd)


def _plan(call: Call, x, kernel, has_flags) -> kernel_call.Plan:
  """Returns a plan without a configuration."""
  return kernel_call.Plan(
      call.update,
      call.operand,
      call.params,
      x.shape[2],
      kernel.shape[0],
      thread_layout.Shape(*call.shape, call.time_major),
      call.reverse,
      call.both,
      has_flags,
      jnp.promote_types(x.dtype, kernel.dtype),
      None,
      call.clip,
      call.stop,
  )


def _forward_pieces(call: Call, x, kernel, states, has_flags, save):
  """Returns the pieces of the forward kernel."""

  def make_plan(piece: Call):
    plan = _plan(piece, x, kernel, has_flags)
    plan = dataclasses.replace(
        plan, early=kernel_call.early_gates(plan, states)
    )
    streams = kernel_call.forward_streams(
        plan, x.dtype, states, call.outputs, call.out_dtype, save
    )
    return _configured(plan, streams, plan.products, False, call.target)

  return _pieces(call, make_plan)


def _backward_pieces(call: Call, x, kernel, states, has_flags):
  """Returns the pieces of the adjoint."""

  def make_plan(piece: Call):
    plan = _plan(piece, x, kernel, has_flags)
    d_dtypes = [call.out_dtype] * call.outputs
    streams = kernel_call.backward_streams(plan, x.dtype, states, d_dtypes)
    products = lambda config: plan.adjoints
    return _configured(plan, streams, products, True, call.target)

  return _pieces(call, make_plan)


def _configured(
    plan: kernel_call.Plan, streams, products, adjoint: bool, target
):
  """Returns the plan with the configuration that is best of those that fit."""
  ins, outs = streams
  needs = lambda config: kernel_call.needs(
      plan, ins, outs, products(config), config
  )
  kind = tuning.Kind(
      plan.stages[0].gates,
      plan.operand is not None,
      adjoint,
      plan.dtype == jnp.float32,
  )
  config = tuning.choose(plan.shape, kind, needs, target)
  return dataclasses.replace(plan, config=config)


def _matrix(kernel: Array, dtype) -> tuple[Array, ...]:
  """Returns a recurrent kernel as tensor cores take it."""
  if dtype == jnp.float32:
    return thread_layout.split_parts(kernel.astype(jnp.float32))
  return (kernel.astype(dtype),)


def _multiply(h: Array, kernel: Array) -> Array:
  """[N, B, T, 1, D] and [G, N, D, D] -> float32 [N, B, T, G, D].

  The forward kernel did not round these sums either. Rounded to 16 bits, they
  made errors of some gradients twice as large.
  """
  heads, *lead, _, size = h.shape
  product = lax.dot_general(
      h.reshape(heads, -1, size),
      jnp.transpose(kernel, (1, 2, 0, 3)).reshape(heads, size, -1),
      (((2,), (1,)), ((0,), (0,))),
      preferred_element_type=jnp.float32,
  )
  return product.reshape(heads, *lead, -1, size)


# Elements of a product's result that keep a device busy, and the least number
# of products that are worth a sum of their own.
_BUSY, _SUMMED = 1 << 21, 64


def _outer(h: Array, d_gates: Array) -> Array:
  """[N, B, T, 1, D] and [N, B, T, G, D] -> float32 [G, N, D, D]."""
  heads, *lead, gates, size = d_gates.shape
  steps = math.prod(lead)
  result = gates * heads * size**2
  # A small result of a long sum is left to a few multiprocessors, unless the
  # sum is cut in parts.
  parts = 1
  while (
      parts * result < _BUSY
      and steps % (2 * parts) == 0
      and steps >= 2 * parts * _SUMMED
  ):
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
