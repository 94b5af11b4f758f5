"""Instructions for single threads, where Pallas speaks of whole warpgroups.

The kernels of `dense.py` place every value themselves: which thread holds which
unit of which batch row follows from the tensor cores' fragments. To Pallas, a
value is an array [n * 128] of a warpgroup, thread i holding elements i, 128 + i
and so on, so that `jnp` works on it. What Pallas has no word for is PTX here: a
template with %0, %1, ... for the results and then the operands, emitted once
for each of the n elements of a thread.

Memory is addressed in bytes from the start of a reference. All accesses are
ordered as written; those of other threads only by `barrier`.
"""

from collections.abc import Sequence
import math
import re
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxlib.mlir.dialects import vector
import numpy as np

Array = jax.Array
Ref = Any

# Threads of a warpgroup.
LANES = 128

# A pattern that no store below writes, in 16 and 32 bits: a NaN, but not the
# one that arithmetic makes.
POISON = -1


def layout(count: int) -> Any:
  """Returns the layout of `count` elements a thread."""
  return plgpu.Layout.WG_STRIDED((count * LANES,), vec_size=1)


def per_thread(x: Array) -> int:
  """Returns how many elements each thread holds."""
  return math.prod(x.shape) // LANES if x.ndim else 0


def full(count: int, value, dtype=jnp.float32) -> Array:
  """Returns `count` elements a thread, all equal."""
  return plgpu.layout_cast(
      jnp.full((count * LANES,), value, dtype), layout(count)
  )


def emit(
    template: str,
    results: Sequence[Any],
    *operands: Array | Ref | int,
    count: int = 1,
    pure: bool = False,
) -> tuple[Array, ...]:
  """Emits PTX for every element of a thread.

  Args:
    template: the code; %0, %1, ... are the results, then the operands. %% is a
      label that is unique to each copy.
    results: dtypes, float32 or int32.
    *operands: arrays [count * 128], [128] or [] of float32 or int32, which are
      repeated as needed; references, which become addresses; or numbers.
    count: elements a thread.
    pure: whether it may be dropped, merged and moved.

  Returns:
    Arrays [count * 128], one for each of `results`.
  """
  kinds, given, types = [], [], []
  for x in operands:
    if isinstance(x, (int, np.integer)):
      x = jnp.int32(x)
    given.append(x)
    if _is_ref(x):
      kinds.append('ref')
      types.append(plgpu.RefType())
    elif not x.ndim:
      kinds.append('scalar')
      types.append(plgpu.Layout.WG_SPLAT)
    else:
      kinds.append('array')
      types.append(layout(per_thread(x)))
  types = [t(()) if t is plgpu.Layout.WG_SPLAT else t for t in types]
  out = tuple(
      plgpu.ShapeDtypeStruct((count * LANES,), d, layout=layout(count))
      for d in results
  )

  @plgpu.inline_mgpu(arg_types=tuple(types), return_type=out)
  def inline(_, *args):
    values = [_scalars(x, kind) for x, kind in zip(args, kinds, strict=True)]
    columns: list[list[ir.Value]] = [[] for _ in results]
    for i in range(count):
      row = [v[i % len(v)] for v in values]
      outs = _inline(template, [_type(d) for d in results], row, pure)
      for column, x in zip(columns, outs, strict=True):
        column.append(x)
    return tuple(
        _array(column, dtype)
        for column, dtype in zip(columns, results, strict=True)
    )

  return inline(*given)


def _is_ref(x) -> bool:
  # Under vmap it is one with an index applied, which has no type of its own.
  return hasattr(x, 'transforms') or hasattr(jax.typeof(x), 'inner_aval')


def _type(dtype) -> ir.Type:
  if jnp.dtype(dtype) == jnp.float32:
    return ir.F32Type.get()
  return ir.IntegerType.get_signless(32)


def _scalars(x, kind: str) -> list[ir.Value]:
  """Returns the values of one operand, one for each element of a thread."""
  if kind == 'ref':
    pointer = mgpu_utils.memref_ptr(x)
    shared = mgpu_utils.is_smem_ref(x)
    bits = ir.IntegerType.get_signless(32 if shared else 64)
    return [llvm.ptrtoint(bits, pointer)]
  values = []
  for register in x.registers.flat:
    if isinstance(register.type, ir.VectorType):
      register = vector.extract(
          register,
          dynamic_position=[],
          static_position=ir.DenseI64ArrayAttr.get([0]),
      )
    values.append(register)
  return values


def _inline(template, result_types, operands, pure) -> list[ir.Value]:
  constraints = ['=' + _letter(t) for t in result_types]
  constraints += [_letter(x.type) for x in operands]
  if not pure:
    constraints.append('~{memory}')
  text = re.sub(r'%(\d+)', r'$\1', template).replace('%%', '${:uid}')
  if not result_types:
    llvm.inline_asm(
        ir.Type.parse('!llvm.void'),
        operands,
        text,
        ','.join(constraints),
        has_side_effects=True,
    )
    return []
  struct = result_types[0]
  if len(result_types) > 1:
    struct = llvm.StructType.get_literal(result_types)
  out = llvm.inline_asm(
      struct,
      operands,
      text,
      ','.join(constraints),
      has_side_effects=not pure,
  )
  if len(result_types) == 1:
    return [out]
  return [llvm.extractvalue(t, out, [i]) for i, t in enumerate(result_types)]


def _letter(t: ir.Type) -> str:
  if isinstance(t, ir.F32Type):
    return 'f'
  return 'l' if ir.IntegerType(t).width == 64 else 'r'


def _array(values: Sequence[ir.Value], dtype) -> mgpu.FragmentedArray:
  element = _type(dtype)
  registers = [
      vector.broadcast(ir.VectorType.get((1,), element), x) for x in values
  ]
  is_float = jnp.dtype(dtype) == jnp.float32
  return mgpu.FragmentedArray(
      _registers=np.asarray(registers, dtype=object),
      _layout=mgpu.WGStridedFragLayout((len(values) * LANES,), 1),
      _is_signed=None if is_float else True,
  )


def stack(arrays: Sequence[Array]) -> Array:
  """Joins what threads hold, one array after the other."""
  counts = [per_thread(x) for x in arrays]
  if len(arrays) == 1:
    return arrays[0]
  total = sum(counts)
  dtype = arrays[0].dtype

  @plgpu.inline_mgpu(
      arg_types=tuple(layout(n) for n in counts),
      return_type=plgpu.ShapeDtypeStruct(
          (total * LANES,), dtype, layout=layout(total)
      ),
  )
  def inline(_, *args):
    values = [v for x in args for v in _scalars(x, 'array')]
    return _array(values, dtype)

  return inline(*arrays)


def split(x: Array, counts: Sequence[int]) -> list[Array]:
  """Takes apart what threads hold, the inverse of `stack`."""
  dtype = x.dtype

  @plgpu.inline_mgpu(
      arg_types=(layout(per_thread(x)),),
      return_type=tuple(
          plgpu.ShapeDtypeStruct((n * LANES,), dtype, layout=layout(n))
          for n in counts
      ),
  )
  def inline(_, arg):
    values = _scalars(arg, 'array')
    parts, start = [], 0
    for n in counts:
      parts.append(_array(values[start : start + n], dtype))
      start += n
    return tuple(parts)

  return list(inline(x))


def thread() -> Array:
  """Returns each thread's index in its warpgroup, int32 [128]."""
  code = '{ .reg .u32 t; mov.u32 t, %tid.x; and.b32 %0, t, 127; }'
  return emit(code, [jnp.int32], pure=True)[0]


def barrier(warpgroups: int) -> None:
  """Waits for all threads of all warpgroups, and orders shared memory."""
  # Pallas uses the first few of the sixteen barriers.
  emit(f'bar.sync 15, {warpgroups * LANES};', [])


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
    return emit('{' + code + '}', [jnp.int32], ref, offset, count=count)[0]
  if dtype == jnp.float32:
    code += f' ld.{space}.f32 %0, [{address}];'
  else:
    short = _SHORT[dtype.name]
    code += f' .reg .b16 h; ld.{space}.b16 h, [{address}];'
    code += f' cvt.f32.{short} %0, h;'
  return emit('{' + code + '}', [jnp.float32], ref, offset, count=count)[0]


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
  emit('{' + code + '}', [], *operands, count=per_thread(value))


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
  emit('{' + code + '}', [], shared_ref, shared_offset, ref, offset, where)


def fetch_commit() -> None:
  """Makes one group of the copies that this thread started since the last."""
  emit('cp.async.commit_group;', [])


def fetch_wait(pending: int) -> None:
  """Waits until at most `pending` of this thread's groups are on the way."""
  emit(f'cp.async.wait_group {pending};', [])


def copy_out(
    ref: Ref, offset, shared_ref: Ref, shared_offset, size: int, where
) -> None:
  """Copies 16 bytes from shared to device memory; arguments as for `fetch`."""
  code, address = _address('global')
  code = code.format(base='%0', offset='%1', shift=_log2(size))
  code += (
      ' .reg .u32 s; .reg .b32 w<4>; .reg .pred p; add.u32 s, %2, %3;'
      ' setp.ne.s32 p, %4, 0;'
      ' @p ld.shared.v4.b32 {w0, w1, w2, w3}, [s];'
      f' @p st.global.v4.b32 [{address}], {{w0, w1, w2, w3}};'
  )
  emit('{' + code + '}', [], ref, offset, shared_ref, shared_offset, where)


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
  return emit('{' + code + '}', [jnp.int32] * 4, *operands)


# Attempts to read what another multiprocessor writes, each of more than half a
# microsecond, before a kernel gives up.
_PATIENCE = 1 << 24


def poll(places: Sequence[Sequence[Any]], size: int) -> list[Array]:
  """Reads 16 bytes at each place as soon as they have been written.

  The places hold `POISON` until `store(publish=True)` replaces it, so that the
  data is its own signal: no flag, no fence, one trip through the L2 cache. If
  it does not come, the kernel is aborted with an error.

  Args:
    places: each a reference to device memory and an offset in elements,
      followed by any number of (int32 condition, reference, offset) that are
      read instead where the condition is not 0, the last one first.
    size: bytes of an element, 2 or 4.

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
  code += ' again_%%:'
  for i in range(n):
    words = ', '.join(outs[4 * i : 4 * i + 4])
    code += f' ld.relaxed.gpu.global.v4.b32 {{{words}}}, [a{i}];'
  kind = 'u32' if size == 4 else 'u16x2'
  code += f' mov.b32 m, {outs[0]};'
  code += ''.join(f' max.{kind} m, m, {x};' for x in outs[1:])
  if size == 4:
    code += ' setp.eq.u32 p, m, 0xFFFFFFFF;'
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
  return list(emit('{' + code + '}', [jnp.int32] * (4 * n), *operands))


def narrow(low: Array, high: Array, dtype) -> Array:
  """Packs two float32 as 16-bit elements of `dtype`, the first one lower."""
  short = _SHORT[jnp.dtype(dtype).name]
  code = f'cvt.rn.{short}x2.f32 %0, %2, %1;'
  return emit(code, [jnp.int32], low, high, count=per_thread(low), pure=True)[0]


def as_float(words: Array) -> Array:
  """Returns the float32 that int32 words hold."""
  code = 'mov.b32 %0, %1;'
  return emit(code, [jnp.float32], words, count=per_thread(words), pure=True)[0]


def upper(word: Array) -> Array:
  """Returns the float32 of the upper bfloat16 of a word."""
  return as_float(word & jnp.int32(-65536))


def lower(word: Array) -> Array:
  """Returns the float32 of the lower bfloat16 of a word."""
  return as_float(jnp.left_shift(word, jnp.int32(16)))


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
  return emit(code, [jnp.float32] * 4, *a, *b, *acc, pure=True)


def _log2(size: int) -> int:
  return size.bit_length() - 1


def round_short(x: Array) -> Array:
  """Rounds float32 to bfloat16 and back."""
  code = (
      '{ .reg .b16 h, z; cvt.rn.bf16.f32 h, %1; mov.b16 z, 0;'
      ' mov.b32 %0, {z, h}; }'
  )
  return emit(code, [jnp.float32], x, count=per_thread(x), pure=True)[0]


def store_pair(ref: Ref, offset: Array, pair: Sequence[Array]) -> None:
  """Stores two float32 [128] side by side in shared memory."""
  code = '{ .reg .u32 a; add.u32 a, %0, %1; st.shared.v2.f32 [a], {%2, %3}; }'
  emit(code, [], ref, offset, *pair)


def fill(ref: Ref, offset, size: int, where) -> None:
  """Fills 16 bytes of device memory with `POISON`; arguments as for `fetch`."""
  code, address = _address('global')
  code = code.format(base='%0', offset='%1', shift=_log2(size))
  code += (
      ' .reg .b32 w; .reg .pred p; mov.b32 w, 0xFFFFFFFF;'
      ' setp.ne.s32 p, %2, 0;'
      f' @p st.global.v4.b32 [{address}], {{w, w, w, w}};'
  )
  emit('{' + code + '}', [], ref, offset, where)


def fence() -> None:
  """Makes what this thread has stored visible to all multiprocessors."""
  emit('fence.acq_rel.gpu;', [])


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
  emit(code, [], ref, offset, *words, signals, signal, rank, where)


def send_float(
    ref: Ref, offset, value: Array, signals: Ref, signal, rank, where
) -> None:
  """Like `send`, for one float32 instead of 16 bytes."""
  code = (
      '{ .reg .u32 s, r, m; .reg .pred p; .reg .b32 w; add.u32 s, %0, %1;'
      ' mad.lo.u32 m, %4, 8, %3; setp.ne.s32 p, %6, 0; mov.b32 w, %2;'
      ' mapa.shared::cluster.u32 r, s, %5; mapa.shared::cluster.u32 m, m, %5;'
      ' @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32'
      ' [r], w, [m]; }'
  )
  emit(code, [], ref, offset, value, signals, signal, rank, where)


def make_signals(signals: Ref, count: int, where) -> None:
  """Makes 64-bit signals in shared memory; before a `cluster_barrier`."""
  code = '{ .reg .u32 m; .reg .pred p; setp.ne.s32 p, %1, 0;'
  for i in range(count):
    code += f' add.u32 m, %0, {8 * i};'
    code += ' @p mbarrier.init.shared::cta.b64 [m], 1;'
  code += ' @p fence.mbarrier_init.release.cluster; }'
  emit(code, [], signals, where)


def expect(signals: Ref, signal, size, where) -> None:
  """Tells a signal that it stands for so many bytes from `send`."""
  code = (
      '{ .reg .u32 m; .reg .pred p; setp.ne.s32 p, %3, 0;'
      ' mad.lo.u32 m, %1, 8, %0;'
      ' @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [m], %2; }'
  )
  emit(code, [], signals, signal, size, where)


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
  emit(code, [], signals, signal, turn)


def cluster_barrier() -> None:
  """Waits for all threads of all CTAs of the cluster, and orders memory."""
  emit('barrier.cluster.arrive.release; barrier.cluster.wait.acquire;', [])
