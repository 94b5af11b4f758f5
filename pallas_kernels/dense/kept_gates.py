"""Whether the forward pass keeps the recurrent gates R h for the adjoint.

The adjoint reads R h of every step. Either the forward kernel, which has it
anyway, writes it in float16; or one GEMM over all steps forms it again in
float32, before the adjoint's loop (`time_gemms.h_gates`); or the adjoint itself
multiplies again (`Plan.again`).

Keeping takes less memory than the GEMM, and mostly less time: of an LSTM of 16
x 1024 x 12 x 64 (batch x time x heads x units) .76 ms forward and backward on
one H100, instead of .81. Others that were measured take 1 to 4 % less, or up to
2 % more (benchmarks/tuning_kept_gates_h100.json).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dense import pieces
from pallas_kernels.dense import plan as plan_lib


def pay(
    recurrence: plan_lib.Recurrence,
    x: Any,
    recurrent_kernel: jax.Array,
    *,
    states: int,
    flags: bool,
) -> bool:
  """Returns whether to keep the recurrent gates of a batch.

  Where XLA splits the batch over devices, the whole batch decides for all: by
  then the arrays that are kept have to be known.

  Args:
    recurrence: static facts of the whole batch.
    x: the inputs; their type is read.
    recurrent_kernel: the recurrent kernel; its type is read.
    states: arrays of the carry.
    flags: whether there are flags.
  """
  # Where h has the digits of float16, R h rounded to it would make gradients up
  # to 1.3 times as inexact.
  dtype = jnp.promote_types(x.dtype, recurrent_kernel.dtype)
  if not recurrence.call.keep_gates or dtype != jnp.bfloat16:
    return False
  if recurrence.operand is not None:  # Unmeasured.
    return False
  plan = functools.partial(
      pieces.plan_pieces,
      recurrence,
      x,
      recurrent_kernel,
      states=states,
      flags=flags,
  )
  without = [*plan(save=True), *plan(adjoint=True)]
  # Kernels whose operands go straight to registers are unmeasured.
  if any(piece.plan.again or piece.plan.config.direct for piece in without):
    return False
  try:
    kept = [*plan(save=True, keeps=True), *plan(adjoint=True, keeps=True)]
  except NotImplementedError:
    return False
  # Room for one array more, or less, is no reason to cut the work otherwise.
  return list(map(_cut, kept)) == list(map(_cut, without))


def _cut(piece: pieces.Piece) -> tuple[int, Any]:
  """Returns the rows and the cut of a piece, of any slots of inputs."""
  config = dataclasses.replace(piece.plan.config, stages=0)
  return piece.start, config
