"""Row blocks: how CTAs learn that the operand of a step is whole.

The tiles of one row block need each other's results, all other tiles do not. A
row block has a counter in device memory. Warpgroups that have stored their part
of the operand of a step add one, and the warp that copies that operand waits
until all have. Counters only grow.

Results are stored by threads and read by TMA, which is another proxy: the
reader fences, once it knows of them. If writers fence as well, a step of an
LSTM of 128 rows of 768 units takes .4 us longer, on an H100.
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

  def publish(self, index, first, warpgroups: int = 1) -> None:
    """Adds one, after all stores of some warpgroups.

    One thread releases the stores of all, which the barrier orders before it.

    Args:
      index: of the row block.
      first: number of the first of the warpgroups in its CTA.
      warpgroups: how many, one after another.
    """
    # Those of Pallas come first, and 15 is that of the whole CTA.
    barrier = first + 12
    code = (
        f'bar.sync %barrier, {warpgroups * ptx.LANES};'
        ' { .reg .u32 t; .reg .pred p; .reg .u64 a, o; mov.u32 t, %tid.x;'
        ' setp.eq.u32 p, t, %thread; cvt.s64.s32 o, %index;'
        ' shl.b64 o, o, 2; add.u64 a, %base, o;'
        ' @p red.release.gpu.global.add.u32 [a], 1; }'
    )
    operands = {
        'barrier': barrier,
        'thread': first * ptx.LANES,
        'index': index,
        'base': self.ref,
    }
    ptx.emit(code, {}, operands)

  def wait(self, index, count) -> None:
    """Waits until a counter has reached a number.

    Only the first warp of a warpgroup waits: one of its threads starts all of
    the warpgroup's copies, and more that poll would slow down the writers. If
    the counter does not reach the number, the kernel is aborted with an error.
    """
    # The index of the warp is the same in all its threads, and ptxas has to see
    # that: else it takes what follows for divergent, and runs the products of
    # tensor cores one after the other.
    code = (
        '{ .reg .u32 v, k, w; .reg .pred p, q; .reg .u64 a, o;'
        ' mov.u32 w, %tid.x; shr.u32 w, w, 5;'
        ' shfl.sync.idx.b32 w, w, 0, 31, 0xFFFFFFFF; and.b32 w, w, 3;'
        ' setp.eq.u32 q, w, 0; mov.b32 k, 0; cvt.s64.s32 o, %index;'
        ' shl.b64 o, o, 2; add.u64 a, %base, o; mov.b32 v, %count;'
        ' again_%%: @q ld.acquire.gpu.global.u32 v, [a];'
        ' setp.ge.s32 p, v, %count; @p bra done_%%; add.u32 k, k, 1;'
        f' setp.lt.u32 p, k, {sync.PATIENCE}; @p bra again_%%; trap;'
        ' done_%%: fence.proxy.async.global; }'
    )
    ptx.emit(code, {}, {'index': index, 'base': self.ref, 'count': count})
