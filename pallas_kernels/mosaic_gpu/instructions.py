"""The instructions that kernels are made of, for single threads.

Memory is addressed in bytes from the start of a reference in shared memory, in
elements in device memory. All accesses are ordered as written; those of other
threads only by barriers and signals.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import ptx

Array = jax.Array
Ref = Any

# A pattern that nothing below writes for what it means, in 16 and 32 bits: a
# NaN, but not the one that arithmetic makes.
POISON = '0xFFFFFFFF'


def barrier(warpgroups: int) -> None:
  """Waits for all threads of all warpgroups, and orders shared memory."""
  # Pallas uses the first few of the sixteen barriers.
  ptx.emit(f'bar.sync 15, {warpgroups * ptx.LANES};', [])


# Names of the 16-bit types in PTX.
_SHORT = {'bfloat16': 'bf16', 'float16': 'f16'}


def _address(space: str) -> tuple[str, str]:
  """Returns code that adds %base and %offset, and the address's name."""
  if space == 'shared':
    return '.reg .u32 a; add.u32 a, {base}, {offset};', 'a'
  return (
      '.reg .u64 a, o; cvt.s64.s32 o, {offset};'
      ' shl.b64 o, o, {shift}; add.u64 a, {base}, o;'
  ), 'a'


def load(
    ref: Ref, offset: Array, dtype, *, shared: bool, count: int = 1
) -> Array:
  """Returns float32 of elements of `dtype`, or int32 as they are.

  Args:
    ref: of any shape.
    offset: where, int32: in bytes in shared memory, else in elements.
    dtype: of what is stored there.
    shared: whether ref lies in shared memory.
    count: elements a thread.
  """
  dtype = jnp.dtype(dtype)
  space = 'shared' if shared else 'global'
  code, address = _address(space)
  code = code.format(base='%1', offset='%2', shift=_log2(dtype.itemsize))
  if dtype == jnp.int32:
    code += f' ld.{space}.b32 %0, [{address}];'
    return ptx.emit('{' + code + '}', [jnp.int32], ref, offset, count=count)[0]
  if dtype == jnp.float32:
    code += f' ld.{space}.f32 %0, [{address}];'
  else:
    short = _SHORT[dtype.name]
    code += f' .reg .b16 h; ld.{space}.b16 h, [{address}];'
    code += f' cvt.f32.{short} %0, h;'
  return ptx.emit('{' + code + '}', [jnp.float32], ref, offset, count=count)[0]


def store(
    ref: Ref,
    offset: Array,
    value: Array,
    dtype,
    *,
    shared: bool,
    where: Array | None = None,
    publish: bool = False,
) -> None:
  """Stores float32 values as `dtype`, or int32 as they are.

  Args:
    ref: of any shape.
    offset: where, int32: in bytes in shared memory, else in elements.
    value: what, float32 or int32.
    dtype: of what is stored.
    shared: whether ref lies in shared memory.
    where: int32, not 0 where something is stored at all; None for everywhere.
    publish: whether other multiprocessors are waiting for it, see `poll`.
  """
  dtype = jnp.dtype(dtype)
  space = 'shared' if shared else 'global'
  code, address = _address(space)
  code = code.format(base='%0', offset='%1', shift=_log2(dtype.itemsize))
  guard = ''
  operands = [ref, offset, value]
  if where is not None:
    code += ' .reg .pred p; setp.ne.s32 p, %3, 0;'
    guard = '@p '
    operands.append(where)
  how = f'relaxed.gpu.{space}' if publish else space
  if dtype == jnp.int32:
    code += f' {guard}st.{how}.b32 [{address}], %2;'
  elif dtype == jnp.float32:
    if publish:
      code += ' .reg .b32 w; mov.b32 w, %2; min.u32 w, w, 0xFFFFFFFE;'
      code += f' {guard}st.{how}.b32 [{address}], w;'
    else:
      code += f' {guard}st.{how}.f32 [{address}], %2;'
  else:
    short = _SHORT[dtype.name]
    code += f' .reg .b16 h; cvt.rn.{short}.f32 h, %2;'
    code += f' {guard}st.{how}.b16 [{address}], h;'
  ptx.emit('{' + code + '}', [], *operands, count=ptx.per_thread(value))


def fetch(
    shared_ref: Ref, shared_offset, ref: Ref, offset, size: int, where
) -> None:
  """Starts copying 16 bytes to shared memory, or filling them with zeros.

  Args:
    shared_ref: where to.
    shared_offset: in bytes.
    ref: where from, in device memory.
    offset: in elements.
    size: bytes of an element.
    where: int32, 2 for a copy, 1 for zeros, 0 for nothing.
  """
  code, address = _address('global')
  code = code.format(base='%2', offset='%3', shift=_log2(size))
  code += (
      ' .reg .u32 s, n; .reg .pred p; add.u32 s, %0, %1;'
      ' setp.gt.s32 p, %4, 1; selp.u32 n, 16, 0, p; setp.gt.s32 p, %4, 0;'
      f' @p cp.async.cg.shared.global [s], [{address}], 16, n;'
  )
  ptx.emit('{' + code + '}', [], shared_ref, shared_offset, ref, offset, where)


def fetch_commit() -> None:
  """Makes one group of the copies that this thread started since the last."""
  ptx.emit('cp.async.commit_group;', [])


def fetch_wait(pending: int) -> None:
  """Waits until at most `pending` of this thread's groups are on the way."""
  ptx.emit(f'cp.async.wait_group {pending};', [])


def reciprocal(x: Array) -> Array:
  """Returns 1 / x of float32, to an error of 1e-7; denormals count as 0."""
  count = ptx.per_thread(x)
  code = 'rcp.approx.ftz.f32 %0, %1;'
  return ptx.emit(code, [jnp.float32], x, count=count, pure=True)[0]


def load_words(ref: Ref, offset, *, shared: bool, size: int, where=None):
  """Returns 16 bytes as four int32 [128], zeros where `where` is 0.

  Args:
    ref: of any shape.
    offset: in bytes in shared memory, else in elements.
    shared: whether ref lies in shared memory.
    size: bytes of an element.
    where: int32, or None for everywhere.
  """
  space = 'shared' if shared else 'global'
  code, address = _address(space)
  code = code.format(base='%4', offset='%5', shift=_log2(size))
  words = '{%0, %1, %2, %3}'
  operands = [ref, offset]
  if where is not None:
    code += ' .reg .pred p; setp.ne.s32 p, %6, 0;'
    code += ''.join(f' mov.b32 %{i}, 0;' for i in range(4))
    code += f' @p ld.{space}.v4.b32 {words}, [{address}];'
    operands.append(where)
  else:
    code += f' ld.{space}.v4.b32 {words}, [{address}];'
  return ptx.emit('{' + code + '}', [jnp.int32] * 4, *operands)


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
  code, address = _address('global')
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
      code += f' shl.b64 o, o, {_log2(size)};'
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
  code, address = _address('global')
  code = code.format(base='%0', offset='%1', shift=2)
  code += f' st.relaxed.gpu.global.v2.b32 [{address}], {{%2, %3}};'
  ptx.emit('{' + code + '}', [], ref, offset, *words)


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


def narrow(low: Array, high: Array, dtype) -> Array:
  """Packs two float32 as 16-bit elements of `dtype`, the first one lower."""
  short = _SHORT[jnp.dtype(dtype).name]
  code = f'cvt.rn.{short}x2.f32 %0, %2, %1;'
  return ptx.emit(
      code, [jnp.int32], low, high, count=ptx.per_thread(low), pure=True
  )[0]


def as_float(words: Array) -> Array:
  """Returns the float32 that int32 words hold."""
  code = 'mov.b32 %0, %1;'
  return ptx.emit(
      code, [jnp.float32], words, count=ptx.per_thread(words), pure=True
  )[0]


def as_word(x: Array) -> Array:
  """Returns the int32 word that holds a float32; undoes `as_float`."""
  code = 'mov.b32 %0, %1;'
  return ptx.emit(code, [jnp.int32], x, count=ptx.per_thread(x), pure=True)[0]


def shuffle(x: Array, mask: int) -> Array:
  """Returns float32 of the thread whose lane differs in the bits of a mask."""
  code = f'shfl.sync.bfly.b32 %0, %1, {mask}, 31, 0xFFFFFFFF;'
  return ptx.emit(code, [jnp.float32], x, pure=True)[0]


def upper(word: Array, dtype=jnp.bfloat16) -> Array:
  """Returns the float32 of the upper 16-bit element of a word."""
  if jnp.dtype(dtype) == jnp.float16:
    return _half(word, 'h')
  return as_float(word & jnp.int32(-65536))


def lower(word: Array, dtype=jnp.bfloat16) -> Array:
  """Returns the float32 of the lower 16-bit element of a word."""
  if jnp.dtype(dtype) == jnp.float16:
    return _half(word, 'l')
  return as_float(jnp.left_shift(word, jnp.int32(16)))


def _half(word: Array, which: str) -> Array:
  code = f'{{ .reg .b16 l, h; mov.b32 {{l, h}}, %1; cvt.f32.f16 %0, {which}; }}'
  return ptx.emit(code, [jnp.float32], word, pure=True)[0]


def load_matrices(ref: Ref, offset: Array, count: int) -> Sequence[Array]:
  """Loads transposed 8 x 8 matrices of 16-bit elements; whole warps do.

  Args:
    ref: in shared memory.
    offset: where a row lies, in bytes: of the first matrix for lanes 0 to 7, of
      the second one for the next 8 lanes, and so on.
    count: of matrices, 1, 2 or 4.

  Returns:
    Two elements of each matrix as an int32 [128]: lane l has column l/4 of rows
    2 (l mod 4) and the next.
  """
  words = ', '.join(f'%{i}' for i in range(count))
  code = (
      f'{{ .reg .u32 s; add.u32 s, %{count}, %{count + 1};'
      f' ldmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 {{{words}}}, [s];'
      ' }'
  )
  return ptx.emit(code, [jnp.int32] * count, ref, offset)


def store_matrices(
    ref: Ref, offset: Array, words: Sequence[Array], where: Array | None
) -> None:
  """Stores transposed 8 x 8 matrices; undoes `load_matrices`.

  Args:
    ref: in shared memory.
    offset: as for `load_matrices`.
    words: two elements of each of 1, 2 or 4 matrices.
    where: int32, not 0 in warps that store at all; None for all.
  """
  count = len(words)
  operands = [ref, offset, *words]
  names = ', '.join(f'%{2 + i}' for i in range(count))
  code, guard = '', ''
  if where is not None:
    code = f' .reg .pred p; setp.ne.s32 p, %{2 + count}, 0;'
    guard = '@p '
    operands.append(where)
  code = (
      f'{{ .reg .u32 s; add.u32 s, %0, %1;{code} {guard}stmatrix.sync.aligned'
      f'.m8n8.x{count}.trans.shared.b16 [s], {{{names}}}; }}'
  )
  ptx.emit(code, [], *operands)


def mma(
    acc: Sequence[Array], a: Sequence[Array], b: Sequence[Array], dtype
) -> tuple[Array, ...]:
  """Acc + a b on a warp's tensor core: 16 rows, 8 columns, 16 deep.

  Args:
    acc: four float32 [128]: rows l/4 (twice) and l/4 + 8 (twice), columns 2 (l
      mod 4) and the next, l the lane.
    a: four int32 [128], two elements each: rows as acc's first and third,
      columns 2 (l mod 4) and the next; then the same rows, 8 columns further.
    b: two int32 [128]: column l/4, rows 2 (l mod 4) and the next; 8 further.
    dtype: of a and b, 16 bits.
  """
  short = _SHORT[jnp.dtype(dtype).name]
  code = (
      f'mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32'
      ' {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};'
  )
  return ptx.emit(code, [jnp.float32] * 4, *a, *b, *acc, pure=True)


def _log2(size: int) -> int:
  return size.bit_length() - 1


def round_short(x: Array) -> Array:
  """Rounds float32 to bfloat16 and back."""
  code = (
      '{ .reg .b16 h, z; cvt.rn.bf16.f32 h, %1; mov.b16 z, 0;'
      ' mov.b32 %0, {z, h}; }'
  )
  return ptx.emit(code, [jnp.float32], x, count=ptx.per_thread(x), pure=True)[0]


def store_pair(ref: Ref, offset: Array, pair: Sequence[Array], where=None):
  """Stores two float32 [128] side by side in shared memory."""
  code = '.reg .u32 a; add.u32 a, %0, %1;'
  _store(code, 'st.shared.v2.f32 [a], {%2, %3};', where, ref, offset, *pair)


def store_words(
    ref: Ref, offset, words: Sequence[Array], *, shared: bool, size: int, where
) -> None:
  """Stores four int32 [128], 16 bytes; arguments as for `load_words`."""
  space = 'shared' if shared else 'global'
  code, address = _address(space)
  code = code.format(base='%0', offset='%1', shift=_log2(size))
  instruction = f'st.{space}.v4.b32 [{address}], {{%2, %3, %4, %5}};'
  _store(code, instruction, where, ref, offset, *words)


def _store(code: str, instruction: str, where, *operands) -> None:
  """Emits code and a store, which is done where `where` is None or not 0."""
  if where is not None:
    code += f' .reg .pred p; setp.ne.s32 p, %{len(operands)}, 0; @p'
    operands = *operands, where
  ptx.emit('{' + f'{code} {instruction}' + '}', [], *operands)


def fill(ref: Ref, offset, size: int, where) -> None:
  """Fills 16 bytes of device memory with `POISON`; arguments as for `fetch`."""
  code, address = _address('global')
  code = code.format(base='%0', offset='%1', shift=_log2(size))
  code += (
      f' .reg .b32 w; .reg .pred p; mov.b32 w, {POISON};'
      ' setp.ne.s32 p, %2, 0;'
      f' @p st.global.v4.b32 [{address}], {{w, w, w, w}};'
  )
  ptx.emit('{' + code + '}', [], ref, offset, where)


def fence() -> None:
  """Makes what this thread has stored visible to all multiprocessors."""
  ptx.emit('fence.acq_rel.gpu;', [])


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


def make_signals(signals: Ref, count: int, where) -> None:
  """Makes 64-bit signals in shared memory; before a `cluster_barrier`."""
  code = '{ .reg .u32 m; .reg .pred p; setp.ne.s32 p, %1, 0;'
  for i in range(count):
    code += f' add.u32 m, %0, {8 * i};'
    code += ' @p mbarrier.init.shared::cta.b64 [m], 1;'
  code += ' @p fence.mbarrier_init.release.cluster; }'
  ptx.emit(code, [], signals, where)


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


def cluster_barrier() -> None:
  """Waits for all threads of all CTAs of the cluster, and orders memory."""
  ptx.emit('barrier.cluster.arrive.release; barrier.cluster.wait.acquire;', [])
