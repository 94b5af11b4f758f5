"""How threads and CTAs wait for each other, and tell what is waited for.

Within a CTA by barriers; within a cluster by signals in shared memory, which
count the bytes that have come; across the device by polling memory that is
poisoned, so that the data is its own signal.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import instructions
from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any

# A pattern that nothing below writes for what it means, in 16 and 32 bits: a
# NaN, but not the one that arithmetic makes.
POISON = '0xFFFFFFFF'


def barrier(warpgroups: int) -> None:
  """Waits for all threads of all warpgroups, and orders shared memory."""
  # Pallas uses the first few of the sixteen barriers.
  ptx.emit(f'bar.sync 15, {warpgroups * ptx.LANES};', [])


def cluster_barrier() -> None:
  """Waits for all threads of all CTAs of the cluster, and orders memory."""
  ptx.emit('barrier.cluster.arrive.release; barrier.cluster.wait.acquire;', [])


def fence() -> None:
  """Makes what this thread has stored visible to all multiprocessors."""
  ptx.emit('fence.acq_rel.gpu;', [])


def delay(cycles: int) -> None:
  """Waits for some cycles."""
  code = (
      '{ .reg .u32 a, b; .reg .pred p; mov.u32 a, %clock;'
      ' L%%: mov.u32 b, %clock; sub.u32 b, b, a;'
      f' setp.lt.u32 p, b, {cycles}; @p bra L%%; }}'
  )
  ptx.emit(code, [])


# Attempts to read what another multiprocessor writes, each of more than half a
# microsecond, before a kernel gives up.
_PATIENCE = 1 << 24


def peek(places: Sequence[Sequence[Any]]) -> list[Array]:
  """Reads 16 bytes at each place, written or not, for `poll`.

  Args:
    places: each a reference to device memory and an offset in words.

  Returns:
    Four int32 [128] for each place.
  """
  code, address = instructions.address_of('global')
  code = code.format(base='%4', offset='%5', shift=2)
  code += f' ld.relaxed.gpu.global.v4.b32 {{%0, %1, %2, %3}}, [{address}];'
  words: list[Array] = []
  for ref, offset in places:
    words += ptx.emit('{' + code + '}', [jnp.int32] * 4, ref, offset)
  return words


def poll(
    places: Sequence[Sequence[Any]],
    size: int,
    seen: Sequence[Array] | None = None,
) -> list[Array]:
  """Reads 16 bytes at each place as soon as they have been written.

  The places hold `POISON` until `store(publish=True)` or `publish_pair` replace
  it, so that the data is its own signal: no flag, no fence, one trip through
  the L2 cache. If it does not come, the kernel is aborted with an error.

  Args:
    places: each a reference to device memory and an offset in elements,
      followed by any number of (int32 condition, reference, offset) that are
      read instead where the condition is not 0, the last one first.
    size: bytes of an element, 2 or 4.
    seen: what `peek` has returned for these places, if they were read before,
      and not in an earlier turn of a loop: results are written in turn.

  Returns:
    Four int32 [128] for each place.
  """
  n = len(places)
  name = lambda i: f'%{i}'
  outs = [name(i) for i in range(4 * n)]
  code = ' .reg .pred p; .reg .b32 m, k, x; .reg .u64 o;'
  code += f' .reg .u64 a<{n}>; mov.b32 k, 0;'
  operands: list[Any] = []

  def operand(x):
    operands.append(x)
    return name(4 * n + len(operands) - 1)

  for i, (ref, offset, *others) in enumerate(places):
    for condition, ref_, offset_ in ((None, ref, offset), *others):
      code += f' cvt.s64.s32 o, {operand(offset_)};'
      code += f' shl.b64 o, o, {instructions.log2(size)};'
      code += f' add.u64 o, o, {operand(ref_)};'
      if condition is None:
        code += f' mov.u64 a{i}, o;'
      else:
        code += f' setp.ne.s32 p, {operand(condition)}, 0;'
        code += f' selp.b64 a{i}, o, a{i}, p;'
  if seen is not None:
    for out, word in zip(outs, seen, strict=True):
      code += f' mov.b32 {out}, {operand(word)};'
    code += ' bra.uni check_%%;'
  code += ' again_%%:'
  for i in range(n):
    words = ', '.join(outs[4 * i : 4 * i + 4])
    code += f' ld.relaxed.gpu.global.v4.b32 {{{words}}}, [a{i}];'
  code += ' check_%%:'
  kind = 'u32' if size == 4 else 'u16x2'
  code += f' mov.b32 m, {outs[0]};'
  code += ''.join(f' max.{kind} m, m, {x};' for x in outs[1:])
  if size == 4:
    code += f' setp.eq.u32 p, m, {POISON};'
  else:
    # Whether one of the halves of ~m is zero.
    code += ' not.b32 m, m; sub.u32 x, m, 0x00010001;'
    code += ' lop3.b32 x, x, m, 0x80008000, 0x20; setp.ne.u32 p, x, 0;'
  # All threads of a warp together, as tensor cores want them.
  code += ' vote.sync.any.pred p, p, 0xFFFFFFFF;'
  code += ' add.u32 k, k, 1;'
  code += ' @!p bra done_%%;'
  code += f' setp.lt.u32 p, k, {_PATIENCE};'
  code += ' @p bra again_%%;'
  code += ' trap;'
  code += ' done_%%:'
  return list(ptx.emit('{' + code + '}', [jnp.int32] * (4 * n), *operands))


def poison() -> Array:
  """Returns the words int32 [128] that `poll` waits to be replaced."""
  return ptx.emit(f'mov.b32 %0, {POISON};', [jnp.int32], pure=True)[0]


def publishable(x: Array) -> Array:
  """Returns the words of float32 [128], but for `POISON`."""
  code = '{ .reg .b32 w; mov.b32 w, %1; min.u32 %0, w, 0xFFFFFFFE; }'
  return ptx.emit(code, [jnp.int32], x, pure=True)[0]


def publish_pair(ref: Ref, offset: Array, words: Sequence[Array]) -> None:
  """Stores two words in device memory, for which others may be waiting."""
  code, address = instructions.address_of('global')
  code = code.format(base='%0', offset='%1', shift=2)
  code += f' st.relaxed.gpu.global.v2.b32 [{address}], {{%2, %3}};'
  ptx.emit('{' + code + '}', [], ref, offset, *words)


def fill(ref: Ref, offset, size: int, where) -> None:
  """Fills 16 bytes of device memory with `POISON`; arguments as for `fetch`."""
  code, address = instructions.address_of('global')
  code = code.format(base='%0', offset='%1', shift=instructions.log2(size))
  code += (
      f' .reg .b32 w; .reg .pred p; mov.b32 w, {POISON};'
      ' setp.ne.s32 p, %2, 0;'
      f' @p st.global.v4.b32 [{address}], {{w, w, w, w}};'
  )
  ptx.emit('{' + code + '}', [], ref, offset, where)


def meet(warpgroups: int) -> None:
  """Waits for other warpgroups on the device, and orders device memory.

  Args:
    warpgroups: how many call this, all CTAs together.
  """
  fence()
  barrier(1)
  semaphore = pl.get_global(plgpu.SemaphoreType.REGULAR)
  plgpu.semaphore_signal(semaphore, 1, memory_scope='gpu')
  await_count(semaphore, warpgroups)


def await_count(semaphore: Ref, count: int) -> None:
  """Waits until a semaphore in device memory has been signalled often enough.

  Other kernels may hold multiprocessors for a while, such as wait for another
  host. After minutes the kernel is aborted with an error.
  """
  code = (
      '{ .reg .u32 v, k; .reg .pred p; mov.b32 k, 0;'
      ' again_%%: ld.acquire.gpu.global.u32 v, [%0];'
      ' setp.ge.u32 p, v, %1; @p bra done_%%; add.u32 k, k, 1;'
      f' nanosleep.u32 500; setp.lt.u32 p, k, {1 << 28}; @p bra again_%%; trap;'
      ' done_%%: }'
  )
  ptx.emit(code, [], semaphore, count)


def make_signals(signals: Ref, count: int, where) -> None:
  """Makes 64-bit signals in shared memory; before a `cluster_barrier`."""
  code = '{ .reg .u32 m; .reg .pred p; setp.ne.s32 p, %1, 0;'
  for i in range(count):
    code += f' add.u32 m, %0, {8 * i};'
    code += ' @p mbarrier.init.shared::cta.b64 [m], 1;'
  code += ' @p fence.mbarrier_init.release.cluster; }'
  ptx.emit(code, [], signals, where)


def send(
    ref: Ref, offset, words: Sequence[Array], signals: Ref, signal, rank, where
) -> None:
  """Stores 16 bytes in another CTA's shared memory, and tells its signal.

  Args:
    ref: in shared memory.
    offset: where in it, in bytes.
    words: four int32 [128].
    signals: 64-bit signals in shared memory.
    signal: which.
    rank: of the other CTA in this one's cluster; it may be this one.
    where: int32, not 0 where something is sent.
  """
  code = (
      '{ .reg .u32 s, r, m; .reg .pred p; add.u32 s, %0, %1;'
      ' mad.lo.u32 m, %7, 8, %6; setp.ne.s32 p, %9, 0;'
      ' mapa.shared::cluster.u32 r, s, %8; mapa.shared::cluster.u32 m, m, %8;'
      ' @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32'
      ' [r], {%2, %3, %4, %5}, [m]; }'
  )
  ptx.emit(code, [], ref, offset, *words, signals, signal, rank, where)


def expect(signals: Ref, signal, size, where) -> None:
  """Tells a signal that it stands for so many bytes from `send`."""
  code = (
      '{ .reg .u32 m; .reg .pred p; setp.ne.s32 p, %3, 0;'
      ' mad.lo.u32 m, %1, 8, %0;'
      ' @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [m], %2; }'
  )
  ptx.emit(code, [], signals, signal, size, where)


def await_signal(signals: Ref, signal, turn) -> None:
  """Waits until all bytes have come.

  Args:
    signals: in shared memory.
    signal: which.
    turn: 0 and 1 alternately, each time that this signal is waited for.
  """
  code = (
      '{ .reg .u32 m, k; .reg .pred p; mad.lo.u32 m, %1, 8, %0; mov.b32 k, 0;'
      ' again_%%:'
      ' mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [m], %2;'
      ' @p bra done_%%; add.u32 k, k, 1;'
      f' setp.lt.u32 p, k, {_PATIENCE}; @p bra again_%%; trap;'
      ' done_%%: }'
  )
  ptx.emit(code, [], signals, signal, turn)
