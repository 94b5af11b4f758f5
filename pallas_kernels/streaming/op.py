"""Linear and diagonal recurrences as one differentiable operation.

`run` brings arrays into the form that kernels take. A linear recurrence runs in
`linear`, any other in `diagonal`. Under `vmap` a kernel gains an axis of its
grid, by Pallas's own rule, unless its CTAs wait for each other: along such an
axis they would wait for ever. Then the rows of all elements may fill the device
without segments, and one kernel runs them all; else the kernel runs once for
each element.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import auto_axes
from pallas_kernels import call as call_lib
from pallas_kernels import devices
from pallas_kernels import projection
from pallas_kernels.mosaic import autodiff
from pallas_kernels.mosaic import cells
from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import step_flags
from pallas_kernels.streaming import blocks
from pallas_kernels.streaming import diagonal
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import linear
from pallas_kernels.streaming import tuning

# The static record of one recurrence, and facts that follow from it.


Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrence:
  """Static (hashable) arguments of one recurrence.

  Attributes:
    step: (theta, inputs) -> (A, b) if linear, else (theta, inputs, carry) ->
      carry; pointwise, hashable.
    linear: whether carry_t = A_t carry_{t-1} + b_t.
    states: number of arrays of the carry.
    params: number of rows of theta.
    reads_starts: whether the step has one input more: whether it restarts.
    shape: (B, T, F).
    call: the caller's options; `out_dtype` is given.
    target: the device.
  """

  step: Callable[..., Any]
  linear: bool
  states: int
  params: int
  reads_starts: bool = False
  shape: tuple[int, int, int]
  call: call_lib.Call
  target: devices.Target

  @property
  def layout(self) -> blocks.Layout:
    batch, time, features = self.shape
    return blocks.Layout(
        batch=batch,
        time=time,
        features=features,
        time_major=self.call.time_major,
    )

  @property
  def batch_axis(self) -> int:
    """Axis of the batch in arrays of all steps."""
    return 1 if self.call.time_major else 0

  def of_batch(self, batch: int) -> 'Recurrence':
    """Returns the recurrence of so many sequences."""
    return dataclasses.replace(self, shape=(batch, *self.shape[1:]))

  def aligned(self, arrays: Sequence[Any]) -> int:
    """Returns the features that streams are padded to, at least F.

    Args:
      arrays: arrays of the streams that are read.
    """
    batch, _, features = self.shape
    if jnp.issubdtype(self.call.out_dtype, jnp.complexfloating):
      return features  # Without TMA.
    # TMA wants rows of device memory to start at multiples of 16 bytes.
    dtypes = [x.dtype for x in arrays] + [self.call.out_dtype]
    multiple = 16 // min(dtype.itemsize for dtype in dtypes)
    aligned = blocks.round_up(features, multiple)
    # A tile of features that is wider than F must not look contiguous, or the
    # copy of a block would go on behind F.
    gates = {x.shape[2] if x.ndim == 4 else 1 for x in arrays} | {1}
    rows = {g * (batch if self.call.time_major else 1) for g in gates}
    while aligned < blocks.LANES and blocks.LANES in (
        row * aligned for row in rows
    ):
      aligned += multiple
    return aligned

  def plan(
      self, config: blocks.Config, carry, restart, flags
  ) -> kernel_call.Plan:
    """Returns the plan of a kernel.

    Args:
      config: the cut.
      carry: the caller's carry, None for zeros.
      restart: the caller's restart, None for zeros.
      flags: None for none.
    """
    layout, interpret = self.layout, None
    if self.target.interpret:
      interpret = plgpu.InterpretGPUParams()
      # Interpret mode knows no copies that reach beyond an array.
      margin = config.warpgroups * config.segments * config.rows
      layout = dataclasses.replace(layout, margin=margin)
    return kernel_call.Plan(
        step=self.step,
        params=self.params,
        layout=layout,
        config=config,
        reverse=self.call.reverse,
        has_flags=flags is not None,
        has_carry=carry is not None,
        has_restart=restart is not None,
        reads_starts=self.reads_starts,
        interpret=interpret,
    )

  def operations(self, gates: int) -> int:
    """Returns about the number of operations of a step of a diagonal cell."""
    lane = jax.ShapeDtypeStruct((blocks.LANES,), jnp.float32)
    args = (lane,) * self.params, (lane,) * gates, (lane,) * self.states
    step = cells.legalize(self.step)
    return len(jax.make_jaxpr(step)(*args).eqns)

  def operands(
      self, theta, arrays, carries, carry, restart, flags
  ) -> kernel_call.Operands:
    """Returns operands as a kernel takes them.

    An operand that the kernel does not read is replaced by an array that
    exists. Zeros would do, but each constant costs a launch of its own.
    """
    unread, every = arrays[0], (*arrays, *carries)
    if not self.target.has_tma and max(x.size for x in every) >= 2**31:
      raise NotImplementedError(
          'GPU kernels for linear and diagonal recurrences take arrays of fewer'
          ' than 2^31 elements on a device without TMA, got'
          f' {max(x.size for x in every):,}; a smaller batch would work.'
      )
    return kernel_call.Operands(
        theta=theta if self.params else unread,
        arrays=arrays,
        carries=carries,
        carry=unread if carry is None else carry,
        restart=unread if restart is None or flags is None else restart,
        flags=unread if flags is None else flags,
    )


# The operations on arrays, with their gradients.


Inputs = tuple[Array | projection.Product, ...]


def run(
    recurrence: Recurrence,
    theta: Array,
    arrays: tuple[Array, ...],
    input_kernel: Array | None,
    carry: Array | None,
    restart: Array | None,
    reset: Array | None,
    mask: Array | None,
) -> tuple[Array, tuple[Array, ...]]:
  """Runs a recurrence; differentiable in all its floating-point operands.

  Args:
    recurrence: the static arguments.
    theta: per-feature parameters, float32 [rows, F].
    arrays: inputs, [B, T, F] or [B, T, g, F]; with W the one array that it
      multiplies, [B, T, I].
    input_kernel: W, [G, I, F], or None.
    carry: float32 [S, B, F]; None for zeros, if linear.
    restart: float32 [S, B, F]; None for zeros, if linear.
    reset: bool [B, T] or None, in the order of the loop.
    mask: bool [B, T] or None.

  Returns:
    The final carry, float32 [S, B, F], and the first `outputs` arrays of the
    carry after every step, each [B, T, F].
  """
  features = recurrence.shape[-1]
  # Rows and a carry of zeros that were made here vary over no axis of a mesh.
  operands = theta, arrays, input_kernel, carry, restart, reset, mask
  operands = devices.alike(operands)
  theta, arrays, input_kernel, carry, restart, reset, mask = operands
  flags = step_flags.pack(reset, mask)
  inputs: Inputs = arrays
  if input_kernel is not None:
    inputs = (projection.Product(input_kernel, arrays[0]),)
  padded, inputs = _pad(recurrence, inputs)
  if recurrence.call.keep_gates:
    inputs = projection.form(inputs)
  aligned = padded.shape[-1]
  theta, carry, restart = blocks.pad_to_tiles(aligned, (theta, carry, restart))
  last, carries = _run(padded, theta, inputs, carry, restart, flags)
  if aligned != features:
    carries = _cut_features(carries, recurrence)
  return last[..., :features], carries


def linear_adjoint_of(
    recurrence: Recurrence,
    theta: Array,
    arrays: tuple[Array, ...],
    carry: Array,
    reset: Array | None,
    h: Array,
    d_last: Array,
    d_h: Array,
) -> tuple[tuple[Array, ...], Array]:
  """Runs the adjoint of a linear recurrence by itself.

  Args:
    recurrence: the static arguments.
    theta: per-feature parameters, float32 [rows, F].
    arrays: inputs, [B, T, F] or [B, T, g, F].
    carry: h before the first step, float32 [S, B, F].
    reset: bool [B, T] or None.
    h: h after every step, [B, T, F].
    d_last: cotangent of the final carry, float32 [S, B, F].
    d_h: cotangent of h.

  Returns:
    The cotangents of `arrays` and of `carry`.
  """
  operands = theta, arrays, carry, reset, h, d_last, d_h
  operands = devices.alike(autodiff.differentiable_once(operands))
  theta, arrays, carry, reset, h, d_last, d_h = operands
  padded, inputs = _pad(recurrence, arrays)
  aligned = padded.shape[-1]
  theta, carry, d_last = blocks.pad_to_tiles(aligned, (theta, carry, d_last))
  h, d_h = (blocks.pad_features(x, aligned) for x in (h, d_h))
  flags = step_flags.pack(reset, None)
  saved = theta, inputs, (h,), carry, None, flags
  _, d_arrays, d_carry, *_ = backward(padded, saved, (d_last, (d_h,)))
  features = recurrence.shape[-1]
  return _cut_features(d_arrays, recurrence), d_carry[..., :features]


def _pad(recurrence: Recurrence, inputs: Inputs) -> tuple[Recurrence, Inputs]:
  """Pads features, as far as kernels can read them."""
  aligned = recurrence.aligned(jax.eval_shape(projection.form, inputs))
  shape = *recurrence.shape[:2], aligned
  padded = tuple(_pad_inputs(gates, aligned) for gates in inputs)
  return dataclasses.replace(recurrence, shape=shape), padded


def _pad_inputs(
    gates: Array | projection.Product, size: int
) -> Array | projection.Product:
  """Pads the features of input gates, in W where it is there."""
  if isinstance(gates, projection.Product):
    kernel = projection.pad(gates.kernel, 1, size)
    return dataclasses.replace(gates, kernel=kernel)
  return blocks.pad_features(gates, size)


def forward(recurrence: Recurrence, theta, arrays, carry, restart, flags):
  """Returns the last carry and carries, for arguments of `run` with padding.

  Arrays may be products, which are then computed again in the backward pass
  instead of being kept.
  """
  arrays = projection.form(arrays)
  axis = recurrence.batch_axis

  def part(theta, arrays, carry, restart, flags):
    own, arrays = _of_part(recurrence, arrays)
    last, carries = _forward(own, theta, arrays, carry, restart, flags)
    return last, _cut_features(carries, recurrence)

  operands = theta, arrays, carry, restart, flags
  positions = auto_axes.WHOLE, axis, 1, 1, 0
  run_part = auto_axes.over_batch(
      recurrence.target, part, operands, positions, (1, axis)
  )
  results = run_part(*operands)
  return jax.tree.map(lambda x: devices.like(x, arrays[0]), results)


def _of_part(recurrence: Recurrence, *arrays):
  """Returns the recurrence of a part of the batch, and arrays as it wants them.

  Args:
    recurrence: the recurrence of the whole batch.
    *arrays: trees of arrays of all steps; the first has the inputs.
  """
  inputs, *_ = arrays
  own = recurrence.of_batch(inputs[0].shape[recurrence.batch_axis])
  # A narrower batch may want other rows of features, see `aligned`.
  aligned = own.aligned(inputs)
  own = dataclasses.replace(own, shape=(*own.shape[:2], aligned))
  return own, *jax.tree.map(lambda x: blocks.pad_features(x, aligned), arrays)


def _cut_features(arrays, recurrence: Recurrence):
  """Undoes the padding of `_of_part`."""
  return jax.tree.map(lambda x: x[..., : recurrence.shape[-1]], arrays)


def _forward(recurrence: Recurrence, theta, arrays, carry, restart, flags):
  """Runs the forward kernel; returns the last carry and carries."""
  out_dtype, outputs = recurrence.call.out_dtype, recurrence.call.outputs
  ins = blocks.streams_of(arrays)
  outs = blocks.of_carry(outputs, out_dtype)
  operands = recurrence.operands(theta, arrays, (), carry, restart, flags)

  def kernel(config):
    run_kernel = linear.forward if recurrence.linear else diagonal.forward
    plan = recurrence.plan(config, carry, restart, flags)
    return functools.partial(
        run_kernel, plan, outputs=outputs, out_dtype=out_dtype
    )

  carries, last = _tuned(recurrence, ins, outs, kernel)(operands)
  return last, carries


def _run_fwd(recurrence: Recurrence, theta, arrays, carry, restart, flags):
  theta, arrays, carry, restart = autodiff.differentiable_once(
      (theta, arrays, carry, restart)
  )
  # The backward pass reads all carries.
  call = dataclasses.replace(recurrence.call, outputs=recurrence.states)
  saving = dataclasses.replace(recurrence, call=call)
  last, carries = forward(saving, theta, arrays, carry, restart, flags)
  saved = theta, arrays, carries, carry, restart, flags
  return (last, carries[: recurrence.call.outputs]), saved


def backward(recurrence: Recurrence, saved, cotangents):
  """Returns the cotangents of the operands of `run`.

  Args:
    recurrence: the static arguments.
    saved: theta, arrays, carries of all steps, carry, restart, flags.
    cotangents: cotangents of the last carry and of the carries.
  """
  theta, arrays, carries, carry, restart, flags = saved
  axis = recurrence.batch_axis
  whole = auto_axes.WHOLE

  def part(theta, arrays, carries, carry, restart, flags, d_last, d_carries):
    own, arrays, carries, d_carries = _of_part(
        recurrence, arrays, carries, d_carries
    )
    d_arrays, *others = _backward(
        own, theta, arrays, carries, carry, restart, flags, (d_last, d_carries)
    )
    return _cut_features(d_arrays, recurrence), *others

  operands = *saved, *cotangents
  run_part = auto_axes.over_batch(
      recurrence.target,
      part,
      operands,
      (whole, axis, axis, 1, 1, 0, 1, axis),
      (axis, 1, whole, 1),
  )
  d_arrays, d_carry, d_theta, d_restart = run_part(*operands)
  d_theta = d_theta if recurrence.params else jnp.zeros_like(theta)
  if flags is None and restart is not None:
    d_restart = jnp.zeros_like(restart)
  # An operand that is None has no cotangent.
  d_carry = None if carry is None else d_carry
  d_restart = None if restart is None else d_restart
  primals = theta, arrays, carry, restart
  d_primals = d_theta, d_arrays, d_carry, d_restart
  return *jax.tree.map(devices.like, d_primals, primals), None


def _run_bwd(recurrence: Recurrence, saved, cotangents):
  *saved, flags = saved
  saved, cotangents = autodiff.differentiable_once((tuple(saved), cotangents))
  theta, kept, *others = saved
  arrays, kept, cotangents = projection.form_again(kept, cotangents)
  d_theta, d_arrays, *rest = backward(
      recurrence, (theta, arrays, *others, flags), cotangents
  )
  return d_theta, projection.pull(kept, d_arrays), *rest


# JAX calls `forward` itself where there is no derivative.
_run = jax.custom_vjp(forward, nondiff_argnums=(0,))
_run.defvjp(_run_fwd, _run_bwd)


def _backward(
    recurrence: Recurrence, theta, arrays, carries, carry, restart, flags, given
):
  """Runs the adjoint; returns cotangents of arrays, carry, theta, restart."""
  d_last, d_carries = given
  outs = blocks.streams_of(arrays)
  ins = list(outs)
  operands = recurrence.operands(theta, arrays, carries, carry, restart, flags)
  if recurrence.linear:
    count = blocks.numbers(outs)
    needed = linear.needed(
        recurrence.step, recurrence.params, count, recurrence.reads_starts
    )
    ins = linear.read(outs, needed)
  ins += [blocks.Stream(0, None, x.dtype) for x in (*carries, *d_carries)]

  def kernel(config):
    plan = recurrence.plan(config, carry, restart, flags)

    def summed(*operands):
      # The cut decides over how many warpgroups and segments these are summed.
      if recurrence.linear:
        *results, d_theta, d_restart = linear.backward(plan, *operands)
        return *results, d_theta.sum((0, 1)), d_restart.sum(2)
      *results, d_theta, d_restart = diagonal.backward(plan, *operands)
      return *results, d_theta.sum(0), d_restart

    return summed

  tuned = _tuned(recurrence, ins, outs, kernel, adjoint=True)
  return tuned(operands, kernel_call.Cotangents(d_carries, d_last))


def _tuned(recurrence: Recurrence, ins, outs, kernel, adjoint=False):
  """Returns a kernel as a function of its operands, with the best cut.

  Args:
    recurrence: the static arguments.
    ins: the streams that are read.
    outs: the streams that are written.
    kernel: returns the kernel of a cut. Under `vmap` that is the best for all
      elements together if it has one segment.
    adjoint: whether it is for the backward pass.
  """
  layout, target = recurrence.layout, recurrence.target

  def choose(batch: int):
    many = dataclasses.replace(layout, batch=batch)
    if recurrence.linear:
      return tuning.linear(many, ins, outs, target, adjoint)
    # An adjoint runs a step again before its derivative.
    gates = len(outs if adjoint else ins)
    size = recurrence.operations(gates) * (2 if adjoint else 1)
    return tuning.diagonal(many, ins, outs, target, size)

  config = choose(layout.batch)
  alone = kernel(config)
  if config.segments == 1:
    return alone
  function = jax.custom_batching.custom_vmap(alone)

  @function.def_vmap
  def _rule(size, batched, *operands):
    each = mailbox.one_at_a_time(alone)
    together = choose(size * layout.batch)
    if together.segments == 1:
      each = kernel(together)
    return mapped(each, batched, operands)

  return function


def mapped(function, batched, operands):
  """Returns the results of a `custom_vmap` rule that maps a function."""
  axes = jax.tree.map(lambda yes: 0 if yes else None, tuple(batched))
  results = jax.vmap(function, axes)(*operands)
  return results, jax.tree.map(lambda _: True, results)
