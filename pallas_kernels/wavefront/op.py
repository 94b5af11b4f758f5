"""Levels in one kernel: arrays of layers in, outputs of the highest out."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cell_rows
from pallas_kernels import sharding
from pallas_kernels.dense import kernel_call
from pallas_kernels.dense import pieces
from pallas_kernels.dense import plan as plan_lib
from pallas_kernels.mosaic import step_flags
from pallas_kernels.wavefront import forward
from pallas_kernels.wavefront import plan as wavefront_plan

Array = jax.Array


def plan_levels(
    recurrence: plan_lib.Recurrence,
    inputs: int,
    gates: int,
    recurrent_kernel: Any,
    states: int,
    flags: bool,
) -> wavefront_plan.Plan:
  """Returns the plan of a kernel for all levels.

  Args:
    recurrence: static facts, of the heads of all levels.
    inputs: features of the lowest level's inputs.
    gates: input gates of a level.
    recurrent_kernel: R of all levels, or its type, in the dtype of the inputs.
    states: arrays of the carry.
    flags: whether there are flags.

  Raises:
    NotImplementedError: no kernel can run it.
  """
  target = recurrence.target
  if target.interpret or not target.wgmma:
    raise NotImplementedError(
        'Levels run in one kernel on GPUs with compute capability 9.'
    )
  batch, time, heads, size = recurrence.shape
  if size % 8:
    raise NotImplementedError(
        'Levels run in one kernel with a multiple of 8 units in a head, got'
        f' {size}.'
    )
  x: Any = jax.ShapeDtypeStruct(
      (batch, time, gates, heads * size), recurrent_kernel.dtype
  )
  planned = pieces.plan_pieces(
      recurrence, x, recurrent_kernel, states=states, flags=flags
  )
  if len(planned) > 1:
    raise NotImplementedError(f'{batch} sequences do not fit at once.')
  inputs = -(-inputs // 8) * 8
  return wavefront_plan.make(planned[0].plan, inputs, target.cores)


def run(
    plan: wavefront_plan.Plan,
    params: Mapping[str, Array],
    bias: Array | None,
    x: Array,
    kernels: Sequence[Array],
    recurrent_kernel: Array,
    carry: Array,
    restart: Array,
    reset: Array | None,
    mask: Array | None,
) -> tuple[Array, Array]:
  """Runs levels, from the lowest inputs up; without derivatives.

  Args:
    plan: static facts, of `plan_levels`.
    params: of the cells of all levels, each [..., L F].
    bias: of the input gates, [G, L F], or None.
    x: inputs of the lowest level, [B, T, I] or time-major.
    kernels: W of each, [G, I, F].
    recurrent_kernel: R, [G', L N, D, D].
    carry: float32 [S, B, L F].
    restart: likewise.
    reset: bool [B, T] in the order of the loop, or None.
    mask: bool [B, T], or None.

  Returns:
    The final carries, float32 [S, B, L F], and the outputs of the highest
    level, in the dtype of x.
  """
  dense = plan.dense
  dtype = dense.dtype
  flags = step_flags.pack(reset, mask)
  if flags is not None:
    shape = dense.shape
    flags = jnp.broadcast_to(flags, (plan.levels, shape.batch, shape.time))
    flags = kernel_call.prepare_flags(flags, shape)
  rows = cell_rows.Rows.of(params, bias, None, carry.shape[-1])
  missing = plan.inputs - x.shape[-1]
  transposed = jnp.swapaxes(recurrent_kernel.astype(dtype), -1, -2)
  inputs = forward.Inputs(
      x=jnp.pad(x.astype(dtype), ((0, 0), (0, 0), (0, missing))),
      kernels=tuple(
          # The kernel reads no other dtypes.
          w if w.dtype in (dtype, jnp.float32) else w.astype(dtype)
          for w in kernels
      ),
      theta=rows.pack(params, bias, None),
      carry=carry,
      restart=restart,
      matrix=transposed,
      flags=flags,
  )
  inputs = sharding.alike(inputs)
  results = forward.forward(plan, sharding.local(inputs))
  return jax.tree.map(lambda y: sharding.like(y, inputs.x), results)
