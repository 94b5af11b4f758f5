"""Barriers, fences and mbarriers: how threads wait for each other.

Within a CTA threads meet at a barrier. Within a cluster a CTA stores into
another one's shared memory and an mbarrier there counts the bytes that have
arrived. Hand-offs across the device are in `mailbox`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any

# Attempts to read data of another CTA, each of more than half a microsecond,
# before a kernel gives up.
PATIENCE = 1 << 24

# An mbarrier, in int32.
SIGNAL_WORDS = 2

# Attempts that come at once.
_FAST_PATIENCE = 1 << 30


def barrier(warpgroups: int) -> None:
  """Waits for all threads of all warpgroups, and orders shared memory."""
  # Pallas uses the first few of the sixteen barriers.
  ptx.emit(f'bar.sync 15, {warpgroups * ptx.LANES};', {}, {})


def cluster_barrier() -> None:
  """Waits for all threads of all CTAs of the cluster, and orders memory."""
  code = 'barrier.cluster.arrive.release; barrier.cluster.wait.acquire;'
  ptx.emit(code, {}, {})


def fence() -> None:
  """Makes this thread's stores visible to all multiprocessors."""
  ptx.emit('fence.acq_rel.gpu;', {}, {})


def delay(cycles: int) -> None:
  """Waits for some cycles."""
  code = (
      '{ .reg .u32 a, b; .reg .pred p; mov.u32 a, %clock;'
      ' L%%: mov.u32 b, %clock; sub.u32 b, b, a;'
      f' setp.lt.u32 p, b, {cycles}; @p bra L%%; }}'
  )
  ptx.emit(code, {}, {})


def make_signals(signals: Ref, arrivals: Sequence[int], where) -> None:
  """Initialises mbarriers; before a `cluster_barrier`.

  Args:
    signals: shared memory, 8 bytes for each mbarrier.
    arrivals: number of arrivals that complete a phase of each mbarrier.
    where: int32, not 0 in the one thread that does it.
  """
  code = '{ .reg .u32 m; .reg .pred p; setp.ne.s32 p, %where, 0;'
  for i, count in enumerate(arrivals):
    code += f' add.u32 m, %signals, {8 * i};'
    code += f' @p mbarrier.init.shared::cta.b64 [m], {count};'
  code += ' @p fence.mbarrier_init.release.cluster; }'
  ptx.emit(code, {}, {'signals': signals, 'where': where})


def distance(ref: Ref, other: Ref) -> Array:
  """Returns the bytes from one place in shared memory to another one."""
  code = 'sub.u32 %bytes, %other, %ref;'
  operands = {'ref': ref, 'other': other}
  return ptx.emit(code, {'bytes': jnp.int32}, operands, pure=True)[0]


def send(
    ref: Ref, offset, words: Sequence[Array], signals: Ref, signal, rank, where
) -> None:
  """Stores 16 bytes in another CTA's shared memory, counted by its mbarrier.

  Args:
    ref: shared memory, at one address in both CTAs.
    offset: the place in bytes.
    words: four int32 [128].
    signals: mbarriers in shared memory.
    signal: index of the mbarrier.
    rank: rank of the receiver in this CTA's cluster; it may be this CTA.
    where: int32, not 0 in threads that send.
  """
  code = (
      '{ .reg .u32 s, r, m; .reg .pred p; add.u32 s, %base, %offset;'
      ' mad.lo.u32 m, %signal, 8, %signals; setp.ne.s32 p, %where, 0;'
      ' mapa.shared::cluster.u32 r, s, %rank;'
      ' mapa.shared::cluster.u32 m, m, %rank;'
      ' @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32'
      ' [r], {%w0, %w1, %w2, %w3}, [m]; }'
  )
  operands = {
      'base': ref,
      'offset': offset,
      **{f'w{i}': word for i, word in enumerate(words)},
      'signals': signals,
      'signal': signal,
      'rank': rank,
      'where': where,
  }
  ptx.emit(code, {}, operands)


def expect(signals: Ref, signal, size, where) -> None:
  """Tells an mbarrier the number of bytes that complete its phase.

  Args:
    signals: mbarriers in shared memory.
    signal: index of the mbarrier.
    size: bytes, int32.
    where: int32, not 0 in the one thread that does it.
  """
  code = (
      '{ .reg .u32 m; .reg .pred p; setp.ne.s32 p, %where, 0;'
      ' mad.lo.u32 m, %signal, 8, %signals;'
      ' @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [m], %size; }'
  )
  operands = {
      'signals': signals,
      'signal': signal,
      'size': size,
      'where': where,
  }
  ptx.emit(code, {}, operands)


def arrive(signals: Ref, signal, lane: Array) -> None:
  """Arrives at an mbarrier of this CTA, once for all threads of a warp.

  Args:
    signals: mbarriers in shared memory.
    signal: index of the mbarrier.
    lane: this thread's lane.
  """
  operands = {'signals': signals, 'lane': lane}
  if isinstance(signal, int):
    address = f'add.u32 m, %signals, {8 * signal};'
  else:
    operands['signal'] = signal
    address = 'mad.lo.u32 m, %signal, 8, %signals;'
  code = (
      '{ .reg .u32 m; .reg .pred p; bar.warp.sync 0xFFFFFFFF;'
      f' {address} setp.eq.s32 p, %lane, 0;'
      ' @p mbarrier.arrive.shared::cta.b64 _, [m]; }'
  )
  ptx.emit(code, {}, operands)


def await_signal(
    signals: Ref, signal, turn, busy: bool = False, scope: str = 'cluster'
) -> None:
  """Waits until an mbarrier's phase is complete.

  Args:
    signals: mbarriers in shared memory.
    signal: index of the mbarrier.
    turn: parity of the phase, 0 and 1 alternately.
    busy: whether warps ask again and again instead of sleeping; they notice it
      sooner, and take turns from other warps.
    scope: 'cluster', or 'cta' where only threads of this CTA have arrived.
  """
  attempt, patience = 'try', PATIENCE
  if busy:
    attempt, patience = 'test', _FAST_PATIENCE
  code = (
      '{ .reg .u32 m, k; .reg .pred p; mad.lo.u32 m, %signal, 8, %signals;'
      ' mov.b32 k, 0;'
      ' again_%%:'
      f' mbarrier.{attempt}_wait.parity.acquire.{scope}.shared::cta.b64'
      ' p, [m], %turn; @p bra done_%%; add.u32 k, k, 1;'
      f' setp.lt.u32 p, k, {patience}; @p bra again_%%; trap;'
      ' done_%%: }'
  )
  operands = {'signals': signals, 'signal': signal, 'turn': turn}
  ptx.emit(code, {}, operands)
