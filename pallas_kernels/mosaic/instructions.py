"""The instructions that kernels are made of, for single threads.

Memory is addressed in bytes from the start of a reference in shared memory, in
elements in device memory. All accesses are ordered as written; those of other
threads only by barriers and signals.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.mosaic import ptx

Array = jax.Array
Ref = Any

# Names of the 16-bit types in PTX.
_SHORT = {'bfloat16': 'bf16', 'float16': 'f16'}


def address_of(space: str) -> tuple[str, str]:
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
  code, address = address_of(space)
  code = code.format(base='%1', offset='%2', shift=log2(dtype.itemsize))
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
    publish: whether other multiprocessors are waiting for it (`waiting.poll`).
  """
  dtype = jnp.dtype(dtype)
  space = 'shared' if shared else 'global'
  code, address = address_of(space)
  code = code.format(base='%0', offset='%1', shift=log2(dtype.itemsize))
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
  code, address = address_of('global')
  code = code.format(base='%2', offset='%3', shift=log2(size))
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
  # What is the same for all threads may have no layout.
  x = plgpu.layout_cast(x, ptx.layout(count))
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
  code, address = address_of(space)
  code = code.format(base='%4', offset='%5', shift=log2(size))
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


def log2(size: int) -> int:
  """Returns the logarithm of a power of two."""
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
  code, address = address_of(space)
  code = code.format(base='%0', offset='%1', shift=log2(size))
  instruction = f'st.{space}.v4.b32 [{address}], {{%2, %3, %4, %5}};'
  _store(code, instruction, where, ref, offset, *words)


def _store(code: str, instruction: str, where, *operands) -> None:
  """Emits code and a store, which is done where `where` is None or not 0."""
  if where is not None:
    code += f' .reg .pred p; setp.ne.s32 p, %{len(operands)}, 0; @p'
    operands = *operands, where
  ptx.emit('{' + f'{code} {instruction}' + '}', [], *operands)
