"""Row blocks: how CTAs learn that the operand of a step is whole.

The tiles of one row block need each other's results, all other tiles do not. A
row block has a counter in device memory. A warpgroup that has stored its part
of the operand of a step adds one, and whoever copies that operand waits until
all have. Counters only grow.

Results are stored by threads and read by TMA, which is another proxy: both
sides fence.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import mailbox
from pallas_kernels.mosaic import memory
from pallas_kernels.mosaic import ptx
from pallas_kernels.mosaic import sync

Array = jax.Array
Ref = Any


class Counters(mailbox.Mailbox):
  """A counter for each row block.

  Args:
    ref: int32 in device memory, one each.
    count: number of them.
  """

  def __init__(self, ref: Ref, count: int):
    self.ref, self.count = ref, count

  @classmethod
  def type(cls, count: int) -> jax.ShapeDtypeStruct:
    """Returns the type of the array."""
    return jax.ShapeDtypeStruct(
        (-(-count // ptx.LANES) * ptx.LANES,), jnp.int32
    )

  def clear(self) -> None:
    """Every CTA stores the same zeros, before all of them meet."""
    lane = ptx.thread()
    for start in range(0, self.count, ptx.LANES):
      zero = ptx.full(1, 0, jnp.int32)
      memory.store_gmem(self.ref, lane + start, zero, jnp.int32)

  def publish(self, index, warpgroup) -> None:
    """Adds one, after all stores of this warpgroup.

    One thread releases the stores of all, which the barrier orders before it.

    Args:
      index: of the row block.
      warpgroup: number of this warpgroup in its CTA.
    """
    # Those of Pallas come first, and 15 is that of the whole CTA.
    barrier = warpgroup + 12
    code = (
        f'fence.proxy.async; bar.sync %barrier, {ptx.LANES};'
        ' { .reg .u32 t; .reg .pred p; .reg .u64 a, o; mov.u32 t, %tid.x;'
        ' and.b32 t, t, 127; setp.eq.u32 p, t, 0; cvt.s64.s32 o, %index;'
        ' shl.b64 o, o, 2; add.u64 a, %base, o;'
        ' @p red.release.gpu.global.add.u32 [a], 1; }'
    )
    operands = {'barrier': barrier, 'index': index, 'base': self.ref}
    ptx.emit(code, {}, operands)

  def wait(self, index, count) -> None:
    """Waits until a counter has reached a number.

    If it does not, the kernel is aborted with an error.
    """
    code = (
        '{ .reg .u32 v, k; .reg .pred p; .reg .u64 a, o; mov.b32 k, 0;'
        ' cvt.s64.s32 o, %index; shl.b64 o, o, 2; add.u64 a, %base, o;'
        ' again_%%: ld.acquire.gpu.global.u32 v, [a];'
        ' setp.ge.s32 p, v, %count; @p bra done_%%; add.u32 k, k, 1;'
        f' setp.lt.u32 p, k, {sync.PATIENCE}; @p bra again_%%; trap;'
        ' done_%%: fence.proxy.async; }'
    )
    ptx.emit(code, {}, {'index': index, 'base': self.ref, 'count': count})
