"""Path 1: `lax.scan` over time.

This is the reference that every other path is tested against, and the path
that runs everywhere. Forward and backward work through time in chunks: a
chunk's input projection comes first, then its steps one by one, so the input
gates of a long sequence never exist at once. Saved for the backward pass
(`autodiff.py`) are the inputs, the carries and, where they are small, the
recurrent gates. The path knows cells with one stage and with two, and no cell
by name.
"""

import dataclasses
import math

import jax
from jax import export
from jax import lax

from pallas_kernels import promotion
from rnnzoo import cell as cell_lib
from rnnzoo.engines import autodiff
from rnnzoo.engines import call as call_lib
from rnnzoo.engines import products
from rnnzoo.engines.scan import derivatives as scan_derivatives
from rnnzoo.engines.scan import steps as scan_steps

Carry = cell_lib.Carry


# Elements of input gates that are formed at once. On a CPU they should stay in
# cache: 2 MiB in float32, or up to 8 MiB where 2 are not even 4 steps. An
# accelerator wants few, large operations: 256 MiB.
_CPU_ELEMENTS, _CPU_ELEMENTS_OF_FEW_STEPS, _CPU_STEPS = 2**19, 2**21, 4

# On a CPU, sequences of less than 8 MiB run as one chunk of up to 32 steps: a
# loop less to compile. Longer ones have temporaries that the allocator maps
# anew in each call.
_CPU_WHOLE_ELEMENTS = 2**21
_ACCELERATOR_ELEMENTS = 2**26

# Recurrent gates are saved for the backward pass up to this many elements.
_SAVED_ELEMENTS = 2**22

# On a CPU, where a cache has not even 32 steps, the recurrent gates of a
# sequence of up to 64 MiB are saved. (Saving the gates of longer sequences
# took more time than it gained.)
_FEW_STEPS, _CPU_SAVED_ELEMENTS = 32, 2**24

# Saved gates of 13 to 22 MiB take all temporaries of a gradient above 32 MiB,
# which glibc's malloc maps anew in each call: an LSTM of 64 units with 256
# rows and 64 steps took 32 ms in place of 22. Cells of more arrays are above
# anyway, and larger heads take longer to multiply again: 384 units made no
# difference, and with 512 it was 61 in place of 77 ms once, and 122 in place of
# 114 when the machine had slower products.
_CPU_MAPPED_ELEMENTS = 13 * 2**18, 22 * 2**18
_CPU_MAPPED_STATES, _CPU_MAPPED_UNITS = 2, 384

# On a CPU, sequences of up to 4 MiB of gates are one chunk, with their gates in
# one array where that runs as fast: XLA has a third less to compile.
_CPU_JOINT_ELEMENTS = 2**20


def chunk_length(time: int, width: int) -> int:
  """Returns for how many steps the input gates are formed at once.

  On a CPU, chunks keep gates in cache and save the page faults of large
  temporaries. At T = 784 this is most of the gain in benchmarks/cpu_peers.json.

  If only T is known, as under `jax.export`, few steps save memory. A T that
  is not known is not divided.

  Args:
    time: T.
    width: elements of all input gates in one step.
  """
  if not isinstance(time, int):
    return time
  if export.is_symbolic_dim(width):
    return scan_steps.divisor(time, _FEW_STEPS)
  width = max(width, 1)
  if jax.default_backend() == 'cpu':
    is_short = time * width < _CPU_WHOLE_ELEMENTS
    steps = _FEW_STEPS if is_short else _CPU_STEPS
    few = min(steps, _CPU_ELEMENTS_OF_FEW_STEPS // width)
    target = max(_CPU_ELEMENTS // width, few)
  else:
    target = _ACCELERATOR_ELEMENTS // width
  return scan_steps.divisor(time, target)


def make_plan(
    cell: cell_lib.Cell,
    project: call_lib.Projection,
    operands: call_lib.Operands,
    call: call_lib.Call,
    keep: str | None = None,
    chunk: int | None = None,
) -> scan_steps.Plan:
  """Chooses the length of chunks, and whether recurrent gates are saved.

  Args:
    cell: the equations.
    project: makes the input gates, as in `Plan`.
    operands: time-major, with a carry.
    call: static options.
    keep: whether to save recurrent gates, as in `selection.Scan`.
    chunk: steps whose input gates exist at once, as in `selection.Scan`.
  """
  time = operands.x.shape[0]
  width = math.prod(operands.carry[0].shape)
  saved = time * cell.recurrent_gates * width
  most = max(cell.input_gates, cell.recurrent_gates) * width
  kernel = operands.recurrent_kernel
  # A diagonal R is as cheap to multiply by again as its gates to read.
  units = 1 if kernel is None else kernel.shape[-1]
  is_known = not export.is_symbolic_dim(time * width)
  on_cpu = is_known and jax.default_backend() == 'cpu'
  is_wide = (
      on_cpu
      and units > 1
      and most * _FEW_STEPS > _CPU_ELEMENTS
      and time * most <= _CPU_SAVED_ELEMENTS
  )
  above, up_to = _CPU_MAPPED_ELEMENTS
  is_mapped = (
      on_cpu
      and len(cell.carry_names) <= _CPU_MAPPED_STATES
      and above < saved <= up_to
      and 1 < units <= _CPU_MAPPED_UNITS
  )
  few = is_known and saved <= _SAVED_ELEMENTS
  saves = (few or is_wide) and not is_mapped
  joint = (
      on_cpu
      and keep is None
      and chunk is None
      and cell.recurrent_gates > 0
      and time * most <= _CPU_JOINT_ELEMENTS
  )
  is_whole = joint
  if chunk is None or not isinstance(time, int):
    chunk = chunk_length(time, cell.input_gates * width)
    is_whole |= is_wide and time * most < _CPU_WHOLE_ELEMENTS
  else:
    chunk = min(chunk, time)
  return scan_steps.Plan(
      cell=cell,
      project=project.joint() if joint else project,
      # Equal plans share a compilation: the layout is always this one.
      call=dataclasses.replace(call, time_major=True, out_dtype=None),
      chunk=chunk,
      adjoint_chunk=time if is_whole else chunk,
      save_gates=saves if keep is None else keep == 'gates',
      joint=joint,
  )


def carries(
    plan: scan_steps.Plan, operands: call_lib.Operands
) -> tuple[Carry, Carry]:
  """Returns the last carry and every step's carry, without derivatives."""
  carry, (every, _, _) = _forward(plan, operands)
  return carry, every


def _forward(plan: scan_steps.Plan, operands: call_lib.Operands):
  """Returns the final carry, all carries, and gates and starts if saved."""
  params, weights, x, kernel, carry, restart, reset, mask = operands
  kernels = scan_steps.pack(plan.cell, kernel)
  reverse = plan.call.reverse
  bias = None
  # XLA's CPU backend would add it in a pass of its own, outside of the loop.
  if jax.default_backend() == 'cpu' and carry[0].dtype == promotion.wide(
      x.dtype
  ):
    weights, bias = plan.project.without_bias(weights)

  def body(carry, xs):
    x_gates, reset, mask = xs
    x_gates = products.add_bias(x_gates, bias)
    start = scan_steps.select(reset, restart, carry)
    # Clipping is left to the adjoint. Autodiff of this pass serves second
    # derivatives only, and the gradient of a clipped gradient is not clipped.
    carry, h_gates = scan_steps.step(
        plan.cell,
        params,
        kernels,
        x_gates,
        start,
        stop=plan.call.stop_recurrent_gradient,
    )
    if mask is not None:
      carry = scan_steps.select(mask, carry, start)
    if plan.joint:
      h_gates = (products.join(h_gates),)
    return carry, (
        carry,
        h_gates if plan.save_gates else None,
        start if plan.joint else None,
    )

  def chunk(carry, xs):
    x, reset, mask = xs
    x_gates = scan_steps.project(plan.project, carry, mask, weights, x)
    xs = x_gates, reset, mask
    if x.shape[0] == 1:  # Outside of jit, each call would compile its loop.
      carry, ys = body(carry, jax.tree.map(lambda a: lax.squeeze(a, [0]), xs))
      return carry, jax.tree.map(lambda a: lax.expand_dims(a, [0]), ys)
    return lax.scan(body, carry, xs, reverse=reverse)

  if plan.joint:
    return chunk(carry, (x, reset, mask))
  return scan_steps.scan_chunks(
      chunk, carry, (x, reset, mask), plan.chunk, reverse
  )


def _forward_with_residuals(plan: scan_steps.Plan, operands: call_lib.Operands):
  carry, (carries, h_gates, start) = _forward(plan, operands)
  kept = None if plan.joint else carries
  saved = scan_steps.Saved(operands, kept, h_gates, start)
  return (carry, carries[: plan.call.outputs]), saved


# (plan, operands) -> the carry after the last step, each [B, F], and the first
# `plan.call.outputs` arrays of the carries after every step, each [T, B, F].
# All state has the dtype of the carry. Derivatives of every order, both modes.
unroll = autodiff.differentiable(
    _forward_with_residuals,
    scan_derivatives.forward,
    scan_derivatives.backward,
)
