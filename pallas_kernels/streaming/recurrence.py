"""The static record of one recurrence, and facts that follow from it."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import call as call_lib
from pallas_kernels import targets
from pallas_kernels.mosaic import pointwise
from pallas_kernels.streaming import kernel_call
from pallas_kernels.streaming import streams
from pallas_kernels.streaming import time_blocks

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrence:
  """Static (hashable) arguments of one recurrence.

  Attributes:
    step: (theta, inputs) -> (a, b) if linear, else (theta, inputs, carry) ->
      carry; pointwise, hashable.
    linear: whether carry_t = a_t carry_{t-1} + b_t.
    params: number of rows of theta.
    shape: (B, T, F).
    call: the caller's options; `out_dtype` is given.
    target: the device.
  """

  step: Callable[..., Any]
  linear: bool
  params: int
  shape: tuple[int, int, int]
  call: call_lib.Call
  target: targets.Target

  @property
  def layout(self) -> streams.Layout:
    batch, time, features = self.shape
    return streams.Layout(
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
      arrays: of the streams that are read.
    """
    batch, _, features = self.shape
    # TMA wants rows of device memory to start at multiples of 16 bytes.
    dtypes = [x.dtype for x in arrays] + [self.call.out_dtype]
    multiple = 16 // min(dtype.itemsize for dtype in dtypes)
    aligned = streams.round_up(features, multiple)
    # A tile of features that is wider than F must not look contiguous, or the
    # copy of a block would go on behind F.
    gates = {x.shape[2] if x.ndim == 4 else 1 for x in arrays} | {1}
    rows = {g * (batch if self.call.time_major else 1) for g in gates}
    while aligned < streams.LANES and streams.LANES in (
        row * aligned for row in rows
    ):
      aligned += multiple
    return aligned

  def plan(
      self, config: time_blocks.Config, carry, restart, flags
  ) -> kernel_call.Plan:
    """Returns the plan of a kernel.

    Args:
      config: the cut.
      carry: of the caller, None for zeros; so is restart.
      restart: likewise.
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
        interpret=interpret,
    )

  def operations(self, gates: int, states: int) -> int:
    """Returns about the number of operations of a step of a diagonal cell."""
    lane = jax.ShapeDtypeStruct((streams.LANES,), jnp.float32)
    args = (lane,) * self.params, (lane,) * gates, (lane,) * states
    step = pointwise.legalize(self.step)
    return len(jax.make_jaxpr(step)(*args).eqns)

  def kernel_operands(
      self, theta, arrays, carry, restart, flags
  ) -> 'KernelOperands':
    """Returns operands as a kernel takes them.

    An operand that the kernel does not read is replaced by an array that
    exists. Zeros would do, but each constant costs a launch of its own.
    """
    unread = arrays[0]
    if self.linear:  # Then h is all of the carry.
      carry, restart = (None if x is None else x[0] for x in (carry, restart))
    return KernelOperands(
        theta=theta if self.params else unread,
        arrays=arrays,
        carry=unread if carry is None else carry,
        restart=unread if restart is None or flags is None else restart,
        flags=unread if flags is None else flags,
    )


class KernelOperands(NamedTuple):
  """Operands of a kernel, in its order.

  Attributes:
    theta: per-feature parameters, [rows, Fp], with Fp the padded features.
    arrays: inputs, each [B, T, F] or [B, T, G, F].
    carry: before the first step, [B, Fp] if linear, else [S, B, Fp].
    restart: the carry after a reset, likewise.
    flags: int32 [B, T].
  """

  theta: Array
  arrays: tuple[Array, ...]
  carry: Array
  restart: Array
  flags: Array
